"""An engine with parallel drafting that says which processes are its drafter's, and works until it is killed."""

import json
import os

from tests.engine import harness
from vllm_vidspec.tools import pairs

if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    spec = {"pruner": "uniform", "parallel": {"device": "cpu"}, "on_draft_error": "raise"}
    llm = LLM(**pairs.llm_kwargs(harness.LLAVA, "draft", **spec))
    engine = harness.Engine(llm, harness.LLAVA)
    print("RESULT " + json.dumps(engine.runner.drafter_client.pids), flush=True)
    while True:
        engine.generate(harness.videos(harness.LLAVA, 2))
