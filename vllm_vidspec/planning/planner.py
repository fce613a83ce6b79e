"""The planner: which drafts pay for a pair on given cards, by batch size, and from where on none do; plain Python."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from vllm_vidspec.config.paths import SPECVLM_PATHS
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.planning.acceptance import Agreement, bisect, default_agreement, with_rate
from vllm_vidspec.planning.gpus import ASSUMED, Assumptions, Gpu
from vllm_vidspec.planning.roofline import (
    MemorySplit,
    Placement,
    forward_seconds,
    kv_bytes,
    memory_split,
    prefill_seconds,
    weight_bytes,
)
from vllm_vidspec.planning.shapes import ModelShape
from vllm_vidspec.planning.speed import StreamTimes, run_streams, speedup, window_of

NONE, CHAIN, TREE, PARALLEL = SHAPES = ("none", "chain", "tree-static", "parallel")
WORTH = 1.05  # a gain below this is within the model's error: it does not pay
MOST_CHAIN = 10
WINDOWS = (16, 8, 4, 2)  # greatest windows that are tried
MOST_BATCH = 1024
RATIOS = (0.0, 0.5, 0.8, 0.9, 0.95)
# Nodes that have children, by level: what each draft forward of SpecVLM's tree computes; the root first.
TREE_WIDTHS = (1, *(len({p[:-1] for p in SPECVLM_PATHS if len(p) == depth}) for depth in range(2, 6)))
# Tokens that a parallel run is followed for: of a row, and where only its place among others counts.
_LONG, _SHORT = 20_000, 3000
# What a row says of a batch size that fits only.
_OF_FITTING = (
    *("shape", "num_speculative_tokens", "prune_ratio", "speedup", "answer_speedup", "acceptance_length"),
    *("t_target_ms", "t_verify_ms", "t_draft_ms", "draft_gpus", "break_even_agreement", "drafter_memory"),
)


@dataclass(frozen=True)
class Question:
    """What is to be planned.

    Attributes:
        target: The target's shape.
        draft: The draft's; the target's own object: it drafts for itself.
        gpu: The card.
        ranks: Tensor-parallel ranks of the target; a draft in turns has as many.
        draft_gpus: Cards of a parallel drafter's own; 0: none, so no parallel drafting.
        video_tokens: Of a request's prompt.
        text_tokens: The prompt's text and what of the answer is written on average.
        answer_tokens: Of an answer, over which the draft's prefill is spread.
        prune_ratios: r to choose from.
        agreement: Of the pair, at the one ratio; None: what the papers tell.
        target_ms: Measured T_t of one request; None: by the roofline.
        draft_ms: Measured T_d of one request, at the one ratio; None: by the roofline.
        assumed: What cards reach of their data sheets.
    """

    target: ModelShape
    draft: ModelShape
    gpu: Gpu
    ranks: int = 1
    draft_gpus: int = 1
    video_tokens: int = 25_000
    text_tokens: int = 512
    answer_tokens: int = 256
    prune_ratios: tuple[float, ...] = RATIOS
    agreement: Agreement | None = None
    target_ms: float | None = None
    draft_ms: float | None = None
    assumed: Assumptions = ASSUMED

    @property
    def is_self(self) -> bool:
        """Whether the target drafts for itself."""
        return self.draft is self.target

    @property
    def context(self) -> int:
        """Tokens in the target's cache of a request."""
        return self.video_tokens + self.text_tokens

    def draft_context(self, prune_ratio: float) -> float:
        """Return the tokens in the draft's cache of a request."""
        return (1 - prune_ratio) * self.video_tokens + self.text_tokens

    def agreement_at(self, prune_ratio: float) -> Agreement:
        """Return how often the pair agrees."""
        return self.agreement or default_agreement(self.target.family, prune_ratio, self.is_self)

    @property
    def may_take_turns(self) -> bool:
        """Whether the draft can stand on the target's ranks."""
        return self.is_self or self.draft.is_shared_by(self.ranks)


