"""Two ranks under the controller: who rests is decided beside the scheduler; as a program, answers as JSON."""

import json
import os

from tests.engine import harness
from vllm_vidspec.tools import pairs

FAMILY = harness.LLAVA


def ask_all(engine: harness.Engine) -> dict:
    """Answer videos and texts, every second step with the first request at rest."""
    controller = engine.scheduler._vidspec_side._control._controller
    decide, calls = controller.decide, [0]
    option = max(controller.options, key=lambda option: option.num_tokens)

    def in_turns(req_ids, most=None):
        calls[0] += 1
        resting = frozenset(req_ids[:1]) if calls[0] % 4 < 2 else frozenset()
        return decide(req_ids, most)._replace(option=option, resting=resting, number=calls[0])

    controller.decide = in_turns
    outputs, counted = engine.measured(harness.videos_and_texts(FAMILY))
    return {"token_ids": harness.token_ids(outputs), "counters": counted}


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    spec = {"adaptive_tokens": True, "on_draft_error": "raise"}
    ranks = LLM(**pairs.llm_kwargs(FAMILY, "draft", overrides={"tensor_parallel_size": 2}, **spec))
    print("RESULT " + json.dumps(ask_all(harness.Engine(ranks, FAMILY))))
