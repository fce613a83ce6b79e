"""VisionCache: the draft's vision embeddings that were used lately, in one bounded piece of memory.

A chat sends its video again with every turn, and `n` answers to a prompt share it: the draft's tower encodes it once.
A video that takes it several steps is put together here, too, and can be read once it is whole.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

PAGE_ROWS = 64  # a row is one token's embedding


@dataclass
class _Item:
    pages: np.ndarray
    num_rows: int
    num_here: int = 0  # from the first row on


class VisionCache:
    """Keeps whole items, the least recently used of which a new one displaces.

    Rows are copied out as they are asked for, so that any item can be displaced. What is kept follows from the order of
    calls alone: it is the same on all tensor-parallel ranks. Less than a page of bytes keeps nothing.
    """

    def __init__(self, num_bytes: int, hidden_size: int, dtype: torch.dtype, device: torch.device):
        self._bytes_per_page = PAGE_ROWS * hidden_size * dtype.itemsize
        num_pages = num_bytes // self._bytes_per_page
        # [num_pages * PAGE_ROWS, hidden_size]
        self._store = torch.empty(num_pages * PAGE_ROWS, hidden_size, dtype=dtype, device=device)
        self._free = list(range(num_pages - 1, -1, -1))
        self._items: OrderedDict[str, _Item] = OrderedDict()  # by name, the least recently used first

    @property
    def num_bytes(self) -> int:
        return self._store.shape[0] // PAGE_ROWS * self._bytes_per_page

    @property
    def num_used_bytes(self) -> int:
        return self.num_bytes - len(self._free) * self._bytes_per_page

    def read(self, name: str, num_rows: int, chosen: np.ndarray | None = None) -> torch.Tensor | None:
        """Return a copy of an item's rows, or of the `chosen` `[k]`; None where it is not kept, or of another size."""
        if num_rows != self.num_here(name, num_rows):
            return None
        self._items.move_to_end(name)
        rows = np.arange(num_rows) if chosen is None else chosen
        return self._store[self._places(self._items[name].pages, rows)]

    def num_here(self, name: str, num_rows: int) -> int:
        """Return how many of an item's rows are here, from the first on; 0 where it is not kept."""
        item = self._items.get(name)
        return item.num_here if item is not None and item.num_rows == num_rows else 0

    def unfinished(self) -> set[str]:
        return {name for name, item in self._items.items() if item.num_here < item.num_rows}

    def can_keep(self, num_rows: int) -> bool:
        return 0 < -(-num_rows // PAGE_ROWS) * PAGE_ROWS <= self._store.shape[0]

    def extend(self, name: str, num_rows: int, start: int, embeddings: torch.Tensor) -> bool:
        """Copy an item's next rows `[k, hidden_size]` in, from `start` on, 0: anew; return whether they are kept."""
        if start == 0:
            self.drop(name)
            if not self.can_keep(num_rows):
                return False
            num_pages = -(-num_rows // PAGE_ROWS)
            while len(self._free) < num_pages:
                self.drop(next(iter(self._items)))
            self._items[name] = _Item(np.array([self._free.pop() for _ in range(num_pages)]), num_rows)
        elif self.num_here(name, num_rows) != start:
            return False
        item = self._items[name]
        end = start + len(embeddings)
        places = self._places(item.pages, np.arange(start, end))
        self._store.index_copy_(0, places, embeddings.to(self._store.dtype))
        item.num_here = end
        self._items.move_to_end(name)
        return True

    def clear(self) -> None:
        for name in list(self._items):
            self.drop(name)

    def drop(self, name: str) -> None:
        item = self._items.pop(name, None)
        if item is not None:
            self._free.extend(int(page) for page in reversed(item.pages))

    def _places(self, pages: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        places = pages[rows // PAGE_ROWS] * PAGE_ROWS + rows % PAGE_ROWS
        return async_tensor_h2d(places, device=self._store.device)
