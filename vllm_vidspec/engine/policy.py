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
from typing import NamedTuple

import numpy as np

from vllm_vidspec.names import CLASS_SIZES

SHORT_ANSWER = 16  # tokens: answers of fewer lose with their first step and their last what the others gain
DECIDE_EVERY = 16  # steps, where no request has come or gone
_HYSTERESIS = 1.02  # by how much another option must be faster than the one in use, and drafts than none
_STICKY = 1.05  # on the expected tokens of a request that has drafts: a change of who has them costs a prefill
_RESUME = 1.05  # gain of whole answers at which a paused class is drafted for again
_PRIOR, _PRIOR_STEPS = 0.8, 2.0  # acceptance of a class that is not known, and the verify steps that this counts as
_MEMORY, _PAUSED_MEMORY = 1024.0, 6.0  # verify steps in a class's EMA; and once it is paused, so that a probe counts
_OWN_TOKENS = 16.0  # of its class's acceptance, that a request's own is blended with
_LEAST_KNOWN = 8  # verify steps of a class before it may be paused
_PROBE_EVERY = 24  # requests of a paused class between two probes
_PROBE_STEPS, _PROBE_MORE = 4, 12  # verify steps of a probe, and more where these gave a draft token each
_PROBE_SHARE = 0.005  # of the time, that probes may take
_TRY_AFTER, _TRY_STEPS, _TRY_WITHIN = 512, 5, 0.8  # `Policy._stale`: in steps, steps, and of the best rate
_CORRECTION = 0.05  # weight of a step in its entry's correction
_SETTLED = 32  # steps after which what changes in an entry is the machine's: entries not in use follow it
_NEW_ANSWER = 0.1  # weight of an answer in what is known of its class's
_LENGTHS = (300, 600, 1200, 2400, 4800, 9600, 19200)  # visual tokens, at most, of each of CLASS_SIZES but the last
_MAX_CLASSES = 256


class Option(NamedTuple):
    """What a step may draft for each of its requests."""

    shape: str  # As in `config.Plan`; "none" with 0 tokens
    num_tokens: int  # Draft tokens of each request
    num_levels: int  # Forwards of the draft, one after another; 0 where they run elsewhere, at the same time
    is_prefix: bool  # Whether fewer tokens are the first of these, as of a chain: acceptance is then known by position


NONE = Option("none", 0, 0, True)


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


