"""A target and a drafter of any number of ranks each; as a program, with outputs and counters as JSON."""

import json
import os
import sys

from tests.engine import harness
from tests.engine.tensor_parallel import FAMILY
from vllm_vidspec.tools import pairs

LONG = 400  # tokens of an answer that no drafter is too late for

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
            on_draft_error="raise",
            # Three processes on two cores, maybe beside others: without a wait no draft would ever be in time.
            parallel={"device": "cpu", "tensor_parallel_size": of_drafter, "wait_us": 500_000},
        )
    )
    engine = harness.Engine(ranks, FAMILY)
    outputs, counted = engine.measured(harness.videos(FAMILY, 4) + harness.videos(FAMILY, 4, temperature=1.0))
    long, counted_long = engine.measured(harness.videos(FAMILY, 1, max_tokens=LONG, ignore_eos=True))
    result = {"token_ids": harness.token_ids(outputs), "counters": counted}
    print("RESULT " + json.dumps(result | {"long": harness.token_ids(long)[0][0], "counters_long": counted_long}))
    ranks.llm_engine.engine_core.shutdown()
