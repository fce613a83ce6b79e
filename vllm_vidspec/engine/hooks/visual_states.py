"""The target's final hidden states of each request's video tokens, kept from prefill for the loose scorer (LVSpec).

An image or video is an item of the store, known by all that it depends on (`content_keys`): a request whose prefill the
target took from its prefix cache finds the states there. Else, or if they do not fit, it is verified strictly.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tp_group

from vidspec_kernels import merge_relevance
from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.hooks.prompts import content_keys, prefills
from vllm_vidspec.engine.hooks.protocol import Forward, Guard, RelevanceRules, TargetHook
from vllm_vidspec.engine.hooks.state_store import Item, StateStore
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.requests import NewRequest
from vllm_vidspec.pruning.prompt import visual_indices
from vllm_vidspec.scoring import TOP_N


@dataclass(eq=False)
class _Holder:
    """A request with visual tokens, while it runs."""

    req_state_idx: int
    places: list[np.ndarray]  # per item [m] int64 prompt indices
    num_tokens: int  # length of the prompt, and after a preemption of the output so far
    is_needed: bool  # whether its own verification needs them; else they are for those that will share its prefix
    items: list[Item] = field(default_factory=list)  # in prompt order
    num_reused: int = 0  # items whose states another request's prefill has left
    missed: str | None = None  # why it is verified strictly, or None
    is_done: bool = False  # whether its prefill is


class VisualStates(TargetHook):
    """Keeps the states and measures relevance against them; see the module."""

    loss = "hidden states were not kept; these requests are verified strictly"

    def __init__(
        self,
        knobs: Knobs,
        vllm_config: Any,
        max_num_reqs: int,
        counters: Counters,
        rules: RelevanceRules,
        agreement: Agreement,
    ):
        self.knobs, self.counters, self._rules, self._agreement = knobs, counters, rules, agreement
        self._group = get_tp_group()
        self._guard = Guard(knobs, agreement, "relevance was not measured; these requests are verified strictly")
        model, device = vllm_config.model_config, vllm_config.device_config.device
        self._bytes_per_token = -(-model.get_hidden_size() * model.dtype.itemsize // self._group.world_size)
        self.store = StateStore(
            model.get_hidden_size(), model.dtype, model.max_model_len, max_num_reqs, device, self._group
        )
        self._holders: dict[int, _Holder] = {}  # by persistent row
        self._batch: Any = None

    def reserve(self, available_bytes: int) -> int:
        wanted = self.knobs.current.state_bytes_for("relevance")
        return self.store.reserve(available_bytes // 20 if wanted is None else wanted, available_bytes)

    def init_kv(self, runner: Any) -> None:
        self.store.allocate(runner.kv_allocation())
        self.counters.set("relevance_pool_bytes", self.store.pool.nbytes)
        self.counters.set("relevance_bytes_per_token", self._bytes_per_token)

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, request: NewRequest) -> None:
        """Begin to observe a request, or to share what is known already; while there is room a strict one, too: a loose
        one may ask about its video next, and the target will not compute the states again.
        """
        features = [feature for feature in request.features if feature.modality in ("image", "video")]
        if not features or request.sampling is None:
            return  # there is no relevance of anything, or to anything, and nothing to count
        req_state_idx, places = request.req_state_idx, [visual_indices(feature) for feature in features]
        is_needed = self._rules.needs_relevance(req_state_idx)
        holder = _Holder(req_state_idx, places, len(request.token_ids), is_needed)
        self._holders[req_state_idx] = holder
        self._claim(holder, content_keys(request, features, [int(item[-1]) + 1 for item in places]))

    def _claim(self, holder: _Holder, keys: list[bytes]) -> None:
        for key, own in zip(keys, holder.places, strict=True):
            item = self.store.find(key)
            holder.num_reused += item is not None
            item = item or self.store.make(key, len(own), may_drop=holder.is_needed)
            if item is None:
                self._miss(holder, "memory")
                return
            holder.items.append(item)
        if not self.store.fits(holder.items):
            self._miss(holder, "memory")

    def _miss(self, holder: _Holder, reason: str) -> None:
        """Give up on a request's relevance: its rule stays strict."""
        holder.missed = reason
        if holder.is_needed:
            self.counters.add(f"strict_{reason}")
        self._leave(holder)

    def _leave(self, holder: _Holder) -> None:
        for item in holder.items:
            self.store.drop(item)
        holder.items = []
        self.store.hide(holder.req_state_idx)

    def remove(self, req_state_idx: int) -> None:
        if holder := self._holders.pop(req_state_idx, None):
            self._leave(holder)

    def active_rows(self) -> Iterable[int]:
        return self._holders

    def forget_kv(self) -> None:
        """Forget every item, because the pool's contents are about to be lost; requests in prefill are not observed."""
        for holder in self._holders.values():
            if holder.missed is None:
                self._miss(holder, "memory")
            self._leave(holder)
        self.store.clear()

    def fail(self, error: Exception) -> None:
        """Let an exception cost the requests in prefill their looseness, never their answers."""
        for holder in self._holders.values():
            if not holder.is_done and holder.missed is None:
                self._miss(holder, "error")

    # ---- prefill ---------------------------------------------------------------------------------------------------

    def before_forward(self, batch: Any) -> None:
        self._batch = batch

    def after_forward(self, forward: Forward) -> None:
        """Keep the states of the step's visual tokens; finish prefilled prompts, whatever fails on this rank."""
        batch, self._batch = self._batch, None
        if batch is None or not self._holders or not batch.is_prefilling_np.any():
            return
        begin = time.perf_counter()
        found = [observed for observed in prefills(batch, self._holders) if not observed[1].is_done]
        finished = [holder for _, holder, _, end in found if end == holder.num_tokens]
        try:
            self._observe(batch, found, forward.hidden_states)
            for holder in finished:
                self._finish(holder)
        except Exception as error:
            self.fail(error)
            raise
        finally:
            self._add(finished)
            self.counters.add("relevance_us", int(1e6 * (time.perf_counter() - begin)))

    def _observe(
        self, batch: Any, found: list[tuple[int, _Holder, int, int]], hidden_states: torch.Tensor | None
    ) -> None:
        """Keep the states of `prefills`' spans, of `[num_tokens, hidden_size]`."""
        sources, slots = [], []
        for req_idx, holder, start, end in found:
            for item, places in zip(holder.items, holder.places, strict=False):
                if item in self.store:
                    continue  # another request has left them
                inside = np.flatnonzero((places >= start) & (places < end))
                item.observed[inside] = True
                mine, rows = self.store.places(item, inside)
                sources.append(places[mine] - start + int(batch.query_start_loc_np[req_idx]))
                slots.append(rows)
        if sum(map(len, sources)):
            assert hidden_states is not None
            self.store.write(hidden_states, np.concatenate(sources), np.concatenate(slots))

    def _finish(self, holder: _Holder) -> None:
        if holder.missed is not None:
            return
        for i, item in enumerate(holder.items):
            holder.items[i] = self.store.publish(item)
            holder.num_reused += holder.items[i] is not item
        if not holder.is_needed:
            self._leave(holder)
        elif all(item in self.store for item in holder.items):
            self.store.show(holder.req_state_idx, holder.items)
        else:
            self._miss(holder, "cached")  # a cached prefix hid some, and no earlier request has left them

    def _add(self, finished: list[_Holder]) -> None:
        """Let the prefilled requests be loose whose states every rank has."""
        waiting = [holder for holder in finished if holder.is_needed]
        has_states = self._agreement.all_ranks_and("visual states", [holder.missed is None for holder in waiting])
        for holder, is_ready in zip(waiting, has_states, strict=True):
            if is_ready:
                self.counters.add("relevance_prompts")
                self.counters.add("relevance_reused", holder.num_reused)
                self.counters.add("relevance_tokens", sum(map(len, holder.places)))
                self._rules.ready(holder.req_state_idx)
            elif holder.missed is None:
                self._miss(holder, "error")  # of another rank
        for holder in finished:
            holder.is_done = True

    # ---- verification ----------------------------------------------------------------------------------------------

    def relevance(self, hidden_states: torch.Tensor, batch: Any, max_queries: int) -> torch.Tensor:
        """Return `[num_logits]` float32 visual relevance (LVSpec eq. 8) of a forward's final states `[num_tokens,
        hidden_size]`; 0 where a request, which has `max_queries` rows at most, has no video, NaN everywhere if a rank
        could not measure it: that one still takes part in the gather.
        """
        begin = time.perf_counter()
        try:
            partial = self.store.cosines(hidden_states[batch.logits_indices], batch, TOP_N, max_queries)
        except Exception as error:
            self._guard.survive(error)
            partial = torch.full((len(batch.logits_indices), TOP_N), torch.nan, device=self.store.device)
            found = map(self._holders.get, batch.idx_mapping_np.tolist())
            for holder in (holder for holder in found if holder is not None):
                if holder.is_needed and holder.missed is None:  # each is counted once
                    holder.missed = "error"
                    self.counters.add("strict_error")
        partial = partial[None]
        if self._group.world_size > 1:
            partial = self._group.all_gather(partial, dim=0)
        merged = merge_relevance(partial)
        self.counters.add("relevance_us", int(1e6 * (time.perf_counter() - begin)))
        return merged
