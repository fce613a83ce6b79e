"""The drafter: prefills pruned prompts and proposes drafts; it takes messages and never sees the model runner."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.utils.mem_utils import format_gib

from vidspec_kernels import StepTables, begin_step, warm_up
from vllm_vidspec.config import Plan
from vllm_vidspec.drafting import make_policy
from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.draft import messages
from vllm_vidspec.engine.draft.chains import ChainDrafter
from vllm_vidspec.engine.draft.forwards import DraftBuffers, Forwards
from vllm_vidspec.engine.draft.graphs import DraftGraphs, Part, Run
from vllm_vidspec.engine.draft.kv import UNBOUNDED, DraftKV
from vllm_vidspec.engine.draft.memory import DraftMemory, max_slots_per_request
from vllm_vidspec.engine.draft.model import DraftModel, kv_bytes_per_token
from vllm_vidspec.engine.draft.noise import CoupledSampler, Processed
from vllm_vidspec.engine.draft.prefill import DraftPrefill
from vllm_vidspec.engine.draft.score_blocks import rows_per_block
from vllm_vidspec.engine.draft.target_kv import TargetBlocks, TargetKV
from vllm_vidspec.engine.draft.target_prefill import TargetPrefill
from vllm_vidspec.engine.draft.trees import TakeTrees, TreeDrafter
from vllm_vidspec.engine.hooks.pixels import SharedPixels
from vllm_vidspec.engine.hooks.target_vision import TargetVision
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.report.observer import Observer
from vllm_vidspec.engine.tree_attention import TreeAttention

logger = init_logger("vllm.vidspec")


@dataclass(frozen=True, kw_only=True)
class DraftContext:
    """What a drafter works with; in the target's process and in one of its own."""

    model: DraftModel
    knobs: Knobs
    sample: CoupledSampler
    counters: Counters
    agreement: Agreement
    graphs: DraftGraphs
    memory: DraftMemory  # what of the rank's the drafter allocates, inside `allocation()`
    committed: messages.Committed
    attention: TreeAttention | None  # for trees, and the two tokens fed first where the layers' own is slow
    max_num_reqs: int
    max_model_len: int
    allocation: Callable[[], AbstractContextManager] = contextlib.nullcontext
    target_vision: TargetVision | None = None  # whose embeddings the draft is shown; None: its own tower's
    pixels: SharedPixels | None = None  # what the target has copied to the device; None in a process of its own
    fills_trees: bool = False  # see `TreeDrafter`; `take_trees` too
    take_trees: TakeTrees | None = None
    target: TargetBlocks | None = None  # where the draft's KV lies in the target's cache; None: it has its own
    max_run: int = 0  # most tokens of a chain that `go_on` draws behind what `draft` has; 0: it is never asked
    observers: Sequence[Observer] = ()


