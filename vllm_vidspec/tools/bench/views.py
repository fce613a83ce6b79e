"""How `vidspec bench acceptance` and `bench speed` show their rows: tables, and a plot of acceptance; no engine."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools.bench.acceptance import AXES
from vllm_vidspec.tools.bench.speed import PARALLEL, PHASES
from vllm_vidspec.tools.tables import Columns, by, by_columns, fill

Row = dict[str, Any]
Rows = Sequence[Row]

# ---- bench acceptance ------------------------------------------------------------------------------------------------

_SHORT = {"num_speculative_tokens": "K", "temperature": "T", "prune_ratio": "prune"}
_SHOWN_ALONE = ("family", "draft", "pruner", "prune_ratio", "num_speculative_tokens", "temperature")
_OF_CHAINS: Columns = {"accept\nrate": "{acceptance_rate:p}", "drafts": "{num_drafts}"}
# Per verify step: the length that a tree's depth allows, its nodes and the draft's forwards.
_OF_TREES: Columns = {
    "at\nmost": "{max_acceptance_length:.2f}",
    "nodes": "{nodes_per_step:.1f}",
    "draft\nruns": "{draft_forwards_per_step:.1f}",
}


def acceptance_tables(rows: Rows) -> Iterator[Table]:
    """Yield the table: what changes in front and what does not in the caption."""
    several = [name for name in AXES if len({str(row[name]) for row in rows}) > 1]
    has_trees = any(row["drafting"] != "chain" for row in rows)
    shown = [
        {
            **row,
            **{name: _short(row[name]) for name in AXES},
            "kept": row["draft_kv_bytes"] / row["full_draft_kv_bytes"] if row["full_draft_kv_bytes"] else None,
        }
        for row in rows
    ]
    columns: Columns = {
        **{_SHORT.get(name, name.replace("_", " ")): f"{{{name}}}" for name in several},
        "accept\nlength": "{acceptance_length:.2f}",
        **(_OF_TREES if has_trees else _OF_CHAINS),
        "same\noutput": "{identical_frac:p}",
        "draft KV\nof full": "{kept:p}",
        "s": "{decode_s:.1f}",
        "vanilla\ns": "{vanilla_decode_s:.1f}",
    }
    fixed = [f"{_SHORT.get(name, name)} {shown[0][name]}" for name in _SHOWN_ALONE if name not in several]
    fixed += [f"{rows[0]['scheduling']} scheduling"] if has_trees else []
    fixed += [f"{name} {json.dumps(value)}" for name, value in rows[0]["knobs"].items()]
    title = f"Acceptance on {rows[0]['requests']} held-out videos"
    yield by_columns(columns, shown, len(several), title=title, caption=", ".join(fixed))


def _short(value: Any) -> str:
    """Return a value of an axis; of a path its last part."""
    return Path(value).name if isinstance(value, str) else f"{value:g}"


def shape_of(row: Row) -> str:
    """Return what a row's drafts are called: the shape, and the knobs that are not the defaults."""
    knobs = sorted((row.get("knobs") or {}).items())
    return ", ".join([row["drafting"], *(f"{name} {json.dumps(value)}" for name, value in knobs)])


def check_axes(path: str, axes: Mapping[str, Sequence[Any]]) -> tuple[str, str]:
    """Return what a plot's lines and its x axis are, pruners or shapes, prune ratio or temperature; refuse more."""
    several = [name for name in AXES if len(set(axes[name])) > 1]
    lines = "drafting" if "drafting" in several else "pruner"
    over = "temperature" if lines == "drafting" and "prune_ratio" not in several else "prune_ratio"
    if more := [name for name in several if name not in ("family", lines, over)]:
        raise VidSpecError(f"cannot draw {path}: a figure shows one {more[0]}, there are {len(set(axes[more[0]]))}")
    return lines, over


def draw_acceptance(rows: Rows, path: str) -> None:
    """Draw acceptance length, a panel per family, a line per pruner or, where there are several, shape.

    The x axis is the prune ratio, or where shapes have one only the temperature. Its values are evenly spaced, because
    what happens between 0.9 and 1 is the point.
    """
    from vllm_vidspec.tools.plots import draw

    rows = [row | {"drafting": shape_of(row)} for row in rows if row["acceptance_length"] is not None]
    if not rows:
        raise VidSpecError(f"cannot draw {path}: no row has an acceptance length")
    axes = {name: [row[name] for row in rows] for name in AXES}
    if len({(row["drafting"], row["num_speculative_tokens"]) for row in rows}) == len(set(axes["drafting"])):
        axes["num_speculative_tokens"] = []  # each shape has its own
    line, over = check_axes(path, axes)
    panels = {
        family: {
            name: sorted((row[over], row["acceptance_length"]) for row in points)
            for (name,), points in by(ours, line).items()
        }
        for (family,), ours in by(rows, "family").items()
    }
    words = {"prune_ratio": "prune ratio (share of the video's tokens that is dropped)"}
    length = "acceptance length (tokens per verify step)"
    draw(path, panels, words.get(over, over), length, ticks=sorted(set(axes[over])))


# ---- bench speed -----------------------------------------------------------------------------------------------------

SPEEDUP: Columns = {
    "speedup": "{speedup:x}",
    "p20 - p80": lambda row: fill("-" if row["speedup"] is None else "{speedup_p20:.2f} - {speedup_p80:.2f}", row),
}
_SPEED: Columns = {
    "engine": "{method}",
    "tokens\nper s": "{tokens_per_s:.1f}",
    **SPEEDUP,
    "TTFT\nms": "{ttft_ms:.1f}",
    "ms a\ntoken": "{inter_token_ms:.2f}",
    "step\nms": "{t_step_ms:.1f}",
    "step\np99": "{t_step_ms_p99:.1f}",
    "accept\nlength": "{acceptance_length:.2f}",
    "same\noutput": "{identical_frac:p}",
}
# What only a parallel drafter has.
_STREAMS: Columns = {"stream\nlength": "{stream_length:.2f}", "late": "{late_frac:p}", "T_t /\nT_d": "{ratio:.1f}"}
_PHASES: Columns = {
    "engine": "{method}",
    "a request\nms": "{request_ms:.1f}",
    **{f"{name.replace('_', ' ')}\nms": f"{{{name}_ms:.1f}}" for name in PHASES},
}


def rounds_words(row: Row) -> str:
    return fill("{rounds:.0f} rounds of {requests:.0f} requests; ", row) + (row["label"] or "the pair as it is")


def speed_tables(rows: Rows) -> Iterator[Table]:
    """Yield two tables of each family and ratio: speed, and what of a request drafting takes."""
    for group in by(rows, "family", "inflate").values():
        is_parallel = group[-1]["mode"] == PARALLEL
        title = fill(
            "{family}: {drafting} of {num_speculative_tokens:.0f}, {pruner} {prune_ratio:g}, {scorer}", group[-1]
        )
        title += ", drafter in a process of its own" if is_parallel else ""
        shown = [row | {"ttft_ms": None if row["ttft_s"] is None else 1e3 * row["ttft_s"]} for row in group]
        columns = {**_SPEED, **(_STREAMS if is_parallel else {})}
        yield by_columns(columns, shown, title=title, caption=rounds_words(group[0]))
        note = "the draft's vision and pruning are in draft prefill; the rest is the target's and the host's"
        note += "; the drafter works beside the others" if is_parallel else ""
        yield by_columns(_PHASES, group, title="what drafting takes of a request", caption=note)
