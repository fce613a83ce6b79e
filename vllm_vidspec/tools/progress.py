"""What the tools report while they run, and the one view of it: bars on standard error; no engine."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Report = Callable[[str, dict[str, Any]], None]  # what a tool tells whoever listens: an event's name and its fields


def silent(event: str, fields: dict[str, Any]) -> None:
    """Report to nobody."""


@contextlib.contextmanager
def bars(console: Console) -> Iterator[Progress]:
    """Show progress bars on `console` (standard error) that leave when they are done; none where it is no terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        yield shown


class View:
    """Shows the events of a tool, a bar over its measurements: how many there will be (`plan`), what starts now
    (`loading`), that it is there (`measuring`), and that one is done, with what came out (`measured`).
    """

    def __init__(self, bars: Progress) -> None:
        """Draw on `bars`; where these are off, print a line for what is loaded."""
        self._bars = bars
        self._task = bars.add_task("starting", total=None, note="")

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        getattr(self, f"_{event}")(**fields)

    def _plan(self, total: int) -> None:
        self._bars.update(self._task, total=total, completed=0)

    def _loading(self, label: str) -> None:
        self._bars.update(self._task, description=f"loading {label}", note="")
        if self._bars.disable:
            self._bars.console.print(f"loading {label}", markup=False, highlight=False)

    def _measuring(self) -> None:
        self._bars.update(self._task, description="measuring")

    def _measured(self, note: str = "") -> None:
        self._bars.update(self._task, advance=1, note=note)
