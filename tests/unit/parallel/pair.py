"""A target and a drafter that are functions of the text, on real tables: what a window must be is known exactly.

The target's next token is `target(text)`, the drafter's `draft(text)`; they agree now and then. The drafter's KV is
kept as the tokens that were fed, position by position, and is compared with the text whenever it is read.
"""

import zlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from vidspec_kernels import WINDOW_INFO_SIZE, gather_draft_windows
from vllm_vidspec.engine.parallel import messages
from vllm_vidspec.engine.parallel.lead import DrafterLead
from vllm_vidspec.engine.parallel.rank import Progress
from vllm_vidspec.streams import Sizes, StreamState, Tables

VOCAB = 11
MOST = 5  # K
MAX_LEN = 96
MAX_REQS = 3
SIZES = Sizes(max_num_reqs=MAX_REQS, max_model_len=MAX_LEN, max_ahead=2 * MOST + 2, num_counters=1)


def _hash(*parts: int) -> int:
    return zlib.crc32(np.asarray(parts, dtype=np.int64).tobytes())


def target(text: list[int]) -> int:
    return _hash(1, *text) % VOCAB


def draft(text: list[int], errs: int) -> int:
    """Return the drafter's guess: another token than the target's after one text in `errs`; 0: after none."""
    guess = target(text)
    return (guess + 1) % VOCAB if errs and _hash(2, *text) % errs == 0 else guess


def drawn(text: list[int], count: int, errs: int) -> list[int]:
    out = list(text)
    for _ in range(count):
        out.append(draft(out, errs))
    return out[len(text) :]


class FakeRank:
    """Carries commands out as `DrafterRank` does, 7 tokens at a time, and checks what they say of the KV."""

    def __init__(self, errs: int):
        self.errs = errs
        self.text: dict[int, list[int]] = {}
        self.kv: dict[int, list[int]] = {}
        self.num_draws = self.num_more = 0
        self.last: list[tuple[int, int]] = []  # rows of the last draw, and what each was given

    def do(self, command):
        return getattr(self, f"_{type(command).__name__.lower()}", lambda _: None)(command)

    def _add(self, message):
        assert message.req_state_idx not in self.text, "the row's last request was not released"
        self.text[message.req_state_idx] = message.token_ids.tolist()

    def _prefill(self, message):
        self.kv[message.req_state_idx] = []

    def _remove(self, message):
        self.text.pop(message.req_state_idx)
        self.kv.pop(message.req_state_idx, None)

    def _requeue(self, message):
        for row, num_fed in zip(message.rows.tolist(), message.num_fed.tolist(), strict=True):
            del self.kv[row][num_fed:]

    def _read(self, message):
        ready = []
        for row, length, (start, tokens) in zip(
            message.rows.tolist(), message.lengths.tolist(), message.new_text, strict=True
        ):
            text, kv = self.text[row], self.kv[row]
            # What was drawn is known from the draws: it was fed.
            text[:] = (text if len(text) >= start else kv)[:start] + tokens.tolist()
            assert len(text) == length, "text that was committed and never told"
            end = min(len(kv) + 7, length - 1)
            kv[len(kv) :] = text[len(kv) : end]
            if len(kv) == length - 1:
                ready.append(row)
        return Progress(ready, [])

    def _draw(self, message):
        self.num_draws += 1
        if message.goes_on:  # by what this side drew last, as it stands on the device: the message is not looked at
            self.num_more += 1
            assert [row for row, _ in self.last] == message.rows.tolist(), "the last draw was of others"
            for row, token in self.last:
                self.kv[row].append(token)
        else:
            self._start(message)
        rows = message.rows.tolist()
        assert [len(self.kv[row]) for row in rows] == message.lengths.tolist(), "KV with a hole"
        self.last = [(row, draft(self.kv[row], self.errs)) for row in rows]
        return np.array([token for _, token in self.last], dtype=np.int64), []

    def _start(self, message):
        for row, length, last, missing in zip(
            message.rows.tolist(), message.lengths.tolist(), message.last.tolist(), message.missing, strict=True
        ):
            kv = self.kv[row]
            del kv[length - 2 if missing else length - 1 :]
            kv.extend(last if missing else last[1:])


