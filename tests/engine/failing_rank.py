"""Two ranks of which one fails, again and again; prints what came of it as JSON; a process of its own."""

import json
import time

from tests.engine import harness, ranks
from vidspec_tools import watching

LOOSE = {"extra_args": {"vidspec_scorer": "loose", "vidspec_lambda": 1.0}}


def inject(worker, point: str, ranks: tuple[int, ...]) -> None:
    """Let a step of the given ranks fail until `heal`."""
    from vllm_vidspec.engine.draft import model as draft_model
    from vllm_vidspec.engine.hooks import state_store

    runner, parts = worker.model_runner, worker.model_runner.parts
    kinds = {kind.need: kind for kind in parts.guidance.kinds}
    owner, name = {
        "observe": (kinds["attention"], "observe"),
        "take": (kinds["attention"], "take"),
        "allocate": (kinds["uv"], "_allocate"),
        "listen": (kinds["uv"], "_observe"),
        "claim": (parts.visual, "_claim"),
        "hear": (parts.visual, "_observe"),
        "finish": (parts.visual, "_finish"),
        "relevance": (state_store, "visual_relevance"),
        "encode": (draft_model, "group_and_batch_mm_kwargs"),
        "plan": (runner.speculator.backend.drafter.prefills, "_plan"),
        "look": (runner.speculator.backend.drafter.prefills.vision, "_assign"),
        "prefill": (runner.speculator.backend.draft_model, "forward"),
        "draft": (runner.speculator.backend.drafter, "draft"),
    }[point]

    def failing(*args, **kwargs):
        raise ValueError(f"injected into {point}")

    runner.injected = owner, name, getattr(owner, name)
    if worker.rank in ranks:
        setattr(owner, name, failing)


def heal(worker) -> None:
    setattr(*worker.model_runner.injected)


def be_impatient(worker) -> None:
    """Wait a second for a rank that never comes."""
    worker.model_runner.agreement.failed_patience_s = 1.0


def _break(engine, hit, ask) -> None:
    """Let one failure of one rank be too many; ask while speculation is off, and once it is on again."""
    breaker = engine.breaker
    engine.look()
    breaker._failures.clear()
    most, rest_s, breaker._most, breaker._rest_s = breaker._most, breaker._rest_s, 1, 3600.0
    hit("prefill", (1,))
    engine.look()
    ask("off")
    breaker._most, breaker._rest_s, breaker._until = most, rest_s, 0.0
    engine.look()
    ask("on again")


def main() -> None:
    """Print what came of the request that each injection hit, and of those without one."""
    spec = {"pruner": "auto", "guidance_layers": "all", "request_scorers": ["strict", "loose"], "lambda_max": 1.0}
    engine = ranks.start(2, harness.NO_CACHE, prune_ratio=0.98, **spec)  # it observes both attention and hidden states
    engine.retune(pruner="specvlm")
    llm, (prompt, arguments), result = engine.llm, harness.videos(ranks.FAMILY, 1)[0], {}

    def ask(name: str, **more) -> None:
        outputs, gained = engine.measured([(prompt, {"max_tokens": 24, **arguments, **more})])
        watched = llm.collective_rpc(watching.pruning, args=(True, True))
        found = {"token_ids": harness.token_ids(outputs)[0][0], "counters": gained}
        result[name] = found | ranks.seen(outputs, watched)

    def hit(point: str, failing: tuple[int, ...] = (1,), **more) -> None:
        llm.collective_rpc(inject, args=(point, failing))
        ask(f"{point} {sum(failing)}" if len(failing) == 1 else f"{point} both", **more)
        llm.collective_rpc(heal)

    llm.collective_rpc(watching.pruning, args=(True, True))
    hit("observe")  # the first, so that nothing is remembered of the video
    ask("strict")
    # After each of these the draft has to look again.
    for point, rank in (("take", 1), ("encode", 1), ("look", 1), ("plan", 1), ("prefill", 1), ("prefill", 0)):
        hit(point, (rank,))
    hit("draft", (0, 1))
    ask("strict again")
    _break(engine, hit, ask)
    for point in ("claim", "hear", "finish"):  # the first three, so that nobody has left the states
        hit(point, **LOOSE)
    ask("loose", **LOOSE)
    for rank in (1, 0):
        hit("relevance", (rank,), **LOOSE)
    ask("loose again", **LOOSE)
    engine.retune(pruner="uv")
    for point in ("allocate", "listen"):
        hit(point)
    ask("uv")
    print("RESULT " + json.dumps(result), flush=True)
    # The last: a rank that fails alone where none waits for the others.
    llm.collective_rpc(be_impatient)
    llm.collective_rpc(inject, args=("draft", (1,)))
    begin = time.monotonic()
    try:
        ask("end")
    except Exception as error:
        print("ENDED " + json.dumps([type(error).__name__, time.monotonic() - begin]), flush=True)


if __name__ == "__main__":
    main()
