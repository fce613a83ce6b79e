"""The methods of the papers' tables as this project runs them, beside vanilla: the one list of them; no engine."""

from dataclasses import dataclass, field
from typing import Any

VANILLA, SEQUENTIAL, PARALLEL = "vanilla", "sequential", "parallel"
STOCK = "stock"  # vLLM's own way to draft, without us
WINDOW = 5  # drafts a step of the papers' chains
LOOSE_WINDOW = 10  # of methods that accept mismatches (LVSpec, section 4)
_PRUNED: dict[str, Any] = {"pruner": "specvlm", "prune_ratio": 0.9}


@dataclass(frozen=True)
class Method:
    # Knobs of VidSpecConfig, the draft's shape spelled `drafting`; of STOCK vLLM's own
    spec: dict[str, Any] = field(default_factory=dict)
    # SEQUENTIAL, STOCK, or PARALLEL, whose window follows from the ratio of target time to draft time
    mode: str = SEQUENTIAL
    # Which model drafts, as `pairs.speculative_config` names it; None: the one that is asked for
    draft: str | None = None


METHODS: dict[str, Method] = {
    "SD-chain": Method({"pruner": "none", "num_speculative_tokens": WINDOW}),
    "SD-tree": Method({"pruner": "none", "drafting": "tree-static"}),
    "SD-Rand": Method({"pruner": "random", "prune_ratio": 0.9, "drafting": "tree-static"}),
    "SpecVLM": Method(_PRUNED | {"drafting": "tree-static"}),
    "SAGE": Method(_PRUNED | {"drafting": "tree-adaptive"}),
    "ParallelVLM": Method({"pruner": "uv", "prune_ratio": 0.9}, PARALLEL),
    "LVSpec": Method(_PRUNED | {"scorer": "loose", "num_speculative_tokens": LOOSE_WINDOW}),
    "FLy": Method(_PRUNED | {"scorer": "fly", "num_speculative_tokens": LOOSE_WINDOW}),
    "OnSD": Method({"pruner": "uniform", "prune_ratio": 1.0, "num_speculative_tokens": WINDOW}),
    "self-SD": Method(_PRUNED | {"drafting": "tree-static"}, draft="target"),
    "stock draft_model": Method({"method": "draft_model", "num_speculative_tokens": WINDOW}, STOCK),
}


def parallel_window(ratio: float) -> int:
    """Return the greatest window of parallel drafting at a ratio: twice it, as a step takes what is measured online."""
    return max(WINDOW, round(2 * ratio))
