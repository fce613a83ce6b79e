"""Terminal views of the benchmarks' results: rich tables and progress bars; no engine."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
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


@contextlib.contextmanager
def progress(console: Console) -> Iterator[Progress]:
    """Show progress bars on `console` (standard error) that leave when they are done; none where it is no terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield bars


@dataclass
class _Engine:
    """What `BenchView` knows of an engine that runs."""

    task: TaskID
    total: int  # requests of all samplings
    finished: int = 0  # requests of the samplings that are done


class BenchView:
    """Shows the events of `acceptance.run`: a bar for the sweep, one per running engine, a line per failure."""

    def __init__(self, bars: Progress, console: Console) -> None:
        """Draw on `bars`; failures go to `console`."""
        self._bars, self._console = bars, console
        self._sweep: TaskID | None = None
        self._num_engines = self._num_ended = 0
        self._running: dict[int, _Engine] = {}

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        """Take one event."""
        number = fields["engine"]
        if event == "start":
            if self._sweep is None:
                self._num_engines = fields["engines"]
                self._sweep = self._bars.add_task("engines", total=self._num_engines, note=f"0/{self._num_engines}")
            task = self._bars.add_task(fields["label"], total=None, note="loading")
            self._running[number] = _Engine(task, fields["total"])
            if self._bars.disable:
                self._print(f"{number + 1}/{self._num_engines} {fields['label']}")
        elif event == "ready":
            self._show(self._running[number], 0)
        elif event == "progress":
            self._show(self._running[number], fields["done"])
        elif event == "result":
            self._running[number].finished += len(fields["token_ids"])
            self._show(self._running[number], 0)
        elif event in ("done", "failed"):
            self._end(number)
            if event == "failed":
                self._print(f"vidspec: {fields['label']}: {fields['reason']}")

    def _show(self, engine: _Engine, done: int) -> None:
        """Show an engine with `done` requests of the current sampling."""
        done += engine.finished
        self._bars.update(engine.task, total=engine.total, completed=done, note=f"{done}/{engine.total} requests")

    def _end(self, number: int) -> None:
        assert self._sweep is not None
        self._bars.remove_task(self._running.pop(number).task)
        self._num_ended += 1
        note = f"{self._num_ended}/{self._num_engines}"
        self._bars.update(self._sweep, completed=self._num_ended, note=note)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)


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


class EnginesView:
    """Shows the events of `show_pruning.run` and `costs.run`: one bar over the engines."""

    def __init__(self, bars: Progress) -> None:
        """Draw on `bars`."""
        self._bars = bars
        self._task: TaskID | None = None

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        """Take one event."""
        if event == "plan":
            self._task = self._bars.add_task("", total=fields["total"], note="")
        elif self._task is not None and event == "loading":
            self._bars.update(self._task, description=fields["label"])
        elif self._task is not None:
            self._bars.advance(self._task)
