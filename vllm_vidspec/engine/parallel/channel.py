"""Channel: messages between two processes over a socket without a name, what is large in memory without a name.

vLLM's own msgpack encoder writes them, and nothing is unpickled. When both processes are gone, however they went, so
are memory and socket. Sending never waits: what is not written or not taken yet stays in the queue here.
"""

import collections
import contextlib
import dataclasses
import mmap
import os
import select
import socket
import struct
import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm.logger import init_logger
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_vidspec.names import WRITER_THREAD
from vllm_vidspec.streams import aligned

logger = init_logger("vllm.vidspec")

_INLINE_BYTES = 16 << 10  # a longer message travels as memory
_RECEIVE_BYTES = 64 << 10
_WRITTEN_AT_ONCE_BYTES = 256 << 10  # in a tenth of a millisecond; a longer message is the writer's
_COUNT = struct.Struct("<q")


@dataclasses.dataclass(eq=False)
class _Packet:
    """A message queued: its bytes, or the descriptor of the memory that holds it; neither while that is written."""

    data: bytes = b""
    memory: int | None = None

    @property
    def is_ready(self) -> bool:
        return bool(self.data) or self.memory is not None


class Channel:
    """One end: over a connected `SOCK_SEQPACKET` socket, which is closed with it. It receives messages of a union of
    kinds; its thread writes what is large on these cores, wherever this process runs if there are none.
    """

    def __init__(self, end: socket.socket, kinds: Any, cores: Collection[int] = ()):
        self._socket = end
        end.setblocking(False)
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(kinds)
        self._line: collections.deque[_Packet] = collections.deque()
        # A video's pixels are many megabytes: a thread of its own writes them, on the drafter's cores where these are
        # known, and sends them; socket and line are used by one at a time.
        self._lock = threading.RLock()
        self._cores = cores
        self._writer: ThreadPoolExecutor | None = None
        self.is_closed = False

    @classmethod
    def pair(cls, kinds: Any, cores: Collection[int] = ()) -> tuple["Channel", socket.socket]:
        """Return an end, and the socket of the other one."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(here, kinds, cores), there

    def send(self, message: Any) -> None:
        """Send a message as soon as the other end, if any, takes it; until then what it holds must not change."""
        if self.is_closed:
            return
        buffers = [memoryview(buffer).cast("B") for buffer in self._encoder.encode(message)]
        is_small = len(buffers) == 1 and buffers[0].nbytes <= _INLINE_BYTES
        packet = _Packet(bytes(buffers[0]) if is_small else b"")
        with self._lock:
            self._line.append(packet)
        if is_small:
            self.flush()
        elif sum(buffer.nbytes for buffer in buffers) <= _WRITTEN_AT_ONCE_BYTES:
            self._write(packet, buffers)
        else:
            if self._writer is None:
                self._writer = ThreadPoolExecutor(1, WRITER_THREAD, initializer=_move_to, initargs=(self._cores,))
            self._writer.submit(self._write, packet, buffers)

    def _write(self, packet: _Packet, buffers: list[memoryview]) -> None:
        try:
            memory = _into_memory(buffers)
        except OSError as error:  # no memory, no descriptor: without the message the other end knows nothing
            logger.error("vidspec: failed to send an IPC message: %s", error)
            self.close()
            return
        with self._lock:
            packet.memory = memory
            if self.is_closed:
                os.close(memory)
        self.flush()

    def flush(self) -> None:
        """Send what is in the queue, as far as it is written and the other end takes it."""
        with self._lock:
            while self._line and not self.is_closed and self._line[0].is_ready:
                packet = self._line[0]
                try:
                    if packet.memory is None:
                        self._socket.send(packet.data)
                    else:  # an empty packet would be the end of the line
                        socket.send_fds(self._socket, [b"m"], [packet.memory])
                except BlockingIOError:
                    return
                except OSError:
                    self.close()
                    return
                self._line.popleft()
                if packet.memory is not None:
                    os.close(packet.memory)

    def receive(self) -> list[Any]:
        """Return the messages that have come; `is_closed` afterwards if the other end is gone, or makes no sense."""
        messages = []
        while not self.is_closed:
            try:
                data, memories, _, _ = socket.recv_fds(self._socket, _RECEIVE_BYTES, 1)
            except BlockingIOError:
                break
            except OSError:
                data, memories = b"", []
            if not data:
                self.close()
                break
            try:
                messages.append(self._decoder.decode(_from_memory(memories[0]) if memories else data))
            except Exception as error:  # whatever it is, the other end does not speak as we do
                logger.error("vidspec: what came from the drafter's other end is no message: %s", error)
                self.close()
        return messages

    def wait(self, timeout_s: float) -> None:
        """Sleep until a message comes, or the other end goes, or for so long."""
        if not self.is_closed:
            with contextlib.suppress(ValueError):  # the writer has hung up just now
                select.select([self._socket], [], [], timeout_s)

    def close(self) -> None:
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            self._socket.close()
            for packet in self._line:
                if packet.memory is not None:
                    os.close(packet.memory)
            self._line.clear()
        if self._writer is not None:
            self._writer.shutdown(wait=False, cancel_futures=True)


def _move_to(cores: Collection[int]) -> None:
    """Let the calling thread run on these cores; without any, or without the right to, where it is."""
    if cores:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)


def _into_memory(buffers: list[memoryview]) -> int:
    """Write buffers into new memory, their number and sizes first; return its descriptor."""
    descriptor = os.memfd_create("vidspec-message", os.MFD_CLOEXEC)
    # Written, not mapped: a map's pages would be faulted in one by one, which takes longer than the copy.
    with open(descriptor, "wb", closefd=False) as file:
        file.write(struct.pack(f"<{1 + len(buffers)}q", len(buffers), *(buffer.nbytes for buffer in buffers)))
        for buffer in buffers:
            file.seek(aligned(file.tell()))
            file.write(buffer)
    return descriptor


def _from_memory(descriptor: int) -> list[memoryview]:
    """Return the buffers that a descriptor's memory holds, which live as long as what is made of them."""
    with os.fdopen(descriptor, "rb") as file:
        # Private: tensors on it may be written, and no other process sees that.
        memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    (count,) = _COUNT.unpack_from(memory, 0)
    sizes = struct.unpack_from(f"<{count}q", memory, _COUNT.size)
    buffers, end = [], aligned(_COUNT.size * (1 + count))
    for size in sizes:
        buffers.append(memory[end : end + size])
        end = aligned(end + size)
    return buffers