def check(question: Question, batches: Sequence[int] = (1,)) -> None:
    """Refuse a question that has no answer.

    Args:
        question: What is asked.
        batches: Requests that decode at once.

    Raises:
        VidSpecError: One line naming the option.
    """
    if min(batches, default=0) < 1:
        raise VidSpecError("--batch: each must be at least 1")
    for option, count, least in (
        ("--tp", question.ranks, 1),
        ("--draft-gpus", question.draft_gpus, 0),
        ("--video-tokens", question.video_tokens, 0),
        ("--text-tokens", question.text_tokens, 1),
        ("--answer-tokens", question.answer_tokens, 1),
    ):
        if count < least:
            raise VidSpecError(f"{option} must be at least {least}, not {count}")
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
        sizes = ", ".join(str(size) for size in range(1, 65) if question.target.is_shared_by(size))
        raise VidSpecError(f"--tp {question.ranks}: ranks cannot share the target's heads evenly; {sizes} would do")
    if question.draft_gpus and not question.draft.is_shared_by(question.draft_gpus):
        raise VidSpecError(f"--draft-gpus {question.draft_gpus}: ranks cannot share the draft's heads evenly")
    if not question.may_take_turns and not question.draft_gpus:
        raise VidSpecError(
            f"the draft's {question.draft.heads} heads cannot be shared by --tp {question.ranks} ranks: choose another "
            "--tp, or give it GPUs of its own, --draft-gpus 1"
        )
    weights = weight_bytes(question.target, question.ranks)
    if weights > question.assumed.usable_frac * question.gpu.memory_bytes:
        raise VidSpecError(
            f"--tp {question.ranks}: a rank of {question.target.name} has {weights / 1e9:.0f} GB of weights, "
            f"more than {question.gpu.name} takes"
        )


@dataclass(frozen=True)
class Candidate:
    """What one way of drafting comes to at a batch size, all of it modelled.

    Attributes:
        shape: One of SHAPES.
        num_tokens: K, drafts of a step.
        prune_ratio: r.
        speedup: Decode speed over vanilla's at this batch size.
        answer_speedup: The same with the draft's prefill spread over the answer: what candidates are compared by.
        acceptance_length: tau.
        target_s: T_t, vanilla's step.
        verify_s: T_t^K, the target's step over all drafts.
        draft_s: All draft forwards of a step; in parallel one.
        memory: Of a card of the target's.
        drafter_memory: Of a card of the parallel drafter's own, else None.
    """

    shape: str
    num_tokens: int
    prune_ratio: float
    speedup: float
    answer_speedup: float
    acceptance_length: float
    target_s: float
    verify_s: float
    draft_s: float
    memory: MemorySplit
    drafter_memory: MemorySplit | None = None

    @property
    def fits(self) -> bool:
        """Whether every card has room."""
        return self.memory.fits and (self.drafter_memory is None or self.drafter_memory.fits)


