"""Programs with several ranks, in processes of their own, that print a line "RESULT " of JSON."""

import json
import math
import os
import sys
import time
from typing import Any

from benchmarks import watching
from tests.engine import harness
from tests.engine.conftest import QUESTION
from vllm_vidspec.engine.policy import NONE
from vllm_vidspec.tools import pairs

FAMILY = harness.LLAVA  # its bundled vision towers have an even number of heads
LONG = 400  # tokens of an answer that no drafter is too late for
# Chains while many requests run, trees while few do; strict, unless a request asks for less.
SPEC: dict[str, Any] = {
    "pruner": "specvlm",
    "guidance_layers": "all",
    "drafting": "auto",
    "draft_table": [[1, 3, "tree-adaptive", 16], [4, 64, "chain", 5]],
    "num_speculative_tokens": 16,
    "request_scorers": ["strict", "loose"],
    "lambda_loose": 1.0,
    "on_draft_error": "raise",
}

LOOSE = {"extra_args": {"vidspec_scorer": "loose", "vidspec_lambda": 1.0}}


def start(num_ranks: int, overrides: dict | None = None, draft: str = "draft", **spec: Any) -> harness.Engine:
    """Load the bundled pair on so many ranks; functions are sent to them only by this process itself."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    overrides = {"tensor_parallel_size": num_ranks, **(overrides or {})}
    return harness.Engine(LLM(**pairs.llm_kwargs(FAMILY, draft, overrides=overrides, **spec)), FAMILY)


def ask_all(engine: harness.Engine) -> dict[str, dict]:
    """Ask four greedy and four sampled requests, strictly and then loosely, and three greedy ones, which get trees."""
    requests = harness.greedy_and_sampled(FAMILY)
    tell = engine.llm.collective_rpc

    def ask(num_requests: int = 8, **more: Any) -> dict:
        tell(watching.pruning, args=(True,))
        tell(watching.scores, args=(True,))
        outputs, counted = engine.measured([(prompt, {**args, **more}) for prompt, args in requests[:num_requests]])
        pruned, scored = tell(watching.pruning, args=(False, True)), tell(watching.scores, args=(False,))
        for rank in (*pruned, *scored):  # in the order of the prompts, not of the batch
            rank.sort(key=lambda record: int(record["req_id"].split("-")[0]))
        return {"token_ids": harness.token_ids(outputs), "counters": counted, "scored": scored} | seen(outputs, pruned)

    strict = ask()
    loose = ask(extra_args={"vidspec_scorer": "loose", "vidspec_lambda": 0.9})
    engine.llm.reset_prefix_cache()
    return {"strict": strict, "loose": loose, "trees": ask(3)}


def seen(outputs: list, pruned: list[list[dict]]) -> dict[str, Any]:
    """Return the prompts of requests, and by rank the scores and the choice of each."""
    return {
        "prompt_ids": [list(output.prompt_token_ids) for output in outputs],
        "scores": [[(record["scores"] or [None])[0] for record in rank] for rank in pruned],
        "kept_indices": [[record["kept_indices"][0] for record in rank] for rank in pruned],
    }


def two() -> dict[str, dict]:
    return ask_all(start(2, **SPEC))


def itself() -> dict[str, dict]:
    """Let a target of two ranks draft for itself over a tenth of the video, and over all of it."""
    engine = start(2, {"block_size": 32}, "target", pruner="specvlm", on_draft_error="raise")
    tell, found = engine.llm.collective_rpc, {}
    for name, ratio in (("pruned", 0.9), ("whole", 0.0)):
        engine.retune(prune_ratio=ratio)
        tell(watching.pruning, args=(True,))
        outputs, counted = engine.measured(harness.greedy_and_sampled(FAMILY))
        pruned = tell(watching.pruning, args=(False, True))
        found[name] = {"token_ids": harness.token_ids(outputs), "counters": counted} | seen(outputs, pruned)
    return found


def adaptive(num_ranks: int, num_stages: int) -> dict:
    """Answer videos and texts under the policy, half of the steps with the first request paused, some with all."""
    overrides = {"pipeline_parallel_size": num_stages}
    engine = start(num_ranks, overrides, adaptive_tokens=True, on_draft_error="raise", pruner="specvlm")
    policy, calls = engine.scheduler._vidspec_side._policy, [0]
    decide, option = policy.decide, max(policy.options, key=lambda option: option.num_tokens)

    def in_turns(req_ids, *bounds):
        calls[0] += 1
        paused = frozenset(req_ids[:1]) if calls[0] % 4 < 2 else frozenset()
        now = NONE if calls[0] % 16 > 9 else option
        return decide(req_ids, *bounds)._replace(option=now, paused=paused)

    policy.decide = in_turns
    outputs, counted = engine.measured(harness.videos_and_texts(FAMILY))
    return {"token_ids": harness.token_ids(outputs), "counters": counted}


def shown() -> dict:
    """Answer by a draft equal to the target, through its tower: as that encodes, and when it has forgotten."""
    engine = start(2, draft=pairs.checkpoint(FAMILY, "target"), pruner="none", on_draft_error="raise")
    requests, found = harness.videos(FAMILY, 4, QUESTION * 4), []  # it begins blocks behind the video
    for _ in range(2):
        outputs, counted = engine.measured(requests)
        found.append({"token_ids": harness.token_ids(outputs), "counters": counted})
        engine.llm.collective_rpc(forget_embeddings)
        engine.scheduler.encoder_cache_manager.reset()
    config = engine.core.vllm_config.additional_config["vidspec"]
    return {"vision": config["draft_vision"], "found": found}


def forget_embeddings(worker: Any) -> None:
    worker.model_runner.encoder_cache.encoder_outputs.clear()
    worker.model_runner.speculator.backend.forget_media()


def stages() -> dict:
    """Answer on two pipeline stages, prompts in chunks, by a draft equal to the target: guided, loosely, unpruned."""
    from vllm.sampling_params import StructuredOutputsParams

    overrides = {"pipeline_parallel_size": 2, "max_num_batched_tokens": harness.CHUNK_SIZES[FAMILY]}
    spec = {"request_scorers": ["strict", "loose"], "lambda_loose": 1.0, "on_draft_error": "raise", "pruner": "specvlm"}
    engine = start(1, overrides, pairs.checkpoint(FAMILY, "target"), **spec)
    requests = harness.greedy_and_sampled(FAMILY)

    def ask(**more: Any) -> dict:
        outputs, counted = engine.measured([(prompt, {**arguments, **more}) for prompt, arguments in requests])
        texts = [output.outputs[0].text for output in outputs]
        return {"token_ids": harness.token_ids(outputs), "counters": counted, "texts": texts}

    found = {"guided": ask(), "loose": ask(extra_args={"vidspec_scorer": "loose", "vidspec_lambda": 0.9})}
    engine.retune(prune_ratio=0.0)
    engine.llm.reset_prefix_cache()
    regex = "(blue|circle|vertically){16,20}"
    return found | {"equal": ask(), "structured": ask(structured_outputs=StructuredOutputsParams(regex=regex))}


def parallel(of_target: int, of_drafter: int, num_stages: int = 1) -> dict:
    """A target and a drafter of any number of ranks each."""
    drafter = {"device": "cpu", "tensor_parallel_size": of_drafter}
    overrides = {"pipeline_parallel_size": num_stages}
    engine = start(of_target, overrides, pruner="specvlm", on_draft_error="raise", parallel=drafter)
    engine.llm.collective_rpc(wait_for_drafts)
    outputs, counted = engine.measured(harness.greedy_and_sampled(FAMILY))
    long, counted_long = engine.measured(harness.videos(FAMILY, 1, max_tokens=LONG, ignore_eos=True))
    found = {"token_ids": harness.token_ids(outputs), "counters": counted}
    engine.llm.llm_engine.engine_core.shutdown()
    return found | {"long": harness.token_ids(long)[0][0], "counters_long": counted_long}


def server() -> None:
    """Say which processes are the drafter's, and work until killed."""
    engine = start(1, pruner="uniform", parallel={"device": "cpu"}, on_draft_error="raise")
    print("RESULT " + json.dumps(engine.runner.drafter_supervisor.pids), flush=True)
    while True:
        engine.generate(harness.videos(FAMILY, 2))


