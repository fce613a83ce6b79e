"""A target and a drafter of any number of ranks each; as a program, with outputs and counters as JSON."""

import json
import os
import sys
import time

from tests.engine import harness
from tests.engine.tensor_parallel import FAMILY
from vllm_vidspec.tools import pairs

if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    of_target, of_drafter = map(int, sys.argv[1:])
    ranks = LLM(
        **pairs.llm_kwargs(
            FAMILY,
            "draft",
            overrides={"tensor_parallel_size": of_target},
            pruner="specvlm",
            parallel={"device": "cpu", "tensor_parallel_size": of_drafter},
        )
    )
    engine = harness.Engine(ranks, FAMILY)
    if of_target == 1:  # a drafter of two ranks beside it has no core of its own: give it time
        propose = engine.speculator.propose
        engine.speculator.propose = lambda *args, **more: (time.sleep(0.2), propose(*args, **more))[1]
    outputs, counted = engine.measured(harness.videos(FAMILY, 4) + harness.videos(FAMILY, 4, temperature=1.0))
    print("RESULT " + json.dumps({"token_ids": harness.token_ids(outputs), "counters": counted}))
    ranks.llm_engine.engine_core.shutdown()