class Planner:
    """Answers one question at any batch size.

    Args:
        question: Checked here.

    Raises:
        VidSpecError: See `check`.
    """

    def __init__(self, question: Question):
        check(question)
        self.question = question
        self._place = Placement(question.gpu, question.ranks, question.assumed)
        self._own_place = Placement(question.gpu, max(1, question.draft_gpus), question.assumed)
        self._by_shape: dict[int, dict[str, Candidate]] = {}
        self._target_scale = self._draft_scale = 1.0
        if question.target_ms is not None:
            self._target_scale = question.target_ms / 1e3 / self.target_seconds(1, 1)
        if question.draft_ms is not None:
            place = self._place if question.may_take_turns else self._own_place
            modelled = self.draft_seconds(1, 1, question.prune_ratios[0], place)
            self._draft_scale = question.draft_ms / 1e3 / modelled

    # ---- times ---------------------------------------------------------------------------------------------------

    def target_seconds(self, batch: int, rows: int) -> float:
        """Return T_t of `rows` tokens a request, the host's share included; scaled to what was measured, if it was."""
        asked = self.question
        forward = forward_seconds(asked.target, self._place, batch, rows, asked.context)
        return self._target_scale * (forward + asked.assumed.step_s)

    def draft_seconds(self, batch: int, rows: int, prune_ratio: float, place: Placement) -> float:
        """Return T_d of `rows` tokens a request."""
        asked = self.question
        context = asked.draft_context(prune_ratio)
        return self._draft_scale * forward_seconds(asked.draft, place, batch, rows, context)

    # ---- candidates ----------------------------------------------------------------------------------------------

    def vanilla(self, batch: int) -> Candidate:
        """Return what no drafts come to: a speed-up of 1."""
        seconds = self.target_seconds(batch, 1)
        return Candidate(NONE, 0, 0.0, 1.0, 1.0, 1.0, seconds, seconds, 0.0, self._memory(batch, None))

    def chain(self, batch: int, num_tokens: int, prune_ratio: float, agreement: Agreement | None = None) -> Candidate:
        """Return what chains of K drafts, in turns, come to; K = 0 is vanilla."""
        if num_tokens == 0:
            return self.vanilla(batch)
        agreement = agreement or self.question.agreement_at(prune_ratio)
        # The first forward has a request's last two tokens.
        widths = {2: 1, 1: num_tokens - 1}
        length = agreement.chain_length(num_tokens)
        return self._in_turns(CHAIN, batch, num_tokens, prune_ratio, length, widths)

    def tree(self, batch: int, prune_ratio: float, agreement: Agreement | None = None) -> Candidate:
        """Return what SpecVLM's static tree, in turns, comes to."""
        agreement = agreement or self.question.agreement_at(prune_ratio)
        widths = Counter((2, *TREE_WIDTHS[1:]))
        return self._in_turns(TREE, batch, len(SPECVLM_PATHS), prune_ratio, agreement.tree_length(), widths)

    def _in_turns(
        self, shape: str, batch: int, num_tokens: int, prune_ratio: float, length: float, widths: Mapping[int, int]
    ) -> Candidate:
        target, verify = self.target_seconds(batch, 1), self.target_seconds(batch, num_tokens + 1)
        draft = sum(
            number * self.draft_seconds(batch, rows, prune_ratio, self._place) for rows, number in widths.items()
        )
        found = speedup(length, target, draft, verify, self.question.assumed.speculation_s)
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
        tokens: int = _SHORT,
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
        run = run_streams(agreement, window, StreamTimes(lambda drafts: step, turn), answer=tokens)
        target, verify = self.target_seconds(batch, 1), self.target_seconds(batch, window + 1)
        own = memory_split(
            self._own_place,
            draft=(
                weight_bytes(asked.draft, self._own_place.ranks),
                kv_bytes(asked.draft, self._own_place.ranks, batch, asked.draft_context(prune_ratio)),
            ),
        )
        found = run.speedup(target)
        vanilla = asked.answer_tokens * target
        seen = asked.draft_context(prune_ratio)
        alone = min(batch * prefill_seconds(asked.draft, self._own_place, seen), vanilla)
        over_answer = vanilla / (alone + (vanilla - alone) / found)
        gains = (found, over_answer, run.acceptance_length, target, verify, turn)
        return Candidate(PARALLEL, window, prune_ratio, *gains, self._memory(batch, None), own)

    def _memory(self, batch: int, prune_ratio: float | None) -> MemorySplit:
        """Return what a card of the target's holds; None: no draft beside it."""
        asked, ranks = self.question, self.question.ranks
        target = (weight_bytes(asked.target, ranks), kv_bytes(asked.target, ranks, batch, asked.context))
        draft = (0.0, 0.0)
        if prune_ratio is not None:
            weights = 0.0 if asked.is_self else weight_bytes(asked.draft, ranks)
            draft = (weights, kv_bytes(asked.draft, ranks, batch, asked.draft_context(prune_ratio)))
        return memory_split(self._place, target, draft)

    def candidates(self, batch: int) -> Iterator[Candidate]:
        """Yield everything that could be done at a batch size, whether it fits or not; vanilla first."""
        yield self.vanilla(batch)
        if self.question.may_take_turns:
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

    def by_shape(self, batch: int) -> dict[str, Candidate]:
        """Return the fastest candidate of each shape that fits; nothing of a shape that never does."""
        if batch not in self._by_shape:
            found: dict[str, Candidate] = {}
            for one in self.candidates(batch):
                if one.fits and (one.shape not in found or one.answer_speedup > found[one.shape].answer_speedup):
                    found[one.shape] = one
            self._by_shape[batch] = found
        return self._by_shape[batch]

    def best(self, batch: int) -> Candidate | None:
        """Return what to do at a batch size: vanilla where nothing gains WORTH; None: the KV has no room."""
        found = self.by_shape(batch)
        if NONE not in found:
            return None
        fastest = max(found.values(), key=lambda one: one.answer_speedup)
        return fastest if fastest.answer_speedup >= WORTH else found[NONE]

    # ---- limits --------------------------------------------------------------------------------------------------

    def most_requests(self) -> int:
        """Return the largest batch whose KV fits beside the target's weights, at most MOST_BATCH; 0: not even one."""
        return _last(lambda batch: self.vanilla(batch).fits, MOST_BATCH)

    def paying(self) -> list[tuple[int, int]]:
        """Return the ranges of batch sizes at which drafts pay, up to `most_requests`; edges are exact to a request.

        Sizes are tried in powers of two, so a range that lies between two of them would be missed.
        """
        sizes = _powers(self.most_requests())
        pays = {size: self._pays(size) for size in sizes}
        ranges: list[tuple[int, int]] = []
        for size, following in zip_longest(sizes, sizes[1:]):
            if not pays[size]:
                continue
            first = size if not ranges or ranges[-1][1] < size else ranges.pop()[0]
            if following is None:
                last = size
            elif pays[following]:
                last = following
            else:
                last = _last(self._pays, following - 1, size)
            ranges.append((first, last))
        return ranges

    def _pays(self, batch: int) -> bool:
        """Return whether `best` would draft; parallel runs are followed only where nothing in turns gains enough."""
        return self.vanilla(batch).fits and any(
            one.fits and one.answer_speedup >= WORTH for one in self.candidates(batch)
        )

    def break_even(self, batch: int, plan: Candidate) -> float | None:
        """Return the agreement per token below which a plan gains less than WORTH; None: even one of 1 does not.

        Runner-ups are taken to be right less often in proportion.

        Args:
            batch: Of the plan.
            plan: One that drafts.
        """
        agreement = self.question.agreement_at(plan.prune_ratio)

        def gain(rate: float) -> float:
            given = with_rate(agreement, rate)
            if plan.shape == CHAIN:
                return self.chain(batch, plan.num_tokens, plan.prune_ratio, given).answer_speedup
            if plan.shape == TREE:
                return self.tree(batch, plan.prune_ratio, given).answer_speedup
            return self.parallel(batch, plan.prune_ratio, given, plan.num_tokens).answer_speedup

        return bisect(gain, WORTH) if gain(1.0) >= WORTH else None

    # ---- the answer ----------------------------------------------------------------------------------------------

    def row(self, batch: int) -> dict[str, Any]:
        """Return the plan of a batch size as plain values; times in ms, memory in bytes a card."""
        found = self.best(batch)
        if found is None:
            memory = asdict(self.vanilla(batch).memory)
            return {"batch": batch, "fits": False, **dict.fromkeys(_OF_FITTING), "memory": memory, "alternatives": {}}
        others = {shape: one.answer_speedup for shape, one in self.by_shape(batch).items() if shape != NONE}
        if found.shape == PARALLEL:
            found = self.parallel(batch, found.prune_ratio, most=found.num_tokens, tokens=_LONG)
            others[PARALLEL] = found.answer_speedup
        drafts = found.shape != NONE
        return {
            "batch": batch,
            "fits": True,
            "shape": found.shape,
            "num_speculative_tokens": found.num_tokens,
            "prune_ratio": found.prune_ratio if drafts else None,
            "speedup": found.speedup,
            "answer_speedup": found.answer_speedup,
            "acceptance_length": found.acceptance_length,
            "t_target_ms": 1e3 * found.target_s,
            "t_verify_ms": 1e3 * found.verify_s,
            "t_draft_ms": 1e3 * found.draft_s,
            "draft_gpus": self.question.draft_gpus if found.shape == PARALLEL else 0,
            "break_even_agreement": self.break_even(batch, found) if drafts else None,
            "memory": asdict(found.memory),
            "drafter_memory": None if found.drafter_memory is None else asdict(found.drafter_memory),
            "alternatives": others,
        }

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Return the speed-up of each shape's fastest candidate, at batch sizes in powers of two as far as they fit."""
        found: dict[str, list[tuple[int, float]]] = {}
        for batch in _powers(self.most_requests()):
            for shape, one in self.by_shape(batch).items():
                found.setdefault(shape, []).append((batch, one.answer_speedup))
        return found

    def sentence(self, ranges: Sequence[tuple[int, int]]) -> str:
        """Return when drafts pay and when they do not, in plain words; `ranges` are those of `paying`."""
        most = self.most_requests()
        if not most:
            return "Not even one request fits beside the target's weights."
        limit = f"{most} requests fit" + (" or more" if most == MOST_BATCH else "")
        if not ranges:
            return f"Do not speculate: no draft gains {WORTH - 1:.0%} at any batch size ({limit})."
        spans = " and ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in ranges)
        if list(ranges) == [(1, most)]:
            return f"Drafts pay at every batch size that fits ({limit})."
        words = [f"Drafts pay at batch sizes {spans} ({limit})."]
        if ranges[0][0] > 1:
            words.append(f"Below {ranges[0][0]} {self._why_not(ranges[0][0] - 1)}.")
        if ranges[-1][1] < most:
            words.append(f"From {ranges[-1][1] + 1} on {self._why_not(ranges[-1][1] + 1)}.")
        return " ".join(words)

    def _why_not(self, batch: int) -> str:
        """Return why nothing is drafted at a batch size."""
        if set(self.by_shape(batch)) == {NONE}:
            return "there is no room for the draft"
        return f"no draft gains {WORTH - 1:.0%}: do not speculate there"


