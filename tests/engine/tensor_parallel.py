"""Run one scenario at a tensor-parallel size and print outputs and counters as JSON; a process of its own."""

import json
import sys

from tests.engine import harness
from vllm_vidspec import metrics


def main() -> None:
    """Arguments: family, tensor-parallel size, "vanilla" or a draft role, the pruner, the draft's shape.

    A chain with the default pruner is asked a second time, loosely: `loose` has the same results of that.
    """
    from vllm import LLM, SamplingParams

    from vllm_vidspec.tools import pairs

    family, size, draft, pruner, shape = sys.argv[1], int(sys.argv[2]), *sys.argv[3:6]
    spec = (
        {}
        if draft == "vanilla"
        else {"on_draft_error": "raise", "pruner": pruner, "guidance_layers": "all", "drafting": shape}
    )
    if spec and (pruner, shape) == ("specvlm", "chain"):
        spec |= {"request_scorers": ["strict", "loose"], "lambda_max": 1.0}
    llm = LLM(
        **pairs.llm_kwargs(
            family, None if draft == "vanilla" else draft, overrides={"tensor_parallel_size": size}, **spec
        )
    )
    if spec:
        llm.collective_rpc("vidspec_watch", args=(True,))
    requests = harness.videos(family, 4) + harness.videos(family, 4, temperature=1.0)

    def ask(**more):
        return llm.generate(
            [prompt for prompt, _ in requests],
            [SamplingParams(**{"max_tokens": harness.MAX_TOKENS, **arguments, **more}) for _, arguments in requests],
            use_tqdm=False,
        )

    def counters():
        return metrics.read_metrics(metrics.path_for(llm.llm_engine.vllm_config.instance_id))

    outputs = ask()
    result = {"token_ids": harness.token_ids(outputs), "prompt_ids": [list(o.prompt_token_ids) for o in outputs]}
    if spec:
        result["counters"] = counters()
        watched = llm.collective_rpc("vidspec_watch", args=(False, True))  # per rank
        for rank in watched:  # in the order of the prompts, not of the batch
            rank.sort(key=lambda record: int(record["req_id"].split("-")[0]))
        for name in ("scores", "kept_indices"):
            result[name] = [[(record[name] or [None])[0] for record in rank] for rank in watched]
    if spec and (pruner, shape) == ("specvlm", "chain"):
        llm.collective_rpc("vidspec_watch_scores", args=(True,))
        loose = ask(extra_args={"vidspec_scorer": "loose", "vidspec_lambda": 0.9})
        scored = llm.collective_rpc("vidspec_watch_scores", args=(False,))  # per rank
        for rank in scored:
            rank.sort(key=lambda record: int(record["req_id"].split("-")[0]))
        gained = metrics.difference(result["counters"], counters())
        result["loose"] = {"token_ids": harness.token_ids(loose), "scored": scored, "counters": gained}
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
