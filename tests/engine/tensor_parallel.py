"""One scenario at any tensor-parallel size; as a program, on two ranks, with outputs and counters as JSON."""

import json
import os
from typing import Any

from tests.engine import harness
from vllm_vidspec import metrics
from vllm_vidspec.tools import pairs

FAMILY = harness.LLAVA  # its bundled vision towers have an even number of heads
# Chains while many requests run, trees while few do; strict, unless a request asks for less.
SPEC: dict[str, Any] = {
    "pruner": "specvlm",
    "guidance_layers": "all",
    "drafting": "auto",
    "draft_table": [[1, 3, "tree-adaptive", 16], [4, 64, "chain", 5]],
    "num_speculative_tokens": 16,
    "request_scorers": ["strict", "loose"],
    "lambda_max": 1.0,
    "on_draft_error": "raise",
}


def ask_all(llm: Any) -> dict[str, dict]:
    """Ask four greedy and four sampled requests, strictly and then loosely, and three greedy ones, which get trees."""
    from vllm import SamplingParams

    requests = harness.videos(FAMILY, 4) + harness.videos(FAMILY, 4, temperature=1.0)

    def ask(num_requests: int = 8, **more: Any) -> dict:
        path = metrics.path_for(llm.llm_engine.vllm_config.instance_id)
        before = metrics.read_metrics(path)
        for what in ("vidspec_watch", "vidspec_watch_scores"):
            llm.collective_rpc(what, args=(True,))
        outputs = llm.generate(
            [prompt for prompt, _ in requests[:num_requests]],
            [SamplingParams(max_tokens=harness.MAX_TOKENS, **arguments, **more) for _, arguments in requests][
                :num_requests
            ],
            use_tqdm=False,
        )
        pruned, scored = (
            llm.collective_rpc("vidspec_watch", args=(False, True)),
            llm.collective_rpc("vidspec_watch_scores", args=(False,)),
        )
        for rank in (*pruned, *scored):  # in the order of the prompts, not of the batch
            rank.sort(key=lambda record: int(record["req_id"].split("-")[0]))
        return {
            "token_ids": harness.token_ids(outputs),
            "prompt_ids": [list(output.prompt_token_ids) for output in outputs],
            "counters": metrics.difference(before, metrics.read_metrics(path)),
            "scored": scored,
            **{
                name: [[(record[name] or [None])[0] for record in rank] for rank in pruned]
                for name in ("scores", "kept_indices")
            },
        }

    strict = ask()
    loose = ask(extra_args={"vidspec_scorer": "loose", "vidspec_lambda": 0.9})
    llm.reset_prefix_cache()
    return {"strict": strict, "loose": loose, "trees": ask(3)}


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    ranks = LLM(**pairs.llm_kwargs(FAMILY, "draft", overrides={"tensor_parallel_size": 2}, **SPEC))
    print("RESULT " + json.dumps(ask_all(ranks)))
