"""Candidates: a pair, cards and requests to plan for, and what each way of drafting comes to; plain Python."""

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_vidspec.config.static_tree import GROWN_DEPTHS, SPECVLM_PATHS, grow_paths, level_widths, most_nodes
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.planning import pool
from vllm_vidspec.planning.acceptance import Agreement, default_agreement
from vllm_vidspec.planning.roofline import (
    ASSUMED,
    Assumptions,
    Gpu,
    MemorySplit,
    Placement,
    forward_seconds,
    kv_bytes,
    memory_split,
    prefill_seconds,
    weight_bytes,
)
from vllm_vidspec.planning.shapes import ModelShape
from vllm_vidspec.planning.speed import run_streams, speedup, window_of

RATIOS = (0.0, 0.5, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class Question:
    target: ModelShape  # the target's shape
    draft: ModelShape  # the draft's; the target's own object: it drafts for itself, over its own KV cache
    gpu: Gpu  # the card
    ranks: int = 1  # tensor-parallel ranks of the target; a sequential draft has as many
    draft_gpus: int = 0  # cards of a parallel drafter's own; 0: none, so no parallel drafting
    video_tokens: int = 25_000  # of a request's prompt
    text_tokens: int = 512  # the prompt's text and what of the answer is written on average
    answer_tokens: int = 256  # of an answer
    prune_ratios: tuple[float, ...] = RATIOS  # r to choose from
    agreement: Agreement | None = None  # of the pair, at the one ratio; None: what the papers tell
    target_ms: float | None = None  # measured T_t of one request; None: by the roofline
    draft_ms: float | None = None  # measured T_d of one request, at the one ratio; None: by the roofline
    fps: float | None = None  # frames a second that videos are sampled at; None: as the server does
    assumed: Assumptions = ASSUMED  # what cards reach of their data sheets

    @property
    def is_self(self) -> bool:
        return self.draft is self.target

    @property
    def context(self) -> int:
        return self.video_tokens + self.text_tokens

    def draft_context(self, prune_ratio: float) -> float:
        return (1 - prune_ratio) * self.video_tokens + self.text_tokens

    def agreement_at(self, prune_ratio: float) -> Agreement:
        return self.agreement or default_agreement(self.target.family, prune_ratio, self.is_self)

    @property
    def may_be_sequential(self) -> bool:
        return self.is_self or self.draft.is_shared_by(self.ranks)

    @property
    def may_be_parallel(self) -> bool:
        """A drafter on cards of its own has neither the target's KV cache nor its visual embeddings."""
        return self.draft_gpus > 0 and not self.is_self and not self.draft.has_map


def check(question: Question) -> None:
    for ratio in question.prune_ratios:
        if not 0 <= ratio <= 1:
            raise VidSpecError(f"--prune-ratio {ratio:g}: a share lies between 0 and 1")
    for option, value in (("--target-ms", question.target_ms), ("--draft-ms", question.draft_ms)):
        if value is not None and not 0 < value < float("inf"):
            raise VidSpecError(f"{option} must be above 0 and finite, not {value:g}")
    for option, is_given in (("--acceptance", question.agreement), ("--draft-ms", question.draft_ms)):
        if is_given is not None and len(question.prune_ratios) > 1:
            raise VidSpecError(f"{option}: it was measured at one prune ratio; give that one as --prune-ratio")
    if not question.target.is_shared_by(question.ranks):
        sizes = ", ".join(map(str, _rank_numbers(question.target)))
        raise VidSpecError(f"--tp {question.ranks}: ranks cannot share the target's heads evenly; {sizes} would do")
    if question.draft_gpus and not question.draft.is_shared_by(question.draft_gpus):
        raise VidSpecError(f"--draft-gpus {question.draft_gpus}: ranks cannot share the draft's heads evenly")
    if not question.may_be_sequential and not question.draft_gpus:
        raise VidSpecError(
            f"the draft's {question.draft.heads} heads cannot be shared by --tp {question.ranks} ranks: choose another "
            "--tp, or give it GPUs of its own, --draft-gpus 1"
        )
    usable = question.assumed.usable_frac * question.gpu.memory_bytes
    if weight_bytes(question.target, question.ranks) > usable:
        weights = weight_bytes(question.target, question.ranks) / 1e9
        more = [ranks for ranks in _rank_numbers(question.target) if weight_bytes(question.target, ranks) < usable]
        raise VidSpecError(
            f"--tp {question.ranks}: a rank of {question.target.name} has {weights:.0f} GB of weights, "
            f"more than {question.gpu.name} takes" + (f"; --tp {more[0]} would do" if more else "")
        )


def _rank_numbers(shape: ModelShape) -> list[int]:
    return [ranks for ranks in range(1, 65) if shape.is_shared_by(ranks)]


def notes(question: Question) -> Iterator[str]:
    yield (
        "Modelled, not measured: data sheets, fitted to decode steps of one H100; prefills at "
        f"{100 * question.assumed.flops_frac:.0f} % of the products' peak (assumed), from decoded videos on."
    )
    yield "eyes: acceptance as with a tower is assumed; `vidspec calibrate --eyes` fits the map and measures it."
    if not question.may_be_sequential:
        yield (
            f"{question.draft.name} has {question.draft.heads} heads, which {question.ranks} ranks cannot share: it "
            "cannot draft sequentially, but in parallel on GPUs of its own or not at all."
        )


# ---- what each way of drafting comes to ------------------------------------------------------------------------------

NONE, CHAIN, TREE, PARALLEL = "none", "chain", "tree-static", "parallel"
TREES = (*GROWN_DEPTHS, TREE)
SHAPES = (NONE, CHAIN, *TREES, PARALLEL)
MOST_CHAIN = 10
WINDOWS = (16, 8, 4, 2)  # greatest windows that are tried
_BLOCK = 16  # tokens of a KV block, as vLLM has it by default
_FOLLOWED = 6000  # tokens that a parallel run is followed for


@dataclass(frozen=True)
class Candidate:
    """What one way of drafting comes to at a batch size, all of it modelled."""

    shape: str  # one of SHAPES
    num_tokens: int  # K, drafts of a step
    prune_ratio: float  # r
    batch: int  # requests that decode at once
    speedup: float  # decode speed over vanilla's at this batch size: that of answers about a video in the prefix cache
    acceptance_length: float  # tau
    target_s: float  # T_t, vanilla's step
    verify_s: float  # T_t^K, the target's step over all drafts
    memory: MemorySplit  # of a card of the target's
    vanilla_s: float  # decoding an answer without drafts
    read_s: float  # the target's prefill and tower
    draft_s: float = 0.0  # T_d, a draft forward, the mean of a step's
    forwards: int = 0  # draft forwards of a step that the target waits for; 0 in parallel
    waited_s: float = 0.0  # a draft's prefill and tower, if the target waits for them
    alone_s: float = 0.0  # of `vanilla_s`, how long a target decodes without its drafter, which still reads
    drafter_memory: MemorySplit | None = None  # of a card of the parallel drafter's own, else None

    @property
    def drafting_s(self) -> float:
        """What drafting adds to a step."""
        return self.forwards * self.draft_s

    @property
    def ttft_s(self) -> float:
        """The first token of a request that waits for no other."""
        return self.read_s + self.waited_s

    @property
    def answer_s(self) -> float:
        """A whole answer, while each of the batch's requests brings a new video, which all wait for."""
        return self.batch * self.ttft_s + self.alone_s + (self.vanilla_s - self.alone_s) / self.speedup

    @property
    def answer_speedup(self) -> float:
        """Vanilla's whole answer over this one, at this batch size: what candidates are compared by."""
        return (self.batch * self.read_s + self.vanilla_s) / self.answer_s

    @property
    def videos_per_hour(self) -> float:
        return 3600 * self.batch / self.answer_s

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
        elif question.is_self:
            self._draft_scale = self._target_scale

    def target_seconds(self, batch: int, rows: int, is_tree: bool = False) -> float:
        """Return T_t of `rows` tokens a request, the host's share included; scaled to what was measured, if it was."""
        asked = self.question
        forward = forward_seconds(asked.target, self._place, batch, rows, asked.context, is_tree)
        return self._target_scale * (forward + asked.assumed.step_s)

    def draft_seconds(self, batch: int, rows: int, prune_ratio: float, place: Placement) -> float:
        asked = self.question
        context = asked.draft_context(prune_ratio)
        return self._draft_scale * forward_seconds(asked.draft, place, batch, rows, context)

    @functools.cached_property
    def _read_s(self) -> float:
        """What the target takes to read a prompt."""
        asked = self.question
        return prefill_seconds(asked.target, self._place, asked.context, asked.video_tokens)

    def _draft_read_s(self, prune_ratio: float, place: Placement) -> float:
        """Return what a draft takes to read a prompt: its tower sees the whole video, its decoder what is kept. A
        target that drafts for itself copies what it has.
        """
        asked = self.question
        if asked.is_self:
            return 0.0
        return prefill_seconds(asked.draft, place, asked.draft_context(prune_ratio), asked.video_tokens)

    def vanilla(self, batch: int) -> Candidate:
        seconds = self.target_seconds(batch, 1)
        answer = self.question.answer_tokens * seconds
        return Candidate(
            *(NONE, 0, 0.0, batch, 1.0, 1.0, seconds, seconds), self._memory(batch, None), answer, self._read_s
        )

    def chain(self, batch: int, num_tokens: int, prune_ratio: float, agreement: Agreement | None = None) -> Candidate:
        """Return what sequential chains of K drafts come to; K = 0 is vanilla."""
        if num_tokens == 0:
            return self.vanilla(batch)
        agreement = agreement or self.question.agreement_at(prune_ratio)
        # The first forward has a request's last two tokens.
        widths = {2: 1, 1: num_tokens - 1}
        length = agreement.chain_length(num_tokens)
        return self._sequential(CHAIN, batch, num_tokens, prune_ratio, length, widths)

    def tree(self, batch: int, prune_ratio: float, agreement: Agreement | None = None, shape: str = TREE) -> Candidate:
        """Return what a static tree, drafted sequentially, comes to: SpecVLM's, or one grown to the target's tile."""
        agreement = agreement or self.question.agreement_at(prune_ratio)
        paths = SPECVLM_PATHS
        if shape != TREE:
            target = self.question.target
            paths = grow_paths(most_nodes(target.heads // target.kv_heads), GROWN_DEPTHS[shape])
        # The first forward has a request's last two tokens.
        widths = Counter((2, *level_widths(paths)[1:]))
        return self._sequential(shape, batch, len(paths), prune_ratio, agreement.tree_length(paths), widths)

    def _sequential(
        self, shape: str, batch: int, num_tokens: int, prune_ratio: float, length: float, widths: Mapping[int, int]
    ) -> Candidate:
        is_tree, assumed, vanilla = shape in TREES, self.question.assumed, self.vanilla(batch)
        verify = self.target_seconds(batch, num_tokens + 1, is_tree)
        forwards = sum(widths.values())
        drafting = sum(
            number * self.draft_seconds(batch, rows, prune_ratio, self._place) for rows, number in widths.items()
        )
        if is_tree:
            drafting += (forwards - 1) * self.question.draft.layers * assumed.level_layer_s
        return replace(
            vanilla,
            shape=shape,
            num_tokens=num_tokens,
            prune_ratio=prune_ratio,
            speedup=speedup(length, vanilla.target_s, drafting, verify, assumed.speculation_s),
            acceptance_length=length,
            verify_s=verify,
            draft_s=drafting / forwards,
            forwards=forwards,
            waited_s=self._draft_read_s(prune_ratio, self._place),
            memory=self._memory(batch, prune_ratio),
        )

    def parallel(
        self,
        batch: int,
        prune_ratio: float,
        agreement: Agreement | None = None,
        most: int = WINDOWS[0],
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
        run = run_streams(agreement, window, step, turn, answer=_FOLLOWED)
        vanilla = self.vanilla(batch)
        return replace(
            vanilla,
            shape=PARALLEL,
            num_tokens=window,
            prune_ratio=prune_ratio,
            speedup=run.speedup(vanilla.target_s),
            acceptance_length=run.acceptance_length,
            verify_s=self.target_seconds(batch, window + 1),
            draft_s=turn,
            alone_s=min(batch * self._draft_read_s(prune_ratio, self._own_place), vanilla.vanilla_s),
            drafter_memory=self._drafter_memory(batch, prune_ratio),
        )

    def _memory(self, batch: int, prune_ratio: float | None) -> MemorySplit:
        """Return what a card of the target's holds; None: no draft beside it.

        The draft's part is the engine's (`DraftMemory.plan`), with its defaults: a pool that follows from the memory
        and not from the requests, in which images keep what they do by default. A target that drafts for itself copies
        the kept share of each request's video.
        """
        asked, ranks = self.question, self.question.ranks
        target = (weight_bytes(asked.target, ranks), kv_bytes(asked.target, ranks, batch, asked.context))
        if prune_ratio is None:
            return memory_split(self._place, target)
        if asked.is_self:
            kept_tokens = (1 - prune_ratio) * asked.video_tokens
            return memory_split(self._place, target, (0.0, kv_bytes(asked.target, ranks, batch, kept_tokens), 0.0))
        weights = weight_bytes(asked.draft, ranks)
        free = max(0.0, asked.assumed.usable_frac * asked.gpu.memory_bytes - target[0] - weights)
        media = (pool.VISION_SHARE + (0.0 if asked.draft.has_map else pool.PIXEL_SHARE)) * free
        of_target, of_draft = (kv_bytes(shape, ranks, 1, 1) for shape in (asked.target, asked.draft))
        kept = 1 - prune_ratio
        size = pool.pool_bytes(int(free - media), of_target, of_draft, kept, asked.context, _BLOCK)
        return memory_split(self._place, target, (weights, size, media))

    def has_room(self, batch: int, prune_ratio: float, shape: str) -> bool:
        """Return whether so many requests fit, on the cards of the target and of a parallel drafter."""
        if shape == PARALLEL:
            return self._memory(batch, None).fits and self._drafter_memory(batch, prune_ratio).fits
        return self._memory(batch, prune_ratio).fits

    def _drafter_memory(self, batch: int, prune_ratio: float) -> MemorySplit:
        draft, ranks = self.question.draft, self._own_place.ranks
        kv = kv_bytes(draft, ranks, batch, self.question.draft_context(prune_ratio))
        return memory_split(self._own_place, draft=(weight_bytes(draft, ranks), kv, 0.0))

    def candidates(self, batch: int, ratios: Sequence[float] | None = None) -> Iterator[Candidate]:
        """Yield every way to draft at a batch size, whether it fits or not, with these prune ratios or all."""
        ratios = self.question.prune_ratios if ratios is None else ratios
        if self.question.may_be_sequential:
            for ratio in ratios:
                for num_tokens in range(1, MOST_CHAIN + 1):
                    yield self.chain(batch, num_tokens, ratio)
                for shape in () if self.question.is_self else TREES:
                    yield self.tree(batch, ratio, shape=shape)
        if self.question.may_be_parallel:
            for ratio in ratios:
                window = WINDOWS[0] + 1
                for most in WINDOWS:
                    if most < window:
                        found = self.parallel(batch, ratio, most=most)
                        window = found.num_tokens
                        yield found
