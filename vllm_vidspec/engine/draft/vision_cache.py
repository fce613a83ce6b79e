"""VisionCache: the draft's vision embeddings of what was shown lately, in one bounded piece of memory.

A chat shows its video again with every turn, and `n` answers to a prompt show it n times: the draft's tower looks once.
"""

from collections import OrderedDict

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

PAGE_ROWS = 64  # a row is one token's embedding


class VisionCache:
    """Keeps whole items, the least recently used of which makes way for a new one.

    Rows are copied out as soon as they are asked for, so no item is in use for longer than a call, and any can make
    way. What is kept follows from the order of calls alone: it is the same on all ranks of a tensor-parallel group.

    Args:
        num_bytes: Size; what is less than a page keeps nothing.
        hidden_size: Of an embedding.
        dtype: Of an embedding.
        device: Where they live.
    """

    def __init__(self, num_bytes: int, hidden_size: int, dtype: torch.dtype, device: torch.device):
        self._bytes_per_page = PAGE_ROWS * hidden_size * dtype.itemsize
        num_pages = num_bytes // self._bytes_per_page
        # [num_pages * PAGE_ROWS, hidden_size]
        self._store = torch.empty(num_pages * PAGE_ROWS, hidden_size, dtype=dtype, device=device)
        self._free = list(range(num_pages - 1, -1, -1))
        # By name: the pages of an item and how many rows it has; the least recently used first.
        self._items: OrderedDict[str, tuple[np.ndarray, int]] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return self._store.shape[0] // PAGE_ROWS * self._bytes_per_page

    @property
    def num_used_bytes(self) -> int:
        """Bytes of the pages that hold an item."""
        return self.num_bytes - len(self._free) * self._bytes_per_page

    def read(self, name: str, num_rows: int, chosen: np.ndarray | None = None) -> torch.Tensor | None:
        """Return a copy of an item's rows.

        Args:
            name: The item's.
            num_rows: How many it should have; one of another size is not the same item.
            chosen: `[k]` which rows; None for all.

        Returns:
            `[k, hidden_size]`, or None where the item is not kept.
        """
        pages, known_rows = self._items.get(name, (None, 0))
        if pages is None or known_rows != num_rows:
            return None
        self._items.move_to_end(name)
        return self._store[self._places(pages, np.arange(num_rows) if chosen is None else chosen)]

    def can_keep(self, num_rows: int) -> bool:
        """Return whether an item of so many rows fits at all."""
        return 0 < -(-num_rows // PAGE_ROWS) * PAGE_ROWS <= self._store.shape[0]

    def keep(self, name: str, embeddings: torch.Tensor) -> bool:
        """Copy an item `[m, hidden_size]` in; return False for one that the whole cache cannot hold."""
        num_rows = len(embeddings)
        num_pages = -(-num_rows // PAGE_ROWS)
        self._drop(name)
        if not self.can_keep(num_rows):
            return False
        while len(self._free) < num_pages:
            self._drop(next(iter(self._items)))
        pages = np.array([self._free.pop() for _ in range(num_pages)])
        self._store.index_copy_(0, self._places(pages, np.arange(num_rows)), embeddings.to(self._store.dtype))
        self._items[name] = (pages, num_rows)
        return True

    def clear(self) -> None:
        """Forget everything: the weights or the memory have changed."""
        for name in list(self._items):
            self._drop(name)

    def _drop(self, name: str) -> None:
        pages, _ = self._items.pop(name, ((), 0))
        self._free.extend(int(page) for page in reversed(pages))

    def _places(self, pages: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        """Return where an item's rows are in the store, `[k]` int64 on the device."""
        places = pages[rows // PAGE_ROWS] * PAGE_ROWS + rows % PAGE_ROWS
        return async_tensor_h2d(places, device=self._store.device)
