"""LocalBackend: the draft runs in the target's process, between the target's forwards."""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.compat import model as compat
from vllm_vidspec.engine.draft import messages
from vllm_vidspec.engine.draft.drafter import DraftContext, Drafter, without_room
from vllm_vidspec.engine.draft.graphs import DraftGraphs, mode_of_draft
from vllm_vidspec.engine.draft.memory import DraftMemory
from vllm_vidspec.engine.draft.model import DraftModel, kv_bytes_per_token
from vllm_vidspec.engine.draft.noise import CoupledSampler
from vllm_vidspec.engine.draft.target_kv import READER, TargetBlocks, TargetKV
from vllm_vidspec.engine.draft.waiting import WaitingRoom
from vllm_vidspec.engine.draft_backend import DraftBackend, Reading, Step
from vllm_vidspec.engine.failures import DraftFailures
from vllm_vidspec.engine.hooks.pixels import SharedPixels
from vllm_vidspec.engine.hooks.target_vision import TargetVision
from vllm_vidspec.engine.hooks.trees import TargetTrees
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.kv_views import attention_layers, cache_views, check_layout, check_readable
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.report.observer import Observer
from vllm_vidspec.engine.requests import DraftBatch, NewRequest, Phase, Request, RequestRows
from vllm_vidspec.engine.target_pruning import places_of
from vllm_vidspec.engine.tree_attention import TreeAttention, make_attention

# Of one step: what was proposed, and for which places of the batch; None for all.
_Proposals = list[tuple[messages.Drafts, torch.Tensor | None]]


