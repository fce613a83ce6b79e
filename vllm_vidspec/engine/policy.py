"""Policy: how many tokens a step drafts, and for which of its requests; numpy only.

costs        seconds of a step by option and batch size, measured once at start-up, linear in the context; a slow
             correction of each entry by real steps                                                   `StepCosts`
acceptance   by position and class of requests, an EMA; a request's own is blended in                 `Acceptance`
decide       of the options, and of the numbers m of requests that have drafts, those with the most expected tokens
             over expected seconds, with hysteresis                                                   `Policy.decide`
admit        a class is paused while whole answers, the draft's prefill included, take longer with drafts than
             without; one of its requests is a probe now and then                                     `Policy.add`
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from vllm_vidspec.engine.estimates import MAX_CLASSES, NONE, Acceptance, Option, StepCosts
from vllm_vidspec.metrics import decision_text
from vllm_vidspec.names import CLASS_SIZES

__all__ = ["NONE", "Acceptance", "Decision", "Observed", "Option", "Policy", "StepCosts", "class_label"]

SHORT_ANSWER = 16  # tokens: answers of fewer lose with their first step and their last what the others gain
_DECIDE_FIRST, _DECIDE_LAST = 16, 64  # steps between two decisions on the same batch: twice as many each time
_HYSTERESIS = 1.02  # by how much another option must be faster than the one in use, and drafts than none
_STICKY = 1.05  # on the expected tokens of a request that has drafts: a change of who has them costs a prefill
_RESUME = 1.05  # gain of whole answers at which a paused class is drafted for again
_OWN_TOKENS = 16.0  # of its class's acceptance, that a request's own is blended with
_LEAST_KNOWN = 8  # verify steps of a class before it may be paused
_PROBE_EVERY = 24  # requests of a paused class between two probes
_PROBE_STEPS, _PROBE_MORE = 4, 12  # verify steps of a probe, and more where three of these in four gave a draft token
_PROBE_SHARE = 0.005  # of the time, that probes may take
_TRY_AFTER, _TRY_STEPS, _TRY_WITHIN = 512, 5, 0.8  # `Policy._stale`: in steps, steps, and of the best rate
_NEW_ANSWER = 0.1  # weight of an answer in what is known of its class's
_LENGTHS = (300, 600, 1200, 2400, 4800, 9600, 19200)  # visual tokens, at most, of each of CLASS_SIZES but the last


_ROW = np.dtype(
    [
        ("class", np.int64),  # Index of the request's
        *((name, np.float64) for name in ("context", "draft_context")),  # Thousands of tokens that a model has of it
        ("start_s", np.float64),  # Of the draft's prefill so far
        *((name, np.float64) for name in ("own", "hoped")),  # Draft tokens accepted, and expected by its class
        *((name, np.int64) for name in ("verify_steps", "verify_tokens", "probe_left")),
        *((name, bool) for name in ("may_draft", "has_draft")),
    ]
)


class Decision(NamedTuple):
    """What the requests of a step get."""

    option: Option
    paused: frozenset[str] = frozenset()  # Requests that get nothing
    pads: bool = False  # Whether these have as many rows of the target's forward as the others


class Observed(NamedTuple):
    """What a step of `n` requests has shown."""

    decision: Decision  # By which it drafted, for the step after it
    verified: Decision | None  # By which the drafts were made that it verified; None after a pause of the engine
    req_ids: Sequence[str]
    num_tokens: np.ndarray  # `[n]` int64 tokens that each got
    is_drafted: np.ndarray  # `[n]` bool: whether drafts of it were verified, and no placeholders
    seconds: float | None  # Of the step; None where it did not decode alone, or nobody knows when it began
    reading: Iterable[str] = ()  # Requests of whose text the draft has read a part
    reading_s: float = 0.0  # Host time of that


class Ended(NamedTuple):
    """A request that has ended: the place of its class in CLASS_LABELS, its verify steps and the tokens they gave."""

    label: int
    verify_steps: int
    verify_tokens: int


def class_label(num_video: int, num_image: int) -> int:
    """Return the place in CLASS_LABELS of a request with so many video and image tokens."""
    if not num_video and not num_image:
        return 0
    return 1 + (len(CLASS_SIZES) if num_video else 0) + bisect_left(_LENGTHS, num_video + num_image)


def _mean(known: float, new: float) -> float:
    """Return the EMA of a class's figure, 0 for none, with a new one."""
    return known + (new - known) * (_NEW_ANSWER if known else 1.0)


