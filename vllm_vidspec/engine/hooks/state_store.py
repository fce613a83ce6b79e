"""StateStore: a paged pool of unit hidden states, by image or video. It knows items, users and room, not requests.

An item stays, the least recently used first to go, while no other needs the room. With tensor parallelism rank r keeps
the tokens i with i % size = r of each item; a share has the same room on all ranks, so that all decide alike.
"""

from collections import OrderedDict
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vidspec_kernels import store_states, visual_relevance
from vllm_vidspec.errors import VidSpecError

BLOCK_ROWS = 64
_MAX_ITEMS = 256  # of one prompt, beyond which its table may be too short


@dataclass(eq=False)
class Item:
    """The states of one image or video."""

    key: bytes  # digest of what they depend on
    blocks: list[int]  # of this rank
    observed: np.ndarray  # [m] bool, which tokens have their states
    users: int = 1  # requests that hold it


class StateStore:
    """Holds items, and by persistent row which of them a request is measured against."""

    def __init__(
        self,
        hidden_size: int,
        dtype: torch.dtype,
        max_model_len: int,
        max_num_reqs: int,
        device: torch.device,
        group: Any,
    ):
        self.device = device
        self.bytes_per_block = BLOCK_ROWS * hidden_size * dtype.itemsize
        self._shape, self._dtype = (BLOCK_ROWS, hidden_size), dtype
        self._group, self._max_num_reqs = group, max_num_reqs
        self._blocks_per_request = self._num_blocks(max_model_len) + _MAX_ITEMS
        self._size = 0  # blocks of the pool
        self._items: OrderedDict[bytes, Item] = OrderedDict()  # complete ones, the least recently used first

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // (self._group.world_size * BLOCK_ROWS))

    def reserve(self, wanted_bytes: int, available_bytes: int) -> int:
        """Return how many of a rank's KV memory bytes the pool takes; a VidSpecError if it holds or leaves nothing."""
        self._size = min(wanted_bytes // self.bytes_per_block, self._max_num_reqs * self._blocks_per_request)
        taken = self._size * self.bytes_per_block
        if not taken:
            one = f"{self.bytes_per_block} are one block"
            raise VidSpecError(f"state_bytes: {wanted_bytes} bytes of hidden states hold nothing; {one}")
        if taken >= available_bytes:
            raise VidSpecError(f"state_bytes: {taken} leaves nothing of the {available_bytes} bytes of KV memory")
        return taken

    def allocate(self, allocation: AbstractContextManager) -> None:
        """Take the pool's memory inside `allocation`; what was reserved is taken."""
        size, device = self._size, self.device
        width = max(1, min(self._blocks_per_request, size))
        with allocation:
            self.pool = torch.zeros(size, *self._shape, dtype=self._dtype, device=device)
        self.block_fill = torch.zeros(size, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(self._max_num_reqs, width, dtype=torch.int32, device=device)
        self.num_blocks = torch.zeros(self._max_num_reqs, dtype=torch.int32, device=device)
        self.num_blocks_np = np.zeros(self._max_num_reqs, dtype=np.int32)  # the same on the host
        self._is_stale = False  # whether the device has yet to get the new tables
        self._free = list(range(size - 1, -1, -1))

    def __contains__(self, item: Item) -> bool:
        """Whether all requests may read states of what the item is of, its own or another item's."""
        return item.key in self._items

    def find(self, key: bytes) -> Item | None:
        """Return a complete item for one more user."""
        item = self._items.get(key)
        if item is not None:
            item.users += 1
            self._items.move_to_end(key)
        return item

    def make(self, key: bytes, num_tokens: int, may_drop: bool) -> Item | None:
        """Return a new item, without states, for one user; None without room, even where unused items may go."""
        count = self._num_blocks(num_tokens)
        idle = [item for item in self._items.values() if item.users == 0] if may_drop else []
        if count > len(self._free) + sum(len(item.blocks) for item in idle):
            return None
        for item in idle:
            if count <= len(self._free):
                break
            del self._items[item.key]
            self._free.extend(item.blocks)
        return Item(key, [self._free.pop() for _ in range(count)], np.zeros(num_tokens, dtype=bool))

    def publish(self, item: Item) -> Item:
        """Let an item that has all its states be found; return the one that another user has published before."""
        known = self._items.get(item.key)
        if known is None and item.observed.all():
            self._items[item.key] = item
        elif known is not None and known is not item:
            known.users += 1
            self.drop(item)
            return known
        return item

    def drop(self, item: Item) -> None:
        """Take one user off an item; its states stay while they are complete and no other needs the room."""
        item.users -= 1
        if item.users == 0 and self._items.get(item.key) is not item:
            self._free.extend(item.blocks)

    @property
    def held_bytes(self) -> int:
        """Memory that no new item could have: what users hold, and what is neither free nor any item's."""
        idle = sum(len(item.blocks) for item in self._items.values() if item.users == 0)
        return (self._size - len(self._free) - idle) * self.bytes_per_block

    def clear(self) -> None:
        for item in self._items.values():
            self._free.extend(item.blocks)
        self._items.clear()

    def places(self, item: Item, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which of an item's tokens `[n]` this rank keeps, and their rows of the pool, `[<= n]` int64 each."""
        rank, size = self._group.rank_in_group, self._group.world_size
        mine = tokens[tokens % size == rank]
        entry = mine // size
        return mine, np.asarray(item.blocks)[entry // BLOCK_ROWS] * BLOCK_ROWS + entry % BLOCK_ROWS

    def write(self, hidden_states: torch.Tensor, sources: np.ndarray, slots: np.ndarray) -> None:
        """Keep rows `sources` of `[num_tokens, hidden_size]` states in rows `slots` of the pool, `[n]` int64 each."""
        source, slot = async_tensor_h2d(np.stack((sources, slots)), device=self.device)
        store_states(hidden_states, source, slot, self.pool)

    def fits(self, items: list[Item]) -> bool:
        return sum(len(item.blocks) for item in items) <= self.block_table.shape[1]

    def show(self, req_state_idx: int, items: list[Item]) -> None:
        rank, size = self._group.rank_in_group, self._group.world_size
        blocks = [block for item in items for block in item.blocks]
        fills = []
        for item in items:
            num_rows = len(range(rank, len(item.observed), size))
            fills += [min(BLOCK_ROWS, max(0, num_rows - i * BLOCK_ROWS)) for i in range(len(item.blocks))]
        table = async_tensor_h2d(np.asarray([blocks, fills], dtype=np.int32), device=self.device)
        self.block_table[req_state_idx, : len(blocks)] = table[0]
        self.block_fill[table[0].long()] = table[1]
        self.num_blocks_np[req_state_idx], self._is_stale = len(blocks), True

    def hide(self, req_state_idx: int) -> None:
        if self.num_blocks_np[req_state_idx]:
            self.num_blocks_np[req_state_idx], self._is_stale = 0, True

    def cosines(self, states: torch.Tensor, batch: Any, top_n: int, max_queries: int) -> torch.Tensor:
        """Return `[num_logits, top_n]` float32, the largest cosines of states with this rank's part of their videos."""
        if self._is_stale:
            async_tensor_h2d(self.num_blocks_np, out=self.num_blocks)
            self._is_stale = False
        most = int(self.num_blocks_np[batch.idx_mapping_np].max(initial=0))
        tables = (self.pool, self.block_fill, self.block_table, self.num_blocks)
        return visual_relevance(states, batch.cu_num_logits, batch.idx_mapping, *tables, top_n, max_queries, most)
