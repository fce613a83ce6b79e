"""Tables of what pruners are worth, of every pair, with 95 % intervals over requests."""

from typing import Any

import numpy as np

from vidspec_tools.pages.tables import Row, markdown, origin, read, recorded
from vllm_vidspec import assets

NAME = "long-videos"
NAMES = dict(zip(assets.LONG_PAIRS, (NAME, f"{NAME}-llava"), strict=True))  # of results, by pair
NAMES |= {family: f"pruners-{family}" for family in (*assets.FAMILIES, assets.PLAIN)}
KEPT = 0.9  # the share dropped of the tables
_DRAWS = 4000
_SHOWN = ("specvlm", "specvlm:stride", "uniform", "uniform:stride", "random", "uv")
# What differs in each column: (heading, setting, the one that it is compared with)
_DIFFERENCES = (
    ("`specvlm` less `random`", f"specvlm {KEPT:g}", f"random {KEPT:g}"),
    ("`specvlm` less `uniform`", f"specvlm {KEPT:g}", f"uniform {KEPT:g}"),
    ("lattice less stride, `specvlm`", f"specvlm {KEPT:g}", f"specvlm:stride {KEPT:g}"),
    ("lattice less stride, `uniform`", f"uniform {KEPT:g}", f"uniform:stride {KEPT:g}"),
    ("`original` less `compacted`, `specvlm`", f"specvlm {KEPT:g}", f"specvlm {KEPT:g} compacted"),
    ("`original` less `compacted`, `uniform`", f"uniform {KEPT:g}", f"uniform {KEPT:g} compacted"),
)


def mean_length(requests: list[Row], kind: str | None = None) -> float:
    """Return output tokens per verify step, over the requests of one kind of question or all."""
    chosen = [one for one in requests if kind in (None, one["kind"])]
    drafts = sum(one["drafts"] for one in chosen)
    return 1 + sum(one["accepted"] for one in chosen) / drafts if drafts else float("nan")


def with_interval(requests: list[Row]) -> str:
    """Return tokens per verify step and half of their 95 % interval."""
    low, high = interval(requests)
    return f"{mean_length(requests):.2f} ± {(high - low) / 2:.2f}"


def today(found: dict[str, dict[str, list[Row]]]) -> dict[str, dict[str, list[Row]]]:
    """Return the lengths at which today's choices were measured."""
    return {tokens: found[tokens] for tokens in sorted(found, key=int) if f"specvlm {KEPT:g}" in found[tokens]}


def interval(requests: list[Row], less: list[Row] | None = None) -> tuple[float, float]:
    """Return the 95 % interval of tokens per verify step, or of the difference from the same requests in `less`.

    By bootstrap over requests, which are drawn in pairs.
    """
    drawn = np.random.default_rng(0).integers(0, len(requests), (_DRAWS, len(requests)))

    def lengths(rows: list[Row]) -> np.ndarray:
        accepted, drafts = (np.array([row[name] for row in rows])[drawn].sum(1) for name in ("accepted", "drafts"))
        return 1 + accepted / drafts

    found = lengths(requests) - (0 if less is None else lengths(less))
    low, high = np.quantile(found, (0.025, 0.975))
    return float(low), float(high)


def _points() -> list[tuple[str, int, dict[str, list[Row]]]]:
    """Return pair, video tokens and requests by setting."""
    return [
        (family, int(tokens), points)
        for family, name in NAMES.items()
        if recorded(name)
        for tokens, points in today(read(name)["acceptance"]).items()
    ]


def lengths() -> str:
    """Return tokens per verify step of every pair and length."""
    names = {"whole": "whole video", **{f"{one} {KEPT:g}": f"`{one}`" for one in _SHOWN}, "blind": "no video"}
    lines = []
    for family, tokens, points in _points():
        cells = [f"`{family}`", f"{tokens:,}", str(len(points["whole"]))]
        for name in names:
            cells.append(with_interval(points[name]) if name in points else "-")
        same = [one["is_identical"] for requests in points.values() for one in requests]
        lines.append([*cells, f"{sum(same):,} of {len(same):,}"])
    head = ["pair", "video tokens", "requests", *names.values(), "identical to vanilla"]
    return f"{markdown(head, lines)}\n\n{_origins()}"


def differences() -> str:
    """Return differences between settings over the same requests; bold where 0 is not in the interval."""
    lines = []
    for family, tokens, points in _points():
        cells = [f"`{family}`", f"{tokens:,}"]
        for _, name, other in _DIFFERENCES:
            if name not in points or other not in points:
                cells.append("-")
                continue
            low, high = interval(points[name], points[other])
            text = f"{low:+.2f} to {high:+.2f}"
            cells.append(f"**{text}**" if low > 0 or high < 0 else text)
        lines.append(cells)
    return markdown(["pair", "video tokens", *(heading for heading, *_ in _DIFFERENCES)], lines)


def _origins() -> str:
    lines = dict.fromkeys(origin(read(name)) for name in NAMES.values() if recorded(name))
    return "  \n".join(lines)


def sections() -> dict[str, Any]:
    """Return what writes each section, where there is a result."""
    return {"pruners": lengths, "pruner-differences": differences} if _points() else {}
