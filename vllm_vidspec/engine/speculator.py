"""vLLM's speculator interface in front of the drafter: runner state becomes messages, draft failures counters."""

import copy
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vidspec_kernels.dispatch import as_array
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.draft.drafter import Drafter, max_slots_per_request
from vllm_vidspec.engine.draft.messages import DraftMessage, PrefillMessage, PrefillStep
from vllm_vidspec.engine.draft.model import DraftModel, held_bytes, kv_bytes_per_token
from vllm_vidspec.engine.draft.noise import CoupledSampler
from vllm_vidspec.engine.listen.prompts import Guidance, PendingScores
from vllm_vidspec.engine.listen.trees import TargetTrees
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.errors import VidSpecError

logger = init_logger("vllm.vidspec")

# A draft that holds less of its requests than the target does runs out first; this margin over the kept share pays for
# text, and for prompts without video.
_TEXT_SHARE = 0.1

# Of the KV memory, for the draft's vision embeddings.
_VISION_SHARE = 0.02

_UNSEEN, _DRAFTING, _SKIPPED, _PREFILLING = 0, 1, 2, 3


class VidSpecSpeculator(BaseSpeculator):
    """Drafts for every running request that the draft's pool has room for."""

    supports_mm_inputs = False  # the target's embeddings are of no use to the draft: it has a vision tower of its own
    draft_logits = None
    num_extra_query_per_req = 0

    def __init__(
        self, vllm_config, config: VidSpecConfig, device: torch.device, counters: Counters, agreement: Agreement
    ):
        self.vllm_config = vllm_config
        self.config = config
        self.device = device
        self.counters = counters
        self.max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.max_model_len = vllm_config.model_config.max_model_len
        self._agreement = agreement
        self.draft_model = DraftModel(vllm_config, device, config.is_self_draft, agreement)
        self.guidance: Guidance | None = None  # the runner's, once the target is loaded
        self.trees: TargetTrees | None = None  # the runner's too, where drafts can be trees
        self._drafter: Drafter | None = None  # until the KV pool exists
        # Prompts by request id, until the target has seen them; whether their output is structured, and whether the
        # prompt is one of embeddings.
        self._arrivals: dict[str, tuple[list[int], list[Any], bool, bool]] = {}
        # By row, the prompts whose scores are on their way to the host.
        self._held: dict[int, tuple[PrefillMessage, PendingScores]] = {}
        # Request ids of the last step, which of them were drafted for, and how many nodes their trees have.
        self._last_step: tuple[list[str], np.ndarray, torch.Tensor | None] = ([], np.empty(0, dtype=bool), None)
        self._num_nodes: torch.Tensor | None = None  # [num_drafting] of the step's trees, until `_last_step` has it
        self._state = np.full(self.max_num_reqs, _UNSEEN, dtype=np.int8)  # [max_num_reqs]
        self._has_draft = np.zeros(self.max_num_reqs, dtype=bool)  # [max_num_reqs] what `counters.has_draft` says
        # [max_num_reqs, K]
        self._draft_tokens = torch.zeros(
            self.max_num_reqs, config.num_speculative_tokens, dtype=torch.int64, device=device
        )

    @property
    def model(self) -> torch.nn.Module | None:
        """The draft network, for vLLM's shutdown; None while it is the target itself."""
        return None if self.config.is_self_draft else self.draft_model.model

    @property
    def drafter(self) -> Drafter:
        """The drafter; exists once the KV cache is initialised."""
        assert self._drafter is not None
        return self._drafter

    # ---- set-up ----------------------------------------------------------------------------------------------------

    def load(self, target: torch.nn.Module, req_states: Any, sampler: Any) -> None:
        """Load the draft and remember the runner's state tables that messages are made from."""
        before = held_bytes(self.device)
        self.draft_model.load(target)
        self.counters.set("draft_load_bytes", max(0, held_bytes(self.device) - before))
        self._req_states = req_states
        self._sample = CoupledSampler(sampler, self.config.draft_noise)

    def plan_pool(self, available_bytes: int) -> int:
        """Return the size of the draft's KV pool in bytes.

        Args:
            available_bytes: KV memory of this rank, target and draft together.

        Raises:
            VidSpecError: `draft_kv_bytes` or `draft_kv_fraction` is too small for one request.
        """
        config, per_block = self.config, self.draft_model.bytes_per_block
        max_slots = max_slots_per_request(self.max_model_len, config.num_speculative_tokens)
        blocks_per_req = -(-max_slots // self.draft_model.block_size)
        most = (self.max_num_reqs * blocks_per_req + 1) * per_block
        if config.pool.kv_bytes is not None:
            wanted = config.pool.kv_bytes
        elif config.pool.kv_fraction is not None:
            wanted = int(config.pool.kv_fraction * available_bytes)
        else:
            draft, target = kv_bytes_per_token(self.draft_model.config), kv_bytes_per_token(self.vllm_config)
            kept = 1 - min(config.prune.ratio_for("video"), config.prune.ratio_for("image"))
            share = min(1.0, kept + _TEXT_SHARE) * draft
            wanted = max(int(available_bytes * share / (target + share)), (blocks_per_req + 1) * per_block)
        if wanted < 2 * per_block:
            raise VidSpecError(f"a draft KV pool of {wanted} bytes holds nothing; one block takes {per_block} bytes")
        self._pool_bytes = min(wanted, most)
        return self._pool_bytes

    def plan_vision_cache(self, available_bytes: int) -> int:
        """Return the bytes that the draft's vision embeddings take of a rank's KV memory.

        Raises:
            VidSpecError: `draft_encoder_bytes` leaves nothing.
        """
        wanted = self.config.pool.encoder_bytes
        if wanted is None:
            multimodal = self.vllm_config.model_config.multimodal_config
            shows = multimodal is not None and any(map(multimodal.get_limit_per_prompt, ("image", "video")))
            wanted = int(_VISION_SHARE * available_bytes) if shows else 0
        if wanted >= available_bytes:
            raise VidSpecError(
                f"draft_encoder_bytes: {wanted} leaves nothing of the {available_bytes} bytes of KV memory"
            )
        self._vision_bytes = wanted
        return wanted

    def init_kv(self, encoder_cache: Any, allocation: Callable[[], AbstractContextManager]) -> None:
        """Allocate the pool; the drafter is ready afterwards.

        Args:
            encoder_cache: vLLM's, of the target; None for a target without media.
            allocation: Makes what is entered while memory is taken.
        """
        shares = self.config.is_self_draft and encoder_cache is not None
        with allocation():
            cache = self.draft_model.make_vision_cache(self._vision_bytes)
        num_blocks = self.draft_model.init_kv(self._pool_bytes, allocation())
        self._drafter = Drafter(
            self.draft_model,
            self.config,
            self._sample,
            self.counters,
            num_blocks,
            self.max_num_reqs,
            self.max_model_len,
            cache,
            self._agreement,
            shared=encoder_cache.encoder_outputs if shares else {},
            fills_trees=(
                self.vllm_config.scheduler_config.async_scheduling
                if self.config.tree.fill is None
                else self.config.tree.fill
            ),
        )
        draft, target = kv_bytes_per_token(self.draft_model.config), kv_bytes_per_token(self.vllm_config)
        for name, value in (
            ("draft_pool_blocks_total", num_blocks - 1),
            ("draft_pool_bytes", num_blocks * self.draft_model.bytes_per_block),
            ("draft_encoder_bytes", cache.num_bytes),
            ("draft_kv_bytes_per_token", draft),
            ("target_kv_bytes_per_token", target),
        ):
            self.counters.set(name, value)

    def init_cudagraph_manager(self, cudagraph_mode) -> None:
        """The draft's forwards are not captured."""

    def capture(self) -> None:
        """The draft's forwards are not captured."""

    # ---- serving ---------------------------------------------------------------------------------------------------

    def forget_media(self) -> None:
        """Drop the draft's vision embeddings: weights have changed, or the memory that holds them has."""
        if self._drafter is not None:
            self._drafter.prefills.cache.clear()

    def arrive(
        self,
        req_id: str,
        token_ids: list[int],
        features: list[Any],
        is_structured: bool = False,
        has_embeds: bool = False,
    ) -> None:
        """Keep a new or resumed request's prompt on the host until its target prefill is done.

        Args:
            req_id: vLLM's request id.
            token_ids: Prompt, and after a preemption the output so far.
            features: vLLM's multimodal features in prompt order.
            is_structured: Whether a grammar constrains the output.
            has_embeds: Whether the prompt is one of embeddings, whose `token_ids` mean nothing.
        """
        # Copies, which keep the pixels: vLLM may drop its own once the target has looked at them.
        features = [copy.copy(feature) for feature in features]
        self._arrivals[req_id] = (token_ids, features, is_structured, has_embeds)
        if self.guidance is not None and not has_embeds:
            self.guidance.arrive(req_id, token_ids, features)

    def num_drafted(self) -> dict[str, int]:
        """Return how many draft tokens each request of the last step has, 0 where it runs without speculation."""
        req_ids, live, num_nodes = self._last_step
        counts = np.where(live, self.config.num_speculative_tokens, 0)
        if num_nodes is not None:
            counts[live] = num_nodes.cpu().numpy()  # without async scheduling vLLM has waited for this step anyway
        return dict(zip(req_ids, counts.tolist(), strict=True))

    def release(self, req_id: str) -> None:
        """Free what a request holds; called before the runner frees its row."""
        self._arrivals.pop(req_id, None)
        if self.guidance is not None:
            self.guidance.release(req_id)
        row = self._req_states.req_id_to_index.get(req_id)
        if row is not None:
            self._forget(row, _UNSEEN)

    def forget_all(self) -> None:
        """Give every running request up, because the contents of the pool and the cache are about to be lost."""
        for row in np.flatnonzero(np.isin(self._state, (_PREFILLING, _DRAFTING))):
            self._forget(int(row), _SKIPPED)
        self.forget_media()

    def _forget(self, row: int, state: int) -> None:
        self._held.pop(row, None)
        if self._drafter is not None:
            self._drafter.release(row)
        if self.trees is not None:
            self.trees.forget(row)
        self._state[row] = state
        if self._has_draft[row]:
            # vLLM may pad the row's next request with placeholders for drafts: nobody has proposed those.
            self._has_draft[row] = False
            self.counters.has_draft[row : row + 1].zero_()

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
        num_reqs = input_batch.num_reqs
        output = self._draft_tokens[:num_reqs].zero_()
        if dummy_run:
            if is_profile:
                self.draft_model.profile()
            return output
        max_drafts = self.config.num_speculative_tokens if num_speculative_tokens is None else num_speculative_tokens
        rows_np = input_batch.idx_mapping_np
        done = self._prefill_done(input_batch)  # [num_reqs]
        unseen = np.flatnonzero(done & (self._state[rows_np] == _UNSEEN))
        self._guarded("start of drafts", self._start, input_batch, unseen, is_careful=True)
        # The last draft of this step may commit K more tokens and the target one.
        bound = input_batch.seq_lens_cpu_upper_bound.numpy()[:num_reqs].astype(np.int64) + 1
        self._grow(input_batch, rows_np, bound, done)
        in_line = np.flatnonzero(done & (self._state[rows_np] == _PREFILLING))
        self._guarded("draft prefill", self._prefill, input_batch, in_line, bound, is_careful=True)
        live = done & (self._state[rows_np] == _DRAFTING)
        self._num_nodes = None
        if live.any():
            live_indices = np.flatnonzero(live)
            self._guarded(
                "drafting", self._draft, input_batch, live_indices, output, last_sampled, num_sampled, bound, max_drafts
            )
            live &= self._state[rows_np] == _DRAFTING
        if (self._has_draft[rows_np] != live).any():
            self._has_draft[rows_np] = live
            self.counters.has_draft[input_batch.idx_mapping] = async_tensor_h2d(live, device=self.device)
        self._last_step = (input_batch.req_ids, live, self._num_nodes)
        return output

    @staticmethod
    def _prefill_done(input_batch) -> np.ndarray:
        """Return `[num_reqs]` bool: the target's prefill is complete, so this step sampled a token."""
        computed = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        if input_batch.num_draft_tokens_per_req is not None:
            computed = computed - input_batch.num_draft_tokens_per_req
        return computed >= input_batch.prefill_len_np

    def _guarded(
        self, phase: str, step: Callable, input_batch, batch_indices: np.ndarray, *args, is_careful: bool = False
    ) -> None:
        """Run a step of the draft; an exception on any rank costs these requests their speculation on all of them,
        never their answer.

        `is_careful`: see `Agreement.run`. A step of every decode step is not.
        """
        if not len(batch_indices):
            return
        error = self._agreement.run(phase, step, input_batch, batch_indices, *args, is_careful=is_careful)
        if error is None:
            return
        if self.config.on_draft_error == "raise":
            raise error
        logger.error("vidspec: the draft failed; these requests go on without speculation", exc_info=error)
        # What other requests have left, a rank may have and another not.
        self.forget_media()
        if self.guidance is not None:
            self.guidance.forget_scores()
        for i in batch_indices:
            self.release(input_batch.req_ids[i])
            self._state[input_batch.idx_mapping_np[i]] = _SKIPPED
            self.counters.skip("draft_error", input_batch.req_ids[i], "the draft failed")

    def _start(self, input_batch, batch_indices: np.ndarray) -> None:
        """Hand the drafter the requests whose target prefill has finished, once their scores are on the host."""
        messages = []
        for i in batch_indices:
            message = self._message(int(input_batch.idx_mapping_np[i]), input_batch.req_ids[i])
            if message is not None:
                messages.append(message)
        admitted = [self.drafter.admit(message) for message in messages]
        for message, is_in, is_in_everywhere in zip(
            messages, admitted, self._agreement.settle("draft prefill", admitted), strict=True
        ):
            self._state[message.row] = _PREFILLING if is_in_everywhere else _SKIPPED
            if is_in and not is_in_everywhere:
                self._forget(message.row, _SKIPPED)
                self.counters.skip("draft_error", message.req_id, "the draft failed on another rank")

    def _message(self, row: int, req_id: str) -> PrefillMessage | None:
        """Return what the drafter is told of a request; None while its scores are on their way, or if it is skipped."""
        if row in self._held:
            message, pending = self._held.pop(row)
            return dataclasses.replace(message, **pending.wait()._asdict())
        token_ids, features, is_structured, has_embeds = self._arrivals.pop(req_id)
        scores = None if self.guidance is None else self.guidance.take(req_id)
        if has_embeds:
            self._state[row] = _SKIPPED
            self.counters.skip("unsupported", req_id, "its prompt is one of embeddings, made for the target")
            return None
        if is_structured and self.trees is not None:
            # A grammar is checked along one line of tokens.
            self._state[row] = _SKIPPED
            self.counters.skip("structured", req_id, "trees do not draft for structured outputs")
            return None
        if len(token_ids) + 1 >= self._req_states.max_seq_len[row]:
            self._state[row] = _SKIPPED  # the token just sampled is its last
            return None
        message = PrefillMessage(req_id, row, token_ids, features)
        if scores is None:
            return message
        if scores.is_here:
            return dataclasses.replace(message, **scores.wait()._asdict())
        self._held[row] = (message, scores)
        return None

    def _grow(self, input_batch, rows_np: np.ndarray, bound: np.ndarray, done: np.ndarray) -> None:
        """Reserve the blocks of this step; requests that no longer fit go on without speculation."""
        growing = np.flatnonzero(done & np.isin(self._state[rows_np], (_PREFILLING, _DRAFTING)))
        held = self.drafter.holds(rows_np[growing], bound[growing])
        for i in growing[~held]:
            self._forget(int(rows_np[i]), _SKIPPED)
            self.counters.skip("too_long", input_batch.req_ids[i], self.drafter.context_detail)
        growing = growing[held]
        fits = self.drafter.grow(rows_np[growing], bound[growing])
        for i in growing[~fits]:
            self._forget(int(rows_np[i]), _SKIPPED)
            self.counters.skip("pool_full", input_batch.req_ids[i], "it outgrew the draft's KV pool")

    def _prefill(self, input_batch, batch_indices: np.ndarray, bound: np.ndarray) -> None:
        """Let the drafter read on in the prompts that it has not seen whole."""
        rows = input_batch.idx_mapping_np[batch_indices]
        done = self.drafter.prefill(PrefillStep(rows, bound[batch_indices], self._req_states.all_token_ids.gpu))
        self._state[done.ready] = _DRAFTING
        for row in done.failed:
            self._forget(row, _SKIPPED)

    def _draft(
        self,
        input_batch,
        batch_indices: np.ndarray,
        output: torch.Tensor,
        last_sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        bound: np.ndarray,
        max_drafts: int,
    ) -> None:
        states = self._req_states
        is_whole_batch = len(batch_indices) == input_batch.num_reqs
        # The usual step is of the whole batch, and uploads nothing.
        indices = None if is_whole_batch else async_tensor_h2d(batch_indices, device=self.device)
        rows = input_batch.idx_mapping if indices is None else input_batch.idx_mapping[indices]
        rows_np = input_batch.idx_mapping_np[batch_indices]
        num_tokens = states.total_len.gpu
        row, text = as_array(rows), as_array(states.all_token_ids.gpu)
        previous = torch.as_tensor(text[row, as_array(num_tokens)[row] - 2])
        num_verified = input_batch.num_draft_tokens_per_req
        # `_has_draft` still speaks of the drafts that this step has verified; without one they are vLLM's placeholders.
        was_verified = self._has_draft[rows_np] & (False if num_verified is None else num_verified[batch_indices] > 0)
        drafts = self.drafter.draft(
            DraftMessage(
                rows=rows,
                rows_np=rows_np,
                last_tokens=torch.stack((previous.to(torch.int64), last_sampled[rows, 0]), dim=1),
                num_tokens=num_tokens,
                num_tokens_upper_bound=bound[batch_indices],
                num_accepted=(num_sampled if indices is None else num_sampled[indices]) - 1,
                was_verified=None if was_verified.all() else async_tensor_h2d(was_verified, device=self.device),
                path=None if self.trees is None else self.trees.path[rows],
                max_drafts=max_drafts,
                shape=self.config.shape_for(input_batch.num_reqs),
            )
        )
        if indices is None:
            output[:, : drafts.tokens.shape[1]] = drafts.tokens
        else:
            output[indices, : drafts.tokens.shape[1]] = drafts.tokens
        if self.trees is not None:
            self.trees.store(rows, rows_np, drafts.tree)
        if drafts.tree is not None:
            self._num_nodes = drafts.tree.num_nodes[: len(rows_np)]