class StepCosts:
    """Seconds of a step.

    Args:
        num_options: Options, the last of which drafts nothing.
        measured: By option's index, requests, and thousands of tokens in each one's context: seconds of a step in which
            all of them have drafts. Every option at the same sizes with the least context; any of them with others.
    """

    def __init__(self, num_options: int, measured: Mapping[tuple[int, int, float], float]):
        least = min(context for _, _, context in measured)
        sizes = sorted({size for _, size, context in measured if context == least})
        slopes = np.zeros(num_options)  # seconds of a thousand tokens
        for option in range(num_options):
            found = [
                (seconds - measured[option, size, least]) / (size * (context - least))
                for (of, size, context), seconds in measured.items()
                if of == option and context > least
            ]
            slopes[option] = max(0.0, float(np.median(found))) if found else 0.0
        base = np.array([[measured[option, size, least] for size in sizes] for option in range(num_options)])
        base = np.maximum.accumulate(base, axis=1) - slopes[:, None] * least * np.array(sizes)
        self._sizes, self._none, self._slope = np.array(sizes), base[-1], slopes[-1]
        # What an option takes beside that; its context is the draft's.
        self._extra, self._draft_slopes = np.maximum(base - base[-1], 0.0), np.maximum(slopes - slopes[-1], 0.0)
        shape = num_options, 12, 12  # by option, log2 of the requests, log2 of their mean context in 256 tokens
        self._factor, self._machine_then, self._machine = np.ones(shape), np.ones(shape), 1.0
        self._count, self._at = np.zeros(shape, np.int64), np.zeros(shape, np.int64)

    def _over_sizes(self, size: np.ndarray | float, values: np.ndarray) -> np.ndarray:
        """Interpolate `values` of the measured sizes; beyond the largest they grow in proportion."""
        last = self._sizes[-1]
        return np.interp(size, self._sizes, values) * np.maximum(size, last) / last

    @staticmethod
    def _entry(option: int, size: int, context: float) -> tuple[int, int, int]:
        return option, min(11, max(0, size - 1).bit_length()), min(11, int(4 * context / max(size, 1)).bit_length())

    def seconds(self, option: int, size: int, drafted: np.ndarray, context: float, draft_context: np.ndarray):
        """Return `[m]` seconds of steps.

        Args:
            option: Index of theirs.
            size: Requests of each.
            drafted: `[m]` how many of these have drafts.
            context: Thousands of tokens that the target has of all.
            draft_context: `[m]` the same that the draft has of those with drafts.
        """
        entry = self._entry(option, size, context)
        none = self._over_sizes(float(size), self._none) + self._slope * context
        extra = self._over_sizes(drafted, self._extra[option]) + self._draft_slopes[option] * draft_context
        return (none + extra) * (self._factor[entry] * self._machine / self._machine_then[entry])

    def observe(
        self, option: int, size: int, context: float, predicted: float, seconds: float, num_steps: int, now: int
    ) -> None:
        """Correct an entry by steps that were `predicted` to take so long and took `seconds`; `now` counts steps."""
        entry = self._entry(option, size, context)
        weight = max(1 - (1 - _CORRECTION) ** num_steps, 1 / (1 + self._count[entry]))
        change = min(2.0, max(0.5, seconds / predicted)) ** weight
        factor = self._factor[entry] * self._machine / self._machine_then[entry] * change
        if self._count[entry] >= _SETTLED:
            self._machine *= change
        self._factor[entry], self._machine_then[entry] = factor, self._machine
        self._count[entry] += num_steps
        self._at[entry] = now
        none = len(self._extra) - 1, *entry[1:]  # it takes no longer than with drafts
        most = predicted * change / (self._over_sizes(float(size), self._none) + self._slope * context)
        if option != none[0] and self._factor[none] * self._machine / self._machine_then[none] > most:
            self._factor[none], self._machine_then[none] = most, self._machine

    def shares(self, context: np.ndarray) -> np.ndarray:
        """Return `[n]` shares of a step without drafts that its requests take, of so many thousands of tokens each."""
        seconds = self._over_sizes(len(context), self._none) / len(context) + self._slope * context
        return seconds / seconds.sum()

    def summary(self, options: Sequence[Option]) -> str:
        """Return the measured milliseconds by option and number of requests, for the log."""
        totals = self._none + self._extra
        return "; ".join(
            f"K = {option.num_tokens} ({option.shape}) "
            + ", ".join(f"{1e3 * s:.1f} ms of {size}" for s, size in zip(row, self._sizes.tolist(), strict=True))
            for option, row in zip(options, totals.tolist(), strict=True)
        )

    def age(self, option: int, size: int, context: float, now: int) -> int:
        """Return how many steps ago an entry was corrected."""
        return now - int(self._at[self._entry(option, size, context)])