class LocalBackend(DraftBackend):
    """See `DraftBackend`."""

    def __init__(
        self,
        runner: Any,  # the model runner
        draft_model: DraftModel,
        sample: CoupledSampler,
        trees: TargetTrees | None,  # the target's side of tree drafts; None where drafts are chains
        failures: DraftFailures,
        pixels: SharedPixels | None = None,  # None where the draft has no tower of its own
        vision: TargetVision | None = None,  # None where it has
    ):
        self._knobs: Knobs = runner.knobs
        self._requests: RequestRows = runner.requests
        self._counters: Counters = runner.counters
        self._agreement: Agreement = runner.agreement
        self._observers: list[Observer] = runner.observers
        self._vllm_config, self._req_states = runner.vllm_config, runner.req_states
        self.draft_model, self._sample, self._trees = draft_model, sample, trees
        self._failures, self._placed = failures, places_of(runner)
        self._pixels, self._vision = pixels, vision
        self._media = [part for part in (pixels, vision) if part is not None]  # what waits for a request's draft
        self._device = draft_model.device
        # vLLM makes these in phases: the memory is profiled, graphs have a mode, then there is a KV cache.
        self._memory: DraftMemory | None = None
        self._graphs: Any = None
        self._drafter: Drafter | None = None
        self._own_blocks = range(0)  # of the target's cache, where the target drafts for itself
        self._attention: TreeAttention | None = None  # of the draft's layers, where they need it
        self._room = WaitingRoom(self._requests, self._counters)
        self._picked: tuple[DraftBatch | None, torch.Tensor] = (None, torch.zeros(0))  # see `_places_of`
        shape = (len(self._requests.phase), self._knobs.current.num_speculative_tokens)
        self._draft_tokens = torch.zeros(shape, dtype=torch.int64, device=self._device)

    @property
    def model(self) -> torch.nn.Module | None:
        return None if self.draft_model.is_self_draft else self.draft_model.model

    @property
    def drafter(self) -> Drafter:
        """The drafter; exists once the KV cache is initialised."""
        assert self._drafter is not None
        return self._drafter

    # ---- set-up ----------------------------------------------------------------------------------------------------

    def reserve(self, available_bytes: int) -> int:
        self._memory = DraftMemory.plan(self._knobs.current, self._vllm_config, self.draft_model, available_bytes)
        return self._memory.num_bytes

    def make_graphs(self, cudagraph_mode: Any) -> DraftGraphs:
        self._drafter = None  # that of vLLM's memory profile, whose graphs are gone
        self.draft_model.use_cudagraph_mode(mode_of_draft(cudagraph_mode))
        config, num_rows = self._vllm_config, len(self._requests.phase)
        by_default = self._sample.processes_by_default(config.model_config)
        self._graphs = DraftGraphs(config, self._device, cudagraph_mode, num_rows, by_default)
        return self._graphs

    def widen_kv(self, kv_cache_config: Any) -> Any:
        if not self.draft_model.is_self_draft:
            return kv_cache_config
        assert self._memory is not None
        first, num_own = kv_cache_config.num_blocks, self.draft_model.num_blocks_in(self._memory.pool_bytes)
        self._own_blocks = range(first, first + num_own)
        return self.draft_model.widened(kv_cache_config, num_own)

    def _target_blocks(self) -> TargetBlocks:
        """Return what a target that drafts for itself has; a VidSpecError for a cache that is not plain."""
        layers = attention_layers(self._vllm_config).values()
        for layer in layers:
            check_readable(layer, READER)
        check_layout(layers, READER)
        return TargetBlocks(self._own_blocks, [cache_views(layer.kv_cache, layer) for layer in layers])

    def init_kv(
        self, block_tables: Any, allocation: Callable[[], AbstractContextManager], is_profiling: bool = False
    ) -> None:
        model, config, vllm_config = self.draft_model, self._knobs.current, self._vllm_config
        memory = self._memory = DraftMemory.least(model) if is_profiling else self._memory
        assert memory is not None
        states, is_async = self._req_states, vllm_config.scheduler_config.async_scheduling
        if self._attention is None:
            layers = attention_layers(model.config).values()
            self._attention = make_attention(
                layers, model.config, self._device, num_rows=2, in_trees=config.in_trees, whose="draft"
            )
        path = None if self._trees is None else self._trees.path
        committed = messages.Committed(states.total_len.gpu, states.all_token_ids.gpu, states.last_sampled_tokens, path)
        context = DraftContext(
            model=model,
            knobs=self._knobs,
            sample=self._sample,
            counters=self._counters,
            agreement=self._agreement,
            graphs=self._graphs,
            memory=memory,
            committed=committed,
            attention=self._attention,
            max_num_reqs=len(self._requests.phase),
            max_model_len=vllm_config.model_config.max_model_len,
            allocation=allocation,
            target_vision=self._vision,
            pixels=self._pixels,
            target=self._target_blocks() if model.is_self_draft else None,
            fills_trees=is_async if config.tree_fill is None else config.tree_fill,
            take_trees=None if self._trees is None else self._trees.take,
            observers=self._observers,
        )
        self._drafter = Drafter(context)
        if isinstance(self._drafter.kv, TargetKV):
            compat.observe_block_ids(block_tables, self._drafter.kv.append)
        if self._pixels is not None:
            self._pixels.num_bytes = memory.pixel_bytes
            self._counters.set("draft_pixel_bytes", memory.pixel_bytes)
        self._counters.set("target_kv_bytes_per_token", kv_bytes_per_token(vllm_config))

    def capture(self) -> None:
        if self._drafter is not None:
            self._drafter.capture()

    def dummy_run(self, num_reqs: int, is_profile: bool) -> torch.Tensor:
        if is_profile:
            self.draft_model.profile()
        return self._draft_tokens[:num_reqs].zero_()

    # ---- both ends of a request's life -----------------------------------------------------------------------------

    def add(self, request: NewRequest) -> None:
        """Keep what the draft will be shown of a request, if it may see it; its prompt waits in `RequestRows`."""
        if not request.is_admitted:
            self._requests.skip(request.req_state_idx, "unadmitted")
            return
        for part in self._media:
            part.add(request.req_state_idx, request.features)

    def remove(self, req_state_idx: int) -> None:
        for part in self._media:
            part.remove(req_state_idx)
        if self._drafter is not None:
            self._drafter.remove(req_state_idx)

    def active_rows(self) -> Iterable[int]:
        parts = self._media if self._drafter is None else [*self._media, self._drafter]
        return (row for part in parts for row in part.active_rows())

    def give_up_all(self) -> None:
        rows = np.arange(len(self._requests.phase))
        started = self._requests.are_in(rows, Phase.PREFILLING, Phase.DRAFTING, Phase.PREFILL_STALLED)
        for row in rows[started].tolist():
            self._requests.skip(row, "memory_lost")
        self.forget_media()

    def forget_media(self) -> None:
        if self._drafter is not None:
            self._drafter.forget_media()

    # ---- roll back -------------------------------------------------------------------------------------------------

    def roll_back(self, step: Step) -> None:
        """Put rows that were drafted for and get no drafts in this step back into the prefill queue."""
        if step.paused is not None:
            self._requeue(step, np.flatnonzero(step.paused & self._are_in(step, Phase.DRAFTING)))

    def _requeue(self, step: Step, indices: np.ndarray) -> None:
        """Let the draft catch up, some time, on the text of requests that were drafted for."""
        if not len(indices):
            return
        rows = step.batch.idx_mapping_np[indices]
        # What the draft has surely read: its last step began at the length that the target's own began at, of which the
        # host knows a bound, since the scheduler may run ahead of the verification of K drafts.
        was_committed = step.batch.num_computed_tokens_np[indices] - self._knobs.current.num_speculative_tokens
        self.drafter.prefills.requeue(rows, was_committed)
        self._requests.enter(rows, Phase.PREFILLING)

    def _are_in(self, step: Step, *phases: Phase) -> np.ndarray:
        """Return `[num_reqs]` bool: the requests of a step that are in a phase and whose target prefill is done."""
        return step.is_done & self._requests.are_in(step.batch.idx_mapping_np, *phases)

    # ---- start -----------------------------------------------------------------------------------------------------

    def refusal(self, request: Request) -> tuple[str, str] | None:
        new = request.new
        if new.has_embeds:
            return "unsupported", "its prompt is one of embeddings, made for the target"
        if new.is_structured and self._trees is not None:
            # A grammar is checked along one line of tokens.
            return "structured", "trees do not draft for structured outputs"
        if new.is_structured and self._vllm_config.parallel_config.pipeline_parallel_size > 1:
            # vLLM asks for the last step's drafts to check them, and theirs are of a step before that.
            return "structured", "pipeline stages do not draft for structured outputs"
        if len(new.token_ids) + 1 >= self._req_states.max_seq_len[new.req_state_idx]:
            return "finished", ""  # the token just sampled is its last
        return None

    def start(self, step: Step, rows: np.ndarray, requests: list[Request]) -> None:
        """Queue prompts whose blocks the pool has room for; the others wait for blocks, or are refused."""
        starters = self._room.pop_ready(rows, self.drafter.kv) + requests
        bounds = dict(zip(step.batch.idx_mapping_np.tolist(), step.bound.tolist(), strict=True))
        answers = [self._queue(request, bounds[request.new.req_state_idx], step) for request in starters]
        is_agreed = self._agreement.all_ranks_and("draft prefill", [it != messages.Admission.REFUSED for it in answers])
        for request, answer, is_fine_everywhere in zip(starters, answers, is_agreed, strict=True):
            row = request.new.req_state_idx
            if not is_fine_everywhere:
                self._requests.skip(row, "refused" if answer == messages.Admission.REFUSED else "draft_error")
                if answer != messages.Admission.REFUSED:
                    self._counters.skip("draft_error", request.new.req_id, "the draft failed on another rank")
            elif answer == messages.Admission.ADMITTED:
                self._requests.start(row, Phase.PREFILLING)
                if request.num_attempts:  # it has found room after it had waited
                    self._counters.add("resumed_drafts")
            elif not self._room.defer(request, self.drafter.kv):
                self._requests.skip(row, "pool_full")

    def _queue(self, request: Request, bound: int, step: Step) -> messages.Admission:
        """Hand the drafter a request; paused ones leave the pool for it where that is full."""
        if request.message is None:
            request.message = self._message(request)
        outcome = self.drafter.add(request.message, bound)
        if outcome == messages.Admission.FULL and self._release_paused(step):
            outcome = self.drafter.add(request.message, bound)
        return outcome

    def _message(self, request: Request) -> messages.PrefillMessage:
        new, row = request.new, request.new.req_state_idx
        scores, outcome = (None, ()) if request.guided is None else request.guided
        placed = None if self._placed is None else self._placed(row, len(new.token_ids))
        return messages.PrefillMessage(
            new.req_id, row, new.token_ids, new.features, scores, outcome, placed, new.prune_variant
        )

    def _release_paused(self, step: Step) -> bool:
        """Give up the draft KV of a step's paused requests; return whether there was any."""
        if step.paused is None:
            return False
        is_paused = step.paused & self._are_in(step, Phase.PREFILLING, Phase.PREFILL_STALLED)
        rows = step.batch.idx_mapping_np[is_paused].tolist()
        for row in rows:
            self._requests.skip(row, "released")
        self._counters.add("released_paused", len(rows))
        return bool(rows)

    # ---- prefill ---------------------------------------------------------------------------------------------------

    def prefill(self, step: Step) -> Reading:
        """Reserve the step's blocks and read on; where nothing is drafted, nothing is read."""
        self._reserve(step)
        if not step.plan.num_tokens:
            batch = self._requests.draft_batch(step.batch.idx_mapping_np, step.is_done)
            self._requeue(step, batch.places_np)
            return Reading()
        if not self.drafter.prefills.is_reading:
            return Reading()
        start = time.monotonic()
        in_queue = np.flatnonzero(step.active(self._are_in(step, Phase.PREFILLING)))
        self._failures.run("draft prefill", self._read, step, in_queue, is_careful=True)
        return Reading(frozenset(step.batch.req_ids[i] for i in in_queue.tolist()), time.monotonic() - start)

    def _reserve(self, step: Step) -> None:
        """Reserve the blocks of this step; requests that no longer fit go on without speculation, if only for now."""
        rows_np = step.batch.idx_mapping_np
        everyone = slice(None) if step.paused is None else ~step.paused
        if self.drafter.has_room(rows_np[everyone], step.bound[everyone]):
            self.drafter.kv.apply()
            return
        is_known = self._are_in(step, Phase.PREFILLING, Phase.DRAFTING, Phase.PREFILL_STALLED)
        known = np.flatnonzero(step.active(is_known))
        fits = np.zeros(len(rows_np), dtype=bool)
        fits[known] = True
        for i, reason, detail in without_room(self.drafter, rows_np[known], step.bound[known]):
            if reason == "pool_full" and self._release_paused(step):
                return self._reserve(step)
            fits[known[i]] = False
            if reason != "pool_full":
                self._failures.give_up(step, known[i], reason, detail)
                continue
            row = int(rows_np[known[i]])
            if self._requests.phase[row] == Phase.DRAFTING:
                self._requeue(step, known[i : i + 1])
            self._room.hold(row)
        self._room.resume(rows_np[fits & self._are_in(step, Phase.PREFILL_STALLED)])
        stuck = self._room.largest_of_all(rows_np, self.drafter.kv)
        if stuck is not None:
            place, why = int(np.flatnonzero(rows_np == stuck)[0]), "draft KV pool exhausted"
            self._failures.give_up(step, place, "pool_full", f"{why}; no request left to release blocks")

    def _read(self, step: Step, indices: np.ndarray) -> None:
        rows = step.batch.idx_mapping_np[indices]
        done = self.drafter.prefill(messages.PrefillStep(rows, step.bound[indices], self._req_states.all_token_ids.gpu))
        self._requests.enter(done.ready, Phase.DRAFTING)
        for part in self._media:
            for row in done.ready:
                part.remove(row)
        for row in done.failed:
            self._requests.skip(row, "draft_error")

    # ---- draft -----------------------------------------------------------------------------------------------------

    def propose(self, step: Step, batch: DraftBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        proposals: _Proposals = []
        if step.plan.num_tokens:
            self._failures.run("drafting", self._draft, step, batch.places_np, batch, proposals)
        elif step.is_undrafted:
            self._counters.add("undrafted_steps")
        if not proposals:
            return self._draft_tokens[: step.batch.num_reqs].zero_(), None
        drafts, picked = proposals[0]
        num_nodes = None if drafts.tree is None else drafts.tree.num_nodes[: len(batch.places_np)]
        if picked is None:
            return drafts.tokens, num_nodes
        tokens = self._draft_tokens[: step.batch.num_reqs].zero_()
        tokens[picked] = drafts.tokens
        return tokens, num_nodes

    def _places_of(self, batch: DraftBatch) -> torch.Tensor:
        if self._picked[0] is not batch:
            self._picked = (batch, async_tensor_h2d(batch.places_np, device=self._device))
        return self._picked[1]

    def _draft(self, step: Step, places_np: np.ndarray, batch: DraftBatch, proposals: _Proposals) -> None:
        # The usual step is of the whole batch, and uploads nothing.
        picked = None if batch.is_whole else self._places_of(batch)
        num_verified = step.batch.num_draft_tokens_per_req
        # The rows still speak of the drafts that this step has verified; without one they are vLLM's placeholders.
        had_rows = np.zeros(len(places_np), dtype=bool) if num_verified is None else num_verified[places_np] > 0
        was_verified = had_rows & self._requests.was_drafted(batch)
        if self._trees is not None and step.plan.shape != "chain":
            self._trees.expect(batch.drafted_np)
        message = messages.DraftMessage(
            batch_rows=step.batch.idx_mapping,
            picked=picked,
            idx_mapping_np=batch.drafted_np,
            num_sampled=step.num_sampled,
            was_verified=None if was_verified.all() else async_tensor_h2d(was_verified, device=self._device),
            max_drafts=step.plan.num_tokens,
            shape=step.plan.shape,
            draft_batch=batch,
        )
        drafts = self.drafter.draft(message)
        if self._trees is not None and drafts.tree is None:
            self._trees.take_chains(drafts.rows, batch.drafted_np)
        proposals.append((drafts, picked))
