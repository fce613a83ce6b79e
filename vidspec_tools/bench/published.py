"""What the papers publish of the methods that `vidspec bench parallel --table` and `vidspec bench paper` run."""

from dataclasses import dataclass

BENCHMARK = "VideoDetailCaption"  # of all figures


@dataclass(frozen=True)
class PublishedPair:
    """A pair of ParallelVLM's Table 1, which is what `bench parallel --table` shows.

    Attributes:
        family: The bundled pair that represents it.
        name: As the paper names it.
        ratio: Its c = T_p / T_q, without pruning, rounded.
        figures: By method its mean accepted length M, the target's own token included, and its speedup, on BENCHMARK.
    """

    family: str
    name: str
    ratio: float
    figures: dict[str, tuple[float, float]]


_METHODS = ("SD", "OnSD", "SD-Tree", "SpecVLM", "ParallelVLM")


def _pair(family: str, name: str, ratio: float, *figures: tuple[float, float]) -> PublishedPair:
    return PublishedPair(family, name, ratio, dict(zip(_METHODS, figures, strict=True)))


_QWEN, _LLAVA = "Qwen2.5-VL 7B & 32B", "LLaVA-OV 7B & 72B"
# 128 frames, 512 output tokens, 8 L40S; a window of 5, ParallelVLM's from the ratio (3, 9 and 5 here); pruning 0.9.
# By method of _METHODS.
PUBLISHED = (
    _pair(
        "llava-onevision", "LLaVA-OV 0.5B & 7B", 2, (4.26, 1.08), (3.73, 1.40), (5.08, 1.28), (4.89, 1.83), (8.47, 2.12)
    ),
    _pair("llava-onevision", _LLAVA, 5, (4.14, 1.98), (3.67, 2.14), (4.64, 2.18), (4.51, 2.76), (6.82, 3.43)),
    _pair("qwen2.5-vl", _QWEN, 3, (3.37, 1.26), (2.76, 1.38), (4.21, 1.60), (4.18, 2.11), (4.23, 2.40)),
)


def published(family: str, ratio: float, method: str) -> dict[str, str | float | None]:
    """Return the columns of a row: the family's pair whose ratio is nearest, and what is published of the method there.

    Args:
        family: Of the row.
        ratio: Target time to draft time, as asked for; of two pairs that are equally near the first.
        method: "SD", "SD-Tree", "OnSD", "SpecVLM" or "ParallelVLM"; of any other nothing is published.

    Returns:
        None for each where the paper has no such pair.
    """
    ours = [one for one in PUBLISHED if one.family == family]
    if not ours:
        return dict.fromkeys(("published_pair", "published_m", "published_speedup"))
    pair = min(ours, key=lambda one: abs(one.ratio - ratio))
    length, speedup = pair.figures.get(method, (None, None))
    return {"published_pair": pair.name, "published_m": length, "published_speedup": speedup}


# Papers whose tau is without the target's own token (SpecVLM's code and LVSpec's eq. 2 count accepted drafts only, SAGE
# emits tau + 1); ParallelVLM's M is with it.
WITHOUT_OWN_TOKEN = frozenset({"SpecVLM", "SAGE", "LVSpec"})


@dataclass(frozen=True)
class Figure:
    """What a paper publishes of a method, on BENCHMARK.

    Attributes:
        paper: Which.
        pair: Draft and target, as papers write them.
        tau: Its mean accepted length as printed; for ParallelVLM its M.
        speedup: Over autoregressive decoding.
    """

    paper: str
    pair: str
    tau: float
    speedup: float

    @property
    def acceptance_length(self) -> float:
        """Tokens that a verify step emits, the target's own included: what our own figures are."""
        return round(self.tau + (self.paper in WITHOUT_OWN_TOKEN), 2)

    @property
    def source(self) -> str:
        """Where it is published."""
        return f"{self.paper}, {self.pair}"


def _of_table_1(pair: PublishedPair, method: str) -> Figure:
    return Figure("ParallelVLM", pair.name, *pair.figures[method])


_TABLE_1 = {pair.name: pair for pair in PUBLISHED}
# By the family whose bundled pair represents the papers' and by method: that of the paper which proposes the method, or
# else of the one that runs it as we do.
FIGURES: dict[str, dict[str, Figure]] = {
    "qwen2.5-vl": {
        "SD-chain": _of_table_1(_TABLE_1[_QWEN], "SD"),
        "SD-tree": Figure("SpecVLM", _QWEN, 3.27, 1.40),
        "SD-Rand": Figure("SpecVLM", _QWEN, 3.21, 2.03),
        "SpecVLM": Figure("SpecVLM", _QWEN, 3.23, 2.05),
        "SAGE": Figure("SAGE", "Qwen2.5-VL 7B & 72B", 5.18, 3.18),
        "ParallelVLM": _of_table_1(_TABLE_1[_QWEN], "ParallelVLM"),
        "LVSpec": Figure("LVSpec", _QWEN, 7.76, 2.70),
        "FLy": Figure("LVSpec", _QWEN, 4.37, 1.71),
        "OnSD": _of_table_1(_TABLE_1[_QWEN], "OnSD"),
        "self-SD": Figure("SpecVLM", "Qwen2.5-VL 7B & 7B", 3.83, 1.50),
    },
    "llava-onevision": {
        "SD-chain": _of_table_1(_TABLE_1[_LLAVA], "SD"),
        "SD-tree": Figure("SpecVLM", _LLAVA, 3.68, 2.08),
        "SD-Rand": Figure("SpecVLM", _LLAVA, 3.19, 2.50),
        "SpecVLM": Figure("SpecVLM", _LLAVA, 3.48, 2.68),
        "SAGE": Figure("SAGE", "LLaVA-OV 8B & 72B", 5.74, 3.36),
        "ParallelVLM": _of_table_1(_TABLE_1[_LLAVA], "ParallelVLM"),
        "LVSpec": Figure("LVSpec", _LLAVA, 7.34, 2.94),
        "FLy": Figure("LVSpec", _LLAVA, 4.12, 1.84),
        "OnSD": _of_table_1(_TABLE_1[_LLAVA], "OnSD"),
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
    """Return the columns of a row of `bench paper`; None where nothing is published of the method for the family."""
    found = FIGURES.get(family, {}).get(method)
    if found is None:
        return dict.fromkeys(COLUMNS)
    return dict(zip(COLUMNS, (found.acceptance_length, found.speedup, found.tau, found.source), strict=True))
