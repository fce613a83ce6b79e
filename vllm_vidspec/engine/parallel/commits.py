"""The target's end of the shared tables: what a step has sampled goes in, what the drafter streams is read.

On a GPU the tokens are copied into pinned memory behind what is queued, and a thread that waits for that writes them
down. So the drafter knows of a step as soon as the host can, and the target's loop waits for nothing.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d, get_accelerator_view_from_cpu_tensor

from vidspec_kernels import NO_STREAM, STALE, WINDOW_INFO_SIZE, copy_committed_suffix
from vllm_vidspec import metrics
from vllm_vidspec.engine.draft_backend import Step
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.metrics.counts import changes
from vllm_vidspec.streams import PAGE, Tables, WindowRule

logger = init_logger("vllm.vidspec")

_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegister's flags
_NEW_SHARE = 0.2  # of a step's accepted drafts in a request's mean
_NUM_BUFFERS = 8  # two a step, of the steps that may be on their way


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
        # On a GPU the thread alone writes these counts, `_in_flight` and `_reach`, and observes acceptance. The loop
        # reads them, an array element or a number at a time: a value that is a step old makes a window shorter or
        # longer. What is published of the counts the loop alone remembers.
        self._counts = dict.fromkeys(("late_drafts", "stale_streams", "streams_to_come"), 0)
        self._published_counts = self._counts.copy()
        self._failure: str | None = None  # of the thread
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            # Pinned buffers and events that nothing is on its way in: more are made where the thread falls behind.
            self._buffer_size = num_rows * max(2 + most, WINDOW_INFO_SIZE)
            self._free = deque(self._make_buffer() for _ in range(_NUM_BUFFERS))
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
        is_stale, is_missing = what == STALE, what == NO_STREAM
        self._counts["stale_streams"] += int((is_stale & is_drafted).sum())
        self._counts["late_drafts"] += int(((counts == 0) & ~is_stale & ~is_missing & is_drafted).sum())
        self._counts["streams_to_come"] += int((is_missing & is_drafted).sum())

    # ---- counters --------------------------------------------------------------------------------------------------

    def publish_counters(self) -> None:
        """Add what the drafter has counted, and what was late or out of date, to the engine's counters."""
        for name, count in self._counts.items():
            if gained := count - self._published_counts[name]:
                self._counters.add(name, gained)
                self._published_counts[name] = count
        before, self._published = self._published, self._tables.counters.copy()
        for name, value in changes(before, self._published).items():
            (self._counters.set if name in metrics.GAUGE_NAMES else self._counters.add)(name, value)

    # ---- to the host -----------------------------------------------------------------------------------------------

    def _send(self, packed: torch.Tensor, write: Callable[[np.ndarray], None]) -> None:
        """Hand a tensor of the target's device to `write` once it is on the host: on a GPU, by the thread."""
        if not self._on_gpu:
            write(packed.numpy())
            return
        try:
            memory, event = self._free.popleft()
        except IndexError:
            memory, event = self._make_buffer()
        host = memory[: packed.numel()].view(packed.shape)
        host.copy_(packed, non_blocking=True)
        event.record()
        self._line.put((memory, event, host, write))

    def _make_buffer(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        memory = torch.empty(self._buffer_size, dtype=torch.int32, pin_memory=True)
        return memory, torch.cuda.Event(blocking=True)  # the thread sleeps; another would keep the driver busy

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


class SharedStreams:
    """The drafter's streams as the target's device reads them: the table itself, mapped into the device's addresses, so
    that a window is cut from what stands there when the device comes to it, a step or two behind the host.

    Where that fails, the device gets copies that are as old as the host is ahead, counted in `window_snapshots`.
    """

    def __init__(self, tables: Tables, device: torch.device, counters: Counters):
        self._tables, self._counters = tables, counters
        self._streams = torch.from_numpy(tables.streams)
        self.is_direct = device.type == "cpu"  # whether the device reads the table itself
        if not self.is_direct:
            try:
                self._streams, self.is_direct = self._map(), True
            except Exception as error:  # whatever it is: a driver, a container, a limit of locked memory
                logger.warning(
                    "vidspec: the device cannot read the drafter's streams (%s): windows are cut from copies that are "
                    "a step old, or two with asynchronous scheduling; fewer drafts stand",
                    error,
                )
                self._streams = torch.zeros_like(self._streams, device=device)

    def _map(self) -> torch.Tensor:
        """Return a view of the table at its device address, if the device reads there what the host writes."""
        host, pointer = self._streams, self._streams.data_ptr()
        num_bytes = -(-host.nbytes // PAGE) * PAGE
        error = torch.cuda.cudart().cudaHostRegister(pointer, num_bytes, _PORTABLE_AND_MAPPED)
        if error.value:
            raise RuntimeError(f"cudaHostRegister: error {error.value}")
        weakref.finalize(self, _unregister, pointer, self._tables).atexit = False
        if not host.is_pinned():  # vLLM would return a view of a copy
            raise RuntimeError("registered memory does not count as pinned")
        view = get_accelerator_view_from_cpu_tensor(host)
        for number in (1, 0):
            host[-1, -1] = number
            if int(view[-1, -1]) != number:
                raise RuntimeError("it reads other memory than the host writes")
        return view

    def for_step(self, rows: torch.Tensor, rows_np: np.ndarray) -> torch.Tensor:
        """Return `[max_reqs, NUM_HEADERS + R]` int32 on the device, for `gather_draft_windows` of `[n]` int64 rows."""
        if not self.is_direct:
            self._counters.add("window_snapshots")
            self._streams[rows] = async_tensor_h2d(self._tables.streams[rows_np], device=rows.device)
        return self._streams


def _unregister(pointer: int, _tables: Any) -> None:
    torch.cuda.cudart().cudaHostUnregister(pointer)
