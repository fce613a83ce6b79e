"""The planner: what each choice comes to for a pair on given cards, and which one to serve; plain Python."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.planning.acceptance import bisect, with_rate
from vllm_vidspec.planning.candidates import CHAIN, NONE, PARALLEL, TREES, Candidate, Candidates, Question, notes
from vllm_vidspec.planning.roofline import FITTED
from vllm_vidspec.planning.serving import serve_line
from vllm_vidspec.planning.shapes import FP8, INT4, QUANTISATIONS, WEIGHT_BYTES

WORTH = 1.05  # a gain below this is within the model's error: it does not pay
_GAIN = f"{100 * (WORTH - 1):.0f} %"
MOST_BATCH = 1024
_HOW = {FP8: f'quantised as it loads ("quantization": "{FP8}")', INT4: "in four bits, as a checkpoint of its own,"}
# What can be done: nothing; draft with a smaller model; with the same through the target's eyes, without a tower; let
# the target draft for itself, over its own KV cache.
NOTHING, DRAFT, EYES, SELF = "nothing", "draft", "eyes", "self"


class Planner(Candidates):
    def __init__(self, question: Question):
        super().__init__(question)
        self._fastest: dict[int, Candidate | None] = {}

    def fastest(self, batch: int) -> Candidate | None:
        """Return the draft that fits with the fastest answers, whether it pays or not; None: none fits."""
        if batch not in self._fastest:
            fitting = (one for one in self.candidates(batch) if one.fits)
            self._fastest[batch] = max(fitting, key=lambda one: (one.answer_speedup, one.speedup), default=None)
        return self._fastest[batch]

    def fullest(self) -> Candidate | None:
        """Return the draft with the most whole answers an hour, with as many requests at a time as fit beside it."""
        found = []
        for ratio, shape in itertools.product(self.question.prune_ratios, (CHAIN, PARALLEL)):
            batch = _last(lambda batch: self.has_room(batch, ratio, shape), self.most_requests())  # noqa: B023
            found += [one for one in self.candidates(batch, (ratio,)) if one.fits] if batch else []
        return max(found, key=lambda one: (one.videos_per_hour, one.speedup), default=None)

    def most_requests(self) -> int:
        """Return the largest batch whose KV fits beside the target's weights, at most MOST_BATCH; 0: not even one."""
        return _last(lambda batch: self.vanilla(batch).fits, MOST_BATCH)

    def paying(self) -> list[tuple[int, int]]:
        """Return the ranges of batch sizes at which drafts pay, up to `most_requests`; edges are exact to a request.

        Sizes are tried in powers of two, so a range that lies between two of them would be missed.
        """
        most = self.most_requests()
        sizes = [size for size in (2**power for power in range(11)) if size < most] + [most] * (most > 0)
        ranges: list[tuple[int, int]] = []
        for size, following in itertools.pairwise([*sizes, most + 1]):
            if self.pays(size):
                # Up to the size before the next one, or where drafts end to pay between the two.
                last = _last(self.pays, following - 1, size)
                first = ranges.pop()[0] if ranges and ranges[-1][1] == size - 1 else size
                ranges.append((first, last))
        return ranges

    def pays(self, batch: int) -> bool:
        """Return whether a draft gains WORTH; parallel runs are followed only where nothing sequential does."""
        return self.vanilla(batch).fits and any(
            one.fits and one.answer_speedup >= WORTH for one in self.candidates(batch)
        )

    def served(self, batches: Sequence[int]) -> Candidate | None:
        """Return the draft that gains most at one of these batch sizes, or on a full server; None: none gains WORTH,
        not even where videos are in the prefix cache.
        """
        found = [one for one in (*map(self.fastest, batches), self.fullest()) if one is not None]
        gain = lambda one: (max(one.answer_speedup, WORTH), one.speedup)  # noqa: E731
        best = max(found, key=gain, default=None)
        return best if best and max(best.answer_speedup, best.speedup) >= WORTH else None

    def break_even(self, plan: Candidate) -> float | None:
        """Return the agreement per token below which a plan's decoding gains less than WORTH; None: even one of 1 does
        not. Runner-ups are taken to be right less often in proportion.
        """
        batch = plan.batch
        agreement = self.question.agreement_at(plan.prune_ratio)

        def gain(rate: float) -> float:
            given = with_rate(agreement, rate)
            if plan.shape == CHAIN:
                return self.chain(batch, plan.num_tokens, plan.prune_ratio, given).speedup
            if plan.shape in TREES:
                return self.tree(batch, plan.prune_ratio, given, plan.shape).speedup
            return self.parallel(batch, plan.prune_ratio, given, plan.num_tokens).speedup

        return bisect(gain, WORTH) if gain(1.0) >= WORTH else None

    def sentence(self, ranges: Sequence[tuple[int, int]]) -> str:
        """Return when drafts pay and when they do not, in plain words; `ranges` are those of `paying`."""
        most = self.most_requests()
        if not most:
            return "Not even one request fits beside the target's weights."
        limit = f"{most} requests fit" + (" or more" if most == MOST_BATCH else "")
        if not ranges:
            return f"Do not draft for new videos: nothing gains {_GAIN}, however many at a time ({limit})."
        spans = " and ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in ranges)
        if list(ranges) == [(1, most)]:
            return f"Drafts pay for as many at a time as fit ({limit})."
        words = [f"Drafts pay for {spans} at a time ({limit})."]
        if ranges[0][0] > 1:
            words.append(f"Below {ranges[0][0]} {self._why_not(ranges[0][0] - 1)}.")
        if ranges[-1][1] < most:
            words.append(f"From {ranges[-1][1] + 1} on {self._why_not(ranges[-1][1] + 1)}.")
        return " ".join(words)

    def _why_not(self, batch: int) -> str:
        if self.fastest(batch) is None:
            return "there is no room for the draft"
        return f"no draft gains {_GAIN}"


