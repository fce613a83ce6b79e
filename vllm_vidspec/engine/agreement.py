"""Agreement: the ranks of a tensor-parallel group decide alike about what failed on one of them, or end at once.

An exception is one rank's, the collectives that it would skip are all ranks': the others would wait in them for good.
So before a step that is not taken at every decode step enters a collective, the ranks agree over the CPU
group that they are ready; if one is not, all leave the step alike. What fails past that point, or while decoding, is
left by all ranks at the same place, or the process ends with one line that names the rank, and so vLLM the engine.
"""

import contextlib
import os
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed
from vllm.logger import init_logger

logger = init_logger("vllm.vidspec")

_PATIENCE_S = 120.0  # to wait for a rank: more than ranks drift apart, less than vLLM waits (300 s)
_FAILED_PATIENCE_S = 10.0  # how long to wait for the others to have failed at the same place

_READY, _DONE, _FAILED, _TORN = range(4)
_NUM_HEADERS = 5  # int64: steps so far, phase, one of the above, where it failed, number of flags
_MAX_FLAGS = 64  # of one message
_TAG = 0x51D  # of our messages among others of the group
_FREELY = contextlib.nullcontext()


class OthersFailed(Exception):
    """Another rank could not go on, so that this one must not either."""

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class Agreement:
    """One per process; a single rank agrees with itself and pays nothing."""

    def __init__(self, group: Any, patience_s: float = _PATIENCE_S, failed_patience_s: float = _FAILED_PATIENCE_S):
        self._group = group
        self._rank, self._size = group.rank_in_group, group.world_size
        self.is_first, self.is_alone = self._rank == 0, self._size == 1
        self._peers = [rank for rank in range(self._size) if rank != self._rank]
        self.patience_s, self.failed_patience_s = patience_s, failed_patience_s
        self._num_steps = 0  # so far, the same on all ranks
        self._running: list[int] = []  # numbers of the steps that are being run, the outermost first
        self._phase = ""  # of the innermost if it is run with care, else ""
        self._is_torn = False  # whether an exception now would leave the others in a collective

    def run(self, phase: str, step: Callable[..., None], *args: Any, is_careful: bool = True) -> Exception | None:
        """Run a step that all ranks take together; return why it failed, on all of them alike, or None.

        Before the collectives of a careful step, which it enters under `collective` only, ranks wait for each other; it
        may run others outside of these. Any other step costs nothing while all is well.
        """
        if self.is_alone:
            try:
                step(*args)
            except Exception as error:
                return error
            return None
        self._num_steps += 1
        number, outer = self._num_steps, (self._phase, self._is_torn)
        self._running.append(number)
        self._phase, self._is_torn = phase if is_careful else "", not is_careful
        try:
            step(*args)
            if is_careful:
                self._exchange(phase, _DONE)
            return None
        except OthersFailed as failure:
            self._num_steps = number  # what this rank has run inside, others may not have
            if failure.step != number:
                raise
            return failure
        except Exception as error:
            self._num_steps = number
            self._fail(phase, error)
            return error
        finally:
            self._running.pop()
            self._phase, self._is_torn = outer

    def collective(self) -> contextlib.AbstractContextManager[None]:
        """Return what collectives are entered under: all ranks of a careful step are ready then, or OthersFailed."""
        return self._together() if self._phase else _FREELY

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        self._exchange(self._phase, _READY)
        self._is_torn = True
        yield
        self._is_torn = False

    def all_ranks_and(self, phase: str, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether all ranks have set it, in a few 100 us; OthersFailed as in `collective`."""
        if self.is_alone:
            return list(flags)
        settled: list[bool] = []
        for low in range(0, len(flags), _MAX_FLAGS):
            settled += self._exchange(phase, _READY, flags=flags[low : low + _MAX_FLAGS])
        return settled

    def abort(self, reason: str) -> NoReturn:
        """End this process, so that no rank waits for it: an exception vLLM would log, and the others would wait on."""
        logger.critical("vidspec: rank %d of %d ends the engine: %s", self._rank, self._size, reason)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def _fail(self, phase: str, error: Exception) -> None:
        """Tell the others that this rank has failed; return if all of them leave this step, and no more, too."""
        logger.error("vidspec: rank %d of %d failed in %s: %s", self._rank, self._size, phase, error)
        if self._is_torn:
            self._exchange(phase, _TORN, _place(error, self._rank))
        else:
            self._exchange(phase, _FAILED)

    def _exchange(self, phase: str, verdict: int, place: int = 0, flags: Sequence[bool] = ()) -> list[bool]:
        """Tell every rank where this one is and observe where they are; return the flags that all have set."""
        mine = torch.zeros(_NUM_HEADERS + _MAX_FLAGS, dtype=torch.int64)
        header = [self._num_steps, zlib.crc32(phase.encode()), verdict, place, len(flags)]
        mine[: len(header) + len(flags)] = torch.tensor([*header, *flags], dtype=torch.int64)
        theirs = self._swap(mine, phase, self.failed_patience_s if verdict == _TORN else self.patience_s)
        left = self._num_steps + 1  # the outermost step that another rank has left
        for peer, message in theirs.items():
            num_steps, _, its_verdict, *_ = found = message[:_NUM_HEADERS].tolist()
            if _TORN in (verdict, its_verdict):
                if found != header:
                    rank, other = (self._rank, peer) if verdict == _TORN else (peer, self._rank)
                    self.abort(f"rank {rank} failed in the middle of a step ({phase}) and rank {other} did not")
            elif its_verdict == _FAILED and num_steps in self._running:
                left = min(left, num_steps)
            elif found != header and verdict != _FAILED:
                self.abort(f"it is in {phase}, and rank {peer} is elsewhere")
        if left < (self._running[-1] if verdict == _FAILED else self._num_steps + 1):
            raise OthersFailed(f"another rank failed in {phase}", left)
        if not flags:
            return []
        chosen = slice(_NUM_HEADERS, _NUM_HEADERS + len(flags))
        return torch.stack([mine, *theirs.values()])[:, chosen].bool().all(dim=0).tolist()

    def _swap(self, mine: torch.Tensor, phase: str, patience_s: float) -> dict[int, torch.Tensor]:
        """Send a message to every rank and return theirs, or end with the names of those that never came."""
        ranks, group = self._group.ranks, self._group.cpu_group
        theirs = {peer: torch.empty_like(mine) for peer in self._peers}
        # Rank by rank, not as one collective: only so it is known who is missing.
        works = [
            (peer, work)
            for peer, message in theirs.items()
            for work in (
                torch.distributed.irecv(message, ranks[peer], group=group, tag=_TAG),
                torch.distributed.isend(mine, ranks[peer], group=group, tag=_TAG),
            )
        ]
        deadline = time.monotonic() + patience_s
        missing: dict[int, str] = {}
        for peer, work in works:
            try:
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except RuntimeError as error:
                missing.setdefault(peer, str(error).splitlines()[0])
        if missing:
            names = " and ".join(f"rank {peer}" for peer in missing)
            self.abort(f"in {phase} {names} did not answer within {patience_s:g} s ({next(iter(missing.values()))})")
        return theirs


def _place(error: Exception, rank: int) -> int:
    """Return a number for where and how a step failed: equal on two ranks that stopped after the same collectives."""
    if isinstance(error, torch.OutOfMemoryError):
        return -1 - rank  # what runs out of memory need not do so at the same layer
    frames = traceback.walk_tb(error.__traceback__)
    lines = [type(error).__name__, *(f"{frame.f_code.co_filename}:{line}" for frame, line in frames)]
    return zlib.crc32("\n".join(lines).encode())
