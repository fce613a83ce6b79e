"""One scenario at any tensor-parallel size; as a program, on two ranks, with outputs and counters as JSON."""

import json
import os
from typing import Any

from tests.engine import harness
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


def ask_all(engine: harness.Engine) -> dict[str, dict]:
    """Ask four greedy and four sampled requests, strictly and then loosely, and three greedy ones, which get trees."""
    requests = harness.videos(FAMILY, 4) + harness.videos(FAMILY, 4, temperature=1.0)
    tell = engine.llm.collective_rpc

    def ask(num_requests: int = 8, **more: Any) -> dict:
        tell("vidspec_watch", args=(True,))
        tell("vidspec_watch_scores", args=(True,))
        outputs, counted = engine.measured([(prompt, {**args, **more}) for prompt, args in requests[:num_requests]])
        pruned, scored = tell("vidspec_watch", args=(False, True)), tell("vidspec_watch_scores", args=(False,))
        for rank in (*pruned, *scored):  # in the order of the prompts, not of the batch
            rank.sort(key=lambda record: int(record["req_id"].split("-")[0]))
        return {
            "token_ids": harness.token_ids(outputs),
            "prompt_ids": [list(output.prompt_token_ids) for output in outputs],
            "counters": counted,
            "scored": scored,
            "scores": [[(record["scores"] or [None])[0] for record in rank] for rank in pruned],
            "kept_indices": [[record["kept_indices"][0] for record in rank] for rank in pruned],
        }

    strict = ask()
    loose = ask(extra_args={"vidspec_scorer": "loose", "vidspec_lambda": 0.9})
    engine.llm.reset_prefix_cache()
    return {"strict": strict, "loose": loose, "trees": ask(3)}


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    ranks = LLM(**pairs.llm_kwargs(FAMILY, "draft", overrides={"tensor_parallel_size": 2}, **SPEC))
    print("RESULT " + json.dumps(ask_all(harness.Engine(ranks, FAMILY))))
