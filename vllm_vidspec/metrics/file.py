"""The file: counters shared by the worker (one writer) and the API server (readers), an int64 map."""

import atexit
import contextlib
import errno
import fcntl
import mmap
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics.catalogue import GAUGE_NAMES, NAMES, SLOT
from vllm_vidspec.metrics.counts import Changes, Counts

_MAGIC = int.from_bytes(b"vidspec\0", "little")
VERSION = 17
_HEADER = 8  # int64 words: magic, version, number of slots, sequence, four spare
_SEQUENCE = 3  # odd while a writer is between values that belong together
_NUM_TRIES = 50  # of a reader that meets such a writer; one that died there must not keep it
_REFUSAL_BYTES = 1024
_NUM_WORDS = _HEADER + _REFUSAL_BYTES // 8 + len(NAMES)
_NUM_BYTES = 8 * _NUM_WORDS


class MetricsFile(Counts):
    """One file of int64 counters: a single writer adds, any process reads.

    Each value is one aligned 8-byte word, so a reader sees the old or the new value and never a mixture. Two writers
    would lose counts: an engine has a file of its own, and only its tensor-parallel rank 0 counts. Whoever has the file
    mapped holds a shared lock on it: one that nobody holds is a leftover. Once mapped, it may be deleted.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Map the file that another process created; VidSpecError if it is absent, not ours or of another layout."""
        self.path = str(path)
        try:
            self._held = _open_own(self.path)
            self._map = mmap.mmap(self._held.fileno(), _NUM_BYTES)
        except (OSError, ValueError) as error:
            raise VidSpecError(f"metrics file {self.path}: cannot be mapped ({error})") from None
        with contextlib.suppress(OSError):  # a file system without locks: its leftovers stay
            fcntl.flock(self._held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self._words = np.frombuffer(self._map, dtype="<i8")  # [_NUM_WORDS]
        found = tuple(int(word) for word in self._words[:3])
        if found != (_MAGIC, VERSION, len(NAMES)):
            raise VidSpecError(f"metrics file {self.path}: written by another version of vllm_vidspec")
        text_end = _HEADER + _REFUSAL_BYTES // 8
        self._refusal = self._words[_HEADER:text_end].view(np.uint8)  # [_REFUSAL_BYTES] UTF-8, zeros behind it
        super().__init__(self._words[text_end:])

    @classmethod
    def create(cls, path: str | os.PathLike[str] | None = None) -> "MetricsFile":
        """Make a zeroed file at `path`, by default a new one in the temporary directory, and map it.

        This process unlinks it when it exits. A VidSpecError where the folder is full, read-only or absent.
        """
        words = np.zeros(_NUM_WORDS, dtype="<i8")
        words[:3] = (_MAGIC, VERSION, len(NAMES))
        folder = tempfile.gettempdir() if path is None else os.path.dirname(path)
        try:
            handle, made = tempfile.mkstemp(prefix="vidspec-metrics-", suffix=".i64", dir=folder)
        except OSError as error:
            raise VidSpecError(f"metrics file: {folder} takes no file ({error.strerror})") from None
        # From here on the file goes with this process, whatever fails; it gets its name once it is whole and held.
        atexit.register(_unlink, made if path is None else str(path), os.getpid())
        try:
            with open(handle, "wb") as file:
                file.write(words.tobytes())
            created = cls(made)
            if path is not None:
                os.replace(made, path)
                created.path = str(path)
        except (OSError, VidSpecError) as error:
            _unlink(made, os.getpid())
            raise VidSpecError(f"metrics file: {folder} takes no file ({error})") from None
        return created

    def add_all(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Add to counters, all at once; see `Counts`."""
        with self.at_once():
            super().add_all(slots, counts)

    def take_in(self, carried: Changes) -> None:
        """Write what a worker of another host has counted; readers see all of it or nothing."""
        with self.at_once():
            for name, value in carried.items():
                (self.set if name in GAUGE_NAMES else self.add)(name, value)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Let readers see all of what the block writes, or nothing of it."""
        self._words[_SEQUENCE] += 1
        try:
            yield
        finally:
            self._words[_SEQUENCE] += 1

    def value(self, name: str) -> int:
        """Return one counter or gauge; `KeyError` for a name outside `NAMES`."""
        return int(self._values[SLOT[name]])

    def values(self) -> dict[str, int]:
        """Return every counter and gauge by name, none of them from the middle of an `at_once`."""
        for _ in range(_NUM_TRIES):
            sequence = int(self._words[_SEQUENCE])
            values = self._values.tolist()
            if sequence % 2 == 0 and sequence == int(self._words[_SEQUENCE]):
                break
            time.sleep(1e-4)
        return dict(zip(NAMES, values, strict=True))

    def refuse(self, reason: str) -> None:
        """Leave the one line that says why the engine does not start; any of its processes may."""
        text = reason.encode()[: _REFUSAL_BYTES - 1]
        self._refusal[:] = 0
        self._refusal[: len(text)] = np.frombuffer(text, dtype=np.uint8)

    def refusal(self) -> str | None:
        """Return what `refuse` left, or None."""
        return self._refusal.tobytes().rstrip(b"\0").decode(errors="ignore") or None


def slots_of(names: Iterable[str]) -> np.ndarray:
    """Return `[n]` places of counters, for `Counts.add_all`."""
    return np.array([SLOT[name] for name in names])


def _open_own(path: str) -> IO[bytes]:
    """Open a file to read and write it that this user alone can have made, or changed since; else OSError.

    The temporary directory is everybody's and a file's name there can be guessed: what another user has put in its
    place, a link of his included, is not opened. Nothing here waits, as for the other end of a pipe.
    """
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "r+b", buffering=0)
    found = os.fstat(file.fileno())
    if (
        stat.S_ISREG(found.st_mode)
        and found.st_uid == os.geteuid()
        and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    ):
        return file
    file.close()
    raise PermissionError(errno.EPERM, "it is not a file of this user's alone")


def path_for(instance_id: str, engine: int = 0) -> Path:
    """Return where a data-parallel engine (0 where there is one) of the server of this id keeps its counters.

    Derived, not stored: vLLM hashes `additional_config` into its compile cache, which a random path would miss.
    """
    return Path(tempfile.gettempdir()) / f"vidspec-{os.getuid()}-{instance_id}-{engine}.i64"


def read_metrics(path: str | os.PathLike[str]) -> dict[str, int]:
    """Return a snapshot of the file's values; VidSpecError where it is missing or of another layout."""
    return MetricsFile(path).values()


def _unlink(path: str, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child inherits the exit handler but not the file
        with contextlib.suppress(OSError):  # gone, or never ours
            os.unlink(path)
