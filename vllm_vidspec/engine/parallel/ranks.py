"""Ranks: the drafter's tensor-parallel ranks carry out one list of commands, which the first one writes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from vllm.distributed import get_tp_group
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_vidspec.engine.parallel import messages
from vllm_vidspec.engine.parallel.rank import DrafterRank


class Ranks:
    """Hands commands to the other ranks; a single one has nobody to hand them to."""

    def __init__(self, rank: DrafterRank):
        self._group = get_tp_group()
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(messages.ToRanks)
        self._methods: dict[Any, Callable[[Any], Any]] = {
            messages.Add: rank.add,
            messages.Prefill: rank.prefill,
            messages.Remove: rank.remove,
            messages.ForgetMedia: rank.forget_media,
            messages.Retune: rank.retune,
            messages.Look: rank.look,
            messages.Read: rank.read,
            messages.Requeue: rank.requeue,
            messages.Draw: rank.draw,
            messages.Stop: lambda _: None,
        }

    def do(self, command: Any) -> Any:
        """Carry a command out on every rank; return what it returns here."""
        if self._group.world_size > 1:
            self._send(command)
        return self._methods[type(command)](command)

    def follow(self) -> None:
        while not isinstance(command := self._receive(), messages.Stop):
            self._methods[type(command)](command)

    def _send(self, command: Any) -> None:
        buffers = [memoryview(buffer).cast("B") for buffer in self._encoder.encode(command)]
        self._broadcast(torch.tensor([len(buffers)]))
        self._broadcast(torch.tensor([buffer.nbytes for buffer in buffers]))
        self._broadcast(torch.frombuffer(bytearray().join(buffers), dtype=torch.uint8))

    def _receive(self) -> Any:
        (count,) = self._broadcast(torch.zeros(1, dtype=torch.int64)).tolist()
        sizes = self._broadcast(torch.zeros(count, dtype=torch.int64)).tolist()
        data = memoryview(self._broadcast(torch.empty(sum(sizes), dtype=torch.uint8)).numpy())
        starts = [sum(sizes[:i]) for i in range(count)]
        return self._decoder.decode([data[start : start + size] for start, size in zip(starts, sizes, strict=True)])

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        torch.distributed.broadcast(tensor, self._group.ranks[0], group=self._group.cpu_group)
        return tensor