class ClassState:
    """What is known of a class but its acceptance."""

    def __init__(self, label: int):
        self.label = label  # Its place in CLASS_LABELS
        self.is_paused = False
        self.answer_tokens, self.num_answers = 128.0, 0  # EMA of its answers' lengths, of how many
        self.start_s = 0.0  # EMA of the draft's prefill of a request
        self.context = self.draft_context = 0.0  # thousands of tokens of a request, EMA
        self.since_probe = 0  # requests that were not admitted since the last probe
        self.best: Best | None = None


class Best(NamedTuple):
    """The best option for a class alone, as many as usually run, beside none."""

    option: Option
    tokens: float  # Of a request and verify step
    seconds: float  # Of such a step
    none_s: float  # Of a step without drafts
    probe_s: float  # That drafts of one request add to that
    gain: float  # Seconds of whole answers without drafts over those with them

    def __str__(self) -> str:
        return decision_text(self.option.num_tokens, self.tokens, self.seconds, self.none_s)


class Policy:
    """Decides for the steps of one engine.

    Args:
        options: What may be drafted, `NONE` last.
        costs: Of these.
        num_slots: Requests that are known at the same time, at most; more share a slot.
        pads: As in `Decision`.

    Attributes:
        classes: Of requests.
        decision: The last.
    """

    def __init__(self, options: Sequence[Option], costs: StepCosts, num_slots: int, pads: bool):
        self.options, self.costs, self._pads = tuple(options), costs, pads
        self._index = {option: index for index, option in enumerate(self.options)}
        self.acceptance = Acceptance(self.options)
        self._class_of: dict[tuple, int] = {}
        self.classes: list[ClassState] = []
        self._slots: dict[str, int] = {}
        self._free = list(range(num_slots, 0, -1))
        self._rows = np.zeros(num_slots + 1, dtype=_ROW)  # by slot; slot 0 is of requests that nobody has added
        self._rows["may_draft"][0] = True
        self.decision = Decision(NONE, pads=pads)
        self._bounds: tuple = ()
        # Steps until the next decision, and between it and the last; whether requests have come or gone.
        self._left, self._wait, self._is_changed = 0, _DECIDE_FIRST, True
        self._expected_s, self._drafted = 1.0, (0.0, 0)  # of a step by `decision`; its context, and requests
        self._now, self._elapsed_s, self._probes_s = 0, 0.0, 0.0
        self._size = self._square = 0.0  # EMA of a step's requests, and of their square
        # Since the last decision: option, slots and accepted tokens of verify steps, and seconds of timed ones.
        self._verified: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._step_s: list[float] = []

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(
        self, req_id: str, label: int, kind: tuple, num_tokens: int, num_draft_tokens: int, max_tokens: int
    ) -> bool:
        """Take a request in, or again after a preemption; return whether it is admitted to the draft.

        Args:
            req_id: Its id.
            label: Place in CLASS_LABELS.
            kind: What else tells its class from others.
            num_tokens: Of its prompt.
            num_draft_tokens: Of its prompt as the draft would see it.
            max_tokens: Of its answer.
        """
        self._is_changed = True
        if req_id in self._slots or not self._free:
            return bool(self._rows["may_draft"][self._slots.get(req_id, 0)])
        index = self._class_of.setdefault((label, *kind), min(len(self.classes), MAX_CLASSES - 1))
        if index == len(self.classes):
            self.classes.append(ClassState(label))
        slot = self._slots[req_id] = self._free.pop()
        self._rows[slot] = 0
        row = self._rows[slot]  # a view
        row["class"], row["context"], row["draft_context"] = index, num_tokens / 1e3, num_draft_tokens / 1e3
        known = self.classes[index]
        known.context = _mean(known.context, num_tokens / 1e3)
        known.draft_context = _mean(known.draft_context, num_draft_tokens / 1e3)
        row["may_draft"] = max_tokens >= SHORT_ANSWER and self._admits(index, slot, max_tokens)
        return bool(row["may_draft"])

    def _admits(self, index: int, slot: int, max_tokens: int) -> bool:
        known = self.classes[index]
        if not known.is_paused:
            return self.acceptance.verify_steps[index] < _LEAST_KNOWN or self._best(index, max_tokens).gain >= 1
        known.since_probe += 1
        best = self._best(index, max_tokens)
        probe_s = known.start_s + _PROBE_STEPS * best.probe_s
        if known.since_probe < _PROBE_EVERY or self._probes_s + probe_s > _PROBE_SHARE * self._elapsed_s:
            return False
        known.since_probe = 0
        self._probes_s += probe_s
        self._rows["probe_left"][slot] = _PROBE_STEPS
        return True

    def cannot_draft(self, req_ids: Iterable[str]) -> None:
        """Take note of requests that run without speculation for good."""
        for req_id in req_ids:
            if req_id in self._slots:
                self._rows["may_draft"][self._slots[req_id]] = False
                self._is_changed = True

    def remove(self, req_id: str, num_tokens: int) -> Ended | None:
        """Forget a request that has ended with an answer of so many tokens, 0: not known; return what to count of it,
        None if it was not known.
        """
        if req_id not in self._slots:
            return None
        self._fold()
        self._is_changed = True
        slot = self._slots.pop(req_id)
        self._free.append(slot)
        known = self.classes[self._rows["class"][slot]]
        if num_tokens:
            known.num_answers += 1
            share = max(_NEW_ANSWER, 1 / known.num_answers)
            known.answer_tokens += share * (num_tokens - known.answer_tokens)
        if start_s := float(self._rows["start_s"][slot]):
            known.start_s = _mean(known.start_s, start_s)
        return Ended(known.label, int(self._rows["verify_steps"][slot]), int(self._rows["verify_tokens"][slot]))

    def _slots_of(self, req_ids: Sequence[str]) -> np.ndarray:
        """Return `[n]` int64 slots."""
        get = self._slots.get
        return np.fromiter([get(req_id, 0) for req_id in req_ids], np.int64, len(req_ids))

    def _best(self, index: int, max_tokens: float = np.inf) -> Best:
        """Return the best option for as many requests of a class as usually run, by whole answers."""
        known, size = self.classes[index], max(1, round(self._square / max(self._size, 1e-9)))
        tokens = min(known.answer_tokens, max_tokens)
        expected = self.acceptance.mean if known.is_paused else self.acceptance.expected
        context, draft_context = size * known.context, size * known.draft_context
        none_s = float(self.costs.seconds(len(self.options) - 1, size, 0, context, 0.0))
        found = []
        for place, option in enumerate(self.options[:-1]):
            length = 1 + float(expected[index, place])
            seconds = float(self.costs.seconds(place, size, size, context, draft_context))
            # The first step verifies nothing.
            answers_s = (1 + (tokens - 1) / length) * seconds + size * known.start_s
            probe_s = max(0.0, float(self.costs.seconds(place, size, 1, context, known.draft_context)) - none_s)
            found.append(Best(option, length, seconds, none_s, probe_s, tokens * none_s / answers_s))
        known.best = max(found, key=lambda each: each.gain)
        return known.best

    def _review(self, index: int) -> None:
        """Pause a class whose whole answers lose by drafts, or draft for it again."""
        known = self.classes[index]
        gain = self._best(index).gain
        if known.is_paused:
            known.is_paused = gain < _RESUME
        elif gain < 1 and self.acceptance.verify_steps[index] >= _LEAST_KNOWN:
            known.is_paused, known.since_probe = True, 0
            self.acceptance.pause(index)

    # ---- a step ----------------------------------------------------------------------------------------------------

    def observe(self, step: Observed) -> None:
        """Learn from a step's output."""
        self._now += 1
        self._left -= 1
        slots = self._slots_of(step.req_ids)
        self._rows["context"][slots] += 1e-3 * step.num_tokens
        self._rows["draft_context"][slots] += 1e-3 * step.num_tokens
        if step.verified is not None and step.verified.option.num_tokens:
            those = slots[step.is_drafted]
            self._verified.append((self._index[step.verified.option], those, step.num_tokens[step.is_drafted] - 1))
        if step.reading:
            self._read(step)
        elif step.seconds is not None:
            self._elapsed_s += step.seconds
            if step.verified is step.decision is self.decision:
                self._step_s.append(step.seconds)

    def _read(self, step: Observed) -> None:
        """Share the time in which the draft has read prompts by their lengths; what it catches up on is no prompt."""
        slots = np.array([slot for req_id in step.reading if (slot := self._slots.get(req_id, 0))], np.int64)
        slots = slots[self._rows["verify_steps"][slots] == 0]
        seconds = max(step.reading_s, 0.0 if step.seconds is None else step.seconds - self._expected_s)
        lengths = self._rows["draft_context"][slots]
        self._rows["start_s"][slots] += seconds * lengths / max(float(lengths.sum()), 1e-9)
        self._elapsed_s += seconds

    def _fold(self) -> None:
        """Take in what was observed since the last decision."""
        rows, num_rows = self._rows, len(self._rows)
        for option in {option for option, *_ in self._verified}:
            slots, accepted = (
                np.concatenate([each[of] for each in self._verified if each[0] == option]) for of in (1, 2)
            )
            steps, gained = np.bincount(slots, minlength=num_rows), np.bincount(slots, accepted, num_rows)
            rows["hoped"] += steps * self.acceptance.expected[rows["class"], option]
            rows["own"] += gained
            rows["verify_steps"] += steps
            rows["verify_tokens"] += steps + gained.astype(np.int64)
            is_probed, left = rows["probe_left"] > 0, np.maximum(rows["probe_left"] - steps, 0)
            goes_on = is_probed & (left == 0) & (rows["verify_steps"] < _PROBE_MORE)
            rows["probe_left"] = np.where(goes_on & (4 * rows["own"] >= 3 * rows["verify_steps"]), _PROBE_MORE, left)
            self.acceptance.observe(option, rows["class"][slots], accepted)
        self._verified.clear()
        if self._step_s:
            (context, size), option = self._drafted, self._index[self.decision.option]
            seconds = float(np.median(self._step_s))
            self.costs.observe(option, size, context, self._expected_s, seconds, len(self._step_s), self._now)
            share = 1 - 0.95 ** len(self._step_s)
            self._size += share * (size - self._size)
            self._square += share * (size**2 - self._square)
            self._step_s.clear()

    def decide(self, req_ids: Sequence[str], most: int, shapes: frozenset[str] | None = None) -> Decision:
        """Return what the requests of a step get.

        Args:
            req_ids: Of the step.
            most: Draft tokens that none may exceed.
            shapes: That may be drafted; None for all.
        """
        bounds = req_ids, most, shapes
        if self._left > 0 and not self._is_changed and bounds == self._bounds:
            return self.decision
        self._fold()
        slots = self._slots_of(req_ids)
        is_new = self._is_changed or bounds != self._bounds
        self._wait = _DECIDE_FIRST if is_new else min(2 * self._wait, _DECIDE_LAST)
        self._bounds, self._is_changed, self._left = bounds, False, self._wait
        for index in np.unique(self._rows["class"][slots[slots > 0]]).tolist():
            self._review(index)
        allowed = [
            index
            for index, option in enumerate(self.options[:-1])
            if option.num_tokens <= most and (shapes is None or option.shape in shapes)
        ]
        option, drafted = self._choose(slots, allowed)
        paused = frozenset(compress(req_ids, (~drafted).tolist())) if option.num_tokens else frozenset()
        decision = Decision(option, paused, self._pads)
        if decision != self.decision:  # steps by the same one are known by identity
            self.decision = decision
        self._rows["has_draft"][slots] = drafted
        return self.decision

    def _choose(self, slots: np.ndarray, allowed: list[int]) -> tuple[Option, np.ndarray]:
        """Return an option and `[n]` bool who has drafts, of `[n]` slots."""
        size, context, none = len(slots), float(self._rows["context"][slots].sum()), len(self.options) - 1
        is_paused = np.array([known.is_paused for known in self.classes] or [False])
        is_probed = self._rows["probe_left"][slots] > 0
        can = self._rows["may_draft"][slots] & (is_probed | ~is_paused[self._rows["class"][slots]])
        probed = is_probed & can
        nobody = np.zeros(size, dtype=bool)
        # By option: its rate over that without drafts, its seconds, who has drafts.
        none_s = float(self.costs.seconds(none, size, 0, context, 0.0))
        found = {none: (1.0, none_s, nobody)}
        share = self.costs.shares(self._rows["context"][slots])
        if can.any():
            own = self._rows["own"][slots] + _OWN_TOKENS
            own = (own + np.sqrt(own)) / (self._rows["hoped"][slots] + _OWN_TOKENS)
            sticky = np.where(self._rows["has_draft"][slots], _STICKY, 1.0)
            order = np.flatnonzero(can)
            counts = np.arange(1, len(order) + 1)
            for index in allowed:
                tokens = np.minimum(
                    own * self.acceptance.expected[self._rows["class"][slots], index], self.options[index].depth
                )
                ranked = order[np.argsort(-(share * tokens * sticky)[order])]
                draft_context = np.cumsum(self._rows["draft_context"][slots[ranked]])
                rows = np.full(len(order), size) if self._pads else counts
                seconds = self.costs.seconds(index, size, rows, context, draft_context)
                rates = none_s * (1 + np.cumsum((share * tokens)[ranked])) / seconds
                last = int(rates.argmax())
                drafted = nobody.copy()
                drafted[ranked[: last + 1]] = True
                found[index] = float(rates[last]), float(seconds[last]), drafted | probed
        used = self._index[self.decision.option]
        best = max(found, key=lambda index: found[index][0] * (_HYSTERESIS if index in (used, none) else 1.0))
        if (stale := self._stale(found, best, size, context)) is not None:
            best, self._left = stale, _TRY_STEPS
        if best == none and probed.any() and allowed:
            best, self._left = max(found.keys() - {none}, key=lambda index: found[index][0]), _PROBE_STEPS
            of_probed = float(self._rows["draft_context"][slots[probed]].sum())
            seconds = self.costs.seconds(best, size, int(probed.sum()), context, of_probed)
            found[best] = 0.0, float(seconds), probed
        _, self._expected_s, drafted = found[best]
        self._drafted = context, size
        return self.options[best], drafted

    def _stale(self, found: Mapping[int, tuple], best: int, size: int, context: float) -> int | None:
        """Return an option to measure again for some steps: one nearly as good as the best, not in use for long."""
        least = _TRY_WITHIN * found[best][0]
        for index, (rate, *_) in found.items():
            if index != best and rate > least and self.costs.age(index, size, context, self._now) > _TRY_AFTER:
                return index
        return None