def _last(holds: Callable[[int], bool], most: int, low: int = 0) -> int:
    """Return the last number up to `most` for which something holds that holds from `low` up to some number."""
    high = most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _quantised_drafts(question: Question, batches: Sequence[int]) -> dict[str, list[float | None]] | None:
    """Return what a draft of 16-bit weights would gain quantised: `answer_speedup` by batch size, by QUANTISATIONS.

    None where it is quantised, shares the target's weights, or was measured as it is.
    """
    if question.is_self or question.draft.linear_bytes < WEIGHT_BYTES or question.draft_ms is not None:
        return None
    found: dict[str, list[float | None]] = {}
    for kind in QUANTISATIONS:
        planner = Planner(replace(question, draft=question.draft.quantised(kind)))
        best = [planner.fastest(batch) for batch in batches]
        found[kind] = [None if one is None else one.answer_speedup for one in best]
    return found


def _quantised_notes(
    rows: Sequence[Mapping[str, Any]], batches: Sequence[int], quantised: Mapping[str, Sequence[float | None]] | None
) -> Iterator[str]:
    """Yield a line for each quantisation of the draft that gains more at any batch size."""
    gains = {row["batch"]: row["answer_speedup"] for row in rows if row["choice"] == DRAFT and not row["is_full"]}
    for kind, speedups in (quantised or {}).items():
        found = [
            f"{better:.2f}x instead of {gains[batch]:.2f}x at batch {batch}"
            for batch, better in zip(batches, speedups, strict=True)
            if better is not None and batch in gains and better > 1.01 * gains[batch]
        ]
        if found:
            yield f"The draft {_HOW[kind]} would gain {', '.join(found)}, if it agrees as often."


def choices(question: Question) -> dict[str, Question]:
    """Return what could be drafted with, as questions of their own, what was asked first; of a draft's figures none is
    taken for `self`.
    """
    alone = replace(question, draft_gpus=0)
    own = replace(alone, draft=question.target, agreement=None, draft_ms=None)
    if question.is_self:
        return {SELF: alone}
    eyes = replace(alone, draft=question.draft.with_eyes_of(question.target))
    return {DRAFT: question, **({EYES: eyes} if question.may_be_sequential else {}), SELF: own}


