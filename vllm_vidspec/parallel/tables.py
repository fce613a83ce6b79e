"""Tables: one piece of shared memory, seen as arrays by the target's process and the drafter's.

Every array has one writer. A row's values are written before the number that says how many of them count, and read
after it; whoever reads a row in the middle of that gets a wrong draft, and no more. What a stream's reader needs lies
together: `gather_draft_windows` reads it when it runs, on a GPU through a mapping of this memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from vidspec_kernels import NUM_HEADERS

_ALIGNMENT = 64  # bytes, a cache line: no two writers in one
PAGE = 4096  # bytes; a device maps whole pages
NUM_EVENTS = 1 << 14  # of the timeline that are kept
EVENT_FIELDS = 5  # kind, start and end in seconds, requests, tokens


class StreamState(IntEnum):
    """How far the drafter is with a row's request."""

    NONE = 0
    READING = 1  # it looks at the video, or reads the prompt
    STREAMING = 2
    REFUSED = 3  # it does not draft for this request; a message says why


@dataclass(frozen=True)
class Sizes:
    """Of the tables.

    Attributes:
        max_num_reqs: Persistent rows, M.
        max_model_len: Longest text.
        max_ahead: Tokens that a stream may be ahead of the committed text.
        num_counters: Counters of the drafter.
    """

    max_num_reqs: int
    max_model_len: int
    max_ahead: int
    num_counters: int

    @property
    def ring(self) -> int:
        """Tokens kept of a stream, R: all that the target may look at, from the last agreement on.

        A power of two. The drafter may draw `max_ahead` past an agreement that it has not observed to be old.
        """
        return 1 << (2 * self.max_ahead + 1).bit_length()


class Tables:
    """The arrays.

    Attributes:
        epoch: int64 [M], which request has the row: a number that is never used twice. The target writes it, and
        committed: int64 [M], length of the committed text, and
        text: int32 [M, max_model_len], that text.
        streams: int32 [M, NUM_HEADERS + R], as `gather_draft_windows` reads them, from the beginning of a page on. The
            drafter writes it: the five below are columns of it, and
        generation: int32 [M], odd while the row is cut or changes hands, and greater by two afterwards, and
        stream_epoch: int32 [M], whose stream the row has, and
        checked: int32 [M], the committed length that the stream agrees with, and
        end: int32 [M], length of committed text and stream; 0 before it draws, and
        tokens: int32 [M, R], the stream's token of logical position p at p % R, and
        state: int64 [M], a `StreamState`, and
        beat: int64 [1], which grows while it lives, and
        draft_us: float64 [M + 1], microseconds of a draft forward by its number of requests; 0: none yet, and
        counters: int64 [num_counters], and
        events: float64 [NUM_EVENTS, EVENT_FIELDS], the timeline, and
        num_events: int64 [1], how many there have been since it is watched.
        watching: int64 [1], whether the drafter keeps a timeline. The target writes it.
    """

    epoch: np.ndarray
    committed: np.ndarray
    text: np.ndarray
    streams: np.ndarray
    generation: np.ndarray
    stream_epoch: np.ndarray
    checked: np.ndarray
    end: np.ndarray
    tokens: np.ndarray
    state: np.ndarray
    beat: np.ndarray
    draft_us: np.ndarray
    counters: np.ndarray
    events: np.ndarray
    num_events: np.ndarray
    watching: np.ndarray

    def __init__(self, memory: Any, sizes: Sizes):
        """Lay the arrays over `memory`, a writable buffer of at least `num_bytes`, zeroed when it is new."""
        self.sizes = sizes
        end = 0
        for name, dtype, shape in _layout(sizes):
            count = int(np.prod(shape))
            setattr(self, name, np.frombuffer(memory, dtype=dtype, count=count, offset=end).reshape(shape))
            end += aligned(count * np.dtype(dtype).itemsize)
        self.generation, self.stream_epoch, self.checked, self.end = self.streams[:, :NUM_HEADERS].T
        self.tokens = self.streams[:, NUM_HEADERS:]

    @staticmethod
    def num_bytes(sizes: Sizes) -> int:
        return sum(aligned(int(np.prod(shape)) * np.dtype(dtype).itemsize) for _, dtype, shape in _layout(sizes))

    def forget_streams(self) -> None:
        """Begin without any; the target's, while there is no drafter."""
        self.generation += self.generation & 1  # of one that was killed at it
        self.generation += 1
        self.stream_epoch[:], self.end[:], self.state[:] = -1, 0, 0
        self.generation += 1

    def add(self, req_state_idx: int, epoch: int, token_ids: np.ndarray) -> None:
        """Give a row to a request, whose committed text so far is `[n]` tokens; the target's."""
        self.epoch[req_state_idx] = -1
        self.committed[req_state_idx] = 0
        self.text[req_state_idx, : len(token_ids)] = token_ids
        self.committed[req_state_idx] = len(token_ids)
        self.epoch[req_state_idx] = epoch

    def remove(self, req_state_idx: int) -> None:
        self.epoch[req_state_idx] = -1

    def commit(self, idx_mapping_np: np.ndarray, lengths: np.ndarray, tails: np.ndarray) -> None:
        """Append to the committed texts of `[n]` rows; the target's.

        Args:
            tails: `[n, t]` int32 the last tokens of each text, among them all that are new.
        """
        cols = lengths[:, None] - np.arange(tails.shape[1], 0, -1)
        rows = np.broadcast_to(idx_mapping_np[:, None], cols.shape)
        is_new = (cols >= 0) & (cols >= self.committed[idx_mapping_np, None])
        self.text[rows[is_new], cols[is_new]] = tails[is_new]
        self.committed[idx_mapping_np] = lengths


def _layout(sizes: Sizes) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    rows = (sizes.max_num_reqs,)
    # First, so that it begins a page; as long as whole pages, so that nothing else is mapped with it.
    width = NUM_HEADERS + sizes.ring
    yield "streams", "<i4", (*rows, width)
    yield "_rest_of_page", "<i1", (-(4 * sizes.max_num_reqs * width) % PAGE,)
    yield "epoch", "<i8", rows
    yield "committed", "<i8", rows
    yield "text", "<i4", (*rows, sizes.max_model_len)
    yield "watching", "<i8", (1,)
    yield "state", "<i8", rows
    yield "beat", "<i8", (1,)
    yield "draft_us", "<f8", (sizes.max_num_reqs + 1,)
    yield "counters", "<i8", (max(sizes.num_counters, 1),)
    yield "events", "<f8", (NUM_EVENTS, EVENT_FIELDS)
    yield "num_events", "<i8", (1,)


def aligned(num_bytes: int) -> int:
    """Return a size with what follows it up to the next cache line."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
