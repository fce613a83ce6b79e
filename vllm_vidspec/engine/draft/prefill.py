"""DraftPrefill: chunked prefill of the draft's pruned prompts from a FIFO queue; until then requests go undrafted.

A step runs at most what vLLM lets the target's own prefill run in one: the vision tower over the encoder budget's
tokens (`DraftVision`), the language model over the token budget. So a long video delays no other request's decode.
The target commits text meanwhile: the last piece of a prefill catches up on it. The host knows a bound of its length
only (async scheduling); what is fed past the committed text is stale like any rejected draft. Every decision follows
from what the host knows, so tensor-parallel ranks take the same ones.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.draft.kv import DraftKV
from vllm_vidspec.engine.draft.messages import Admission, Prefilled, PrefillMessage, PrefillStep
from vllm_vidspec.engine.draft.model import DraftModel, Layout
from vllm_vidspec.engine.draft.prefill_job import PrefillJob, PrefillPiece
from vllm_vidspec.engine.draft.vision import DraftVision
from vllm_vidspec.engine.draft.vision_cache import VisionCache
from vllm_vidspec.engine.hooks.pixels import SharedPixels
from vllm_vidspec.engine.hooks.target_vision import TargetVision
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.report.observer import Observer
from vllm_vidspec.families import adapter_for
from vllm_vidspec.pruning.prompt import PromptItem, UnsupportedPrompt, choose_kept, plan_prompt, prune
from vllm_vidspec.pruning.sampled import kept_places

logger = init_logger("vllm.vidspec")


class DraftPrefill:
    """Owns the queue of requests in prefill."""

    def __init__(
        self,
        model: DraftModel,
        knobs: Knobs,
        counters: Counters,
        kv: DraftKV,
        cache: VisionCache,
        agreement: Agreement,
        target_vision: TargetVision | None = None,  # see `DraftVision`, as for `pixels`
        pixels: SharedPixels | None = None,
        observers: Sequence[Observer] = (),
    ):
        self.model, self.counters = model, counters
        self._knobs, self._kv, self._agreement = knobs, kv, agreement
        self._adapter = adapter_for(model.hf_config)
        self.vision = DraftVision(
            model, self._adapter, counters, cache, agreement, self._fail, target_vision, pixels, observers
        )
        self._jobs: dict[int, PrefillJob] = {}  # by row
        self._queue: dict[int, PrefillJob] = {}  # by row, those that are not read whole, in order
        self._failed: list[int] = []  # rows, of the step that runs
        self.observers = observers

    # ---- admission: host only --------------------------------------------------------------------------------------

    def add(self, message: PrefillMessage, num_tokens: int = 0) -> Admission:
        """Put a request in the queue and stage its blocks (`Drafter.add`); one that is refused is counted by reason."""
        try:
            job = self._plan(message)
        except UnsupportedPrompt as reason:
            self.counters.skip("unsupported", message.req_id, str(reason))
            return Admission.REFUSED
        except Exception as error:
            self._count_error(message.req_id, error)
            return Admission.REFUSED
        if (answer := self._take_blocks(job, num_tokens)) != Admission.ADMITTED:
            return answer
        plan = job.plan
        self._kv.add(job.req_state_idx, job.num_dropped, plan.pos_delta)
        self._jobs[job.req_state_idx] = self._queue[job.req_state_idx] = job
        self._drop_unfinished()
        num_visual_kept = plan.num_visual - job.num_dropped
        for name in ("prompts", *message.outcome):
            self.counters.add(name)
        self.counters.add("text_tokens", plan.num_tokens - plan.num_visual)
        self.counters.add("visual_tokens_full", plan.num_visual)
        self.counters.add("visual_tokens_kept", num_visual_kept)
        self.counters.set("draft_pool_blocks_used", self._kv.num_used_blocks)
        return Admission.ADMITTED

    def _take_blocks(self, job: PrefillJob, num_tokens: int) -> Admission:
        """Stage the blocks of a prompt; see `add`."""
        num_slots = max(job.num_kept + 1, num_tokens - job.num_dropped) + self._knobs.current.num_speculative_tokens
        if num_slots > self._kv.num_slots:
            why = f"its pruned prompt takes {num_slots} tokens of the draft's KV pool, which has {self._kv.num_slots}"
            self.counters.skip("too_long", job.req_id, why)
            return Admission.REFUSED
        has_room = self._kv.reserve(np.array([job.req_state_idx]), np.array([num_slots]))[0]
        return Admission.ADMITTED if has_room else Admission.FULL

    def _plan(self, message: PrefillMessage, is_ahead: bool = False) -> PrefillJob:
        placed, knobs = message.placed, self._knobs.current.variant(message.prune_variant)
        plan = plan_prompt(
            message.token_ids,
            message.features,
            knobs,
            lambda modality, data, size: self._adapter.item_grid(modality, data, size, self.model.hf_config),
            self.model.full_positions if placed is None else lambda *_: placed,
        )
        if placed is not None:
            plan = dataclasses.replace(plan, items=tuple(self._as_seen(item, placed.positions) for item in plan.items))
        scores = None if message.scores is None else [unit.joined(message.scores) for unit in plan.units]
        is_borrowed = "reused_guidance" in message.outcome
        job = PrefillJob(message.req_id, message.req_state_idx, plan, scores, knobs=knobs, is_borrowed=is_borrowed)
        for number, unit in enumerate(plan.units):
            if (job.compares or is_ahead) and unit.is_choice:
                job.kept += [None] * len(unit.places)
                continue
            guide = None if scores is None else scores[number]
            job.kept += unit.split(choose_kept(unit, knobs, guide, None))
        job.media, job.whole = [None] * len(job.kept), [None] * len(job.kept)
        return job

    def _as_seen(self, item: PromptItem, positions: torch.Tensor) -> PromptItem:
        """Return an item with what the target has kept of it, given `[num_axes, num_tokens]` positions of a prompt."""
        if item.feature.modality != "video" or not self.model.has_own_tower:  # which are those that it kept
            return item
        data = {key: element.data for key, element in item.feature.data.items()}
        found = self._adapter.whole_video(data, self.model.hf_config)
        seen = None if found is None else kept_places(positions[:, item.where], *found)
        if seen is None:
            raise UnsupportedPrompt("what the target has kept of its video (--video-pruning-rate) is not known")
        return dataclasses.replace(item, seen=seen)

    def remove(self, req_state_idx: int) -> None:
        self._jobs.pop(req_state_idx, None)
        self._queue.pop(req_state_idx, None)
        self._drop_unfinished()

    def active_rows(self) -> Iterable[int]:
        return self._jobs

    def requeue(self, idx_mapping_np: np.ndarray, num_tokens: np.ndarray) -> None:
        """Put `[n]` rows that have left the queue back into it: they lack text from `[n]` committed tokens on."""
        for row, length in zip(idx_mapping_np.tolist(), num_tokens.tolist(), strict=True):
            job = self._queue[row] = self._jobs[row]
            job.resume(length)

    @property
    def is_reading(self) -> bool:
        return bool(self._queue)

    # ---- a step ----------------------------------------------------------------------------------------------------

    def step(self, step: PrefillStep) -> Prefilled:
        bounds = dict(zip(step.idx_mapping_np.tolist(), step.num_tokens_upper_bound.tolist(), strict=True))
        due = [job for row, job in self._queue.items() if row in bounds]
        self._failed = []
        self.vision.encode_missing(due)
        alive = self._agreement.all_ranks_and("draft prefill", [self._is_alive(job) for job in due])
        for job, is_alive in zip(due, alive, strict=True):
            if not is_alive:
                self._fail(job, RuntimeError("another rank could not take its vision embeddings"))
        pieces, ready = self._pieces([job for job in due if self._is_alive(job)], bounds)
        error = self._agreement.run("draft prefill", self._forward, pieces, step.text) if pieces else None
        if error is not None:
            for piece in pieces:
                self._fail(piece.job, error)
        ready = [job for job in ready if self._is_alive(job)]
        for job in ready:
            del self._queue[job.req_state_idx]
            job.finish()
        return Prefilled(ready=[job.req_state_idx for job in ready], failed=self._failed)

    def _is_alive(self, job: PrefillJob) -> bool:
        return self._queue.get(job.req_state_idx) is job

    def _fail(self, job: PrefillJob, error: Exception) -> None:
        if self._is_alive(job):
            del self._jobs[job.req_state_idx], self._queue[job.req_state_idx]
            self._drop_unfinished()
            self._failed.append(job.req_state_idx)
            self._count_error(job.req_id, error)

    def _count_error(self, req_id: str, error: Exception) -> None:
        """Count an error in the draft, and log the first, unless errors are to stop the engine."""
        if self._knobs.current.on_draft_error == "raise":
            raise error
        self.counters.add("draft_failures")
        first_line = next(iter(str(error).splitlines()), "")[:200]
        self.counters.skip("draft_error", req_id, f"the draft failed ({type(error).__name__}: {first_line})")
        logger.debug("vidspec: the draft failed for request %s", req_id, exc_info=error)

    # ---- vision ----------------------------------------------------------------------------------------------------

    def encode_ahead(self, message: PrefillMessage) -> bool:
        """Let the tower encode a step's share of a prompt's media before what guides the pruning is known, for the
        cache; return whether there is more. What goes wrong here goes wrong again in `step`, where it has an owner.
        """
        row = message.req_state_idx
        with contextlib.suppress(Exception):
            if row not in self._jobs:
                job = self._plan(message, is_ahead=True)
                job.ahead = {item.name: item for item in (job.plan.items[i] for i in job.unseen())}
                self._jobs[row] = job
            if self.vision.encode_ahead(self._jobs[row].ahead):
                return True
        self._jobs.pop(row, None)
        self._drop_unfinished()
        return False

    def _drop_unfinished(self) -> None:
        """Free what has been encoded in part and no request waits for any more."""
        if unfinished := self.vision.cache.unfinished():
            wanted = {job.plan.items[i].name for job in self._queue.values() for i in job.unseen()}
            for name in unfinished - wanted.union(*(job.ahead for job in self._jobs.values())):
                self.vision.cache.drop(name)

    # ---- language model --------------------------------------------------------------------------------------------

    def _pieces(self, due: list[PrefillJob], bounds: dict[int, int]) -> tuple[list[PrefillPiece], list[PrefillJob]]:
        """Return what the language model reads in this step, and the requests that are ready to be drafted for then."""
        pieces: list[PrefillPiece] = []
        ready: list[PrefillJob] = []
        left = self.model.max_num_tokens
        for job in due:
            if job.unseen():
                continue  # it waits for the tower: those behind it get the language model
            num_kept, start = job.num_kept, job.num_done
            # The first draft feeds the last committed token, so all before it must be there.
            last = bounds[job.req_state_idx] - 1 - job.num_dropped
            end = max(start, min(start + left, num_kept))
            # Text after the prompt is caught up on in one step: next time the bound on it is another.
            if end >= num_kept and (last - start <= left or (not pieces and start >= num_kept)):
                end = last
                ready.append(job)
            if end > start:
                pieces.append(PrefillPiece(job, start, end))
            left -= end - start
            if end < last or left <= 0:
                break
        return pieces, ready

    def _forward(self, pieces: list[PrefillPiece], text: torch.Tensor) -> None:
        """Read pieces; in one forward, but for a piece of text that is longer than one may be."""
        device, size = self.model.device, self.model.max_num_tokens
        if sum(piece.end - piece.start for piece in pieces) > size:
            (piece,) = pieces
            for start in range(piece.start, piece.end, size):
                self._forward([PrefillPiece(piece.job, start, min(start + size, piece.end))], text)
            return
        for piece in pieces:
            if piece.job.prompt is None:
                self._prune(piece.job)
        counts, ends = [piece.end - piece.start for piece in pieces], [piece.end for piece in pieces]
        query_start_loc_np = np.cumsum([0, *counts], dtype=np.int32)
        query_start_loc = async_tensor_h2d(query_start_loc_np, device=device)
        rows = [piece.job.req_state_idx for piece in pieces]
        self.model.forward(
            self._embed(pieces, query_start_loc_np, text),
            async_tensor_h2d(torch.cat([piece.positions() for piece in pieces], dim=1), device=device),
            Layout(query_start_loc, query_start_loc_np, query_start_loc[1:] - query_start_loc[:-1], max(counts)),
            seq_lens=async_tensor_h2d(ends, device=device, dtype=torch.int32),
            seq_lens_upper_bound=np.array(ends),
            block_table=self._kv.block_tables[async_tensor_h2d(rows, device=device)],
            slot_mapping=self._kv.slots(rows, [piece.start for piece in pieces], counts),
        )
        for piece in pieces:
            piece.job.num_done = piece.end

    def _prune(self, job: PrefillJob) -> None:
        """Put a prompt together once all its items are there."""
        kept = [indices for indices in job.kept if indices is not None]
        job.prompt = prune(job.plan, kept)
        media = [embeds for embeds in job.media if embeds is not None]
        job.embeds = torch.cat(media) if media else None
        job.media = []
        for observer in self.observers:
            observer.pruned(job, kept)

    def _embed(self, pieces: list[PrefillPiece], starts: np.ndarray, text: torch.Tensor) -> torch.Tensor:
        """Return the pieces' input embeddings `[num_tokens, hidden_size]`; `starts` says where each begins."""
        device = self.model.device
        token_ids = async_tensor_h2d(torch.cat([piece.token_ids() for piece in pieces]), device=device)
        places: list[torch.Tensor] = []
        media: list[torch.Tensor] = []
        for piece, start in zip(pieces, starts.tolist(), strict=False):
            job, prompt_len = piece.job, piece.job.num_kept
            first, end = max(piece.start, prompt_len), piece.end
            if first < end:
                begin = first + job.num_dropped
                committed = text[job.req_state_idx, begin : begin + end - first]
                token_ids[start + first - piece.start : start + end - piece.start] = committed
            low, high, where = piece.media()
            if low < high:
                assert job.embeds is not None
                media.append(job.embeds[low:high])
                places.append(where + start)
        if any(piece.end > piece.job.num_kept for piece in pieces):
            # Past the committed text the row holds an earlier request's.
            token_ids.clamp_(0, self.model.vocab_size - 1)
        where = async_tensor_h2d(torch.cat(places), device=device) if places else None
        return self.model.embed(token_ids, media, where)