class Pair:
    """The target's side as `ParallelSpeculator` has it, and a drafter that runs when it is told to."""

    def __init__(self, errs: int):
        self.errs = errs
        self.tables = Tables(bytearray(Tables.num_bytes(SIZES)), SIZES)
        self.tables.epoch[:] = -1
        self.requests: dict[int, Any] = {}  # that the target runs, by row
        self.num_accepted = self.num_verified = self.num_steps = 0
        self.last_epoch = 0
        self.restart()

    def restart(self):
        """Start the drafter, anew with nothing in it."""
        self.tables.forget_streams()
        self.rank, self.told = FakeRank(self.errs), []
        self.lead = DrafterLead(self.rank.do, self.tables, mock.Mock(), MAX_REQS)
        for request in self.requests.values():
            self._tell(request)

    def turn(self, count=1):
        for _ in range(count):
            while self.told:
                self.lead._handle(self.told.pop(0))
            self.lead.turn()
            self.check_streams()

    def check_streams(self):
        streams = self.lead.streams
        for row in np.flatnonzero(streams.is_on):
            assert streams.fed[row] < streams.length[row]
            assert streams.agreed[row] <= streams.length[row]
            ahead = streams.length[row] - streams.agreed[row]
            assert ahead <= SIZES.max_ahead

    def add(self, row, text):
        self.requests[row] = request = SimpleNamespace(row=row, text=list(text), window=[])
        self._tell(request)

    def _tell(self, request):
        self.last_epoch += 1
        request.epoch = self.last_epoch
        token_ids = np.array(request.text, dtype=np.int32)
        self.tables.add(request.row, request.epoch, token_ids)
        self.told += [
            messages.Add(f"r{request.epoch}", request.row, request.epoch, token_ids, len(token_ids), MAX_LEN, [], None),
            messages.Prefill(request.row, request.epoch, None, []),
        ]

    def end(self, row):
        """Take a row from its request: finished, aborted or preempted."""
        request = self.requests.pop(row)
        self.tables.remove(row)
        self.told.append(messages.Remove(row, request.epoch))
        return request

    def step(self, wanted=MOST):
        """Let the target verify what it has taken, commit, and take again."""
        self.num_steps += 1
        rows = np.array(sorted(self.requests), dtype=np.int64)
        if not len(rows):
            return
        for request in self.requests.values():
            self._verify(request)
        lengths = np.array([len(self.requests[row].text) for row in rows.tolist()])
        padded = [([0] * (MOST + 1) + self.requests[row].text)[-(MOST + 1) :] for row in rows.tolist()]
        self.tables.commit(rows, lengths, np.array(padded, dtype=np.int32))
        for row in rows.tolist():
            assert self.tables.text[row, : len(self.requests[row].text)].tolist() == self.requests[row].text
        self._take(rows, lengths, wanted)

    def _verify(self, request):
        for token in request.window:
            if token != target(request.text):
                break
            request.text.append(token)
            self.num_accepted += 1
        request.text.append(target(request.text))
        self.num_verified += len(request.window)
        request.window = []

    def _take(self, rows, lengths, wanted):
        epochs = np.array([self.requests[row].epoch for row in rows.tolist()])
        asked = torch.from_numpy(np.stack((epochs, np.full(len(rows), wanted)), axis=1).astype(np.int32))
        text = torch.zeros(MAX_REQS, MAX_LEN, dtype=torch.int32)
        for row, request in self.requests.items():
            text[row, : len(request.text)] = torch.tensor(request.text)
        num_tokens = torch.zeros(MAX_REQS, dtype=torch.int32)
        num_tokens[rows] = torch.from_numpy(lengths).int()
        tokens = torch.full((len(rows), MOST), -1)
        told = torch.full((len(rows), WINDOW_INFO_SIZE), -1, dtype=torch.int32)
        gather_draft_windows(
            torch.from_numpy(self.tables.streams), asked, torch.from_numpy(rows), num_tokens, text, tokens, told
        )
        for i, row in enumerate(rows.tolist()):
            request, count = self.requests[row], int(told[i, 0])
            window = tokens[i].tolist()
            assert window[count:] == [0] * (MOST - count)
            assert count <= wanted
            assert not count or self.tables.state[row] == StreamState.STREAMING
            # What the drafter says after exactly this text, and nothing that it said before something else came.
            assert window[:count] == drawn(request.text, count, self.errs)
            request.window = window[:count]
