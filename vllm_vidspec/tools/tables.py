"""Terminal views of the benchmarks' results: rich tables and progress bars; no engine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table

from vllm_vidspec.tools.bench.acceptance import AXES, measured_itself

if TYPE_CHECKING:
    from vllm_vidspec.doctor import Check

_SHORT = {"num_speculative_tokens": "K", "temperature": "T", "prune_ratio": "prune"}
_SHOWN_ALONE = ("family", "draft", "pruner", "prune_ratio", "num_speculative_tokens", "temperature")

# Columns of figures that stand for chains alone, and in a table with trees.
_CHAIN_FIGURES: dict[str, Callable[[dict[str, Any]], str]] = {
    "accept\nrate": lambda row: percent(row["acceptance_rate"]),
    "drafts": lambda row: str(row["num_drafts"]),
}
_TREE_FIGURES: dict[str, Callable[[dict[str, Any]], str]] = {
    "at\nmost": lambda row: number(row["max_acceptance_length"], 2),
    "nodes": lambda row: number(row["nodes_per_step"], 1),
    "draft\nruns": lambda row: number(row["draft_forwards_per_step"], 1),
}


def acceptance_table(rows: list[dict[str, Any]]) -> Table:
    """Return the table of `vidspec bench acceptance`: columns for what changes, one caption for what does not.

    Times are shown where one engine ran at a time. A length with a star comes from another row's engine. Beside trees
    stand the length that their depth allows, their nodes and the draft's forwards, per verify step.
    """
    varying = [name for name in AXES if len({str(row[name]) for row in rows}) > 1]
    fixed = [f"{_SHORT.get(name, name)} {_cell(rows[0][name])}" for name in _SHOWN_ALONE if name not in varying]
    timed = rows[0]["jobs"] == 1
    if not timed:
        fixed.append(f"no times: {rows[0]['jobs']} engines ran at once")
    shows_trees = any(row["drafting"] != "chain" for row in rows)
    if shows_trees:
        fixed.append(f"{rows[0]['scheduling']} scheduling")
    if knobs := rows[0]["knobs"]:
        fixed.append(", ".join(f"{name} {json.dumps(value)}" for name, value in knobs.items()))
    if not all(map(measured_itself, rows)):
        fixed.append("* not run itself, see measured_as")
    table = Table(
        title=f"Acceptance on {rows[0]['requests']} held-out videos",
        caption=", ".join(fixed),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in varying:
        table.add_column(_SHORT.get(name, name.replace("_", " ")), no_wrap=True)
    figures = _TREE_FIGURES if shows_trees else _CHAIN_FIGURES
    names = ["accept\nlength", *figures, "same\noutput", "draft KV\nof full"]
    for name in names + ["s", "vanilla\ns"] * timed:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        times = [number(row[name], 1) for name in ("decode_s", "vanilla_decode_s")] * timed
        table.add_row(
            *(_cell(row[name]) for name in varying),
            number(row["acceptance_length"], 2) + ("" if measured_itself(row) else "*"),
            *(show(row) for show in figures.values()),
            percent(row["identical_frac"]),
            percent(row["draft_kv_bytes"] / row["full_draft_kv_bytes"] if row["full_draft_kv_bytes"] else None),
            *times,
        )
    return table


def _cell(value: Any) -> str:
    """Return a value of an axis; of a path its last part."""
    return Path(value).name if isinstance(value, str) else f"{value:g}"


def demo_table(result: dict[str, Any]) -> Table:
    """Return the table of `vidspec demo`."""
    vanilla, ours = result["vanilla"], result["vidspec"]
    table = Table(title=f"{result['family']}: one video, one question, two servers")
    table.add_column("")
    table.add_column("vanilla vLLM", justify="right")
    table.add_column("vLLM + vidspec", justify="right")
    table.add_row("acceptance length (tokens per verify step)", "1.00", number(result["acceptance_length"], 2))
    table.add_row("acceptance rate", "-", percent(result["acceptance_rate"]))
    table.add_row("identical answers", "", "yes" if result["identical"] else "[red]NO[/red]")
    table.add_row("draft KV, full video", "-", kilobytes(result["full_draft_kv_bytes"]))
    table.add_row("draft KV, kept", "-", kilobytes(result["draft_kv_bytes"]))
    table.add_row("output tokens", str(vanilla["output_tokens"]), str(ours["output_tokens"]))
    for name, label in (("ttft_s", "time to first token"), ("decode_s", "decode"), ("server_start_s", "server start")):
        table.add_row(f"{label} (s)", number(vanilla[name], 2), number(ours[name], 2))
    return table


def checks_table(checks: "list[Check]") -> Table:
    """Return the table of `vidspec doctor`."""
    colors = {"ok": "green", "warn": "yellow", "fail": "red"}
    table = Table(title="vidspec doctor", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("check", "status", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for check in checks:
        color = colors[check.status]
        table.add_row(
            escape(check.name), f"[{color}]{check.status}[/{color}]", escape(check.detail), escape(check.remedy)
        )
    return table


class DemoView:
    """Shows the events of `demo.run`: a bar while a server starts, then the answer as it streams."""

    # What a server start takes on two cores; the bar is an estimate, the clock beside it is not.
    USUAL_START_S = 40.0

    def __init__(self, bars: Progress, console: Console) -> None:
        """Draw on `bars`; answers go to `console`."""
        self._bars, self._console = bars, console
        self._task: TaskID | None = None
        self._name = ""

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        """Take one event."""
        if event == "server":
            self._name = fields["name"]
            if self._bars.disable:
                self._bars.console.print(f"starting vllm serve ({self._name})")
            self._task = self._bars.add_task(f"starting vllm serve ({self._name})", total=self.USUAL_START_S, note="")
        elif event == "starting" and self._task is not None:
            self._bars.update(self._task, completed=min(fields["elapsed_s"], 0.98 * self.USUAL_START_S))
        elif event == "ready" and self._task is not None:
            self._bars.remove_task(self._task)
            self._bars.stop()  # the answer streams below; a live bar would overwrite it
            self._console.print(f"[bold]{self._name}[/bold], ready after {fields['seconds']:.0f} s:")
        elif event == "text":
            self._console.print(fields["delta"], end="", markup=False, highlight=False)
        elif event == "answered":
            self._console.print("\n")
            self._bars.start()


def number(value: float | None, digits: int) -> str:
    """Return a number, or a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """Return a share as a percentage, or a dash for None; 100 % only where it is exactly 1."""
    if value is None:
        return "-"
    return f"{min(99.9, 100 * value):.1f} %" if value < 1 else "100 %"


def kilobytes(num_bytes: int) -> str:
    """Return a size in KiB or MiB."""
    return f"{num_bytes / 1024:.0f} KiB" if num_bytes < 2**20 else f"{num_bytes / 2**20:.1f} MiB"
