"""What the tools report while they run, and the one view of it: bars on standard error; no engine."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

# What a tool tells whoever listens: an event's name and its fields.
Report = Callable[[str, dict[str, Any]], None]


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


@dataclass
class _Engine:
    """What `View` knows of an engine that runs beside others."""

    task: TaskID
    total: int  # requests in all
    answered: int = 0  # requests before those that it was asked last


class View:
    """Shows the events of a tool: a bar over its measurements, and one for each engine that runs beside others.

    plan: `total`, the measurements to come.
    loading: `label`, what starts now.
    measuring: what was loading is there.
    measured: one of the total is done; `note` says what came out.
    start: engine number `engine` starts; `label`, its `total` requests, and `plan`'s total as `engines`.
    ready, progress: of an engine; `done` requests of what it was asked last.
    result: an engine has answered all it was asked last; `token_ids`, one of each request.
    done, failed: an engine has ended; `label`, and why it failed as `reason`.
    """

    def __init__(self, bars: Progress) -> None:
        """Draw on `bars`; where these are off, print a line for each engine."""
        self._bars = bars
        self._whole: TaskID | None = None
        self._engines: dict[int, _Engine] = {}
        self._num_engines = self._num_ended = 0

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        """Take one event."""
        getattr(self, f"_{event}")(**fields)

    def _task(self) -> TaskID:
        if self._whole is None:
            self._whole = self._bars.add_task("", total=None, note="")
        return self._whole

    def _plan(self, total: int) -> None:
        self._bars.update(self._task(), total=total, completed=0)

    def _loading(self, label: str) -> None:
        self._bars.update(self._task(), description=f"loading {label}", note="")
        if self._bars.disable:
            self._print(f"loading {label}")

    def _measuring(self) -> None:
        self._bars.update(self._task(), description="measuring")

    def _measured(self, note: str = "") -> None:
        self._bars.update(self._task(), advance=1, note=note)

    def _start(self, engine: int, label: str, total: int, engines: int) -> None:
        if self._whole is None:
            self._num_engines = engines
            self._bars.update(self._task(), description="engines", total=engines, note=f"0/{engines}")
        self._engines[engine] = _Engine(self._bars.add_task(label, total=None, note="loading"), total)
        if self._bars.disable:
            self._print(f"{engine + 1}/{engines} {label}")

    def _ready(self, engine: int, **_: Any) -> None:
        self._progress(engine, 0)

    def _progress(self, engine: int, done: int, **_: Any) -> None:
        shown = self._engines[engine]
        done += shown.answered
        self._bars.update(shown.task, total=shown.total, completed=done, note=f"{done}/{shown.total} requests")

    def _result(self, engine: int, token_ids: list[Any], **_: Any) -> None:
        self._engines[engine].answered += len(token_ids)
        self._progress(engine, 0)

    def _done(self, engine: int, label: str) -> None:
        self._bars.remove_task(self._engines.pop(engine).task)
        self._num_ended += 1
        note = f"{self._num_ended}/{self._num_engines}"
        self._bars.update(self._task(), completed=self._num_ended, note=note)

    def _failed(self, engine: int, label: str, reason: str) -> None:
        self._done(engine, label)
        self._print(f"vidspec: {label}: {reason}")

    def _print(self, line: str) -> None:
        self._bars.console.print(line, markup=False, highlight=False)
