"""Terminal views of results: tables by columns, numbers in them, and the answers of the demo; no engine."""

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

if TYPE_CHECKING:
    from vllm_vidspec.doctor import Check

Columns = dict[str, Callable[[Any], str]]


def by_columns(
    columns: Columns,
    rows: Iterable[Any],
    num_words: int = 1,
    style: Callable[[Any], str | None] = lambda row: None,
    **options: Any,
) -> Table:
    """Return a table of `rows`, each shown by every column, the first `num_words` left-aligned; `style` is a row's."""
    table = Table(**{"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), **options})
    for index, head in enumerate(columns):
        table.add_column(head, justify="left" if index < num_words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(show(row) for show in columns.values()), style=style(row))
    return table


def demo_rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return what `vidspec demo` found: words, vanilla's figure and ours."""
    vanilla, ours = result["vanilla"], result["vidspec"]
    times = (("ttft_s", "time to first token"), ("decode_s", "decode"), ("server_start_s", "server start"))
    return [
        ("acceptance length (tokens per verify step)", "1.00", number(result["acceptance_length"], 2)),
        ("acceptance rate", "-", percent(result["acceptance_rate"])),
        ("identical answers", "", "yes" if result["identical"] else "NO"),
        ("draft KV, full video", "-", kilobytes(result["full_draft_kv_bytes"])),
        ("draft KV, kept", "-", kilobytes(result["draft_kv_bytes"])),
        ("output tokens", str(vanilla["output_tokens"]), str(ours["output_tokens"])),
        *((f"{label} (s)", number(vanilla[name], 2), number(ours[name], 2)) for name, label in times),
    ]


def demo_table(result: dict[str, Any]) -> Table:
    """Return the table of `vidspec demo`."""
    columns: Columns = {"": itemgetter(0), "vanilla vLLM": itemgetter(1), "vLLM + vidspec": itemgetter(2)}
    title = f"{result['family']}: one video, one question, two servers"
    style = lambda row: "red" if row[2] == "NO" else None  # noqa: E731
    return by_columns(columns, demo_rows(result), style=style, title=title, box=box.HEAVY_HEAD, padding=(0, 1))


def checks_table(checks: "list[Check]") -> Table:
    """Return the table of `vidspec doctor`."""
    colors = {"ok": "green", "warn": "yellow", "fail": "red"}
    columns: Columns = {
        "check": lambda check: escape(check.name),
        "status": lambda check: f"[{colors[check.status]}]{check.status}[/]",
        "found": lambda check: escape(check.detail),
        "what to do": lambda check: escape(check.remedy),
    }
    table = by_columns(columns, checks, len(columns), title="vidspec doctor")
    for column in table.columns:
        column.no_wrap, column.overflow = False, "fold"
    return table


class DemoView:
    """Shows the events of `demo.run`: a spinner until a server's answer begins, then the answer as it streams."""

    def __init__(self, bars: Progress, console: Console) -> None:
        self._bars, self._console = bars, console

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        if event == "server":
            self._name = fields["name"]
            self._task = self._bars.add_task(f"starting vllm serve ({self._name})", total=None, note="")
            if self._bars.disable:
                self._bars.console.print(f"starting vllm serve ({self._name})")
        elif event == "ready":
            self._bars.update(self._task, description=f"asking ({self._name})")
            self._console.print(f"[bold]{self._name}[/bold], ready after {fields['seconds']:.0f} s:")
        elif event == "text":
            self._bars.stop()  # a live bar would overwrite the answer that streams
            self._console.print(fields["delta"], end="", markup=False, highlight=False)
        elif event == "answered":
            self._bars.remove_task(self._task)
            self._bars.start()
            self._console.print("\n")


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
