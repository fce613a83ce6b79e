"""What target and drafter share while both run (ParallelVLM): tables in shared memory, streams, windows; numpy.

The two processes never wait for each other. Each writes tables that the other reads when it comes by: the target what
it has committed, the drafter what it thinks comes next. A draft that is torn, late or out of date is a wrong guess,
which the target's own sample refuses as it refuses any other: nothing here can change an answer.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from vidspec_kernels import NUM_HEADERS

_ALIGNMENT = 64  # bytes, a cache line: no two writers in one
PAGE = 4096  # bytes; a device maps whole pages

# ---- tables ----------------------------------------------------------------------------------------------------------


class StreamState(IntEnum):
    """How far the drafter is with a row's request."""

    NONE = 0
    READING = 1  # it encodes the video, or reads the prompt
    STREAMING = 2
    REFUSED = 3  # it does not draft for this request; a message says why


@dataclass(frozen=True)
class Sizes:
    """Of the tables."""

    max_num_reqs: int  # persistent rows, M
    max_model_len: int  # longest text
    num_counters: int  # counters of the drafter
    max_ahead: int = 24  # tokens that a stream may be ahead of the committed text

    @property
    def ring(self) -> int:
        """Tokens kept of a stream, R: all that the target may read, from the last agreement on.

        A power of two. The drafter may draw `max_ahead` past an agreement that it has not observed to be old.
        """
        return 1 << (2 * self.max_ahead + 1).bit_length()


class Tables:
    """One piece of shared memory, seen as arrays by the target's process and the drafter's.

    Every array has one writer. A row's values are written before the number that says how many of them count, and read
    after it. What a stream's reader, `gather_draft_windows`, needs lies together: a GPU reads a mapping of this memory.
    """

    # Written by the target:
    epoch: np.ndarray  # int64 [M] which request has the row: a number that is never used twice
    committed: np.ndarray  # int64 [M] length of the committed text
    text: np.ndarray  # int32 [M, max_model_len] that text
    # Written by the drafter:
    streams: np.ndarray  # int32 [M, NUM_HEADERS + R], from the beginning of a page on; the next five are its columns
    generation: np.ndarray  # int32 [M] odd while the row is cut or changes hands, and greater by two afterwards
    stream_epoch: np.ndarray  # int32 [M] whose stream the row has
    checked: np.ndarray  # int32 [M] the committed length that the stream agrees with
    end: np.ndarray  # int32 [M] length of committed text and stream; 0 before it draws
    tokens: np.ndarray  # int32 [M, R] the stream's token of logical position p at p % R
    state: np.ndarray  # int64 [M] a `StreamState`
    beat: np.ndarray  # int64 [1] which grows while it lives
    draft_us: np.ndarray  # float64 [M + 1] microseconds of a draft forward by its number of requests; 0: none yet
    counters: np.ndarray  # int64 [num_counters]

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

    # The methods are the target's; the drafter writes through `Streams`.

    def forget_streams(self) -> None:
        """Begin without any, while there is no drafter."""
        self.generation += self.generation & 1  # of one that was killed at it
        self.generation += 1
        self.stream_epoch[:], self.end[:], self.state[:] = -1, 0, 0
        self.generation += 1

    def add(self, req_state_idx: int, epoch: int, token_ids: np.ndarray) -> None:
        """Give a row to a request, whose committed text so far is `[n]` tokens."""
        self.epoch[req_state_idx] = -1
        self.committed[req_state_idx] = 0
        self.text[req_state_idx, : len(token_ids)] = token_ids
        self.committed[req_state_idx] = len(token_ids)
        self.epoch[req_state_idx] = epoch

    def remove(self, req_state_idx: int) -> None:
        self.epoch[req_state_idx] = -1

    def commit(self, idx_mapping_np: np.ndarray, lengths: np.ndarray, tails: np.ndarray) -> None:
        """Append to the texts of `[n]` rows, up to `[n]` lengths, the new ones of their last tokens, `[n, t]` int32."""
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
    yield "state", "<i8", rows
    yield "beat", "<i8", (1,)
    yield "draft_us", "<f8", (sizes.max_num_reqs + 1,)
    yield "counters", "<i8", (max(sizes.num_counters, 1),)


