"""The planner: which drafts pay for a pair on given cards, by batch size, and from where on none do; plain Python."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

from vllm_vidspec.planning.acceptance import bisect, with_rate
from vllm_vidspec.planning.candidates import CHAIN, LONG, NONE, PARALLEL, TREES, Candidate, Candidates, Question, notes
from vllm_vidspec.planning.roofline import FITTED
from vllm_vidspec.planning.shapes import FP8, INT4, QUANTISATIONS, WEIGHT_BYTES

WORTH = 1.05  # a gain below this is within the model's error: it does not pay
_GAIN = f"{100 * (WORTH - 1):.0f} %"
MOST_BATCH = 1024
_HOW = {FP8: f'quantised as it loads ("quantization": "{FP8}")', INT4: "in four bits, as a checkpoint of its own,"}


class Planner(Candidates):
    def __init__(self, question: Question):
        super().__init__(question)
        self._by_shape: dict[int, dict[str, Candidate]] = {}

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
        for size, following in pairwise([*sizes, most + 1]):
            if self._pays(size):
                # Up to the size before the next one, or where drafts end to pay between the two.
                last = _last(self._pays, following - 1, size)
                first = ranges.pop()[0] if ranges and ranges[-1][1] == size - 1 else size
                ranges.append((first, last))
        return ranges

    def _pays(self, batch: int) -> bool:
        """Return whether `best` would draft; parallel runs are followed only where nothing sequential gains enough."""
        return self.vanilla(batch).fits and any(
            one.fits and one.answer_speedup >= WORTH for one in self.candidates(batch)
        )

    def break_even(self, batch: int, plan: Candidate) -> float | None:
        """Return the agreement per token below which a plan gains less than WORTH; None: even one of 1 does not.

        Runner-ups are taken to be right less often in proportion.
        """
        agreement = self.question.agreement_at(plan.prune_ratio)

        def gain(rate: float) -> float:
            given = with_rate(agreement, rate)
            if plan.shape == CHAIN:
                return self.chain(batch, plan.num_tokens, plan.prune_ratio, given).answer_speedup
            if plan.shape in TREES:
                return self.tree(batch, plan.prune_ratio, given, plan.shape).answer_speedup
            return self.parallel(batch, plan.prune_ratio, given, plan.num_tokens).answer_speedup

        return bisect(gain, WORTH) if gain(1.0) >= WORTH else None

    def row(self, batch: int) -> dict[str, Any]:
        """Return the plan of a batch size as plain values; times in ms, memory in bytes a card.

        Where not even vanilla fits, all but `batch`, `fits` and `memory` is None.
        """
        best = self.best(batch)
        found = best or self.vanilla(batch)
        others = {shape: one.answer_speedup for shape, one in self.by_shape(batch).items() if shape != NONE}
        if found.shape == PARALLEL:
            found = self.parallel(batch, found.prune_ratio, most=found.num_tokens, tokens=LONG)
            others[PARALLEL] = found.answer_speedup
        drafts = found.shape != NONE
        row = {
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
            "drafter_memory": None if found.drafter_memory is None else asdict(found.drafter_memory),
        }
        if best is None:
            row, others = dict.fromkeys(row), {}
        return {"batch": batch, "fits": best is not None, **row, "memory": asdict(found.memory), "alternatives": others}

    def sentence(self, ranges: Sequence[tuple[int, int]]) -> str:
        """Return when drafts pay and when they do not, in plain words; `ranges` are those of `paying`."""
        most = self.most_requests()
        if not most:
            return "Not even one request fits beside the target's weights."
        limit = f"{most} requests fit" + (" or more" if most == MOST_BATCH else "")
        if not ranges:
            return f"Do not speculate: no draft gains {_GAIN} at any batch size ({limit})."
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
        if set(self.by_shape(batch)) == {NONE}:
            return "there is no room for the draft"
        return f"no draft gains {_GAIN}: do not speculate there"


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
        best = [planner.best(batch) for batch in batches]
        found[kind] = [None if one is None else one.answer_speedup for one in best]
    return found


def _quantised_notes(
    rows: Sequence[Mapping[str, Any]], quantised: Mapping[str, Sequence[float | None]] | None
) -> Iterator[str]:
    """Yield a line for each quantisation of the draft that gains more at any batch size."""
    for kind, speedups in (quantised or {}).items():
        found = [
            f"{better:.2f}x instead of {row['answer_speedup']:.2f}x at batch {row['batch']}"
            for row, better in zip(rows, speedups, strict=True)
            if row["fits"] and better is not None and better > 1.01 * row["answer_speedup"]
        ]
        if found:
            yield f"The draft {_HOW[kind]} would gain {', '.join(found)}, if it agrees as often."


def plan(question: Question, batches: Sequence[int]) -> dict[str, Any]:
    """Return the answer to a question: `rows` by batch size, `quantised_drafts` (None where it is no question), `when`
    (a sentence), `paying` (ranges of batch sizes), `notes`, `agreement` by prune ratio, `assumed` and which of it is
    `fitted`, and what was asked.
    """
    planner = Planner(question)
    rows, ranges = [planner.row(batch) for batch in batches], planner.paying()
    quantised = _quantised_drafts(question, batches)
    asked = ("draft_gpus", "video_tokens", "text_tokens", "answer_tokens")
    return {
        "kind": "modelled",
        "target": question.target.name,
        "draft": "self" if question.is_self else question.draft.name,
        "gpu": question.gpu.name,
        "tp": question.ranks,
        **{name: getattr(question, name) for name in asked},
        "rows": rows,
        "when": planner.sentence(ranges),
        "paying": [list(one) for one in ranges],
        "quantised_drafts": quantised,
        "notes": [*notes(question), *_quantised_notes(rows, quantised)],
        "agreement": [{"prune_ratio": ratio} | asdict(question.agreement_at(ratio)) for ratio in question.prune_ratios],
        "measured": {"target_ms": question.target_ms, "draft_ms": question.draft_ms},
        "assumed": asdict(question.assumed),
        "fitted": list(FITTED),
    }