def _powers(most: int) -> list[int]:
    """Return the powers of two below a number, and the number; nothing for 0."""
    return [size for size in (2**power for power in range(11)) if size < most] + [most] * (most > 0)


def _last(holds: Callable[[int], bool], most: int, low: int = 0) -> int:
    """Return the last number up to `most` for which something holds that holds from `low` up to some number."""
    high = most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def plan(question: Question, batches: Sequence[int]) -> dict[str, Any]:
    """Return the answer to a question.

    Args:
        question: What is to be planned.
        batches: Requests that decode at once.

    Returns:
        `rows` (one a batch size), `when` (a sentence), `paying` (ranges of batch sizes), `notes`, `agreement` (by prune
        ratio), `assumed` and what was asked; everything is modelled, and says so.

    Raises:
        VidSpecError: A question that has no answer, or a batch size below 1.
    """
    check(question, batches)
    planner = Planner(question)
    ranges = planner.paying()
    agreements = {ratio: question.agreement_at(ratio) for ratio in question.prune_ratios}
    return {
        "kind": "modelled",
        "target": question.target.name,
        "draft": "self" if question.is_self else question.draft.name,
        "gpu": question.gpu.name,
        "tp": question.ranks,
        "draft_gpus": question.draft_gpus,
        "video_tokens": question.video_tokens,
        "text_tokens": question.text_tokens,
        "answer_tokens": question.answer_tokens,
        "rows": [planner.row(batch) for batch in batches],
        "when": planner.sentence(ranges),
        "paying": [list(one) for one in ranges],
        "notes": list(notes(question)),
        "agreement": [
            {"prune_ratio": ratio, "rates": list(one.rates), "runner_up": one.runner_up, "source": one.source}
            for ratio, one in agreements.items()
        ],
        "measured": {"target_ms": question.target_ms, "draft_ms": question.draft_ms},
        "assumed": asdict(question.assumed),
    }


def notes(question: Question) -> Iterator[str]:
    """Yield what a reader should know of an answer."""
    yield "Modelled, not measured: no figure of this plan was taken on a GPU. The vision tower is left out."
    if not question.may_take_turns:
        yield (
            f"{question.draft.name} has {question.draft.heads} heads, which {question.ranks} ranks cannot share: it "
            "cannot take turns with the target, and drafts in parallel on GPUs of its own or not at all."
        )
    if question.draft_gpus:
        yield (
            f"Parallel drafting takes {question.draft_gpus} GPU{'s' * (question.draft_gpus > 1)} more than vanilla; "
            "what vanilla would gain by as many is not counted."
        )
