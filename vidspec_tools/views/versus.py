"""How benchmarks interleaved with vanilla show themselves: `bench paper` and `bench speed`."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from vidspec_tools.views import figures
from vidspec_tools.views.figures import times
from vllm_vidspec.tools.bench.rows import PHASES, SPREAD
from vllm_vidspec.tools.bench.trials import PARALLEL, VANILLA
from vllm_vidspec.tools.tables import Columns, by_columns, number, percent

Row = dict[str, Any]
Rows = Sequence[Row]
AS_IT_IS = "the pair as it is"


def by(rows: Rows, *names: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def _spread(row: Row) -> str:
    return "-" if row["speedup"] is None else " - ".join(f"{row[f'speedup_{p}']:.2f}" for p in SPREAD)


def _published_length(row: Row) -> str:
    """Return tokens of a step; of a parallel drafter the paper's M, which is none: marked."""
    if row["mode"] == PARALLEL and row["published_tau"] is not None:
        return f"M {row['published_tau']:.2f}"
    return number(row["published_acceptance_length"], 2)


def _rounds(row: Row) -> str:
    return f"{row['rounds']:.0f} rounds of {row['requests']:.0f} requests; {row['label'] or AS_IT_IS}"


# Columns of both tables, in the terminal and on a page.
_SPEEDUP: Columns = {"speedup": lambda row: times(row["speedup"]), "p20 - p80": _spread}
_TOKENS: Columns = {"tokens\nper s": lambda row: number(row["tokens_per_s"], 1)}
_LENGTH: Columns = {"accept\nlength": lambda row: number(row["acceptance_length"], 2)}
_SAME: Columns = {"same\noutput": lambda row: percent(row["identical_frac"])}


PAPER: Columns = {
    "method": lambda row: row["method"],
    "K": lambda row: number(row["num_speculative_tokens"], 0),
    **_LENGTH,
    "forwards": lambda row: number(row["forwards"], 1),
    **(_TOKENS | _SPEEDUP | _SAME),
    "published\nlength": lambda row: _published_length(row),
    "published\nspeedup": lambda row: times(row["published_speedup"]),
}


def paper_caption(row: Row) -> str:
    lengths = "lengths with the target's own token; M: from one rejection to the next"
    return f"{_rounds(row)}; published on VideoDetailCaption, {lengths}"


def paper_tables(rows: Rows) -> list[Table]:
    return [
        by_columns(PAPER, group, title=f"{group[0]['family']}: one request at a time", caption=paper_caption(group[0]))
        for group in by(rows, "family", "inflate").values()
    ]


def draw(rows: Rows, path: str) -> None:
    """Draw decode speed over vanilla by the ratio that was reached, with the 20th and 80th percentile of the rounds.

    A panel per family, a colour per mode. The same rows give the same file.
    """
    families, shown = by(rows, "family"), [row["mode"] for row in rows if row["mode"] != VANILLA]
    styles = figures.styles(shown)
    with figures.panels(path, (1.8 + 3.8 * len(families), 3.4), 1, len(families)) as (_, (panels,), legend):
        for panel, ((family,), ours) in zip(panels, families.items(), strict=True):
            groups = list(by(ours, "inflate").values())
            for place, group in enumerate(groups):
                drafting = [row for row in group if row["mode"] != VANILLA]
                for number, row in enumerate(drafting):
                    x, y = place + 2 * figures.DODGE * (number - (len(drafting) - 1) / 2), row["speedup"]
                    spread = [[y - row["speedup_p20"]], [row["speedup_p80"] - y]]
                    color, marker = styles[row["mode"]]
                    legend[row["mode"]] = panel.errorbar(x, y, spread, color=color, marker=marker, capsize=3, ls="none")
            panel.axhline(1, color="#777777", linestyle="--", linewidth=1)
            names = [f"{group[-1]['ratio']:.1f}\n+{group[-1]['target_layers']}" for group in groups]
            panel.set_xticks(range(len(groups)), names)
            panel.set(
                xlabel="T_t / T_d, and the no-op layers of the target for it",
                title=family,
                xlim=(-0.5, len(groups) - 0.5),
            )
            panel.set_ylim(bottom=0)
            figures.tidy(panel, "y")
        panels[0].set_ylabel("decode speed over vanilla")


SPEED: Columns = {
    "engine": lambda row: row["method"],
    **(_TOKENS | _SPEEDUP),
    "TTFT\nms": lambda row: number(1e3 * row["ttft_s"], 1),
    "ms a\ntoken": lambda row: number(row["inter_token_ms"], 2),
    "step\nms": lambda row: number(row["t_step_ms"], 1),
    "step\np99": lambda row: number(row["t_step_ms_p99"], 1),
    **(_LENGTH | _SAME),
}
# What only a parallel drafter has.
_STREAMS: Columns = {
    "stream\nlength": lambda row: number(row["stream_length"], 2),
    "late": lambda row: percent(row["late_frac"]),
    "T_t /\nT_d": lambda row: number(row["ratio"], 1),
}
PHASE_TIMES: Columns = {
    "engine": lambda row: row["method"],
    "a request\nms": lambda row: number(row["request_ms"], 1),
    **{
        f"{name.replace('_', ' ')}\nms": lambda row, name=name: number(row[f"{name}_ms"], 1)  # type: ignore[misc]
        for name in PHASES
    },
}


def setting(rows: Rows) -> str:
    row = rows[-1]
    place = ", drafter in a process of its own" if row["mode"] == PARALLEL else ""
    tokens, ratio = f"{row['num_speculative_tokens']:.0f}", f"{row['prune_ratio']:g}"
    return f"{row['drafting']} of {tokens}, {row['pruner']} {ratio}, {row['scorer']}{place}"


def speed_tables(rows: Rows) -> list[Table]:
    """Return two tables of each family and ratio: speed, and what of a request drafting takes."""
    found = []
    for group in by(rows, "family", "inflate").values():
        title = f"{group[0]['family']}: {setting(group)}"
        is_parallel = group[-1]["mode"] == PARALLEL
        columns = SPEED | _STREAMS if is_parallel else SPEED
        found.append(by_columns(columns, group, title=title, caption=_rounds(group[0])))
        note = "the draft's vision and pruning are in draft prefill; the rest is the target's and the host's"
        note += "; the drafter works beside the others" if is_parallel else ""
        found.append(by_columns(PHASE_TIMES, group, title="what drafting takes of a request", caption=note))
    return found
