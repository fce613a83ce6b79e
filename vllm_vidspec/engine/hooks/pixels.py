"""SharedPixels: what the target's encoder has copied to the device stays there until the draft's tower has seen it.

vLLM copies an item when it encodes it and lets go of the copy; here the copy is made a moment earlier, and vLLM's
encoder finds it on the device. What is kept has a bound, which is taken out of the KV memory; where a call of the
encoder would exceed it, vLLM copies as ever, and the draft copies again, which is counted.
"""

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_vidspec.engine.compat import model as compat
from vllm_vidspec.engine.report.counters import Counters

logger = init_logger("vllm.vidspec")


class SharedPixels:
    """Keeps an item for as long as a request that has it is to be drafted for, and the tower has not seen it."""

    def __init__(self, model_state: Any, device: torch.device, counters: Counters):
        self.num_bytes = 0  # the most that is kept; none before memory is reserved
        self._device, self._counters = device, counters
        self._wanted: dict[int, set[str]] = {}  # by row: identifiers of what its prompt has
        self._items: dict[str, Any] = {}  # by identifier: vLLM's processor outputs, their tensors on the device
        compat.take_over_pixels(model_state, self._share)

    @property
    def num_used_bytes(self) -> int:
        return sum(map(_num_bytes, self._items.values()))

    def add(self, req_state_idx: int, features: Iterable[Any]) -> None:
        """Expect that the draft's tower will see these features of vLLM's for a row."""
        self._wanted[req_state_idx] = {feature.identifier for feature in features}

    def remove(self, req_state_idx: int) -> None:
        """Let go of what only this row's request has waited for; its draft has seen it, or never will."""
        for identifier in self._wanted.pop(req_state_idx, ()):
            if not any(identifier in others for others in self._wanted.values()):
                self.drop(identifier)

    def drop(self, identifier: str) -> None:
        """Let go of what the draft's tower has seen; harmless where it is not kept."""
        self._items.pop(identifier, None)

    def active_rows(self) -> Iterable[int]:
        return [row for row, wanted in self._wanted.items() if not wanted.isdisjoint(self._items)]

    def on_device(self, feature: Any, is_first: bool) -> Any:
        """Return a feature for the draft's tower, with pixels on the device if they are kept; copies are counted."""
        item = self._items.get(feature.identifier)
        if item is not None:
            feature = copy.copy(feature)
            feature.data = item
        elif is_first and self._device.type != "cpu":
            self._counters.add("draft_pixel_copies")
        return feature

    def _share(self, identifiers: list[str], items: list[Any]) -> list[Any]:
        """Return the processor outputs that the target's encoder is to take: all on the device, or as they came."""
        try:
            new = {name: item for name, item in zip(identifiers, items, strict=True) if name not in self._items}
            if self.num_used_bytes + sum(map(_num_bytes, new.values())) > self.num_bytes:
                return items
            there = {name: self._on_device(item) for name, item in new.items()}
            wanted = set().union(*self._wanted.values())
            given = [self._items[name] if name in self._items else there[name] for name in identifiers]
            self._items |= {name: item for name, item in there.items() if name in wanted}
            return given
        except Exception as error:  # the target copies as ever, and so will the draft
            logger.warning("vidspec: pixels are copied twice (%s)", error)
            return items

    def _on_device(self, item: Any) -> Any:
        return type(item)(
            {
                name: replace(element, data=async_tensor_h2d(element.data, self._device))
                if _is_pixels(element) and element.data.is_cpu
                else element
                for name, element in item.items()
            }
        )


def _is_pixels(element: Any) -> bool:
    """Return whether vLLM copies an element to the device, and it is one that we can keep."""
    return isinstance(element.data, torch.Tensor) and not element.field.keep_on_cpu


def _num_bytes(item: Any) -> int:
    return sum(element.data.nbytes for element in item.values() if _is_pixels(element))