class Drafter:
    """Owns what the draft keeps of every persistent row: its KV, its place in the prefill queue, its policy."""

    def __init__(self, context: DraftContext):
        model, sample, counters, attention = context.model, context.sample, context.counters, context.attention
        graphs, max_num_reqs, config = context.graphs, context.max_num_reqs, context.knobs.current
        K = self._num_speculative_tokens = config.num_speculative_tokens
        self.model, self.counters, self.attention = model, counters, attention
        self._knobs, self._sample, self._graphs = context.knobs, sample, graphs
        self._max_model_len, self._max_run = context.max_model_len, context.max_run
        with context.allocation():
            cache = model.make_vision_cache(context.memory.vision_bytes)
        tree_shapes = sorted(config.shapes - {"chain"})
        sizes = (model.block_size, max_num_reqs, max_slots_per_request(context.max_model_len, K), model.device)
        self.kv: DraftKV
        if context.target is None:
            num_blocks = model.init_kv(context.memory.pool_bytes, context.allocation())
            caches = attention.caches() if attention is not None and tree_shapes else None
            self.kv = DraftKV(num_blocks, *sizes, caches)
        else:
            model.share_kv()
            self.kv = TargetKV(context.target, *sizes)
        if why := model.why_no_graphs:
            graphs.give_up(why)
        self.prefills = (DraftPrefill if context.target is None else TargetPrefill)(
            model,
            context.knobs,
            counters,
            self.kv,
            cache,
            context.agreement,
            context.target_vision,
            context.pixels,
            context.observers,
        )
        policies = {shape: make_policy(shape, config, max_num_reqs, model.device) for shape in tree_shapes}
        width = max((policy.max_frontier for policy in policies.values()), default=0)
        self.buffers = DraftBuffers(model, self.kv, max_num_reqs, width, K)
        (num_tokens, text, last_sampled, path), kv = context.committed, self.kv
        of_draft = (kv.num_dropped, kv.pos_delta, kv.block_tables, kv.fed if kv.feeds_again else None)
        self._tables = StepTables(num_tokens, text, last_sampled, *of_draft, path)
        num_rows = min(max_num_reqs * max(width, 1), rows_per_block(model.vocab_size))
        num_candidates = max((policy.num_candidates for policy in policies.values()), default=0)
        sample.reserve(num_rows, model.vocab_size, model.device, num_candidates)
        forwards = Forwards(model, self.kv, self.buffers, attention)
        # [max_num_reqs] see `has_room`; rows without drafts need none
        self._capacity_limit = np.full(max_num_reqs, UNBOUNDED, dtype=np.int64)
        # Of the last step, and whether its logits go through vLLM's processors.
        self._draft_batch: object | None = None
        self._is_processed = False
        # Of the last step, for `go_on`: requests, padding included, processors, drafts; and how many tokens may follow.
        self._step: tuple[int, Processed | None, messages.Drafts] | None = None
        self._num_more = 0
        self.chains = ChainDrafter(forwards, sample, graphs, self._max_run > 0) if "chain" in config.shapes else None
        fills, take = context.fills_trees, context.take_trees
        self.trees = {  # by shape
            shape: TreeDrafter(forwards, sample, graphs, shape, policy, fills, take)
            for shape, policy in policies.items()
        }
        counters.set("draft_pool_blocks_total", kv.num_blocks - 1)
        counters.set("draft_pool_bytes", kv.num_blocks * model.bytes_per_block)
        counters.set("draft_encoder_bytes", cache.num_bytes)
        counters.set("draft_kv_bytes_per_token", kv_bytes_per_token(model.config))

    # ---- prefill ---------------------------------------------------------------------------------------------------

    def add(self, message: messages.PrefillMessage, num_tokens: int = 0) -> messages.Admission:
        """Take a request in, if there is room. `num_tokens` bounds its length, where that is past the prompt by now."""
        outcome = self.prefills.add(message, num_tokens)
        if outcome == messages.Admission.ADMITTED:
            self.enter(message.req_state_idx)
        return outcome

    def enter(self, req_state_idx: int) -> None:
        """Expect steps of a row's new request: they need room, and its trees begin anew."""
        self._capacity_limit[req_state_idx] = -1
        for trees in self.trees.values():
            trees.policy.reset_rows(np.array([req_state_idx]))

    def prefill(self, step: messages.PrefillStep) -> messages.Prefilled:
        start = time.perf_counter()
        done = self.prefills.step(step)
        self.counters.add("draft_prefill_us", int(1e6 * (time.perf_counter() - start)))
        return done

    # ---- draft -----------------------------------------------------------------------------------------------------

    def holds(self, idx_mapping_np: np.ndarray, num_tokens_upper_bound: np.ndarray) -> np.ndarray:
        """Return `[n]` bool: the draft's context, which may be the shorter one, has room for the next step (as far as
        the target's has), and so would the pool have if it had no other request: else there is nothing to wait for.
        """
        dropped, wanted = self.kv.num_dropped_np[idx_mapping_np], num_tokens_upper_bound + self._num_speculative_tokens
        longest = np.minimum(wanted, self._max_model_len)
        has_entries = longest - dropped <= self.model.max_model_len
        has_positions = longest + self.kv.pos_delta_np[idx_mapping_np] <= self.model.num_positions
        return has_entries & has_positions & (wanted - dropped <= self.kv.num_slots)

    def reserve(self, idx_mapping_np: np.ndarray, num_tokens_upper_bound: np.ndarray) -> np.ndarray:
        """Make room for the next step, once a step, and send its tables; return `[n]` bool, False: the pool is full."""
        kv, model, longest = self.kv, self.model, self._max_model_len
        dropped, delta = kv.num_dropped_np[idx_mapping_np], kv.pos_delta_np[idx_mapping_np]
        fits = kv.reserve(idx_mapping_np, num_tokens_upper_bound + self._num_speculative_tokens - dropped)
        kv.apply()
        # Up to which bound of the committed length the next step has entries and a context.
        ends = np.stack((model.max_model_len + dropped, model.num_positions - delta))
        ends = np.where(ends >= longest, UNBOUNDED, ends)  # what the target's context does not reach is no end
        limit = np.minimum(ends.min(axis=0), kv.capacity_np[idx_mapping_np] + dropped)
        self._capacity_limit[idx_mapping_np] = limit - self._num_speculative_tokens
        return fits

    def has_room(self, idx_mapping_np: np.ndarray, num_tokens_upper_bound: np.ndarray) -> bool:
        """Return whether `holds` and `reserve` have nothing to do for `[n]` rows: most steps read one table."""
        return not (num_tokens_upper_bound > self._capacity_limit[idx_mapping_np]).any()

    def draft(self, message: messages.DraftMessage) -> messages.Drafts:
        start = time.perf_counter()
        buffers, rows_np = self.buffers, message.idx_mapping_np
        if message.draft_batch is None or message.draft_batch is not self._draft_batch:
            self._draft_batch, self._is_processed = message.draft_batch, self._sample.needs_processors(rows_np)
        num_reqs = self._graphs.size_for(len(rows_np), self._width(message.shape), self._is_processed)
        self._begin(message, num_reqs)
        rows, drafts = buffers.of(len(rows_np))
        processed = Processed(self._sample, rows, rows_np) if self._is_processed else None
        num_drafts, tree, num_forwards = message.max_drafts, None, max(1, message.max_drafts)
        if message.shape == "chain":
            assert self.chains is not None
            is_graph = self.chains.draft(num_reqs, num_drafts, processed)
        else:
            trees = self.trees[message.shape]
            tree = trees.policy.tree
            num_forwards, is_graph = trees.draft(num_reqs, num_drafts, rows_np, processed)
        self._count(num_forwards, is_graph, start)
        found = messages.Drafts(rows, drafts, tree)
        self._step, self._num_more = (num_reqs, processed, found), self._max_run
        return found

    def can_go_on(self, idx_mapping_np: np.ndarray, num_tokens_upper_bound: np.ndarray) -> bool:
        """Return whether `go_on` can follow: the `[n]` rows are the last step's, whose tokens so many are now."""
        return self._num_more > 0 and self.has_room(idx_mapping_np, num_tokens_upper_bound)

    def go_on(self) -> messages.Drafts:
        """Draw one token more behind the last of each of the last step's chains; it is in the first column."""
        assert self.chains is not None and self._step is not None
        start = time.perf_counter()
        num_reqs, processed, drafts = self._step
        is_graph = self.chains.go_on(num_reqs, processed)
        self._num_more -= 1
        self._count(1, is_graph, start)
        return drafts

    def _count(self, num_forwards: int, is_graph: bool, start: float) -> None:
        self.counters.add("draft_steps")
        self.counters.add("draft_forwards", num_forwards)
        if self._graphs.is_wanted and not is_graph:
            self.counters.add("draft_eager_steps")
        self.counters.add("draft_decode_us", int(1e6 * (time.perf_counter() - start)))

    def _begin(self, message: messages.DraftMessage, num_reqs: int) -> None:
        begin_step(
            message.batch_rows,
            message.picked,
            message.num_sampled,
            message.was_verified,
            self._sample.temperature,
            self._sample.seeds,
            self._tables,
            self.buffers.step,
            size=num_reqs,
            block_size=self.kv.block_size,
            max_position=self.model.num_positions - 1,
            max_drafts=self._num_speculative_tokens + self._max_run,
        )

    def warm_up(self) -> None:
        """Compile and load what every step launches of its own, and the draft's matrices, on CUDA."""
        self.model.warm_up()
        step, level = self.buffers.step, self.buffers.level
        warm_up.warm_begin_step(self._tables, step, self._sample.temperature is None)
        if self.chains is not None:
            warm_up.warm_next_level(step, level, self.kv.fed)
        if self.trees:
            warm_up.warm_next_level(step, level, self.kv.fed, self._num_speculative_tokens + 1)
        if self.attention is not None:
            width = max((self._width(shape) for shape in self.trees), default=2)
            self.attention.warm_up(self.kv.block_tables, self.model.dtype, width)
        wants_log_probs = {trees.policy.needs_log_probs for trees in self.trees.values()}
        self._sample.warm_up(self.model.dtype, self.chains is not None, wants_log_probs)
        for trees in self.trees.values():
            trees.policy.warm_up(trees.fills)
        if self.kv.caches is not None:
            warm_up.warm_kv_compact(self.kv.caches, self.kv.block_tables, self._num_speculative_tokens)

    # ---- graphs ----------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        if not self._graphs.is_on:
            return
        parts: dict[Part, Run] = {}
        num_processed = 0
        for is_processed in (False, True):
            num_others = len(parts)
            for num_reqs, plan in self._plans(is_processed):
                drafter = self.chains if plan.shape == "chain" else self.trees[plan.shape]
                assert drafter is not None
                parts |= drafter.parts(num_reqs, plan.num_tokens, is_processed)
            num_processed = len(parts) - num_others

        rows = self.buffers.step.rows[:0]
        nobody = messages.DraftMessage(rows, None, np.zeros(0, dtype=np.int64), rows.int(), None, 0)

        def prepare(key: Part) -> Run:
            self._begin(nobody, key.num_tokens)
            return parts[key]

        start, before = time.perf_counter(), _free_bytes(self.model.device)
        self._graphs.capture_parts(parts, prepare)
        taken, took_s = format_gib(before - _free_bytes(self.model.device)), time.perf_counter() - start
        logger.info(
            "vidspec: %d draft CUDA graphs, %d of them for processed logits alone, %s GiB, %.1f s",
            *(len(parts), num_processed, taken, took_s),
        )

    def _plans(self, is_processed: bool) -> Iterator[tuple[int, Plan]]:
        """Yield padded numbers of requests with what as many, or more of which some are not drafted for, may draft."""
        config, plans = self._knobs.current, self._knobs.current.plans
        if config.adaptive_tokens:  # any batch size may be given any of them
            for plan in config.choices(has_graphs=True):
                for size in self._graphs.sizes_of(self._width(plan.shape), is_processed):
                    yield size, plan
            return
        for shape in sorted({row.plan.shape for row in plans if row.plan.num_tokens}):
            low = 1
            for size in self._graphs.sizes_of(self._width(shape), is_processed):
                for plan in {row.plan for row in plans if row.last >= low or row is plans[-1]}:
                    if plan.shape == shape:
                        yield size, plan
                low = size + 1

    def _width(self, shape: str) -> int:
        return 2 if shape == "chain" else max(2, self.trees[shape].policy.max_frontier)

    # ---- memory ---------------------------------------------------------------------------------------------------

    def remove(self, req_state_idx: int) -> None:
        self.prefills.remove(req_state_idx)
        self.kv.remove(req_state_idx)
        self._capacity_limit[req_state_idx] = UNBOUNDED
        self.counters.set("draft_pool_blocks_used", self.kv.num_used_blocks)

    def active_rows(self) -> Iterable[int]:
        return (*np.flatnonzero(self.kv.capacity_np).tolist(), *self.prefills.active_rows())

    def forget_media(self) -> None:
        self.prefills.vision.cache.clear()


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def no_room_for(message: messages.PrefillMessage) -> str:
    """Return what to say of a request whose prompt the pool has no room for."""
    return f"the draft's KV pool has no room for its prompt of {len(message.token_ids)} tokens, pruned"


def without_room(
    drafter: Drafter, idx_mapping_np: np.ndarray, num_tokens_upper_bound: np.ndarray
) -> Iterator[tuple[int, str, str]]:
    """Make room for the next step of `[n]` rows; yield those without any, why, and what to say; too long ones first."""
    if drafter.has_room(idx_mapping_np, num_tokens_upper_bound):
        return
    is_held, model = drafter.holds(idx_mapping_np, num_tokens_upper_bound), drafter.model
    for i in np.flatnonzero(~is_held).tolist():
        limits = f"context of {model.max_model_len} tokens and {model.num_positions} positions"
        pool = f"its KV pool of {drafter.kv.num_slots} tokens"
        yield i, "too_long", f"it is longer than the draft's {limits}, or than {pool}"
    held = np.flatnonzero(is_held)
    fits = drafter.reserve(idx_mapping_np[held], num_tokens_upper_bound[held])
    for i in held[~fits].tolist():
        yield i, "pool_full", "it outgrew the draft's KV pool"
