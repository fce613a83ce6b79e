"""The target's final hidden states of each request's video tokens, kept from prefill for the loose scorer (LVSpec).

They live in a paged pool of unit rows, bounded and reserved out of the KV memory. An image or video is an item with
blocks of its own, known by everything that its states depend on: the tokens and media up to its end. So requests that
share a prefix share an item, and one whose prefill the target took from its prefix cache finds the states there; if
they are gone, or do not fit, the request is verified strictly, which is counted by reason.

With tensor parallelism rank r keeps the tokens i with i % size = r of each item; all ranks take the same decisions.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d

from vidspec_kernels import merge_relevance, store_states, visual_relevance
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.listen.guard import Guard
from vllm_vidspec.engine.listen.prompts import prefills
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.pruning.prompt import visual_indices

BLOCK_ROWS = 64
_MAX_ITEMS = 256  # of one prompt, beyond which its table may be too short


@dataclass(eq=False)
class _Item:
    """The states of one image or video.

    Attributes:
        key: Digest of what they depend on.
        blocks: Of this rank.
        users: Requests that hold it; one without is kept while nobody needs the room.
        heard: `[m]` bool, which tokens have their states.
    """

    key: bytes
    blocks: list[int]
    heard: np.ndarray
    users: int = 1


@dataclass
class _Holder:
    """A request with visual tokens, while it runs.

    Attributes:
        row: Persistent row.
        items: In prompt order.
        places: Per item `[m]` int64 prompt indices.
        num_tokens: Length of the prompt, and after a preemption of the output so far.
        is_needed: Whether its own verification needs them; else they are for those that will share its prefix.
        num_reused: Items whose states another request's prefill has left.
        missed: Why it is verified strictly, or None.
        is_done: Whether its prefill is.
    """

    row: int
    items: list[_Item]
    places: list[np.ndarray]
    num_tokens: int
    is_needed: bool
    num_reused: int = 0
    missed: str | None = None
    is_done: bool = False


class VisualStates:
    """Keeps the states and measures relevance against them; see the module.

    Args:
        config: Its relevance knobs.
        vllm_config: vLLM's.
        max_num_reqs: Persistent rows.
        counters: Told what was kept and what was not.
        on_ready: Called with a row whose prefill is done, if its relevance can be measured on every rank.
        agreement: Of the ranks.
    """

    def __init__(
        self,
        config: VidSpecConfig,
        vllm_config: Any,
        max_num_reqs: int,
        counters: Counters,
        on_ready: Callable[[int], None],
        agreement: Agreement,
    ):
        self.config = config
        self.counters = counters
        self.device = vllm_config.device_config.device
        self._on_ready = on_ready
        self._agreement = agreement
        self._group = get_tp_group()
        model = vllm_config.model_config
        self._hidden_size = model.get_hidden_size()
        self._dtype = torch.float8_e4m3fn if config.score.relevance_dtype == "fp8" else model.dtype
        self._max_num_reqs = max_num_reqs
        self._blocks_per_request = -(-self._share(model.max_model_len) // BLOCK_ROWS) + _MAX_ITEMS
        self._bytes_per_block = BLOCK_ROWS * self._hidden_size * self._dtype.itemsize
        self._num_blocks = 0
        self._holders: dict[str, _Holder] = {}
        self._items: OrderedDict[bytes, _Item] = OrderedDict()  # complete ones, the least recently used first
        self._step: Any = None
        self._guard = Guard(config, "hidden states were not kept; these requests are verified strictly", agreement)

    def _share(self, num_tokens: int) -> int:
        """Return how many of an item's tokens a rank has room for: the same on all, so that all decide alike."""
        return -(-num_tokens // self._group.world_size)

    def reserve(self, available_bytes: int) -> int:
        """Return how many of a rank's KV memory bytes the pool takes.

        Raises:
            VidSpecError: It would hold nothing, or leave nothing.
        """
        wanted = self.config.score.relevance_bytes or available_bytes // 20
        most = self._max_num_reqs * self._blocks_per_request
        self._num_blocks = min(wanted // self._bytes_per_block, most)
        taken = self._num_blocks * self._bytes_per_block
        if not taken:
            raise VidSpecError(f"relevance_bytes: {wanted} bytes hold nothing; {self._bytes_per_block} are one block")
        if taken >= available_bytes:
            raise VidSpecError(f"relevance_bytes: {taken} leaves nothing of the {available_bytes} bytes of KV memory")
        return taken

    def init_pool(self, allocation: AbstractContextManager) -> None:
        """Allocate the pool inside `allocation`; what was reserved is taken."""
        num_blocks, device = self._num_blocks, self.device
        width = max(1, min(self._blocks_per_request, num_blocks))
        with allocation:
            self.store = torch.zeros(num_blocks, BLOCK_ROWS, self._hidden_size, dtype=self._dtype, device=device)
        self.block_fill = torch.zeros(num_blocks, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(self._max_num_reqs, width, dtype=torch.int32, device=device)
        self.num_blocks = torch.zeros(self._max_num_reqs, dtype=torch.int32, device=device)
        self._num_blocks_np = np.zeros(self._max_num_reqs, dtype=np.int64)  # the same on the host
        self._stale: set[int] = set()  # rows whose `num_blocks` on the device is an ended request's
        self._free = list(range(num_blocks - 1, -1, -1))
        row_bytes = self._hidden_size * self._dtype.itemsize
        self.counters.set("relevance_pool_bytes", num_blocks * self._bytes_per_block)
        self.counters.set("relevance_bytes_per_token", -(-row_bytes // self._group.world_size))

    # ---- requests --------------------------------------------------------------------------------------------------

    def arrive(
        self, req_id: str, row: int, token_ids: list[int], features: list[Any], salt: str, is_needed: bool
    ) -> None:
        """Begin to listen to a request, or to share what is known already.

        A strict request is listened to as well while there is room, because a loose one may ask about its video next:
        the target will not compute the states again.

        Args:
            req_id: vLLM's request id.
            row: Its persistent row.
            token_ids: Prompt, and after a preemption the output so far.
            features: vLLM's multimodal features in prompt order.
            salt: What else its hidden states depend on: an adapter's name.
            is_needed: Whether its own verification needs relevance.
        """
        places = [visual_indices(feature) for feature in features if feature.modality in ("image", "video")]
        if not places:
            return  # text alone: there is no relevance to anything, and nothing to count
        holder = self._holders[req_id] = _Holder(row, [], places, len(token_ids), is_needed)
        self._guarded(self._claim, holder, token_ids, features, salt)

    def _claim(self, holder: _Holder, token_ids: list[int], features: list[Any], salt: str) -> None:
        """Find or make room for every item."""
        text = np.asarray(token_ids, dtype=np.int64)
        digest, done = hashlib.blake2b(salt.encode(), digest_size=16), 0
        names = [feature.identifier for feature in features if feature.modality in ("image", "video")]
        for name, places in zip(names, holder.places, strict=True):
            end = int(places[-1]) + 1
            digest.update(name.encode() + b"\0" + text[done:end].tobytes())
            done = end
            known = self._items.get(digest.digest())
            if known is not None:
                known.users += 1
                self._items.move_to_end(known.key)
                holder.items.append(known)
                holder.num_reused += 1
                continue
            num_rows = self._share(len(places))
            count = -(-num_rows // BLOCK_ROWS)
            blocks = self._allocate(count) if holder.is_needed or count <= len(self._free) else None
            if blocks is None:
                self._miss(holder, "memory")
                return
            holder.items.append(_Item(digest.digest(), blocks, np.zeros(len(places), dtype=bool)))
        if sum(len(item.blocks) for item in holder.items) > self.block_table.shape[1]:
            self._miss(holder, "memory")

    def _allocate(self, count: int) -> list[int] | None:
        """Return so many free blocks, dropping items that nobody uses; None if that is not enough."""
        idle = [item for item in self._items.values() if item.users == 0]
        if count > len(self._free) + sum(len(item.blocks) for item in idle):
            return None
        for item in idle:
            if count <= len(self._free):
                break
            del self._items[item.key]
            self._free.extend(item.blocks)
        return [self._free.pop() for _ in range(count)]

    def _miss(self, holder: _Holder, reason: str) -> None:
        """Give up on a request's relevance: its rule stays strict."""
        holder.missed = reason
        if holder.is_needed:
            self.counters.add(f"strict_{reason}")
        for item in holder.items:
            self._drop(item)
        holder.items = []
        self._unlist(holder.row)

    def _unlist(self, row: int) -> None:
        """Let a row have no states; the device is told before it measures again."""
        if self._num_blocks_np[row]:
            self._num_blocks_np[row] = 0
            self._stale.add(row)

    def _drop(self, item: _Item) -> None:
        """Take one user off an item; its states stay while they are complete and nobody needs the room."""
        item.users -= 1
        if item.users == 0 and self._items.get(item.key) is not item:
            self._free.extend(item.blocks)

    def release(self, req_id: str) -> None:
        """Forget a request: finished, aborted or preempted."""
        holder = self._holders.pop(req_id, None)
        if holder is not None:
            for item in holder.items:
                self._drop(item)
            self._unlist(holder.row)

    def forget_all(self) -> None:
        """Forget every item, because the pool's contents are about to be lost; requests in prefill are not heard."""
        for holder in self._holders.values():
            if holder.missed is None:
                self._miss(holder, "memory")
        for item in self._items.values():
            self._free.extend(item.blocks)
        self._items.clear()

    # ---- prefill ---------------------------------------------------------------------------------------------------

    def before_forward(self, batch: Any) -> None:
        """Remember the step's layout, given vLLM's `InputBatch`."""
        self._step = batch

    def after_forward(self, hidden_states: torch.Tensor | None) -> None:
        """Keep the states `[num_tokens, hidden_size]` of the step's visual tokens; finish prefilled prompts."""
        batch, self._step = self._step, None
        if batch is None or not self._holders or not batch.is_prefilling_np.any():
            return
        begin = time.perf_counter()
        finished = [
            holder
            for _, holder, _, end in prefills(batch, self._holders)
            if end == holder.num_tokens and not holder.is_done
        ]
        self._guarded(self._hear, batch, hidden_states)
        for holder in finished:
            self._guarded(self._finish, holder)
        self._admit(finished)
        self.counters.add("relevance_us", int(1e6 * (time.perf_counter() - begin)))

    def _hear(self, batch: Any, hidden_states: torch.Tensor | None) -> None:
        rank, size = self._group.rank_in_group, self._group.world_size
        sources, slots = [], []
        for i, holder, start, end in prefills(batch, self._holders):
            if holder.is_done:
                continue
            for item, places in zip(holder.items, holder.places, strict=False):
                if item.key in self._items:
                    continue  # somebody's already
                inside = np.flatnonzero((places >= start) & (places < end))
                item.heard[inside] = True
                mine = inside[inside % size == rank]
                entry = mine // size
                sources.append(places[mine] - start + int(batch.query_start_loc_np[i]))
                slots.append(np.asarray(item.blocks)[entry // BLOCK_ROWS] * BLOCK_ROWS + entry % BLOCK_ROWS)
        if sum(map(len, sources)):
            packed = np.stack((np.concatenate(sources), np.concatenate(slots)))
            source, slot = async_tensor_h2d(packed, device=self.device)
            assert hidden_states is not None
            store_states(hidden_states, source, slot, self.store)

    def _finish(self, holder: _Holder) -> None:
        """Decide whether a prefilled request has all of its states, and let the kernel find them."""
        if holder.missed is not None:
            return
        for i in range(len(holder.items)):
            self._complete(holder, i)
        if not holder.is_needed:
            for item in holder.items:
                self._drop(item)
            holder.items = []
        elif all(item.key in self._items for item in holder.items):
            self._write_table(holder)
        else:
            self._miss(holder, "cached")  # a cached prefix hid some, and nobody remembers them

    def _admit(self, finished: list[_Holder]) -> None:
        """Let the prefilled requests be loose whose states every rank has."""
        waiting = [holder for holder in finished if holder.is_needed]
        has_states = self._agreement.settle("visual states", [holder.missed is None for holder in waiting])
        for holder, is_ready in zip(waiting, has_states, strict=True):
            if is_ready:
                self.counters.add("relevance_prompts")
                self.counters.add("relevance_reused", holder.num_reused)
                self.counters.add("relevance_tokens", sum(map(len, holder.places)))
                self._on_ready(holder.row)
            elif holder.missed is None:
                self._miss(holder, "error")  # of another rank
        for holder in finished:
            holder.is_done = True

    def _complete(self, holder: _Holder, i: int) -> None:
        """Let an item that has all its states be found by others, or take the one that another request has finished."""
        item = holder.items[i]
        known = self._items.get(item.key)
        if known is None and item.heard.all():
            self._items[item.key] = item
        elif known is not None and known is not item:
            known.users += 1
            self._drop(item)
            holder.items[i] = known
            holder.num_reused += 1

    def _write_table(self, holder: _Holder) -> None:
        rank, size, row = self._group.rank_in_group, self._group.world_size, holder.row
        blocks = [block for item in holder.items for block in item.blocks]
        fills = []
        for item in holder.items:
            num_rows = len(range(rank, len(item.heard), size))
            fills += [min(BLOCK_ROWS, max(0, num_rows - i * BLOCK_ROWS)) for i in range(len(item.blocks))]
        table = async_tensor_h2d(np.asarray([blocks, fills], dtype=np.int32), device=self.device)
        self.block_table[row, : len(blocks)] = table[0]
        self.block_fill[table[0].long()] = table[1]
        self.num_blocks[row : row + 1].fill_(len(blocks))  # an item's assignment would copy the number from the host
        self._num_blocks_np[row] = len(blocks)
        self._stale.discard(row)

    def _guarded(self, step: Callable[..., None], *args: Any) -> None:
        """Run a step; an exception costs the requests in prefill their looseness, never their answers."""
        if not self._guard(step, *args):
            for holder in self._holders.values():
                if not holder.is_done and holder.missed is None:
                    self._miss(holder, "error")

    # ---- verification ----------------------------------------------------------------------------------------------

    def relevance(
        self,
        hidden_states: torch.Tensor,
        logits_indices: torch.Tensor,
        cu_num_logits: torch.Tensor,
        rows: torch.Tensor,
        rows_np: np.ndarray,
        max_queries: int,
    ) -> torch.Tensor:
        """Return `[num_logits]` float32 visual relevance (LVSpec eq. 8); 0 where a request has no video.

        NaN everywhere if it could not be measured: a rank that fails still takes part in the gather, so that all ranks
        are without it and nobody is waited for.

        Args:
            hidden_states: `[num_tokens, hidden_size]` final ones of the forward.
            logits_indices: `[num_logits]` int64, which of them have logits.
            cu_num_logits: `[num_reqs + 1]` int32.
            rows: `[num_reqs]` int64 persistent rows; `rows_np` the same on the host.
            max_queries: Most rows of a request.
        """
        begin = time.perf_counter()
        found: list[torch.Tensor] = []
        if not self._guard(
            self._measure, found, hidden_states, logits_indices, cu_num_logits, rows, rows_np, max_queries
        ):
            found = [torch.full((len(logits_indices), self.config.score.top_n), torch.nan, device=self.device)]
            self._count_unmeasured(rows_np)
        partial = found[0][None]
        if self._group.world_size > 1:
            partial = self._group.all_gather(partial, dim=0)
        merged = merge_relevance(partial)
        self.counters.add("relevance_us", int(1e6 * (time.perf_counter() - begin)))
        return merged

    def _measure(
        self,
        found: list[torch.Tensor],
        hidden_states: torch.Tensor,
        logits_indices: torch.Tensor,
        cu_num_logits: torch.Tensor,
        rows: torch.Tensor,
        rows_np: np.ndarray,
        max_queries: int,
    ) -> None:
        """Append `[num_logits, top_n]` float32, the largest cosines with this rank's part of the video."""
        if self._stale:
            stale = async_tensor_h2d(np.array(sorted(self._stale)), device=self.device)
            self.num_blocks.index_fill_(0, stale, 0)
            self._stale.clear()
        found.append(
            visual_relevance(
                hidden_states[logits_indices],
                cu_num_logits,
                rows,
                self.store,
                self.block_fill,
                self.block_table,
                self.num_blocks,
                self.config.score.top_n,
                max_queries,
                int(self._num_blocks_np[rows_np].max(initial=0)),
            )
        )

    def _count_unmeasured(self, rows_np: np.ndarray) -> None:
        """Count the requests of `[num_reqs]` rows whose relevance could not be measured, each once."""
        for holder in self._holders.values():
            if holder.is_needed and holder.missed is None and holder.row in rows_np:
                holder.missed = "error"
                self.counters.add("strict_error")
