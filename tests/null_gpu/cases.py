"""The configurations that run on the null GPU; imports no vLLM."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_vidspec.bench import pairs

FAMILY = "qwen2.5-vl"
NUM_FRAMES, FRAME_SIZE = 8, 112
GRAPHS = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}}
COMPILED = {"enforce_eager": False, "compilation_config": {"mode": 3, "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}}


@dataclass(frozen=True)
class Case:
    """One engine and the requests that it runs.

    Attributes:
        name: How tests and tables call it.
        vanilla: Whose waits and copies are the measure: vanilla vLLM in the same mode.
        spec: Knobs of VidSpecConfig, None for vanilla vLLM.
        overrides: Arguments of `LLM`.
        batch: Requests at a time.
        sampling: Arguments of `SamplingParams`.
        skip: Steps after the first token that are not counted.
        steps: Steps that are counted.
        timed_steps: Steps that are timed afterwards.
        after: Called with the session once its requests are aborted; returns what it measured.
    """

    name: str
    spec: dict[str, Any] | None = None
    vanilla: str = "vanilla"
    overrides: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    sampling: dict[str, Any] = field(default_factory=dict)
    skip: int = 6
    steps: int = 10
    timed_steps: int = 20
    after: Callable[[Any], dict[str, Any]] | None = None

    def llm_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `LLM`."""
        overrides = {"dtype": "bfloat16", "kv_cache_memory_bytes": 64 << 20, "disable_log_stats": True} | self.overrides
        if self.spec is None:
            return pairs.llm_kwargs(FAMILY, overrides=overrides)
        spec = {"calibration": None, "on_draft_error": "raise", "draft": "draft"} | self.spec
        return pairs.llm_kwargs(FAMILY, spec.pop("draft"), overrides=overrides, **spec)

    def prompts(self) -> list[dict]:
        """Return a prompt with a video of its own for each request."""
        noise = np.random.default_rng(0)
        shape = (NUM_FRAMES, FRAME_SIZE, FRAME_SIZE, 3)
        return [pairs.video_prompt(FAMILY, noise.integers(0, 255, shape, dtype=np.uint8)) for _ in range(self.batch)]


_ALL = (
    Case("vanilla"),
    Case("vanilla graphs", overrides=GRAPHS),
    Case("chain", {}),
    Case("chain graphs", {}, "vanilla graphs", overrides=GRAPHS),
    Case("static", {"drafting": "tree-static"}),
    Case("static graphs", {"drafting": "tree-static"}, "vanilla graphs", overrides=GRAPHS),
    Case("adaptive", {"drafting": "tree-adaptive"}),
    Case("loose", {"scorer": "loose"}),
    Case("uv", {"pruner": "uv"}),
    Case("self", {"draft": "target"}),
    Case("batch", {}, "vanilla batch", batch=4),
    Case("vanilla batch", batch=4),
    Case("sampled", {}, "vanilla sampled", sampling={"temperature": 1.0, "top_p": 0.9}),
    Case("vanilla sampled", sampling={"temperature": 1.0, "top_p": 0.9}),
)
CASES = {case.name: case for case in _ALL}
