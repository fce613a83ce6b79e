"""The counter files of one server, a file an engine: made, opened by its other processes, and leftovers swept."""

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics.file import MetricsFile, path_for

logger = logging.getLogger("vllm.vidspec")


class CounterFiles(dict[int, MetricsFile]):
    """The files of a server's data-parallel engines by their index; each stays mapped, so deleting it harms nobody."""

    @classmethod
    def create(cls, instance_id: str, engines: Iterable[int]) -> "CounterFiles":
        """Make the files, zeroed, and remove what earlier servers left; VidSpecError where none can be made."""
        sweep()
        return cls({engine: MetricsFile.create(path_for(instance_id, engine)) for engine in engines})

    @classmethod
    def open(cls, instance_id: str, engines: Iterable[int]) -> "CounterFiles":
        """Map the files that the server's first process has made; VidSpecError where one of them is missing."""
        return cls({engine: MetricsFile(path_for(instance_id, engine)) for engine in engines})

    def refusal(self) -> str | None:
        """Return why an engine did not start, if it is one line of ours; the first there is."""
        found = (file.refusal() for file in self.values())
        return next((reason for reason in found if reason), None)


def sweep() -> list[Path]:
    """Remove this user's counter files that no process holds any more; return them."""
    swept = []
    for path in Path(tempfile.gettempdir()).glob(f"vidspec-{os.getuid()}-*-*.i64"):
        try:
            with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                swept.append(path)
        except OSError:  # held, gone, or not ours to touch
            continue
    return swept


def open_for(vllm_config: Any) -> MetricsFile | None:
    """Return the counters of the engine that a `VllmConfig` is of; None, and a line in the log, where there are none.

    Another process has made the file: the API server, which may be on another host.
    """
    try:
        return MetricsFile(_path_of(vllm_config))
    except VidSpecError as error:
        logger.warning("vidspec: counters are not published here; outputs carry a worker's to its server: %s", error)
        return None


def leave_refusal(vllm_config: Any, reason: str) -> None:
    """Leave the line that says why an engine does not start, for the process that started it."""
    with contextlib.suppress(VidSpecError):  # the engine's own log has it
        MetricsFile(_path_of(vllm_config)).refuse(reason)


def _path_of(vllm_config: Any) -> Path:
    engine = vllm_config.parallel_config.data_parallel_index
    instance_id = vllm_config.instance_id.removesuffix(f"_dp{engine}")  # Ray's, by which it tells engines apart
    return path_for(instance_id, engine)
