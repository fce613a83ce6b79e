"""Commits: what each step of the target has sampled, on its way into the shared tables, and what it tells of drafts.

On the CPU engine that is a copy. On a GPU the tokens are on the device when the host is at this point: they are copied
into pinned memory behind what is queued, and a thread that waits for that writes them down. So the drafter knows of a
step as soon as the host can, and the target's loop waits for nothing.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vidspec_kernels import NO_STREAM, STALE, WINDOW_INFO_SIZE, copy_committed_suffix
from vllm_vidspec import metrics
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.target_step import Step
from vllm_vidspec.parallel import Tables, WindowRule

_NEW_SHARE = 0.2  # of a step's accepted drafts in a request's mean
_POLL_S = 20e-6


class Commits:
    """Of the target's first rank."""

    def __init__(self, tables: Tables, rule: WindowRule, counters: Counters, device: torch.device, most: int):
        self._tables, self._rule, self._counters = tables, rule, counters
        num_rows = len(tables.epoch)
        self._tails = torch.zeros(num_rows, 2 + most, dtype=torch.int32, device=device)  # see `copy_committed_suffix`
        self._in_flight = np.zeros(num_rows, dtype=np.int64)  # [max_num_reqs] drafts that the present step verifies
        self._reach = np.full(num_rows, float(most))  # [max_num_reqs] drafts that stand, on average
        self._of_epoch = np.zeros(num_rows, dtype=np.int64)  # whose average it is
        self._most = most
        self._published = np.zeros(len(tables.counters), dtype=np.int64)
        self._num_late = self._num_stale = self._num_to_come = 0  # since they were published
        self._failure: str | None = None  # of the thread
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            # Pinned buffers and events that nothing is on its way in; as many are made as are in use at a time.
            self._free: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
            self._buffer_size = num_rows * max(2 + most, WINDOW_INFO_SIZE)
            self._line: queue.SimpleQueue = queue.SimpleQueue()
            threading.Thread(target=self._write_down, name="vidspec-commits", daemon=True).start()

    # ---- what was sampled ------------------------------------------------------------------------------------------

    def add(self, step: Step, states: Any) -> None:
        """Commit a step: the lengths of its requests' texts, and their last tokens."""
        batch, is_done = step.batch, step.is_done
        if not is_done.any():
            return
        rows, tails = batch.idx_mapping_np.copy(), self._tails[: batch.num_reqs]
        copy_committed_suffix(batch.idx_mapping, states.total_len.gpu, states.all_token_ids.gpu, tails)
        epochs = self._tables.epoch[rows].copy()
        self._send(tails, lambda host: self._commit(rows, epochs, is_done, host))

    def _commit(self, rows: np.ndarray, epochs: np.ndarray, is_done: np.ndarray, tails: np.ndarray) -> None:
        """Write `[n]` rows down, but for those that have another request by now."""
        is_ours = is_done & (self._tables.epoch[rows] == epochs) & (epochs >= 0)
        rows, tails = rows[is_ours], tails[is_ours]
        lengths, tails = tails[:, 0].astype(np.int64), tails[:, 1:]
        before, drafts = self._tables.committed[rows], self._in_flight[rows]
        is_new = self._of_epoch[rows] != epochs[is_ours]
        self._reach[rows[is_new]] = self._most
        self._of_epoch[rows] = epochs[is_ours]
        self._tables.commit(rows, lengths, tails)
        has_drafts = drafts > 0
        if has_drafts.any():
            accepted = np.clip(lengths - before - 1, 0, drafts)[has_drafts]
            self._reach[rows[has_drafts]] += _NEW_SHARE * (accepted - self._reach[rows[has_drafts]])
            self._rule.observe_acceptance(int(accepted.sum()), int(drafts.sum()))
        self._in_flight[rows] = 0

    # ---- what was taken --------------------------------------------------------------------------------------------

    def wanted(self, rows: np.ndarray, window: int) -> np.ndarray:
        """Return `[n]` int64 tokens that each request's window may have: fewer where few stand."""
        return np.minimum(window, np.ceil(2 * self._reach[rows]).astype(np.int64) + 1)

    def took(self, rows: np.ndarray, is_drafted: np.ndarray, info: torch.Tensor) -> None:
        """Note what was taken of the streams of `[n]` rows; `info` as `gather_draft_windows` writes it."""
        rows = rows.copy()
        self._send(info, lambda host: self._note(rows, is_drafted, host[:, 0], host[:, 1]))

    def _note(self, rows: np.ndarray, is_drafted: np.ndarray, counts: np.ndarray, what: np.ndarray) -> None:
        self._in_flight[rows] = counts * is_drafted
        is_stale = what == STALE
        self._num_stale += int((is_stale & is_drafted).sum())
        is_there = what != NO_STREAM
        self._num_late += int(((counts == 0) & ~is_stale & is_there & is_drafted).sum())
        self._num_to_come += int((~is_there & is_drafted).sum())

    def wait_for(self, rows: np.ndarray, epochs: np.ndarray, wanted: np.ndarray, wait_us: int) -> None:
        """Wait until the streams of `[n]` rows are as long as is wanted, or for so long."""
        tables, deadline = self._tables, time.monotonic() + 1e-6 * wait_us
        while time.monotonic() < deadline:
            is_streaming = (tables.stream_epoch[rows] == epochs) & (tables.end[rows] > 0)
            if not (is_streaming & (tables.end[rows] - tables.committed[rows] < wanted)).any():
                return
            time.sleep(_POLL_S)

    # ---- counters --------------------------------------------------------------------------------------------------

    def publish_counters(self) -> None:
        """Add what the drafter has counted, and what was late or out of date, to the engine's counters."""
        counts = (("late_drafts", "_num_late"), ("stale_streams", "_num_stale"), ("streams_to_come", "_num_to_come"))
        for name, attribute in counts:
            if count := getattr(self, attribute):
                self._counters.add(name, count)
                setattr(self, attribute, 0)
        now = self._tables.counters.copy()
        for slot in np.flatnonzero(now != self._published).tolist():
            name = metrics.NAMES[slot]
            if name in metrics.GAUGES:
                self._counters.set(name, int(now[slot]))
            else:
                self._counters.add(name, int(now[slot] - self._published[slot]))
        self._published = now

    # ---- to the host -----------------------------------------------------------------------------------------------

    def _send(self, packed: torch.Tensor, write: Callable[[np.ndarray], None]) -> None:
        """Hand a tensor of the target's device to `write` once it is on the host: on a GPU, by the thread."""
        if not self._on_gpu:
            write(packed.numpy())
            return
        try:
            memory, event = self._free.popleft()
        except IndexError:
            memory = torch.empty(self._buffer_size, dtype=torch.int32, pin_memory=True)
            event = torch.cuda.Event(blocking=True)  # the thread sleeps; another would keep the driver busy
        host = memory[: packed.numel()].view(packed.shape)
        host.copy_(packed, non_blocking=True)
        event.record()
        self._line.put((memory, event, host, write))

    def _write_down(self) -> None:
        while True:
            memory, event, host, write = self._line.get()
            try:
                event.synchronize()
                write(host.numpy())
            except Exception as error:  # whatever it is, the loop must observe of it
                self._failure = f"{type(error).__name__}: {error}"
            self._free.append((memory, event))

    def take_failure(self) -> str | None:
        """Return, once, that a step could not be written down, and why."""
        failure, self._failure = self._failure, None
        return failure
