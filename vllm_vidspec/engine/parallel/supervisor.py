"""DrafterSupervisor: on the target's first rank, starts the drafter's process, watches it, and starts it again.

After a restart `remote_backend` sends all running requests again, as far as their texts have come.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from vllm.logger import init_logger

from vllm_vidspec import metrics
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.parallel import launch
from vllm_vidspec.engine.parallel.channel import Channel
from vllm_vidspec.engine.parallel.messages import Failed, Ready, Refused, Stop, ToTarget
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.streams import Sizes, Tables

logger = init_logger("vllm.vidspec")

START_S = 600.0  # how long it may take to load
STALL_S = 30.0  # without a sign of life while it has requests: it hangs
_BACKOFF_S = (1.0, 2.0, 5.0, 15.0, 60.0)  # before the next start, by the number of starts that failed in a row
_STABLE_S = 120.0  # up for so long: what failed before is forgotten
_GRACE_S = 5.0  # to end by itself


class DrafterSupervisor:
    """Starts the drafter and talks to it. Nothing here waits but `wait_ready` and `close`."""

    def __init__(self, packed: bytes, config: VidSpecConfig, sizes: Sizes, vocab_size: int):
        self._config, self._sizes, self._vocab_size = config, sizes, vocab_size
        self._packed = launch.write_memory(packed, "vidspec-config")
        self._memory = os.memfd_create("vidspec-tables", os.MFD_CLOEXEC)
        os.ftruncate(self._memory, Tables.num_bytes(sizes))
        self.tables = launch.map_tables(self._memory, sizes)  # shared with whichever process is the drafter now
        self._processes: list[subprocess.Popen] = []
        self._channel: Channel | None = None
        self.is_up = False  # whether it has loaded, and not gone since
        self.num_restarts, self.num_connects = -1, 0  # starts after the first, and how often it has come up
        self._num_failures = 0
        self._next_start = 0.0
        self._since = time.monotonic()  # in the present state
        self._beat = (0, self._since)  # and since when
        self._reason = ""

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def start(self) -> None:
        self.tables.forget_streams()
        self.tables.draft_us[:] = 0
        devices = launch.devices_of(self._config, os.environ.get("CUDA_VISIBLE_DEVICES"))
        environment = launch.environment_for(self._config, devices)
        self._channel, other = Channel.pair(ToTarget, launch.cores_of(self._config, os.getpid()))
        # By memory, not by a port, which could be taken before they have begun.
        with other, open(launch.write_memory(b"", "vidspec-rendezvous")) as rendezvous:
            for rank in range(self._config.parallel.tensor_parallel_size):
                channel = other.fileno() if rank == 0 else None
                descriptors = self._memory, self._packed, channel, rendezvous.fileno()
                plan = launch.Plan(rank, os.getpid(), vars(self._sizes), *descriptors, self._vocab_size)
                self._processes.append(launch.start(plan, environment))
        self.num_restarts += 1
        self._since = time.monotonic()

    def wait_ready(self) -> None:
        """Wait until it has loaded; a VidSpecError of one line if it has not."""
        deadline = time.monotonic() + START_S
        while not self.is_up:
            assert self._channel is not None
            self._channel.wait(0.2)
            for _ in self._receive():
                pass
            if not self._processes or time.monotonic() > deadline:
                reason = self._reason or f"it was not ready after {START_S:g} s"
                self.close()
                raise VidSpecError(f"parallel: the drafter's process did not start: {reason}")

    def poll(self) -> list[Refused]:
        """Return what it has refused; notice that it has come up or gone, and start it again when it is time."""
        refused = list(self._receive())
        now = time.monotonic()
        if self.is_up:
            if self._num_failures and now - self._since > _STABLE_S:
                self._num_failures = 0
            beat = int(self.tables.beat[0])
            if beat != self._beat[0] or not (self.tables.epoch > 0).any():  # without requests it need not
                self._beat = (beat, now)
            elif now - self._beat[1] > STALL_S:
                self._lose(f"it gave no sign of life for {STALL_S:g} s")
        elif not self._processes:
            if now >= self._next_start:
                self.start()
        elif now - self._since > START_S:
            self._lose(f"it was not ready after {START_S:g} s")
        return refused

    def send(self, message: Any) -> None:
        """Send a message, without waiting; nothing is sent to one that is not up."""
        if self.is_up and self._channel is not None:
            self._channel.send(message)

    def _receive(self) -> Iterator[Refused]:
        if self._channel is None:
            return
        self._channel.flush()
        for message in self._channel.receive():
            match message:
                case Ready():
                    self.is_up, self._since = True, time.monotonic()
                    self.num_connects += 1
                    self._beat = (int(self.tables.beat[0]), self._since)
                case Failed(reason=reason):
                    self._reason = reason
                    if self.is_up and self._config.on_draft_error == "raise":
                        raise VidSpecError(f"parallel: the drafter failed: {reason}")
                case Refused():
                    yield message
        gone = next((process for process in self._processes if process.poll() is not None), None)
        if self._channel.is_closed or gone is not None:
            self._lose(self._reason or _why(gone))

    def _lose(self, reason: str) -> None:
        self._reason = reason
        delay = _BACKOFF_S[min(self._num_failures, len(_BACKOFF_S) - 1)]
        self._num_failures += 1
        logger.warning(
            "vidspec: the drafter's process is gone (%s): requests go on without speculation; it is started again in "
            "%g s",
            reason,
            delay,
        )
        self._end(grace_s=0.0)
        # What it held is gone with it. Who reads the gauges must not take it for held until another one has come up.
        for name in ("draft_pool_blocks_used", "draft_encoder_bytes_used"):
            self.tables.counters[metrics.NAMES.index(name)] = 0
        self._next_start = time.monotonic() + delay

    def close(self) -> None:
        self.send(Stop())
        self._end(_GRACE_S if self.is_up else 0.0)
        for descriptor in (self._packed, self._memory):
            if descriptor >= 0:
                os.close(descriptor)
        self._packed = self._memory = -1

    def _end(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)  # one that is stopped takes no other
                process.wait()
        self._processes = []
        self.is_up = False
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _why(process: subprocess.Popen | None) -> str:
    if process is None or process.poll() is None:
        return "it hung up"
    code = process.returncode
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
