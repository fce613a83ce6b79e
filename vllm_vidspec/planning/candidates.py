"""Candidates: what each way of drafting comes to at a batch size, in speed and in memory; plain Python."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vllm_vidspec.config.fields import PruneKnobs
from vllm_vidspec.config.static_tree import SPECVLM_PATHS
from vllm_vidspec.planning import pool
from vllm_vidspec.planning.acceptance import Agreement
from vllm_vidspec.planning.question import Question, check
from vllm_vidspec.planning.roofline import (
    MemorySplit,
    Placement,
    forward_seconds,
    kv_bytes,
    memory_split,
    prefill_seconds,
    weight_bytes,
)
from vllm_vidspec.planning.speed import run_streams, speedup, window_of

NONE, CHAIN, TREE, PARALLEL = SHAPES = ("none", "chain", "tree-static", "parallel")
MOST_CHAIN = 10
WINDOWS = (16, 8, 4, 2)  # greatest windows that are tried
# Nodes that have children, by level: what each draft forward of SpecVLM's tree computes; the root first.
TREE_WIDTHS = (1, *(len({p[:-1] for p in SPECVLM_PATHS if len(p) == depth}) for depth in range(2, 6)))
_IMAGES_KEPT = 1 - PruneKnobs().ratio_for("image")
_BLOCK = 16  # tokens of a KV block, as vLLM has it by default
# Tokens that a parallel run is followed for: of a row, and where only its place among others counts.
LONG, SHORT = 20_000, 3000


@dataclass(frozen=True)
class Candidate:
    """What one way of drafting comes to at a batch size, all of it modelled."""

    shape: str  # one of SHAPES
    num_tokens: int  # K, drafts of a step
    prune_ratio: float  # r
    speedup: float  # decode speed over vanilla's at this batch size
    answer_speedup: float  # the same with the draft's prefill spread over the answer: what candidates are compared by
    acceptance_length: float  # tau
    target_s: float  # T_t, vanilla's step
    verify_s: float  # T_t^K, the target's step over all drafts
    draft_s: float  # all draft forwards of a step; in parallel one
    memory: MemorySplit  # of a card of the target's
    drafter_memory: MemorySplit | None = None  # of a card of the parallel drafter's own, else None

    @property
    def fits(self) -> bool:
        return self.memory.fits and (self.drafter_memory is None or self.drafter_memory.fits)


class Candidates:
    """What could be done about one question, at any batch size; the question is checked."""

    def __init__(self, question: Question):
        check(question)
        self.question = question
        self._place = Placement(question.gpu, question.ranks, question.assumed)
        self._own_place = Placement(question.gpu, max(1, question.draft_gpus), question.assumed)
        self._target_scale = self._draft_scale = 1.0
        if question.target_ms is not None:
            self._target_scale = question.target_ms / 1e3 / self.target_seconds(1, 1)
        if question.draft_ms is not None:
            place = self._place if question.may_be_sequential else self._own_place
            modelled = self.draft_seconds(1, 1, question.prune_ratios[0], place)
            self._draft_scale = question.draft_ms / 1e3 / modelled

    def target_seconds(self, batch: int, rows: int, is_tree: bool = False) -> float:
        """Return T_t of `rows` tokens a request, the host's share included; scaled to what was measured, if it was."""
        asked = self.question
        forward = forward_seconds(asked.target, self._place, batch, rows, asked.context, is_tree)
        return self._target_scale * (forward + asked.assumed.step_s)

    def draft_seconds(self, batch: int, rows: int, prune_ratio: float, place: Placement) -> float:
        asked = self.question
        context = asked.draft_context(prune_ratio)
        return self._draft_scale * forward_seconds(asked.draft, place, batch, rows, context)

    def vanilla(self, batch: int) -> Candidate:
        seconds = self.target_seconds(batch, 1)
        return Candidate(NONE, 0, 0.0, 1.0, 1.0, 1.0, seconds, seconds, 0.0, self._memory(batch, None))

    def chain(self, batch: int, num_tokens: int, prune_ratio: float, agreement: Agreement | None = None) -> Candidate:
        """Return what sequential chains of K drafts come to; K = 0 is vanilla."""
        if num_tokens == 0:
            return self.vanilla(batch)
        agreement = agreement or self.question.agreement_at(prune_ratio)
        # The first forward has a request's last two tokens.
        widths = {2: 1, 1: num_tokens - 1}
        length = agreement.chain_length(num_tokens)
        return self._sequential(CHAIN, batch, num_tokens, prune_ratio, length, widths)

    def tree(self, batch: int, prune_ratio: float, agreement: Agreement | None = None) -> Candidate:
        """Return what SpecVLM's static tree, drafted sequentially, comes to."""
        agreement = agreement or self.question.agreement_at(prune_ratio)
        widths = Counter((2, *TREE_WIDTHS[1:]))
        return self._sequential(TREE, batch, len(SPECVLM_PATHS), prune_ratio, agreement.tree_length(), widths)

    def _sequential(
        self, shape: str, batch: int, num_tokens: int, prune_ratio: float, length: float, widths: Mapping[int, int]
    ) -> Candidate:
        is_tree, assumed = shape == TREE, self.question.assumed
        target, verify = self.target_seconds(batch, 1), self.target_seconds(batch, num_tokens + 1, is_tree)
        draft = sum(
            number * self.draft_seconds(batch, rows, prune_ratio, self._place) for rows, number in widths.items()
        )
        if is_tree:
            draft += (sum(widths.values()) - 1) * self.question.draft.layers * assumed.level_layer_s
        found = speedup(length, target, draft, verify, assumed.speculation_s)
        # A draft's prefill keeps all requests waiting, and each brings one.
        prefill = batch * prefill_seconds(self.question.draft, self._place, self.question.draft_context(prune_ratio))
        vanilla = self.question.answer_tokens * target
        over_answer = vanilla / (vanilla / found + prefill)
        memory = self._memory(batch, prune_ratio)
        return Candidate(shape, num_tokens, prune_ratio, found, over_answer, length, target, verify, draft, memory)

    def parallel(
        self,
        batch: int,
        prune_ratio: float,
        agreement: Agreement | None = None,
        most: int = WINDOWS[0],
        tokens: int = SHORT,
    ) -> Candidate:
        """Return what a drafter on cards of its own comes to, its window by the rule that the engine follows.

        One request's stream is followed; those of the others take the same times in the same batches. While the
        drafter reads a prompt the target goes on alone (docs/parallel.md, Prefill).
        """
        asked = self.question
        agreement = agreement or asked.agreement_at(prune_ratio)
        turn = self.draft_seconds(batch, 1, prune_ratio, self._own_place)
        # The window follows the step's time, which follows the window: from above it comes to rest.
        window, longer = most, most + 1
        while window < longer:
            longer = window
            # vLLM verifies K rows in every step, whatever the stream has.
            step = self.target_seconds(batch, window + 1) + asked.assumed.speculation_s
            window = window_of(step, turn, agreement.rates[-1], most)
        run = run_streams(agreement, window, step, turn, answer=tokens)
        target, verify = self.target_seconds(batch, 1), self.target_seconds(batch, window + 1)
        ranks, seen = self._own_place.ranks, asked.draft_context(prune_ratio)
        draft = (weight_bytes(asked.draft, ranks), kv_bytes(asked.draft, ranks, batch, seen), 0.0)
        own = memory_split(self._own_place, draft=draft)
        found = run.speedup(target)
        vanilla = asked.answer_tokens * target
        alone = min(batch * prefill_seconds(asked.draft, self._own_place, seen), vanilla)
        over_answer = vanilla / (alone + (vanilla - alone) / found)
        gains = (found, over_answer, run.acceptance_length, target, verify, turn)
        return Candidate(PARALLEL, window, prune_ratio, *gains, self._memory(batch, None), own)

    def _memory(self, batch: int, prune_ratio: float | None) -> MemorySplit:
        """Return what a card of the target's holds; None: no draft beside it.

        The draft's part is the engine's (`DraftMemory.plan`), with its defaults: a pool that follows from the memory
        and not from the requests, in which images keep what they do by default.
        """
        asked, ranks = self.question, self.question.ranks
        target = (weight_bytes(asked.target, ranks), kv_bytes(asked.target, ranks, batch, asked.context))
        if prune_ratio is None:
            return memory_split(self._place, target)
        weights = 0.0 if asked.is_self else weight_bytes(asked.draft, ranks)
        free = max(0.0, asked.assumed.usable_frac * asked.gpu.memory_bytes - target[0] - weights)
        media = (pool.VISION_SHARE + (0.0 if asked.is_self else pool.PIXEL_SHARE)) * free
        of_target, of_draft = (kv_bytes(shape, ranks, 1, 1) for shape in (asked.target, asked.draft))
        kept = max(1 - prune_ratio, _IMAGES_KEPT)
        size = pool.pool_bytes(int(free - media), of_target, of_draft, kept, asked.context, _BLOCK)
        return memory_split(self._place, target, (weights, size, media))

    def candidates(self, batch: int) -> Iterator[Candidate]:
        """Yield everything that could be done at a batch size, whether it fits or not; vanilla first."""
        yield self.vanilla(batch)
        if self.question.may_be_sequential:
            for ratio in self.question.prune_ratios:
                for num_tokens in range(1, MOST_CHAIN + 1):
                    yield self.chain(batch, num_tokens, ratio)
                yield self.tree(batch, ratio)
        if self.question.draft_gpus:
            for ratio in self.question.prune_ratios:
                window = WINDOWS[0] + 1
                for most in WINDOWS:
                    if most < window:
                        found = self.parallel(batch, ratio, most=most)
                        window = found.num_tokens
                        yield found