class Acceptance:
    """Tokens that the options' drafts give, by class.

    Attributes:
        mean: `[classes, options]` tokens of a verify step beside the target's own.
        expected: The same and a standard error more, so that what is hardly known is tried.
        verify_steps: `[classes]` verify steps that they rest on.
    """

    def __init__(self, options: Sequence[Option]):
        self._options, most = options, max(option.num_tokens for option in options)
        self._passed, self._reached = np.zeros((2, _MAX_CLASSES, most))  # by position, of chains
        self._sum, self._tries = np.zeros((2, _MAX_CLASSES, len(options)))  # of the others
        self.verify_steps = np.zeros(_MAX_CLASSES)
        self.mean, self.expected = np.zeros((2, _MAX_CLASSES, len(options)))
        self._expect(np.arange(_MAX_CLASSES))

    def observe(self, option: int, classes: np.ndarray, accepted: np.ndarray) -> None:
        """Learn from `[v]` verify steps of an option: their classes and accepted tokens."""
        those, counts = np.unique(classes, return_counts=True)
        self._remember(those, np.maximum(0.0, 1 - counts / _MEMORY))
        self.verify_steps[those] += counts
        if self._options[option].is_prefix:
            position = np.arange(1, self._options[option].num_tokens + 1)
            columns = slice(0, len(position))
            np.add.at(self._passed[:, columns], classes, accepted[:, None] >= position)
            np.add.at(self._reached[:, columns], classes, accepted[:, None] >= position - 1)
        else:
            np.add.at(self._sum[:, option], classes, accepted)
            np.add.at(self._tries[:, option], classes, 1.0)
        self._expect(those)

    def pause(self, of_class: int) -> None:
        """Let a class's next verify steps count for more than those so far."""
        those = np.array([of_class])
        self._remember(those, np.minimum(1.0, _PAUSED_MEMORY / np.maximum(self.verify_steps[those], 1.0)))

    def _remember(self, classes: np.ndarray, share: np.ndarray) -> None:
        for counts in (self._passed, self._reached, self._sum, self._tries):
            counts[classes] *= share[:, None]
        self.verify_steps[classes] *= share

    def _expect(self, classes: np.ndarray) -> None:
        """Keep what classes are expected to accept: at a position as at the one before, where it is not known."""
        passed, reached = self._passed[classes], self._reached[classes]
        tries = reached + _PRIOR_STEPS
        chances = np.empty_like(passed)
        before = np.full(len(classes), _PRIOR)
        for position in range(passed.shape[1]):
            before = (passed[:, position] + _PRIOR_STEPS * before) / tries[:, position]
            chances[:, position] = before
        for found, errors in ((self.mean, 0.0), (self.expected, 1.0)):
            likely = np.minimum(1.0, chances + errors * np.sqrt(chances * (1 - chances) / tries))
            in_chains = np.cumsum(np.cumprod(likely, axis=1), axis=1)
            with_twins = np.cumsum(np.cumprod(1 - (1 - likely) ** 2, axis=1), axis=1)  # a tree not tried: two a level
            for index, option in enumerate(self._options[:-1]):
                if option.is_prefix:
                    found[classes, index] = in_chains[:, option.num_tokens - 1]
                    continue
                prior = (
                    with_twins[:, option.num_levels - 1] if option.num_levels else in_chains[:, option.num_tokens - 1]
                )
                num = self._tries[classes, index] + _PRIOR_STEPS
                mean = (self._sum[classes, index] + _PRIOR_STEPS * prior) / num
                mean = mean + errors * np.sqrt(mean * (1 + mean) / num)
                found[classes, index] = np.minimum(option.num_tokens, mean)


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
        return (
            f"K = {self.option.num_tokens}: {self.tokens:.1f} tokens / {1e3 * self.seconds:.1f} ms = "
            f"{self.tokens / self.seconds:.0f}/s; K = 0: 1 / {1e3 * self.none_s:.1f} ms = {1 / self.none_s:.0f}/s"
        )


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
        ended: What is yet to be counted of requests that have ended; the reader empties it.
    """

    def __init__(self, options: Sequence[Option], costs: StepCosts, num_slots: int, pads: bool):
        self.options, self.costs, self._pads = tuple(options), costs, pads
        self._index = {option: index for index, option in enumerate(self.options)}
        self.acceptance = Acceptance(self.options)
        self._class_of: dict[tuple, int] = {}
        self.classes: list[ClassState] = []
        self.ended: list[Ended] = []
        # By slot; slot 0 is of requests that nobody has added.
        self._slots: dict[str, int] = {}
        self._free = list(range(num_slots, 0, -1))
        self._class, self._verify_steps, self._verify_tokens, self._probe_left = np.zeros((4, num_slots + 1), np.int64)
        self._context, self._draft_context, self._start_s, self._own, self._hoped = np.zeros((5, num_slots + 1))
        self._may_draft, self._has_draft = np.zeros((2, num_slots + 1), dtype=bool)
        self._may_draft[0] = True
        self.decision = Decision(NONE, pads=pads)
        self._bounds: tuple = ()
        self._left, self._is_changed = 0, True  # steps until the next decision; whether requests have come or gone
        self._expected_s, self._drafted = 1.0, (0.0, 0)  # of a step by `_decision`; its context, and requests
        self._now, self._elapsed_s, self._probes_s = 0, 0.0, 0.0
        self._size = self._square = 0.0  # EMA of a step's requests, and of their square
        self._verified: list[
            tuple[int, np.ndarray, np.ndarray]
        ] = []  # since the last decision: option, slots, accepted
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
            return bool(self._may_draft[self._slots.get(req_id, 0)])
        index = self._class_of.setdefault((label, *kind), min(len(self.classes), _MAX_CLASSES - 1))
        if index == len(self.classes):
            self.classes.append(ClassState(label))
        slot = self._slots[req_id] = self._free.pop()
        for values in (self._verify_steps, self._verify_tokens, self._probe_left, self._own, self._hoped):
            values[slot] = 0
        self._start_s[slot], self._has_draft[slot], self._class[slot] = 0.0, False, index
        self._context[slot], self._draft_context[slot] = num_tokens / 1e3, num_draft_tokens / 1e3
        known = self.classes[index]
        share = _NEW_ANSWER if known.context else 1.0
        known.context += share * (num_tokens / 1e3 - known.context)
        known.draft_context += share * (num_draft_tokens / 1e3 - known.draft_context)
        self._may_draft[slot] = max_tokens >= SHORT_ANSWER and self._admits(index, slot, max_tokens)
        return bool(self._may_draft[slot])

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
        self._probe_left[slot] = _PROBE_STEPS
        return True

    def cannot_draft(self, req_ids: Iterable[str]) -> None:
        """Take note of requests that run without speculation for good."""
        for req_id in req_ids:
            if req_id in self._slots:
                self._may_draft[self._slots[req_id]] = False
                self._is_changed = True

    def remove(self, req_id: str, num_tokens: int) -> None:
        """Forget a request that has ended with an answer of so many tokens; 0: not known."""
        if req_id not in self._slots:
            return
        self._fold()
        self._is_changed = True
        slot = self._slots.pop(req_id)
        self._free.append(slot)
        known = self.classes[self._class[slot]]
        if num_tokens:
            known.num_answers += 1
            share = max(_NEW_ANSWER, 1 / known.num_answers)
            known.answer_tokens += share * (num_tokens - known.answer_tokens)
        if start_s := float(self._start_s[slot]):
            known.start_s += (start_s - known.start_s) * (_NEW_ANSWER if known.start_s else 1.0)
        self.ended.append(Ended(known.label, int(self._verify_steps[slot]), int(self._verify_tokens[slot])))

    def _best(self, index: int, max_tokens: float = np.inf) -> Best:
        """Return the best option for as many requests of a class as usually run, by whole answers."""
        known, size = self.classes[index], max(1, round(self._square / max(self._size, 1e-9)))
        tokens = min(known.answer_tokens, max_tokens)
        expected = self.acceptance.mean if known.is_paused else self.acceptance.expected
        context, drafted = size * known.context, np.array(size)
        draft_context = np.array(size * known.draft_context)
        none_s = float(self.costs.seconds(len(self.options) - 1, size, np.array(0), context, np.array(0.0)))
        found = []
        for place, option in enumerate(self.options[:-1]):
            length = 1 + float(expected[index, place])
            seconds = float(self.costs.seconds(place, size, drafted, context, draft_context))
            # The first step verifies nothing.
            answers_s = (1 + (tokens - 1) / length) * seconds + size * known.start_s
            one = np.array(1), context, np.array(known.draft_context)
            probe_s = max(0.0, float(self.costs.seconds(place, size, *one)) - none_s)
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
        get = self._slots.get
        slots = np.fromiter([get(req_id, 0) for req_id in step.req_ids], np.int64, len(step.req_ids))
        self._context[slots] += 1e-3 * step.num_tokens
        self._draft_context[slots] += 1e-3 * step.num_tokens
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
        slots = slots[self._verify_steps[slots] == 0]
        seconds = max(step.reading_s, 0.0 if step.seconds is None else step.seconds - self._expected_s)
        lengths = self._draft_context[slots]
        self._start_s[slots] += seconds * lengths / max(float(lengths.sum()), 1e-9)
        self._elapsed_s += seconds

    def _fold(self) -> None:
        """Take in what was observed since the last decision."""
        for option, slots, accepted in self._verified:
            classes = self._class[slots]
            self._hoped[slots] += self.acceptance.expected[classes, option]
            self._own[slots] += accepted
            self._verify_steps[slots] += 1
            self._verify_tokens[slots] += 1 + accepted
            left = self._probe_left[slots]
            goes_on = (left == 1) & (self._own[slots] >= _PROBE_STEPS) & (self._verify_steps[slots] == _PROBE_STEPS)
            self._probe_left[slots] = np.where(goes_on, _PROBE_MORE, np.maximum(left - 1, 0))
        for option in {option for option, *_ in self._verified}:
            slots, accepted = (
                np.concatenate([each[of] for each in self._verified if each[0] == option]) for of in (1, 2)
            )
            self.acceptance.observe(option, self._class[slots], accepted)
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
        get = self._slots.get
        slots = np.fromiter([get(req_id, 0) for req_id in req_ids], np.int64, len(req_ids))
        self._bounds, self._is_changed, self._left = bounds, False, DECIDE_EVERY
        for index in np.unique(self._class[slots[slots > 0]]).tolist():
            self._review(index)
        allowed = [
            index
            for index, option in enumerate(self.options[:-1])
            if option.num_tokens <= most and (shapes is None or option.shape in shapes)
        ]
        option, drafted = self._choose(slots, allowed)
        paused = frozenset() if drafted.all() else frozenset(np.array(req_ids, dtype=object)[~drafted].tolist())
        decision = Decision(option, paused if option.num_tokens else frozenset(), self._pads)
        if decision != self.decision:
            self.decision = decision
        self._has_draft[slots] = drafted
        return self.decision

    def _choose(self, slots: np.ndarray, allowed: list[int]) -> tuple[Option, np.ndarray]:
        """Return an option and `[n]` bool who has drafts, of `[n]` slots."""
        size, context, none = len(slots), float(self._context[slots].sum()), len(self.options) - 1
        is_paused = np.array([known.is_paused for known in self.classes] or [False])
        is_probed = self._probe_left[slots] > 0
        can = self._may_draft[slots] & (is_probed | ~is_paused[self._class[slots]])
        nobody = np.zeros(size, dtype=bool)
        # By option: its rate over that without drafts, its seconds, who has drafts.
        none_s = float(self.costs.seconds(none, size, np.array(0), context, np.array(0.0)))
        found = {none: (1.0, none_s, nobody)}
        share = self.costs.shares(self._context[slots])
        if can.any():
            own = self._own[slots] + _OWN_TOKENS
            own = (own + np.sqrt(own)) / (self._hoped[slots] + _OWN_TOKENS)
            own = np.minimum(own, 1.0 + (own > 1) * 0.0) if False else own
            order = np.flatnonzero(can)
            counts = np.arange(1, len(order) + 1)
            for index in allowed:
                tokens = np.minimum(
                    own * self.acceptance.expected[self._class[slots], index], self.options[index].num_tokens
                )
                ranked = order[np.argsort(-(share * tokens * np.where(self._has_draft[slots], _STICKY, 1.0))[order])]
                draft_context = np.cumsum(self._draft_context[slots[ranked]])
                rows = np.full(len(order), size) if self._pads else counts
                seconds = self.costs.seconds(index, size, rows, context, draft_context)
                rates = none_s * (1 + np.cumsum((share * tokens)[ranked])) / seconds
                last = int(rates.argmax())
                drafted = nobody.copy()
                drafted[ranked[: last + 1]] = True
                found[index] = float(rates[last]), float(seconds[last]), drafted | (is_probed & can)
        used = self._index[self.decision.option]
        best = max(found, key=lambda index: found[index][0] * (_HYSTERESIS if index in (used, none) else 1.0))
        if (stale := self._stale(found, best, size, context)) is not None:
            best, self._left = stale, _TRY_STEPS
        if best == none and (probed := is_probed & can).any() and allowed:
            best, self._left = max(found.keys() - {none}, key=lambda index: found[index][0]), _PROBE_STEPS
            those = np.array(np.count_nonzero(probed)), np.array(self._draft_context[slots[probed]].sum())
            seconds = self.costs.seconds(best, size, those[0], context, those[1])
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
