"""The methods of the papers' tables: how this project runs them beside vanilla, and what is published of them."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_vidspec.tools.bench.speed import PARALLEL, SEQUENTIAL, WINDOW, Variant

STOCK = "stock"  # vLLM's own way to draft, without us
POLICY = "policy"  # drafts what its policy decides
LOOSE_WINDOW = 10  # of methods that accept mismatches (LVSpec, section 4)
_PRUNED: dict[str, Any] = {"pruner": "specvlm:stride", "prune_ratio": 0.9}  # as its authors' code chooses


@dataclass(frozen=True)
class Method:
    # Knobs of VidSpecConfig, the draft's shape spelled `drafting`; of STOCK vLLM's own
    spec: dict[str, Any] = field(default_factory=dict)
    # SEQUENTIAL, STOCK, or PARALLEL, whose window follows from the ratio of target time to draft time
    mode: str = SEQUENTIAL
    # Which model drafts, as `pairs.speculative_config` names it; None: the one that is asked for
    draft: str | None = None

    def variant(self, name: str, ratio: float) -> Variant:
        """Return the engine that runs it at a ratio."""
        tokens = {"num_speculative_tokens": parallel_window(ratio)} if self.mode == PARALLEL else {}
        return Variant(name, self.mode, self.spec | tokens, self.draft)


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


# ---- what is published, all of it on VideoDetailCaption --------------------------------------------------------------

QWEN, LLAVA = "Qwen2.5-VL 7B & 32B", "LLaVA-OV 7B & 72B"
STEP, REJECTION = "step", "rejection"  # what a published length is the mean of
# Papers whose tau is without the target's own token (SpecVLM's code and LVSpec's eq. 2 count accepted drafts only, SAGE
# emits tau + 1). ParallelVLM's M is with it in the rows of others (4.14 where SpecVLM has 3.12); of its own rows it
# does not say, and draws one without (its figure 8).
WITHOUT_OWN_TOKEN = frozenset({"SpecVLM", "SAGE", "LVSpec"})


class Figure(NamedTuple):
    paper: str
    pair: str  # draft and target, as papers write them
    tau: float  # its mean accepted length as printed; for ParallelVLM its M
    speedup: float  # over autoregressive decoding
    # STEP: tokens of one verify step; REJECTION: tokens from one rejection to the next, over several steps of a
    # parallel drafter. Such a length divided by the time of a step is no speed.
    over: str = STEP

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a verify step emits, the target's own included: what our own figures are; None: not told."""
        return round(self.tau + (self.paper in WITHOUT_OWN_TOKEN), 2) if self.over == STEP else None


# ParallelVLM's Table 1: by pair and method its mean accepted length M and speedup. 128 frames, 512 output tokens,
# 8 L40S; a window of 5 drafts, of ParallelVLM's own rows 5 (Qwen) and 9 (LLaVA), from the ratio; pruning 0.9.
_ROWS = ("SD", "OnSD", "SD-Tree", "SpecVLM", "ParallelVLM")
_TABLE_1 = {
    QWEN: ((3.37, 1.26), (2.76, 1.38), (4.21, 1.60), (4.18, 2.11), (4.23, 2.40)),
    LLAVA: ((4.14, 1.98), (3.67, 2.14), (4.64, 2.18), (4.51, 2.76), (6.82, 3.43)),
}
TABLE_1 = {
    pair: {
        row: Figure("ParallelVLM", pair, *figures, REJECTION if row == "ParallelVLM" else STEP)
        for row, figures in zip(_ROWS, table, strict=True)
    }
    for pair, table in _TABLE_1.items()
}


# By the family whose bundled pair represents the papers' and by method: that of the paper which proposes the method, or
# else of the one that runs it as we do.
FIGURES: dict[str, dict[str, Figure]] = {
    "qwen2.5-vl": {
        "SD-chain": TABLE_1[QWEN]["SD"],
        "SD-tree": Figure("SpecVLM", QWEN, 3.27, 1.40),
        "SD-Rand": Figure("SpecVLM", QWEN, 3.21, 2.03),
        "SpecVLM": Figure("SpecVLM", QWEN, 3.23, 2.05),
        "SAGE": Figure("SAGE", "Qwen2.5-VL 7B & 72B", 5.18, 3.18),
        "ParallelVLM": TABLE_1[QWEN]["ParallelVLM"],
        "LVSpec": Figure("LVSpec", QWEN, 7.76, 2.70),
        "FLy": Figure("LVSpec", QWEN, 4.37, 1.71),
        "OnSD": TABLE_1[QWEN]["OnSD"],
        "self-SD": Figure("SpecVLM", "Qwen2.5-VL 7B & 7B", 3.83, 1.50),
    },
    "llava-onevision": {
        "SD-chain": TABLE_1[LLAVA]["SD"],
        "SD-tree": Figure("SpecVLM", LLAVA, 3.68, 2.08),
        "SD-Rand": Figure("SpecVLM", LLAVA, 3.19, 2.50),
        "SpecVLM": Figure("SpecVLM", LLAVA, 3.48, 2.68),
        "SAGE": Figure("SAGE", "LLaVA-OV 8B & 72B", 5.74, 3.36),
        "ParallelVLM": TABLE_1[LLAVA]["ParallelVLM"],
        "LVSpec": Figure("LVSpec", LLAVA, 7.34, 2.94),
        "FLy": Figure("LVSpec", LLAVA, 4.12, 1.84),
        "OnSD": TABLE_1[LLAVA]["OnSD"],
        "self-SD": Figure("SpecVLM", "LLaVA-OV 7B & 7B", 3.98, 1.26),
    },
    "qwen3-vl": {
        "SD-tree": Figure("SAGE", "Qwen3-VL 8B & 235B-A22B", 3.58, 1.22),
        "SpecVLM": Figure("SAGE", "Qwen3-VL 8B & 235B-A22B", 3.24, 1.14),
        "SAGE": Figure("SAGE", "Qwen3-VL 8B & 235B-A22B", 4.39, 1.32),
    },
}
COLUMNS = ("published_acceptance_length", "published_speedup", "published_tau", "published_source")


def figure(family: str, method: str) -> dict[str, str | float | None]:
    """Return the columns of a row of `paper`; None where nothing is published of the method for the family."""
    found = FIGURES.get(family, {}).get(method)
    if found is None:
        return dict.fromkeys(COLUMNS)
    source = f"{found.paper}, {found.pair}"
    return dict(zip(COLUMNS, (found.acceptance_length, found.speedup, found.tau, source), strict=True))
