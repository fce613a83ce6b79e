"""The progress of a benchmark: a bar for each engine that runs beside others."""

from dataclasses import dataclass
from typing import Any

from rich.progress import Progress, TaskID

from vllm_vidspec.tools.progress import View


@dataclass
class _Engine:
    """What is known of an engine: its bar, its requests in all, and those before what it was asked last."""

    task: TaskID
    total: int
    answered: int = 0


class EnginesView(View):
    """Shows further events, of engines.

    start: engine number `engine` starts; `label`, its `total` requests, and `plan`'s total as `engines`.
    ready, progress: of an engine; `done` requests of what it was asked last.
    result: an engine has answered all it was asked last; `token_ids`, one of each request.
    done, failed: an engine has ended; `label`, and why it failed as `reason`.
    """

    def __init__(self, bars: Progress) -> None:
        """Draw on `bars`; where these are off, print a line for each engine."""
        super().__init__(bars)
        self._engines: dict[int, _Engine] = {}
        self._num_engines = self._num_ended = 0

    def _start(self, engine: int, label: str, total: int, engines: int) -> None:
        if self._whole is None:
            self._num_engines = engines
            self._bars.update(self._task(), description="engines", total=engines, note=f"0/{engines}")
        self._engines[engine] = _Engine(self._bars.add_task(label, total=None, note="loading"), total)
        self._say(f"{engine + 1}/{engines} {label}")

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
        self._bars.console.print(f"vidspec: {label}: {reason}", markup=False, highlight=False)
