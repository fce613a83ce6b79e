"""DrafterLead: the drafter's loop. It follows the target, decides what is read and drawn, and publishes streams.

    receive the target's messages: requests that are added, may be read, are removed         messages
    observe what it has committed: streams that differ are cut                               tables
    read a bounded piece of the prompts in the queue, or encode media ahead                  read, encode
    draw the next tokens of the shortest streams, all in one batch                           draw

A turn is one forward of decoding. Only the first rank has a lead; it hands its decisions to the others as commands.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_vidspec.engine.parallel import messages
from vllm_vidspec.engine.parallel.channel import Channel
from vllm_vidspec.streams import Streams, Tables, running_mean

_IDLE_S = 0.2  # there is no request: a message wakes the loop
# Streams are as far ahead as they may be: how long until their commits are read again, at least, and as a share of
# the time that there has been nothing to do.
_ALERT_S, _ALERT_SHARE = 100e-6, 0.05


class DrafterLead:
    """The loop; `do` carries a command out on every rank, and returns what it returns here (`Ranks`)."""

    def __init__(self, do: Callable[[Any], Any], tables: Tables, channel: Channel, max_rows: int):
        self._do, self._tables, self._channel, self._max_rows = do, tables, channel, max_rows
        self.streams = Streams(tables)
        self._waiting: dict[int, messages.Add] = {}  # by row: arrived, and not encoded whole
        self._num_known: dict[int, int] = {}  # by row: arrived, and tokens of its text that the ranks know
        self._reading: dict[int, int] = {}  # by row: in the queue, and tokens of its text that the ranks know
        self._is_over = False

    def run(self) -> None:
        worked = time.monotonic()  # when there was something to do last
        while not self._is_over:
            self._tables.beat[0] += 1
            self._channel.flush()
            for message in self._channel.receive():
                self._handle(message)
            self._is_over |= self._channel.is_closed
            if self._is_over:
                return
            start = time.monotonic()
            if self.turn():
                worked = time.monotonic()
                continue
            is_alert = self.streams.is_on.any() or self._reading
            alert_s = max(_ALERT_S, _ALERT_SHARE * (start - worked))
            self._channel.wait(min(alert_s, _IDLE_S) if is_alert else _IDLE_S)

    def _handle(self, message: Any) -> None:
        match message:
            case messages.Add(req_state_idx=row):
                # `Streams` first: the ranks work on what the target has given the row to by now.
                self.streams.add(row, message.epoch, message.limit)
                self._do(message)
                self._num_known[row] = len(message.token_ids)
                if message.features:
                    self._waiting[row] = message
            case messages.Prefill(req_state_idx=row) if self.streams.epoch[row] == message.epoch:
                self._waiting.pop(row, None)
                refusal = self._do(message)
                if refusal is None:
                    self._reading[row] = self._num_known.pop(row)
                else:
                    self._refuse(row, *refusal)
            case messages.Remove(req_state_idx=row) if self.streams.epoch[row] == message.epoch:
                self._remove(row)
                self._do(message)
            case messages.ForgetMedia() | messages.Retune():
                self._do(message)
            case messages.Stop():
                self._is_over = True

    def _remove(self, row: int) -> None:
        self.streams.remove(row)
        for table in (self._waiting, self._num_known, self._reading):
            table.pop(row, None)

    def _refuse(self, row: int, reason: str, detail: str) -> None:
        epoch = int(self.streams.epoch[row])
        self._remove(row)
        self._do(messages.Remove(row, epoch))
        self.streams.refuse(row, epoch)
        self._channel.send(messages.Refused(row, epoch, reason, detail))

    def turn(self) -> bool:
        self.streams.observe()
        did = self._read() if self._reading else False
        did |= self._encode() if self._waiting and not did else False
        return self._draw() or did

    def _encode(self) -> bool:
        row = next(iter(self._waiting))
        if not self._do(messages.Encode(row)):
            del self._waiting[row]
        return True

    def _read(self) -> bool:
        rows = np.fromiter(self._reading, dtype=np.int64)
        rows = rows[self.streams.live(rows)]
        if not len(rows):
            return False
        tables, lengths = self._tables, self._tables.committed[rows].copy()
        new_text = []
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            new_text.append((self._reading[row], tables.text[row, self._reading[row] : length].copy()))
            self._reading[row] = length
        progress = self._do(messages.Read(rows, lengths, new_text))
        for row, reason, detail in progress.refused:
            self._refuse(row, reason, detail)
        ready = np.array([row for row in progress.ready if row in self._reading], dtype=np.int64)
        if len(ready):
            at = dict(zip(rows.tolist(), lengths.tolist(), strict=True))
            self.streams.start(ready, np.array([at[row] for row in ready.tolist()], dtype=np.int64))
            for row in ready.tolist():
                del self._reading[row]
        return True

    def _draw(self) -> bool:
        streams = self.streams
        rows = streams.due(self._max_rows)
        missing = streams.missing(rows)
        behind = rows[missing > 1]
        if len(behind):
            # The target went on without the stream: its text is read like a prompt's.
            self._do(messages.Requeue(behind, streams.fed[behind]))
            streams.pause(behind)
            self._reading |= {row: int(streams.fed[row]) for row in behind.tolist()}
            rows, missing = rows[missing <= 1], missing[missing <= 1]
        if not len(rows):
            return bool(len(behind))
        start = time.monotonic()
        lengths = streams.length[rows]
        last = streams.text[rows[:, None], lengths[:, None] + (-2, -1)]
        tokens, refused = self._do(messages.Draw(rows, lengths, last, missing > 0, streams.goes_on(rows)))
        for row, reason, detail in refused:
            self._refuse(row, reason, detail)
        if refused:
            rows = rows[streams.is_on[rows]]
        streams.extend(rows, tokens)
        known = self._tables.draft_us
        known[len(rows)] = running_mean(known[len(rows)], 1e6 * (time.monotonic() - start))
        return True
