"""Streams: what the drafter thinks comes next, of every request, and how that follows what the target commits.

A row's text is what the target has committed and, behind it, the stream. The drafter draws on at its end. When the
target has committed more, either the stream said the same, and goes on as it is (the paper's post-verify mode, whose
accepted length grows without bound), or it is cut at the first token that differs and goes on from the target's own
(pre-verify: what the target verifies next begins with the first token drawn after that). ParallelVLM, section 4.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vllm_vidspec.parallel.tables import StreamState, Tables

NOBODY = -1  # the epoch of a row without a stream
_NO_ROWS = np.zeros(0, dtype=np.int64)


class Observed(NamedTuple):
    """What the committed text has told.

    Attributes:
        rows: `[n]` int64 rows with new text.
        cut: `[n]` bool: the stream had said something else.
    """

    rows: np.ndarray
    cut: np.ndarray


class Streams:
    """The drafter's side of the tables, by persistent row.

    Attributes:
        is_on: bool [M], the drafter has read the prompt: the row draws.
        length: int64 [M], tokens of text and stream.
        agreed: int64 [M], tokens of them that are committed, as far as was observed.
        fed: int64 [M], logical tokens from the start whose draft KV stands.
        limit: int64 [M], longest text that the request can have.
        text: int32 [M, max_model_len].
    """

    def __init__(self, tables: Tables):
        self.tables = tables
        num_rows, max_len = tables.text.shape
        self.epoch = np.full(num_rows, NOBODY, dtype=np.int64)
        self.is_on = np.zeros(num_rows, dtype=bool)
        self.length, self.agreed, self.fed, self.limit = np.zeros((4, num_rows), dtype=np.int64)
        self.text = np.zeros((num_rows, max_len), dtype=np.int32)
        self._drawn = _NO_ROWS  # of the last draw, in its order, while all their texts end with it

    # ---- a request's life ------------------------------------------------------------------------------------------

    def add(self, req_state_idx: int, epoch: int, limit: int) -> None:
        self.epoch[req_state_idx], self.limit[req_state_idx] = epoch, limit
        self.is_on[req_state_idx] = False
        self._publish_state(req_state_idx, StreamState.READING)
        with self._changing(req_state_idx):
            self.tables.end[req_state_idx] = self.tables.checked[req_state_idx] = 0
            self.tables.stream_epoch[req_state_idx] = epoch

    def refuse(self, req_state_idx: int, epoch: int) -> None:
        """Say that a row's request goes undrafted; it is forgotten."""
        self.tables.stream_epoch[req_state_idx] = epoch
        self._publish_state(req_state_idx, StreamState.REFUSED)

    def remove(self, req_state_idx: int) -> None:
        with self._changing(req_state_idx):
            self.tables.stream_epoch[req_state_idx], self.tables.end[req_state_idx] = NOBODY, 0
        self._publish_state(req_state_idx, StreamState.NONE)
        self.epoch[req_state_idx], self.is_on[req_state_idx] = NOBODY, False

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
        self._publish_state(rows, StreamState.STREAMING)

    def pause(self, rows: np.ndarray) -> None:
        """Let `[n]` rows catch up on text before they draw again."""
        self.is_on[rows] = False

    def _publish_state(self, rows: np.ndarray | int, state: StreamState) -> None:
        self.tables.state[rows] = state

    @contextlib.contextmanager
    def _changing(self, rows: np.ndarray | int) -> Iterator[None]:
        """Let who reads a row's stream meanwhile know that what it has read is none."""
        self.tables.generation[rows] += 1
        yield
        self.tables.generation[rows] += 1

    # ---- a turn ----------------------------------------------------------------------------------------------------

    def live(self, rows: np.ndarray) -> np.ndarray:
        """Return `[n]` bool: which of the rows the target has still given to the drafter's request."""
        return self.tables.epoch[rows] == self.epoch[rows]

    def observe(self) -> Observed:
        """Follow what the target has committed since the last turn."""
        tables = self.tables
        rows = np.flatnonzero(self.is_on & (tables.epoch == self.epoch) & (tables.committed > self.agreed))
        if not len(rows):
            return Observed(rows, np.zeros(0, dtype=bool))
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
        return Observed(rows, is_over & (first < length))

    def due(self, max_rows: int) -> np.ndarray:
        """Return `[n]` int64 rows that may draw: in ascending order, or if there are more, those with the shortest
        streams first.
        """
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
