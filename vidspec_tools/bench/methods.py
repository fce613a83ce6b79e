"""The methods of the papers' tables as this project runs them, beside vanilla: the one list of them; no engine."""

from dataclasses import dataclass, field
from typing import Any

VANILLA, SEQUENTIAL, PARALLEL = MODES = ("vanilla", "sequential", "parallel")
STOCK = "stock"  # vLLM's own way to draft, without us
OURS = "ParallelVLM"
WINDOW = 5  # drafts a step of the papers' chains
LOOSE_WINDOW = 10  # of methods that accept mismatches (LVSpec, section 4)
_PRUNED: dict[str, Any] = {"pruner": "specvlm", "prune_ratio": 0.9}


@dataclass(frozen=True)
class Method:
    """One row of a table.

    Attributes:
        spec: Knobs of VidSpecConfig, the draft's shape spelled `drafting`; of STOCK vLLM's own.
        mode: Of MODES, or STOCK; a parallel one's window follows from the ratio of target time to draft time.
        draft: Which model drafts, as `pairs.speculative_config` names it; None: the one that is asked for.
    """

    spec: dict[str, Any] = field(default_factory=dict)
    mode: str = SEQUENTIAL
    draft: str | None = None


METHODS: dict[str, Method] = {
    "SD-chain": Method({"pruner": "none", "num_speculative_tokens": WINDOW}),
    "SD-tree": Method({"pruner": "none", "drafting": "tree-static"}),
    "SD-Rand": Method({"pruner": "random", "prune_ratio": 0.9, "drafting": "tree-static"}),
    "SpecVLM": Method(_PRUNED | {"drafting": "tree-static"}),
    "SAGE": Method(_PRUNED | {"drafting": "tree-adaptive"}),
    OURS: Method({"pruner": "uv", "prune_ratio": 0.9}, PARALLEL),
    "LVSpec": Method(_PRUNED | {"scorer": "loose", "num_speculative_tokens": LOOSE_WINDOW}),
    "FLy": Method(_PRUNED | {"scorer": "fly", "num_speculative_tokens": LOOSE_WINDOW}),
    "OnSD": Method({"pruner": "uniform", "prune_ratio": 1.0, "num_speculative_tokens": WINDOW}),
    "self-SD": Method(_PRUNED | {"drafting": "tree-static"}, draft="target"),
    "stock draft_model": Method({"method": "draft_model", "num_speculative_tokens": WINDOW}, STOCK),
}
# The baselines of ParallelVLM's Table 1, by their names there; all of them draft, then verify.
BASELINES: dict[str, Method] = {
    "SD": METHODS["SD-chain"],
    "SD-Tree": METHODS["SD-tree"],
    "SpecVLM": METHODS["SpecVLM"],
    "OnSD": METHODS["OnSD"],
}


def parallel_window(ratio: float) -> int:
    """Return the greatest window of parallel drafting at a ratio: twice it, as a step takes what is measured online."""
    return max(WINDOW, round(2 * ratio))
