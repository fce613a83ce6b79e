"""The loop: after each of the target's steps vLLM calls `propose`, and that is all of speculation on the draft's side.

    for each request whose target prefill is done and that the draft has not met:           start
        prune its prompt by what the target looked at, put it in the line of prefills
    for each request that the draft knows:                                                  reserve
        make room for the committed text and K drafts, else give the request up
    for the first in line: read a bounded piece of their pruned prompts                     prefill
    where drafting does not pay, for a request or for all: nothing of these two             rest
    for each request that the draft has read, all in one batch:                             draft
        roll back to the committed length, feed its last two tokens, then a level at a time:
            logits -> the target's own noise -> the next tokens of a chain, or nodes of a tree
    tell vLLM and the rows what is in flight; the target verifies it in its next step       publish

The rows' state is `RequestRows`'s, the draft's memory `DraftKV`'s. Runner state becomes messages here, and what fails
on the draft's side becomes a counter.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_vidspec.adapt import Decision
from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.draft.drafter import Drafter, without_room
from vllm_vidspec.engine.draft.graphs import DraftGraphs, mode_of_draft
from vllm_vidspec.engine.draft.memory import DraftMemory
from vllm_vidspec.engine.draft.messages import (
    Admission,
    Committed,
    DraftMessage,
    Drafts,
    Placed,
    PrefillMessage,
    PrefillStep,
)
from vllm_vidspec.engine.draft.model import DraftModel, kv_bytes_per_token
from vllm_vidspec.engine.draft.noise import CoupledSampler
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.kv_views import attention_layers
from vllm_vidspec.engine.listen.pixels import SharedPixels
from vllm_vidspec.engine.listen.prompts import Guidance, PendingScores
from vllm_vidspec.engine.listen.trees import TargetTrees
from vllm_vidspec.engine.parallel.timeline import EventKind, Timeline
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.requests import Arrival, Cohort, Phase, RequestRows
from vllm_vidspec.engine.target_step import Step
from vllm_vidspec.engine.tree_attention import TreeAttention, make_attention
from vllm_vidspec.engine.waiting import WaitingRoom

logger = init_logger("vllm.vidspec")


class VidSpecSpeculator(BaseSpeculator):
    """Drafts for every running request that the draft's pool has room for; a `RowTable` of prompts on their way.

    Args:
        vllm_config: vLLM's.
        knobs: The configuration.
        draft_model: The draft, loaded.
        requests: What each row is doing.
        req_states: The runner's tables that messages are made from.
        sample: The draft's sampler.
        guidance: Scores visual tokens for the pruner; None where the pruner needs none.
        trees: The target's side of tree drafts; None where drafts are chains.
        counters: Told what is drafted and what is not.
        agreement: Of the tensor-parallel ranks.
        timeline: Told what took the time, while a tool watches.
        placed: `(row, length) -> Placed`, for a target that prunes videos itself; else None.
        pixels: What the target has copied to the device; None where the draft's tower is shown nothing.
    """

    supports_mm_inputs = False  # the target's embeddings are of no use to the draft: it has a vision tower of its own
    draft_logits = None
    num_extra_query_per_req = 0
    graphs_class = DraftGraphs

    def __init__(
        self,
        vllm_config: Any,
        knobs: Knobs,
        draft_model: DraftModel,
        requests: RequestRows,
        req_states: Any,
        sample: CoupledSampler,
        guidance: Guidance | None,
        trees: TargetTrees | None,
        counters: Counters,
        agreement: Agreement,
        timeline: Timeline,
        placed: Callable[[int, int], Placed] | None = None,
        pixels: SharedPixels | None = None,
    ):
        self._pixels = pixels
        self._placed = placed
        self._timeline = timeline
        self.draft_model = draft_model
        self._vllm_config = vllm_config
        self._knobs = knobs
        self._requests = requests
        self._req_states = req_states
        self._sample = sample
        self._guidance = guidance
        self._trees = trees
        self._counters = counters
        self._agreement = agreement
        self._device = draft_model.device
        self.graphs: Any = None  # vLLM's memory profile looks for managers among our attributes, and drops them
        self._attention: TreeAttention | None = None  # of the draft's layers, where they need it
        self._drafter: Drafter | None = None  # until the KV pool exists
        self._arrivals: dict[int, Arrival] = {}  # by row, until the target has seen the prompt
        # By row, the prompts whose scores are on their way to the host.
        self._waiting: dict[int, tuple[PrefillMessage, PendingScores]] = {}
        self._room = WaitingRoom(requests, counters)
        self._picked: tuple[Cohort | None, torch.Tensor] = (None, torch.zeros(0))  # see `_places_of`
        self.decision: Decision | None = None  # of the step that runs; None: `knobs` say what a batch size drafts
        # Requests whose prompts were read on in it, and what that took of the host.
        self.reading: frozenset[str] = frozenset()
        self.reading_s = 0.0
        # [max_num_reqs, K]
        self._draft_tokens = torch.zeros(
            len(requests.phase), knobs.now.num_speculative_tokens, dtype=torch.int64, device=self._device
        )

    @property
    def model(self) -> torch.nn.Module | None:
        """The draft network, for vLLM's shutdown; None while it is the target itself."""
        return None if self.draft_model.is_self_draft else self.draft_model.model

    @property
    def drafter(self) -> Drafter:
        """The drafter; exists once the KV cache is initialised."""
        assert self._drafter is not None
        return self._drafter

    # ---- set-up ----------------------------------------------------------------------------------------------------

    def reserve(self, available_bytes: int) -> int:
        """Return how many bytes of a rank's KV memory the draft takes.

        Raises:
            VidSpecError: A knob asks for too much, or for too little for one request.
        """
        self._memory = DraftMemory.plan(self._knobs.now, self._vllm_config, self.draft_model, available_bytes)
        return self._memory.num_bytes

    def init_kv(
        self, encoder_cache: Any, allocation: Callable[[], AbstractContextManager], is_profiling: bool = False
    ) -> None:
        """Allocate what was reserved; the drafter is ready afterwards.

        Args:
            encoder_cache: vLLM's, of the target; None for a target without media.
            allocation: Makes what is entered while memory is taken.
            is_profiling: Allocate the least with which graphs can be captured, as nothing is reserved yet.
        """
        if is_profiling:
            self._memory = DraftMemory.least(self.draft_model)
        model, config, vllm_config = self.draft_model, self._knobs.now, self._vllm_config
        states = self._req_states
        if self._attention is None:
            layers = attention_layers(model.config).values()
            self._attention = make_attention(
                layers, model.config, self._device, num_rows=2, in_trees=config.in_trees, whose="draft"
            )
        with allocation():
            cache = model.make_vision_cache(self._memory.vision_bytes)
        num_blocks = model.init_kv(self._memory.pool_bytes, allocation())
        if why := model.why_no_graphs:
            self.graphs.give_up(why)
        shares = config.is_self_draft and encoder_cache is not None
        is_async = vllm_config.scheduler_config.async_scheduling
        self._drafter = Drafter(
            model,
            self._knobs,
            self._sample,
            self._counters,
            num_blocks,
            len(self._requests.phase),
            vllm_config.model_config.max_model_len,
            cache,
            self._agreement,
            Committed(
                states.total_len.gpu,
                states.all_token_ids.gpu,
                states.last_sampled_tokens,
                None if self._trees is None else self._trees.path,
            ),
            self.graphs,
            self._attention,
            shared=encoder_cache.encoder_outputs if shares else {},
            fills_trees=is_async if config.tree.fill is None else config.tree.fill,
            take_trees=None if self._trees is None else self._trees.take,
            pixels=self._pixels,
        )
        if self._pixels is not None:
            self._pixels.num_bytes = self._memory.pixel_bytes
        for name, value in (
            ("draft_pool_blocks_total", num_blocks - 1),
            ("draft_pool_bytes", num_blocks * model.bytes_per_block),
            ("draft_encoder_bytes", cache.num_bytes),
            ("draft_kv_bytes_per_token", kv_bytes_per_token(model.config)),
            ("target_kv_bytes_per_token", kv_bytes_per_token(vllm_config)),
        ):
            self._counters.set(name, value)

    def init_cudagraph_manager(self, cudagraph_mode) -> None:
        """Take the mode that vLLM has resolved; it comes before the KV cache, whose builders ask for it."""
        self._drafter = None  # that of vLLM's memory profile, whose graphs are gone
        self.draft_model.use_cudagraph_mode(mode_of_draft(cudagraph_mode))
        self.graphs = self.graphs_class(
            self._vllm_config,
            self._device,
            cudagraph_mode,
            len(self._requests.phase),
            self._sample.processes_by_default(self._vllm_config.model_config),
        )

    def capture(self) -> None:
        """Capture the parts of a draft step."""
        if self._drafter is not None:
            self._drafter.capture()

    # ---- both ends of a request's life -----------------------------------------------------------------------------

    def admit(self, arrival: Arrival) -> None:
        """Keep a request's prompt on the host until its target prefill is done."""
        if not arrival.is_shown:
            self._requests.skip(arrival.req_state_idx, "unshown")
            return
        self._arrivals[arrival.req_state_idx] = arrival
        if self._pixels is not None:
            self._pixels.admit(arrival.req_state_idx, arrival.features)

    def forget(self, req_state_idx: int) -> None:
        """Free what a row's request holds on the draft's side."""
        self._arrivals.pop(req_state_idx, None)
        self._waiting.pop(req_state_idx, None)
        self._room.forget(req_state_idx)
        self._forget_pixels(req_state_idx)
        if self._drafter is not None:
            self._drafter.forget(req_state_idx)

    def _forget_pixels(self, req_state_idx: int) -> None:
        if self._pixels is not None:
            self._pixels.forget(req_state_idx)

    def held(self) -> Iterable[int]:
        """Return the rows whose prompts, pixels, scores or draft KV are here."""
        return (
            *(() if self._pixels is None else self._pixels.held()),
            *self._arrivals,
            *self._waiting,
            *self._room.held(),
            *(() if self._drafter is None else self._drafter.held()),
        )

    def _give_up(self, req_state_idx: int, reason: str) -> None:
        """Let a request go on without speculation; its draft KV is freed."""
        self.forget(req_state_idx)
        for listener in (self._guidance, self._trees):
            if listener is not None:
                listener.release(req_state_idx)
        self._requests.skip(req_state_idx, reason)

    def give_up_all(self) -> None:
        """Give every running request up, because the contents of the pool and the cache are about to be lost."""
        everyone = np.arange(len(self._requests.phase))
        for req_state_idx in everyone[self._requests.are_in(everyone, Phase.PREFILLING, Phase.DRAFTING, Phase.HELD)]:
            self._give_up(int(req_state_idx), "memory_lost")
        self.forget_media()

    def forget_media(self) -> None:
        """Drop the draft's vision embeddings: weights have changed, or the memory that holds them has."""
        if self._drafter is not None:
            self._drafter.forget_media()

    # ---- the loop --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(
        self,
        input_batch,
        attn_metadata,
        slot_mappings,
        last_hidden_states,
        aux_hidden_states,
        num_sampled,
        num_rejected,
        last_sampled,  # [max_num_reqs, 1]
        next_prefill_tokens,
        temperature,
        seeds,
        dp_sync_state=None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs=None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Return `[num_reqs, K]` int64 draft tokens, of trees in node order; requests without speculation have zeros.

        vLLM has already committed this step: `total_len` and `all_token_ids` include its tokens.
        """
        if dummy_run:
            if is_profile:
                self.draft_model.profile()
            return self._draft_tokens[: input_batch.num_reqs].zero_()
        plan = self._knobs.now.plan_for(input_batch.num_reqs)
        step = Step.of(input_batch, num_sampled, plan, self.decision, num_speculative_tokens)
        plan, pays = step.plan, plan.num_tokens > 0 and (self.decision is None or self.decision.option.num_tokens > 0)
        self.reading = frozenset()
        if step.rests is not None:
            self._put_in_line(step, np.flatnonzero(step.rests & self._are_in(step, Phase.DRAFTING)))
        self._start(step)
        self._reserve(step)
        if plan.num_tokens:
            start = time.monotonic()
            self._prefill(step)
            drafted = time.monotonic()
            self.reading_s = drafted - start
            tokens, num_nodes = self._draft(step)
            if self._timeline.is_on:
                num_drafted = int(self._are_in(step, Phase.DRAFTING).sum())
                self._timeline.note("drafter", EventKind.PREFILL, start, 0, 0, drafted)
                self._timeline.note("drafter", EventKind.DRAFT, drafted, num_drafted, num_drafted * plan.num_tokens)
        else:
            self._rest(step)
            if not pays:
                self._counters.add("undrafted_steps")
            tokens, num_nodes = self._draft_tokens[: input_batch.num_reqs].zero_(), None
        self._requests.publish(input_batch.idx_mapping, input_batch.req_ids, self._cohort(step), num_nodes)
        return tokens

    @property
    def is_at_rest(self) -> bool:
        """Whether nobody is to be drafted for, and nobody was: then `propose` has nothing to do."""
        rests = self.decision is not None and not self.decision.option.num_tokens
        return rests and not self._requests.in_flight and not self._requests.any_in(Phase.DRAFTING)

    def _cohort(self, step: Step) -> Cohort:
        """Return who of a step is drafted for, at this point of it."""
        return self._requests.cohort(step.batch.idx_mapping_np, step.is_done)

    def _are_in(self, step: Step, *phases: Phase) -> np.ndarray:
        """Return `[num_reqs]` bool: the requests of a step that are in a phase and whose target prefill is done."""
        return step.is_done & self._requests.are_in(step.batch.idx_mapping_np, *phases)

    def _are_active(self, step: Step, *phases: Phase) -> np.ndarray:
        """Return the same of those that do not rest."""
        found = self._are_in(step, *phases)
        return found if step.rests is None else found & ~step.rests

    def _guarded(
        self, phase: str, run: Callable[..., None], step: Step, indices: np.ndarray, *args, is_careful: bool = False
    ) -> None:
        """Run a part of the loop for some of a step's requests. An exception on any rank costs these requests their
        speculation on all of them, never their answer.

        `is_careful`: see `Agreement.run`. What is run at every decode step is not.
        """
        if not len(indices):
            return
        error = self._agreement.run(phase, run, step, indices, *args, is_careful=is_careful)
        if error is None:
            return
        if self._knobs.now.on_draft_error == "raise":
            raise error
        logger.error("vidspec: the draft failed; these requests go on without speculation", exc_info=error)
        self._counters.add("draft_failures")
        # What other requests have left, a rank may have and another not.
        self.forget_media()
        if self._guidance is not None:
            self._guidance.forget_scores()
        for i in indices:
            self._skip(step, i, "draft_error", "the draft failed")

    def _skip(self, step: Step, i: int, reason: str, detail: str) -> None:
        """Give the request at a place of the batch up, and count why."""
        self._give_up(int(step.batch.idx_mapping_np[i]), reason)
        self._counters.skip(reason, step.batch.req_ids[i], detail)

    # ---- start -----------------------------------------------------------------------------------------------------

    def _start(self, step: Step) -> None:
        """Hand the drafter the requests whose target prefill has finished, once their scores are on the host, and those
        that it had no room for when there is some.
        """
        if not (self._arrivals or self._waiting or self._room.has_callers):
            return
        if self.decision is not None and not step.plan.num_tokens:
            return  # nobody is shown to the draft while nothing is drafted
        starters = np.flatnonzero(self._are_active(step, Phase.UNSEEN, Phase.OUTSIDE))
        self._guarded("start of drafts", self._admit, step, starters, is_careful=True)

    def _admit(self, step: Step, indices: np.ndarray) -> None:
        rows = step.batch.idx_mapping_np[indices]
        bounds = dict(zip(rows.tolist(), step.bound[indices].tolist(), strict=True))
        unseen = rows[self._requests.are_in(rows, Phase.UNSEEN)].tolist()
        found = (self._message(row) for row in unseen)
        messages = self._room.call_in(rows, self.drafter.kv) + [message for message in found if message is not None]
        said = [self._admit_one(message, bounds[message.req_state_idx], step) for message in messages]
        goes_on = self._agreement.settle("draft prefill", [answer != Admission.REFUSED for answer in said])
        for message, answer, is_fine_everywhere in zip(messages, said, goes_on, strict=True):
            row = message.req_state_idx
            if not is_fine_everywhere:
                self._give_up(row, "refused" if answer == Admission.REFUSED else "draft_error")
                if answer != Admission.REFUSED:
                    self._counters.skip("draft_error", message.req_id, "the draft failed on another rank")
            elif answer == Admission.ADMITTED:
                self._requests.enter(row, Phase.PREFILLING)
                self._room.is_in(row)
            elif not self._room.turn_away(message, self.drafter.kv):
                self._give_up(row, "pool_full")

    def _admit_one(self, message: PrefillMessage, bound: int, step: Step) -> Admission:
        """Hand the drafter a request; those that rest leave the pool for it where that is full."""
        outcome = self.drafter.admit(message, bound)
        if outcome == Admission.FULL and self._release_resting(step):
            outcome = self.drafter.admit(message, bound)
        return outcome

    def _release_resting(self, step: Step) -> bool:
        """Give up the draft KV of a step's requests that rest; return whether there was any."""
        if step.rests is None:
            return False
        rows = step.batch.idx_mapping_np[step.rests & self._are_in(step, Phase.PREFILLING, Phase.HELD)].tolist()
        for row in rows:
            self._give_up(row, "rested")
        self._counters.add("released_resting", len(rows))
        return bool(rows)

    def _message(self, req_state_idx: int) -> PrefillMessage | None:
        """Return what the drafter is told of a request; None while its scores are on their way, or if it is skipped."""
        if req_state_idx in self._waiting:
            message, pending = self._waiting.pop(req_state_idx)
            return dataclasses.replace(message, **pending.wait()._asdict())
        arrival = self._arrivals.pop(req_state_idx)
        scores = None if self._guidance is None else self._guidance.take(req_state_idx)
        if refusal := self._refusal(arrival):
            reason, detail = refusal
            self._forget_pixels(req_state_idx)
            self._requests.skip(req_state_idx, reason)
            if detail:
                self._counters.skip(reason, arrival.req_id, detail)
            return None
        message = PrefillMessage(arrival.req_id, req_state_idx, arrival.token_ids, arrival.features, way=arrival.way)
        if self._placed is not None:
            placed = self._placed(req_state_idx, len(arrival.token_ids))
            message = dataclasses.replace(message, placed=placed)
        if scores is None:
            return message
        if scores.is_here:
            return dataclasses.replace(message, **scores.wait()._asdict())
        self._waiting[req_state_idx] = (message, scores)
        return None

    def _refusal(self, arrival: Arrival) -> tuple[str, str] | None:
        """Return why a request is not drafted for, and what to say of it ("" for nothing); None if it is."""
        if arrival.has_embeds:
            return "unsupported", "its prompt is one of embeddings, made for the target"
        if arrival.is_structured and self._trees is not None:
            # A grammar is checked along one line of tokens.
            return "structured", "trees do not draft for structured outputs"
        if len(arrival.token_ids) + 1 >= self._req_states.max_seq_len[arrival.req_state_idx]:
            return "finished", ""  # the token just sampled is its last
        return None

    # ---- reserve ---------------------------------------------------------------------------------------------------

    def _reserve(self, step: Step) -> None:
        """Reserve the blocks of this step; requests that no longer fit go on without speculation, if only for now."""
        idx_mapping_np = step.batch.idx_mapping_np
        everyone = slice(None) if step.rests is None else ~step.rests
        if self.drafter.has_room(idx_mapping_np[everyone], step.bound[everyone]):
            return
        known = np.flatnonzero(self._are_active(step, Phase.PREFILLING, Phase.DRAFTING, Phase.HELD))
        is_in = np.zeros(len(idx_mapping_np), dtype=bool)
        is_in[known] = True
        for i, reason, detail in without_room(self.drafter, idx_mapping_np[known], step.bound[known]):
            if reason == "pool_full" and self._release_resting(step):
                return self._reserve(step)
            is_in[known[i]] = False
            if reason != "pool_full":
                self._skip(step, known[i], reason, detail)
                continue
            row = int(idx_mapping_np[known[i]])
            if self._requests.phase[row] == Phase.DRAFTING:
                self._put_in_line(step, known[i : i + 1])
            self._room.hold(row)
        self._room.go_on(idx_mapping_np[is_in & self._are_in(step, Phase.HELD)])
        stuck = self._room.largest_of_all(idx_mapping_np, self.drafter.kv)
        if stuck is not None:
            place = int(np.flatnonzero(idx_mapping_np == stuck)[0])
            self._skip(step, place, "pool_full", "it outgrew the draft's KV pool, and nobody else is to leave it")

    # ---- rest ------------------------------------------------------------------------------------------------------

    def _rest(self, step: Step) -> None:
        """Draft nothing: requests that were drafted for get back in line, to read on when drafting pays again."""
        self._put_in_line(step, self._cohort(step).places_np)

    def _put_in_line(self, step: Step, indices: np.ndarray) -> None:
        """Let the draft go on reading, some time, the text of requests that were drafted for."""
        if not len(indices):
            return  # whoever is drafted for stays who is
        rows = step.batch.idx_mapping_np[indices]
        # What the draft has surely read: its last step began at the length that the target's own began at, of which the
        # host knows a bound, since the scheduler may run ahead of the verification of K drafts.
        was_committed = step.batch.num_computed_tokens_np[indices] - self._knobs.now.num_speculative_tokens
        self.drafter.rest(rows, was_committed)
        self._requests.enter(rows, Phase.PREFILLING)

    # ---- prefill ---------------------------------------------------------------------------------------------------

    def _prefill(self, step: Step) -> None:
        """Let the drafter read on in the prompts that it has not seen whole."""
        if not self.drafter.is_reading:
            return
        in_line = np.flatnonzero(self._are_active(step, Phase.PREFILLING))
        if len(in_line):
            self.reading = frozenset(step.batch.req_ids[i] for i in in_line.tolist())
        self._guarded("draft prefill", self._read_on, step, in_line, is_careful=True)

    def _read_on(self, step: Step, indices: np.ndarray) -> None:
        idx_mapping_np = step.batch.idx_mapping_np[indices]
        done = self.drafter.prefill(
            PrefillStep(idx_mapping_np, step.bound[indices], self._req_states.all_token_ids.gpu)
        )
        self._requests.enter(done.ready, Phase.DRAFTING)
        for req_state_idx in done.ready:
            self._forget_pixels(req_state_idx)
        for req_state_idx in done.failed:
            self._give_up(req_state_idx, "draft_error")

    # ---- draft -----------------------------------------------------------------------------------------------------

    def _draft(self, step: Step) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft for every request that the draft has read.

        Returns:
            `[num_reqs, K]` int64 drafts, zeros of requests without, and `[num_drafted]` nodes of trees, None of chains.
        """
        proposals: list[tuple[Drafts, torch.Tensor | None]] = []
        cohort = self._cohort(step)
        self._guarded("drafting", self._propose, step, cohort.places_np, cohort, proposals)
        if not proposals:
            return self._draft_tokens[: step.batch.num_reqs].zero_(), None
        drafts, picked = proposals[0]
        num_nodes = None if drafts.tree is None else drafts.tree.num_nodes[: len(cohort.places_np)]
        if picked is None:
            return drafts.tokens, num_nodes
        tokens = self._draft_tokens[: step.batch.num_reqs].zero_()
        tokens[picked] = drafts.tokens
        return tokens, num_nodes

    def _places_of(self, cohort: Cohort) -> torch.Tensor:
        """Return the places of a cohort on the device, uploaded once."""
        if self._picked[0] is not cohort:
            self._picked = (cohort, async_tensor_h2d(cohort.places_np, device=self._device))
        return self._picked[1]

    def _propose(self, step: Step, places_np: np.ndarray, cohort: Cohort, proposals: list) -> None:
        """Draft for these requests, and append what is proposed and to which of the batch's, None for all."""
        batch = step.batch
        # The usual step is of the whole batch, and uploads nothing.
        picked = None if cohort.is_whole else self._places_of(cohort)
        num_verified = batch.num_draft_tokens_per_req
        # The rows still speak of the drafts that this step has verified; without one they are vLLM's placeholders.
        had_rows = np.zeros(len(places_np), dtype=bool) if num_verified is None else num_verified[places_np] > 0
        was_verified = had_rows & self._requests.was_drafted(cohort)
        if self._trees is not None and step.plan.shape != "chain":
            self._trees.expect(cohort.drafted_np)
        drafts = self.drafter.draft(
            DraftMessage(
                batch_rows=batch.idx_mapping,
                picked=picked,
                idx_mapping_np=cohort.drafted_np,
                num_sampled=step.num_sampled,
                was_verified=None if was_verified.all() else async_tensor_h2d(was_verified, device=self._device),
                max_drafts=step.plan.num_tokens,
                shape=step.plan.shape,
                cohort=cohort,
            )
        )
        if self._trees is not None and drafts.tree is None:
            self._trees.take_chains(drafts.rows, cohort.drafted_np)
        proposals.append((drafts, picked))
