"""What the worker counts: device accumulators read back without a host sync, and the file that /metrics shows."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.utils.torch_utils import current_stream

from vllm_vidspec import metrics
from vllm_vidspec.engine.requests import NewRequest, RequestRows
from vllm_vidspec.metrics.counts import CarriedCounts, Changes, Counts
from vllm_vidspec.metrics.files import open_for
from vllm_vidspec.scoring import Tally

logger = init_logger("vllm.vidspec")

_TOTALS = ("drafts", "draft_tokens", "accepted_tokens", "draft_depth", *(f"{kind}_tokens" for kind in metrics.KINDS))
_DRAFTS, _ACCEPTED = _TOTALS.index("drafts"), _TOTALS.index("accepted_tokens")

WINDOW = 128  # verify steps that are judged at once: their mean varies by about a tenth of a token
LOW = 0.5  # draft tokens that must stand per verify step: the cost of five forwards of a tenth of the target's
SOUND = 1.0  # the log speaks again only after a window as good as this


class Counters:
    """Counts of one worker. Only tensor-parallel rank 0 publishes."""

    def __init__(self, vllm_config: Any, device: torch.device, num_speculative_tokens: int, requests: RequestRows):
        # [7 + K] see `Tally.totals`
        self._totals = torch.zeros(len(_TOTALS) + num_speculative_tokens, dtype=torch.int64, device=device)
        self._requests = requests
        self._launches: dict = {}  # see `Tally.known`
        on_gpu = device.type == "cuda"
        # On the host: the totals themselves, or where a copy of them goes.
        self._host = torch.zeros_like(self._totals, device="cpu", pin_memory=True) if on_gpu else self._totals
        self._host_np = self._host.numpy()
        self._copied = torch.cuda.Event() if on_gpu else None
        self._has_news = self._is_copying = False  # since the last copy was begun; whether one is under way
        self._published = np.zeros(len(self._host), dtype=np.int64)
        positions = (f"accepted_at_pos_{i}" for i in range(num_speculative_tokens))
        self._file_slots = metrics.slots_of((*_TOTALS, *positions))  # of each total
        self._file = self._open(vllm_config)
        self._logged: set[str] = set()
        self._alarm = AcceptanceAlarm()
        self.is_paused = False  # whether nothing is counted: what runs is no client's request
        # Requests that have begun and not ended: what they will count as, "" while they are not drafted for.
        self._fates: dict[str, str] = {}
        self._last_drafted = frozenset[str]()  # the last who were

    @staticmethod
    def _open(vllm_config: Any) -> Counts | None:
        """Return the file, or what takes counts to it from another host; on the first rank alone: it has one writer."""
        if get_tensor_model_parallel_rank() != 0:
            return None
        if vllm_config.parallel_config.node_rank_within_dp:  # whose server made a file without readers
            return CarriedCounts()
        return open_for(vllm_config) or CarriedCounts()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing and log nothing within: vLLM's warm-up steps real requests."""
        self.flush()
        totals, self.is_paused = self._totals.clone(), True
        try:
            yield
        finally:
            self._totals.copy_(totals)
            self.is_paused = False

    def tally(self, idx_mapping: torch.Tensor) -> Tally:
        """Return what the scorer is to count of `[num_reqs]` int64 persistent rows of a verify step."""
        self._has_news = True
        return Tally(idx_mapping, self._requests.has_draft, self._totals, known=self._launches)

    # ---- by request ------------------------------------------------------------------------------------------------

    def begin_request(self, request: NewRequest) -> None:
        """Take note of a request, to count it once it has ended; one that was preempted is known already."""
        if not self.is_paused:
            self._fates.setdefault(request.req_id, "admitted" if request.is_admitted else "undrafted_paused")

    def drafted(self, req_ids: frozenset[str]) -> None:
        """Take note of the requests that a step has drafted for; the same object while they are the same."""
        if req_ids is not self._last_drafted:
            self._last_drafted = req_ids
            for req_id in req_ids:
                if self._fates.get(req_id) == "admitted":
                    self._fates[req_id] = "drafted_requests"

    def end_requests(self, req_ids: Iterable[str], was_paused: Callable[[str], bool]) -> None:
        """Count requests that have finished, or were aborted, once: as drafted for, as skipped (which they are already)
        or why they were neither, given whether one without drafts `was_paused`.
        """
        for req_id in req_ids:
            fate = self._fates.pop(req_id, "skipped")
            if fate == "admitted":
                fate = "undrafted_paused" if was_paused(req_id) else "undrafted_short"
            if fate != "skipped":
                self.add(fate)

    def carried(self) -> Changes | None:
        """Return what a step's output is to carry to the server; None where its file is here, or for nothing."""
        return self._file.take() if isinstance(self._file, CarriedCounts) else None

    # ---- totals ----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Publish what has been counted; on a GPU what a copy has brought by now, and begin the next copy."""
        if self._file is None or self.is_paused:
            return
        if self._copied is None:
            if self._has_news:
                self._has_news = False
                self._publish()
            return
        if self._is_copying and self._copied.query():
            self._is_copying = False
            self._publish()
        if self._has_news and not self._is_copying:
            self._host.copy_(self._totals, non_blocking=True)
            self._copied.record(current_stream())  # torch's own search for the stream costs 20 us
            self._has_news, self._is_copying = False, True

    def _publish(self) -> None:
        assert self._file is not None
        gained = self._host_np - self._published
        num_steps = int(gained[_DRAFTS])
        if not num_steps:  # nothing else is counted without
            return
        self._file.add_all(self._file_slots, gained)
        self._published += gained
        if self._alarm.observe(num_steps, int(gained[_ACCEPTED])):
            self._file.add("low_acceptance_windows")

    def add(self, name: str, value: int = 1) -> None:
        """Add to a host-side counter."""
        if self._file is not None and not self.is_paused:
            self._file.add(name, value)

    def set(self, name: str, value: int) -> None:
        """Set a gauge."""
        if self._file is not None and not self.is_paused:
            self._file.set(name, value)

    def skip(self, reason: str, req_id: str, detail: str) -> None:
        """Count a request that runs without speculation, and log the first of each reason."""
        self.add(f"skipped_{reason}")
        if req_id in self._fates:
            self._fates[req_id] = "skipped"
        if reason not in self._logged and not self.is_paused:
            self._logged.add(reason)
            logger.warning(
                "vidspec: request %s runs without speculation: %s (further ones are only counted)", req_id, detail
            )


class AcceptanceAlarm:
    """Says when drafts have stopped to stand, whatever the cause: judges an engine's verify steps window by window."""

    def __init__(self) -> None:
        self._steps = self._accepted = 0
        self._is_armed = True

    def observe(self, num_steps: int, num_accepted: int) -> bool:
        """Take in new verify steps with drafts; return whether they complete a window that accepted nearly none."""
        self._steps += num_steps
        self._accepted += num_accepted
        if self._steps < WINDOW:
            return False
        mean, self._steps, self._accepted = self._accepted / self._steps, 0, 0
        if mean < LOW and self._is_armed:
            logger.warning(
                "vidspec: draft acceptance is near zero (%.2f per verify step over the last %d or more): speculation "
                "costs more than it gains; see docs/troubleshooting.md, few drafts are accepted",
                mean,
                WINDOW,
            )
        self._is_armed = mean >= SOUND or (self._is_armed and mean >= LOW)
        return mean < LOW