def inject(worker, point: str, failing_ranks: tuple[int, ...]) -> None:
    """Let a step of the given ranks fail until `heal`."""
    from vllm_vidspec.engine.draft import model as draft_model
    from vllm_vidspec.engine.hooks import state_store

    runner, parts = worker.model_runner, worker.model_runner.parts
    kinds = {kind.need: kind for kind in parts.guides}
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
    if worker.rank in failing_ranks:
        setattr(owner, name, failing)


def heal(worker) -> None:
    setattr(*worker.model_runner.injected)


def wait_for_drafts(worker) -> None:
    """Let each step wait half a second for streams that are too short: of three processes on two cores, maybe beside
    others, the drafter's would never be in time.
    """
    parts = getattr(worker.model_runner, "parts", None)  # of the last stage
    commits = None if parts is None else parts.speculator.backend._commits
    if commits is None:  # its first rank alone cuts windows
        return
    wanted, tables = commits.wanted, commits._tables

    def patient(rows, window):
        found, deadline = wanted(rows, window), time.monotonic() + 0.5
        while time.monotonic() < deadline:
            is_streaming = (tables.stream_epoch[rows] == tables.epoch[rows]) & (tables.end[rows] > 0)
            if not (is_streaming & (tables.end[rows] - tables.committed[rows] < found)).any():
                break
            time.sleep(20e-6)
        return found

    commits.wanted = patient


def be_impatient(worker) -> None:
    """Wait a second for a rank that never comes."""
    worker.model_runner.agreement.failed_patience_s = 1.0


def _break(engine, hit, ask) -> None:
    """Let one failure of one rank be too many; ask while speculation is off, and once it is on again."""
    breaker = engine.breaker
    engine.look()
    breaker._failures.clear()
    most, breaker._most = breaker._most, 1
    hit("prefill", (1,))
    engine.look()
    breaker._until = math.inf
    ask("off")
    breaker._most, breaker._until = most, 0.0
    engine.look()
    ask("on again")


def failing() -> None:
    """Print what came of the request that each injection hit, and of those without one."""
    spec = {"pruner": "auto", "guidance_layers": "all", "request_scorers": ["strict", "loose"], "lambda_loose": 1.0}
    engine = start(2, harness.NO_CACHE, prune_ratio=0.98, **spec)  # it observes both attention and hidden states
    engine.retune(pruner="specvlm")
    llm, (prompt, arguments), result = engine.llm, harness.videos(FAMILY, 1)[0], {}

    def ask(name: str, **more) -> None:
        outputs, gained = engine.measured([(prompt, {"max_tokens": 24, **arguments, **more})])
        watched = llm.collective_rpc(watching.pruning, args=(True, True))
        found = {"token_ids": harness.token_ids(outputs)[0][0], "counters": gained}
        result[name] = found | seen(outputs, watched)

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
    program, arguments = globals()[sys.argv[1]], map(int, sys.argv[2:])
    if (found := program(*arguments)) is not None:
        print("RESULT " + json.dumps(found), flush=True)