def aligned(num_bytes: int) -> int:
    """Return a size with what follows it up to the next cache line."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


# ---- streams ---------------------------------------------------------------------------------------------------------

NO_EPOCH = -1  # the epoch of a row without a stream
_NO_ROWS = np.zeros(0, dtype=np.int64)


class Streams:
    """What the drafter thinks comes next, by persistent row, and how that follows what the target commits.

    A row's text is what the target has committed and, behind it, the stream. The drafter draws on at its end. When the
    target has committed more, either the stream said the same, and goes on as it is (the paper's post-verify mode), or
    it is cut at the first token that differs and goes on from the target's own (pre-verify). ParallelVLM, section 4.
    """

    def __init__(self, tables: Tables):
        self.tables = tables
        num_rows, max_len = tables.text.shape
        self.epoch = np.full(num_rows, NO_EPOCH, dtype=np.int64)
        self.is_on = np.zeros(num_rows, dtype=bool)  # [M] the drafter has read the prompt: the row draws
        # [M] each: tokens of text and stream; those committed, as far as was observed; logical tokens from the start
        # whose draft KV stands; longest text that the request can have
        self.length, self.agreed, self.fed, self.limit = np.zeros((4, num_rows), dtype=np.int64)
        self.text = np.zeros((num_rows, max_len), dtype=np.int32)
        self._drawn = _NO_ROWS  # of the last draw, in its order, while all their texts end with it

    def add(self, req_state_idx: int, epoch: int, limit: int) -> None:
        self.epoch[req_state_idx], self.limit[req_state_idx] = epoch, limit
        self.is_on[req_state_idx] = False
        self.tables.state[req_state_idx] = StreamState.READING
        with self._changing(req_state_idx):
            self.tables.end[req_state_idx] = self.tables.checked[req_state_idx] = 0
            self.tables.stream_epoch[req_state_idx] = epoch

    def refuse(self, req_state_idx: int, epoch: int) -> None:
        """Say that a row's request goes undrafted; it is forgotten."""
        self.tables.stream_epoch[req_state_idx] = epoch
        self.tables.state[req_state_idx] = StreamState.REFUSED

    def remove(self, req_state_idx: int) -> None:
        with self._changing(req_state_idx):
            self.tables.stream_epoch[req_state_idx], self.tables.end[req_state_idx] = NO_EPOCH, 0
        self.tables.state[req_state_idx] = StreamState.NONE
        self.epoch[req_state_idx], self.is_on[req_state_idx] = NO_EPOCH, False

    def start(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Let `[n]` rows draw, of whose committed texts, `[n]` tokens, all but the last token are fed."""
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            self.text[row, :length] = self.tables.text[row, :length]
        self.length[rows] = self.agreed[rows] = lengths
        self.fed[rows] = lengths - 1
        self.is_on[rows] = True
        self._drawn = _NO_ROWS
        with self._changing(rows):
            self.tables.checked[rows] = self.tables.end[rows] = lengths
        self.tables.state[rows] = StreamState.STREAMING

    def pause(self, rows: np.ndarray) -> None:
        """Let `[n]` rows catch up on text before they draw again."""
        self.is_on[rows] = False

    @contextlib.contextmanager
    def _changing(self, rows: np.ndarray | int) -> Iterator[None]:
        """Let who reads a row's stream meanwhile know that what it has read is none."""
        self.tables.generation[rows] += 1
        yield
        self.tables.generation[rows] += 1

    def live(self, rows: np.ndarray) -> np.ndarray:
        """Return `[n]` bool: which of the rows the target has still given to the drafter's request."""
        return self.tables.epoch[rows] == self.epoch[rows]

    def observe(self) -> np.ndarray:
        """Follow what the target has committed since the last turn; return the rows whose streams said otherwise."""
        tables = self.tables
        rows = np.flatnonzero(self.is_on & (tables.epoch == self.epoch) & (tables.committed > self.agreed))
        if not len(rows):
            return rows
        committed = tables.committed[rows]
        length, agreed = self.length[rows], self.agreed[rows]
        cols = agreed[:, None] + np.arange(int((committed - agreed).max()))
        is_new = cols < committed[:, None]
        cols = np.minimum(cols, self.text.shape[1] - 1)
        said = tables.text[rows[:, None], cols]
        differs = is_new & ((self.text[rows[:, None], cols] != said) | (cols >= length[:, None]))
        first = np.where(differs.any(axis=1), agreed + differs.argmax(axis=1), committed)
        where = np.broadcast_to(rows[:, None], cols.shape)
        self.text[where[is_new], cols[is_new]] = said[is_new]
        is_over = first < committed  # the stream ends here, and goes on from the target's last token
        self.length[rows] = np.where(is_over, committed, length)
        if is_over.any():
            self._drawn = _NO_ROWS
        # What stands of the draft's KV was fed with the same tokens: none from the first different one on.
        self.fed[rows] = np.minimum(self.fed[rows], np.where(is_over, first, length))
        self.agreed[rows] = committed
        with self._changing(rows[is_over]):
            tables.end[rows] = self.length[rows]
            tables.checked[rows] = committed
        return rows[is_over & (first < length)]

    def due(self, max_rows: int) -> np.ndarray:
        """Return `[n]` int64 rows that may draw, in ascending order; of too many, the shortest streams first."""
        ahead = self.length - self.agreed
        may = self.is_on & (ahead < self.tables.sizes.max_ahead) & (self.length < self.limit)
        rows = np.flatnonzero(may & (self.tables.epoch == self.epoch))
        return rows if len(rows) <= max_rows else rows[np.argsort(ahead[rows], kind="stable")[:max_rows]]

    def missing(self, rows: np.ndarray) -> np.ndarray:
        """Return `[n]` int64: tokens before the last one whose draft KV is missing."""
        return self.length[rows] - 1 - self.fed[rows]

    def extend(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Append `[n]` drawn tokens to `[n]` rows; all of the text but the last token is fed then."""
        ends = self.length[rows]
        self.text[rows, ends] = tokens
        self.tables.tokens[rows, ends % self.tables.sizes.ring] = tokens
        self.fed[rows] = ends
        self.length[rows] = ends + 1
        self._drawn = rows
        self.tables.end[rows] = ends + 1

    def goes_on(self, rows: np.ndarray) -> bool:
        """Return whether the last draw was of `[n]` rows, in this order, and all their texts still end with it."""
        return np.array_equal(rows, self._drawn)


# ---- windows ---------------------------------------------------------------------------------------------------------

_NEW_SHARE = 0.1  # of a new measurement in the mean that is kept
_MOST_TIMES = 4  # the mean: what a longer time counts as
_HYSTERESIS = 0.75  # a window holds while the rule is less than this away from its middle
_NUM_BUCKETS = 12  # batch sizes 1, 2, 3-4, 5-8, ...


def running_mean(mean: float, new: float) -> float:
    """Return a mean of times that a new one has entered, as `_MOST_TIMES` the mean at most; 0: none yet."""
    return mean + _NEW_SHARE * (min(new, _MOST_TIMES * mean) - mean) if mean else new


class WindowRule:
    """How many tokens the target verifies a step, K (`most`) at most.

    The paper's window is c* = T_t / T_d, what the draft draws while the target verifies (ParallelVLM section 4.3),
    rounded down where few drafts stand and up where most do: the acceptance rate is added before rounding down.
    """

    def __init__(self, most: int):
        self._most = most
        self._step_us = np.zeros(_NUM_BUCKETS)
        self._windows = np.full(_NUM_BUCKETS, most)
        self._acceptance = 1.0

    @staticmethod
    def _bucket(num_reqs: int) -> int:
        return min(max(num_reqs - 1, 0).bit_length(), _NUM_BUCKETS - 1)

    def observe_step(self, num_reqs: int, step_us: float) -> None:
        bucket = self._bucket(num_reqs)
        self._step_us[bucket] = running_mean(self._step_us[bucket], step_us)

    def observe_acceptance(self, num_accepted: int, num_drafts: int) -> None:
        if num_drafts:
            self._acceptance += _NEW_SHARE * (num_accepted / num_drafts - self._acceptance)

    def window(self, num_reqs: int, draft_us: float) -> int:
        """Return the window of a step over `num_reqs` requests, where a draft forward takes `draft_us`; 0: unknown."""
        bucket = self._bucket(num_reqs)
        step_us = self._step_us[bucket]
        if not step_us or not draft_us:
            return int(self._windows[bucket])
        wanted = step_us / draft_us + self._acceptance
        if abs(wanted - (self._windows[bucket] + 0.5)) > _HYSTERESIS:
            self._windows[bucket] = min(max(int(wanted), 1), self._most)
        return int(self._windows[bucket])
