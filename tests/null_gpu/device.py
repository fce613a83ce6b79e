"""The null GPU's counters, and the Python line behind each event; loads libcuda.so.1 and touches nothing else."""

import collections
import contextlib
import ctypes
import re
import sys
from collections.abc import Callable, Iterator

# In the order of core.h.
CATEGORIES = ("sync", "copy", "alloc", "launch", "illegal", "graph", "replay")
_PAGEABLE, PINNED, DEVICE = range(3)
# Frames of these files do not name the cause of an event.
_FRAMEWORKS = re.compile(r"/torch/|/triton/|/numba/|/null_gpu/(device|emulate)\.py|<frozen|<string>|contextlib\.py")

_library = ctypes.CDLL("libcuda.so.1")
_library.ng_snapshot.restype = ctypes.c_size_t
_library.ng_snapshot.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
_library.ng_where.argtypes = [ctypes.c_void_p] * 4
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_library.ng_set_callback.argtypes = [_Callback, ctypes.c_uint]
_buffer = ctypes.create_string_buffer(1 << 20)


def counters() -> collections.Counter:
    """Return all counters by name; those that are zero are missing."""
    size = _library.ng_snapshot(_buffer, len(_buffer))
    if size >= len(_buffer):
        raise RuntimeError(f"the null GPU's counters take {size} bytes")
    rows = (line.split(" ", 1) for line in _buffer.value.decode().splitlines())
    return collections.Counter({name: int(value) for value, name in rows})


def gained(before: dict[str, int]) -> collections.Counter:
    """Return what each counter has gained since `before`; those that have not are missing."""
    return collections.Counter(counters() - collections.Counter(before))


def where(address: int) -> int:
    """Return what kind of memory an address is in: pageable (0), `PINNED` or `DEVICE`."""
    return _library.ng_where(address, None, None, None)


def caller() -> str:
    """Return the innermost three Python lines that are not the frameworks' own, innermost first."""
    frame, lines = sys._getframe(1), []
    while frame is not None and len(lines) < 3:
        path = frame.f_code.co_filename
        if not _FRAMEWORKS.search(path):
            lines.append(f"{'/'.join(path.split('/')[-3:])}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(lines) or "(no Python line)"


@contextlib.contextmanager
def _called(function: Callable[[int, bytes, int], None], categories: tuple[str, ...]) -> Iterator[None]:
    callback = _Callback(function)
    _library.ng_set_callback(callback, sum(1 << CATEGORIES.index(category) for category in categories))
    try:
        yield
    finally:
        _library.ng_set_callback(_Callback(), 0)


@contextlib.contextmanager
def trace(*categories: str) -> Iterator[dict[str, list[int]]]:
    """Yield what gains events of `CATEGORIES`, `event|Python lines` to `[times, bytes]`; one trace at a time."""
    seen: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])

    def note(_category: int, name: bytes, size: int) -> None:
        try:
            row = seen[f"{name.decode(errors='replace')[:60]}|{caller()}"]
            row[0] += 1
            row[1] += size
        except Exception as error:  # nothing may be raised into C
            sys.stderr.write(f"[null GPU] trace: {error!r}\n")

    with _called(note, categories):
        yield seen


@contextlib.contextmanager
def in_order(*categories: str) -> Iterator[list[str]]:
    """Yield a list that gains the names of events of `CATEGORIES`, in their order; one trace at a time."""
    names: list[str] = []
    with _called(lambda _category, name, _size: names.append(name.decode(errors="replace")), categories):
        yield names