def replicas(question: Question) -> tuple[int, int, Candidate] | None:
    """Return how the plan's cards serve most videos without drafts: servers, ranks of each, and a full one of them.

    None: as asked, in one server.
    """
    cards, found = question.ranks + question.draft_gpus, []
    for ranks in range(1, cards + 1):
        alone = replace(question, ranks=ranks, draft=question.target, draft_gpus=0, target_ms=None, draft_ms=None)
        with contextlib.suppress(VidSpecError):  # ranks cannot share its heads, or have no room for it
            planner = Planner(alone)
            if most := planner.most_requests():
                found.append((cards // ranks, ranks, planner.vanilla(most)))
    best = max(found, key=lambda one: one[0] * one[2].videos_per_hour, default=None)
    return None if best is None or best[:2] == (1, question.ranks) else best


def _row(
    choice: str, found: Candidate, nothing: Candidate, cards: int, draft_gpus: int = 0, number: int = 1
) -> dict[str, Any]:
    """Return what a choice comes to, beside doing nothing, as plain values: times in ms, memory in bytes a card. Where
    it does not fit, times and gains are None.

    `cards` are those of all `number` servers; `draft_gpus` come on top where a drafter works in parallel.
    """
    draft_gpus = draft_gpus if found.shape == PARALLEL else 0
    tokens = lambda one: one.batch * one.speedup / one.target_s  # noqa: E731
    drafts = found.shape != NONE
    times = {
        "ttft_ms": 1e3 * found.ttft_s,
        "answer_ms": 1e3 * found.answer_s,
        "answer_speedup": number * found.videos_per_hour / nothing.videos_per_hour,
        "speedup": number * tokens(found) / tokens(nothing),
        "videos_per_hour": number * found.videos_per_hour,
        "videos_per_hour_per_gpu": number * found.videos_per_hour / (cards + draft_gpus),
        "acceptance_length": found.acceptance_length,
        "t_target_ms": 1e3 * found.target_s,
        "t_verify_ms": 1e3 * found.verify_s,
        "t_draft_ms": 1e3 * found.draft_s if drafts else None,
    }
    return {
        "choice": choice,
        "batch": found.batch,
        "fits": found.fits,
        "shape": found.shape,
        "num_speculative_tokens": found.num_tokens,
        "draft_forwards": found.forwards if drafts else None,
        "prune_ratio": found.prune_ratio if drafts else None,
        **(times if found.fits else dict.fromkeys(times)),
        "gpus": cards + draft_gpus,
        "draft_gpus": draft_gpus,
        "memory": asdict(found.memory),
        "drafter_memory": None if found.drafter_memory is None else asdict(found.drafter_memory),
    }


def rows(planners: Mapping[str, Planner], batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield what each choice comes to: at each batch size, then (`is_full`) with as many requests as fit."""
    first = next(iter(planners.values()))
    asked = first.question
    groups = [(batch, {name: one.fastest(batch) for name, one in planners.items()}) for batch in batches]
    if most := first.most_requests():
        groups.append((most, {name: one.fullest() for name, one in planners.items()}))
    for index, (batch, drafts) in enumerate(groups):
        nothing, is_full = first.vanilla(batch), index == len(batches)
        yield _row(NOTHING, nothing, nothing, asked.ranks) | {"is_full": is_full}
        if is_full and (more := replicas(asked)) is not None:
            number, ranks, one = more
            yield _row(f"{number} x tp {ranks}", one, nothing, number * ranks, number=number) | {"is_full": True}
        for name, found in drafts.items():
            if found is not None:
                row = _row(name, found, nothing, asked.ranks, planners[name].question.draft_gpus)
                yield row | {"is_full": is_full}


def plan(question: Question, batches: Sequence[int]) -> dict[str, Any]:
    """Return the answer to a question: `rows` by batch size and choice, `when` drafts pay for new videos (a sentence;
    `paying`: ranges of batch sizes), `serve` (a command; None: nothing fits), `break_even_agreement` of what it serves,
    `quantised_drafts` (None where it is no question), `notes`, `agreement` by prune ratio, `assumed` and which of it is
    `fitted`, and what was asked.
    """
    planners = {choice: Planner(of) for choice, of in choices(question).items()}
    planner = next(iter(planners.values()))
    found, ranges = list(rows(planners, batches)), planner.paying()
    served = planner.served(batches)
    quantised = _quantised_drafts(question, batches)
    asked = ("draft_gpus", "video_tokens", "text_tokens", "answer_tokens", "fps")
    return {
        "kind": "modelled",
        "target": question.target.name,
        "draft": SELF if question.is_self else question.draft.name,
        "choice": next(iter(planners)),
        "gpu": question.gpu.name,
        "tp": question.ranks,
        **{name: getattr(question, name) for name in asked},
        "rows": found,
        "when": planner.sentence(ranges),
        "paying": [list(one) for one in ranges],
        "serve": serve_line(question, served) if planner.most_requests() else None,
        "break_even_agreement": planner.break_even(served) if served else None,
        "quantised_drafts": quantised,
        "notes": [*notes(question), *_quantised_notes(found, batches, quantised)],
        "agreement": [{"prune_ratio": ratio} | asdict(question.agreement_at(ratio)) for ratio in question.prune_ratios],
        "measured": {"target_ms": question.target_ms, "draft_ms": question.draft_ms},
        "assumed": asdict(question.assumed),
        "fitted": list(FITTED),
    }
