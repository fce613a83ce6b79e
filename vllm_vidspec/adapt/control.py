"""Controller: how many drafts a request gets in a step, 0 to K, by expected tokens over expected time; numpy only.

Three decisions, none of which changes a token of the output:

    a request comes            is it shown to the draft at all, given what requests like it have gained so far?
    what runs has changed, or  which plan (shape and number of drafts), and which requests rest (get none), so that
    some steps have passed     tokens a second of the whole batch are the most?
    now and then               a plan or a class of requests that was not measured lately is tried for a few steps

The time of a step is `StepCosts`', what is accepted `AcceptanceTable`'s. Trials of plans and of classes are paid from
an allowance: a hundredth of the time that has passed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vllm_vidspec.adapt.acceptance import AcceptanceTable
from vllm_vidspec.adapt.costs import KNOWN, StepCosts
from vllm_vidspec.names import CLASS_SIZES

_DECIDE_FIRST, _DECIDE_LAST = 4, 64  # steps between two decisions about a batch: ever more while they are alike
_MEASURE_EVERY = 4  # steps of a kind that is known, of which one is measured
_TRIAL_STEPS = 5  # steps of a trial that are measured,
_BETWEEN = 6  # steps between two trials while there is something new to try
_LONGEST_TRIAL = 24  # and steps after which it ends in any case: a draft may first have to read what it missed
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 8192  # steps between trials in one situation
_HOPE = 1.25  # what was never measured may be so much better than is estimated
_NEAR = 0.8  # of the best: what is worse than that is not measured again
_STICKY = 1.25  # by how much a request's drafts must be worth more than they cost until it changes what it gets
_MARGIN, _SMALL_MARGIN = 1.1, 1.03  # by how much doing nothing must be better than drafting, or the other way
# round, and one number of drafts than another
_ALLOWANCE = 0.01  # share of the time that trials and probes may cost
_FIRST_ALLOWANCE_STEPS = 40  # and at first as much as so many steps
_LEAST_KNOWN = 6.0  # verify steps of a class before it may rest
_PROBE_STEPS = 8  # verify steps of a request of a resting class that is drafted for nevertheless
_PROBE_EVERY = 8  # requests of a resting class between two probes, at least
_PAYS = 1.02  # time without drafts over time with them, above which a class is shown to the draft
_NEW_ANSWER = 0.1  # share of a new answer in the means of its class

# Visual tokens up to which a request is of each of CLASS_SIZES but the last.
_LENGTHS = (300, 600, 1200, 2400, 4800, 9600, 19200)


def class_label(num_video: int, num_image: int) -> int:
    """Return the place in CLASS_LABELS of a request with so many video and image tokens."""
    if not num_video and not num_image:
        return 0
    size = int(np.searchsorted(_LENGTHS, num_video + num_image, side="left"))
    return 1 + (len(CLASS_SIZES) if num_video else 0) + size


class Option(NamedTuple):
    """What a step may draft for those of its requests that do not rest.

    Attributes:
        shape: As in `config.Plan`; "none" with 0 tokens.
        num_tokens: Drafts of each.
        num_levels: Forwards of the draft, one after another; 0 where they run elsewhere, at the same time.
        is_prefix: Whether fewer tokens are the first of these, as of a chain: acceptance is then known by position.
    """

    shape: str
    num_tokens: int
    num_levels: int
    is_prefix: bool


REST = Option("none", 0, 0, True)


class Decision(NamedTuple):
    """What the requests of a step get.

    Attributes:
        option: What is drafted, at most.
        resting: Requests that get nothing.
        number: Of the decision; steps of one number are alike.
        pads: Whether those that get nothing have as many rows as the others.
    """

    option: Option
    resting: frozenset[str]
    number: int
    pads: bool


class _Batch(NamedTuple):
    """Requests of a step.

    Attributes:
        slots: `[n]` int64.
        place: Class of its size (1, 2, 3 to 4, 5 to 8, ...) and of its mean context (powers of two).
        context: `[n]` thousands of tokens that the target has of each.
        draft_context: `[n]` the same of the draft.
    """

    slots: np.ndarray
    place: tuple[int, int]
    context: np.ndarray
    draft_context: np.ndarray


class Ended(NamedTuple):
    """A request that has ended: place of its class in CLASS_LABELS, its verify steps and the tokens that they gave."""

    label: int
    verify_steps: int
    verify_tokens: int


@dataclass
class _Class:
    """What is known of a class of requests: `label`, mean answer and cost of the start, and whether it rests."""

    label: int
    answer_tokens: float = 128.0
    start_s: float = 0.0
    rests: bool = False
    since_probe: int = 0


@dataclass
class _Situation:
    """What is tried at one batch size and context."""

    steps: int = 0
    rate: float = 0.0  # tokens a second of what is in use; 0: not known
    in_use: Option | None = None
    trial: Option | None = None
    measured: int = 0  # steps of the trial
    until: int = _BETWEEN  # step at which the trial ends, or the next one begins
    pause: int = _FIRST_PAUSE
    seen: dict[Option, int] = field(default_factory=dict)  # step at which an option was measured last


class Controller:
    """Decides for one engine.

    Args:
        options: What may be drafted, `REST` included.
        num_slots: Requests that run at the same time, at most.
        pads: Whether every request of a step has as many rows as those that are drafted for, as CUDA graphs of whole
            forwards need it: then a resting request saves the draft's work and none of the target's.
    """

    def __init__(self, options: Sequence[Option], num_slots: int, pads: bool):
        self.options, self._pads = tuple(options), pads
        self._has_chains = any(option.is_prefix and option.num_tokens for option in options)
        most = max([option.num_tokens for option in options if option.is_prefix], default=1) or 1
        self.acceptance = AcceptanceTable(num_slots, most)
        self.costs = StepCosts()
        self._slots: dict[str, int] = {}
        self._free = list(range(num_slots))[::-1]
        self._context = np.zeros(num_slots)  # thousands of tokens
        self._draft_context = np.zeros(num_slots)
        self._may_draft = np.zeros(num_slots, dtype=bool)
        self._probe_left = np.zeros(num_slots, dtype=np.int64)
        self._is_drafted = np.ones(num_slots, dtype=bool)
        self._start_s = np.zeros(num_slots)
        self._tokens, self._verify_steps, self._verify_tokens = np.zeros((3, num_slots), dtype=np.int64)
        self._class_of: dict[tuple, int] = {}
        self.classes: list[_Class] = []
        self._situations: dict[tuple[int, int], _Situation] = {}
        self._last: tuple[list[str], np.ndarray] = ([], np.zeros(0, dtype=np.int64))
        self._decision = Decision(REST, frozenset(), 0, pads)
        self._left, self._wait, self._limit, self._unmeasured = 0, _DECIDE_FIRST, -1, 0
        self._is_measured = False  # what the last step measured is known
        self._step_s = 0.0  # of a step without drafts, the last that was predicted
        self._elapsed_s = self._spent_s = 0.0

    # ---- a request's life ------------------------------------------------------------------------------------------

    def add(self, req_id: str, label: int, kind: tuple, num_tokens: int, num_draft_tokens: int) -> bool:
        """Take a request in; return whether it is shown to the draft.

        Args:
            req_id: Its id.
            label: Place in CLASS_LABELS.
            kind: What else tells its class from others.
            num_tokens: Of its prompt.
            num_draft_tokens: Of its prompt as the draft would see it.
        """
        if req_id in self._slots:  # it was preempted
            return bool(self._may_draft[self._slots[req_id]])
        if not self._free:
            return True
        key = (label, *kind)
        if key not in self._class_of:
            self._class_of[key] = len(self.classes)
            self.classes.append(_Class(label))
        index = self._class_of[key]
        slot = self._slots[req_id] = self._free.pop()
        self.acceptance.begin(slot, index)
        self._context[slot], self._draft_context[slot] = num_tokens / 1e3, num_draft_tokens / 1e3
        self._start_s[slot] = self._tokens[slot] = self._probe_left[slot] = 0
        self._verify_steps[slot] = self._verify_tokens[slot] = 0
        self._is_drafted[slot] = True
        self._may_draft[slot] = self._is_shown(self.classes[index], index, slot)
        return bool(self._may_draft[slot])

    def remove(self, req_id: str) -> Ended | None:
        """Forget a request that has ended, and learn from its length; None if nobody has taken it in."""
        slot = self._slots.pop(req_id, None)
        if slot is None:
            return None
        self._free.append(slot)
        known = self.classes[self.acceptance.classes[slot]]
        if self._tokens[slot]:
            known.answer_tokens += _NEW_ANSWER * (self._tokens[slot] - known.answer_tokens)
        if self._start_s[slot]:
            known.start_s += (self._start_s[slot] - known.start_s) * (_NEW_ANSWER if known.start_s else 1.0)
        return Ended(known.label, int(self._verify_steps[slot]), int(self._verify_tokens[slot]))

    def expected_length(self, class_index: int) -> float:
        """Return the tokens of a verify step of a class, its own included, that are expected of the longest draft."""
        chains, tree = self.acceptance.expected_of_class(class_index)
        return 1 + (float(chains[-1]) if self._has_chains else tree)

    def _is_shown(self, known: _Class, index: int, slot: int) -> bool:
        """Return whether a request that has just got its slot is shown to the draft; keep its class's state."""
        if self.acceptance.tries(index) < _LEAST_KNOWN or not self.costs.is_fitted:
            known.rests = False
            return True
        is_paying = self._gain(known, slot) > (1.0 if known.rests else 1 / _PAYS)
        if known.rests and not is_paying:
            known.since_probe += 1
            cost = known.start_s + _PROBE_STEPS * self._level_s(slot)
            if known.since_probe >= _PROBE_EVERY and self._may_spend(cost):
                self._spent_s += cost
                known.since_probe, self._probe_left[slot] = 0, _PROBE_STEPS
                return True
            return False
        if known.rests == is_paying:  # it changes
            known.rests = not is_paying
            known.since_probe = 0
            if known.rests:
                self.acceptance.forget(index)
        return is_paying

    def _gain(self, known: _Class, slot: int) -> float:
        """Return a request's time without drafts over its time with the best of them, start included: beside what the
        others do now, or in a batch of requests like it, whichever is more.
        """
        chains, tree = self.acceptance.expected_of_class(int(self.acceptance.classes[slot]))
        others = self._last[1]
        slots = np.append(others[others != slot], slot)
        everyone, answer, best = np.ones(len(slots), dtype=bool), known.answer_tokens, 0.0
        now, batch = self._decision.option, self._batch(slots)
        drafted = np.append(self._may_draft[slots[:-1]], False) if now.num_tokens else ~everyone
        without = self._seconds(now, batch, drafted)
        alone = self._seconds(REST, batch, ~everyone)
        situation = self._situations.get(batch.place)
        token_s = 1 / situation.rate if situation is not None and situation.rate else without / len(slots)
        for option in self.options:
            if not option.num_tokens:
                continue
            length = float(chains[option.num_tokens] if option.is_prefix else tree)
            num_steps = answer / (1 + length)
            together = num_steps * self._seconds(option, batch, everyone) + len(slots) * known.start_s
            best = max(best, answer * alone / together)
            if option == now:
                joined = self._seconds(option, batch, np.append(drafted[:-1], True)) - without
                saved = num_steps * (length * token_s - joined) - known.start_s
                best = max(best, 1 / max(1 - saved / (answer * token_s), 0.01))
        return best

    def _level_s(self, slot: int) -> float:
        """Return what drafting for one request more costs a step, at most."""
        batch, option = self._batch(np.array([slot])), max(self.options, key=lambda option: option.num_tokens)
        drafted = np.ones(1, dtype=bool)
        return max(0.0, self._seconds(option, batch, drafted) - self._seconds(REST, batch, ~drafted))

    def _may_spend(self, seconds: float) -> bool:
        allowed = _ALLOWANCE * self._elapsed_s + _FIRST_ALLOWANCE_STEPS * self._step_s
        return self._spent_s + seconds <= allowed

    # ---- a step ----------------------------------------------------------------------------------------------------

    def decide(self, req_ids: list[str], most: int | None = None) -> Decision:
        """Return what the requests that a step decodes are to get.

        Args:
            req_ids: Of the step; those that nobody has taken in get what all get.
            most: Drafts that none may exceed, None for as many as there are.
        """
        limit = -1 if most is None else most
        if self._left > 0 and limit == self._limit and req_ids == self._last[0]:
            return self._decision
        self._wait = min(2 * self._wait, _DECIDE_LAST)
        if req_ids != self._last[0] or limit != self._limit:
            self._wait = _DECIDE_FIRST
            known = [self._slots[req_id] for req_id in req_ids if req_id in self._slots]
            self._last = (list(req_ids), np.array(known, dtype=np.int64))
        self._left, self._limit = self._wait, limit
        option, drafted = self._choose(self._last[1], most)
        resting = frozenset[str]()
        if option.num_tokens and not drafted.all():
            slots = set(self._last[1][~drafted].tolist())
            resting = frozenset(req_id for req_id in req_ids if self._slots.get(req_id) in slots)
        if (option, resting) != self._decision[:2]:
            self._decision = Decision(option, resting, self._decision.number + 1, self._pads)
            self._left = self._wait = _DECIDE_FIRST if self._left > 1 else 1
        return self._decision

    def _choose(self, slots: np.ndarray, most: int | None) -> tuple[Option, np.ndarray]:
        """Return what is drafted, and `[n]` bool for whom."""
        options = [option for option in self.options if most is None or option.num_tokens <= most]
        nobody = np.zeros(len(slots), dtype=bool)
        if not len(slots):
            return (options[0] if most is None else REST), nobody
        chains, trees = self.acceptance.expected(slots), nobody
        found: dict[Option, tuple[float, np.ndarray]] = {}
        batch = self._batch(slots)
        situation = self._situations.setdefault(batch.place, _Situation())
        self._step_s = self._seconds(REST, batch, nobody)
        token_s = 1 / situation.rate if situation.rate else self._step_s / len(slots)
        for option in options:
            if not option.is_prefix and trees is nobody:
                trees = self.acceptance.expected_tree(slots)
            lengths = chains[:, option.num_tokens] if option.is_prefix else trees
            if not option.num_tokens:
                found[option] = len(slots) / self._step_s, nobody
                continue
            # All that may, or those alone whose drafts pay for themselves: what a request costs is known less well.
            for drafted, margin in (
                (self._may_draft[slots], 1.0),
                (self._paying(option, batch, lengths, token_s), _SMALL_MARGIN),
            ):
                rate = (len(slots) + float(lengths[drafted].sum())) / self._seconds(option, batch, drafted)
                if drafted.any() and (option not in found or rate > margin * found[option][0]):
                    found[option] = rate, drafted
        best = max(found, key=lambda option: found[option][0] * self._favour(option, situation.in_use))
        situation.in_use, situation.rate = best, found[best][0]
        is_probed = (self._probe_left[slots] > 0) & self._may_draft[slots]
        if best == REST and is_probed.any() and len(found) > 1:
            return max(found.keys() - {REST}, key=lambda option: found[option][0]), is_probed
        chosen = self._trial(situation, found, best, batch)
        self._is_drafted[slots] = found[chosen][1]
        return chosen, found[chosen][1]

    @staticmethod
    def _favour(option: Option, in_use: Option | None) -> float:
        """Return by how much an option counts for more, as a change costs something: a draft that goes on has first to
        read what it has missed.
        """
        if in_use is None or option == in_use:
            return _MARGIN
        return 1.0 if REST in (option, in_use) else _MARGIN / _SMALL_MARGIN

    def _paying(self, option: Option, batch: _Batch, lengths: np.ndarray, token_s: float) -> np.ndarray:
        """Return `[n]` bool: the requests whose drafts are worth more than they cost by themselves, given what a token
        costs in seconds; what all of them cost together is the option's.
        """
        _, _, _, row, row_context, _, draft_row, draft_context = self.costs.weights.tolist()
        each_s: np.ndarray | float = 0.0
        if option.num_levels:
            each_s = option.num_tokens * draft_row + option.num_levels * draft_context * batch.draft_context
        if not self._pads:
            each_s = each_s + option.num_tokens * (row + row_context * batch.context)
        # Who is drafted for goes on until it is clearly not worth it, and the other way round.
        margin = np.where(self._is_drafted[batch.slots], 1 / _STICKY, _STICKY)
        pays = lengths * token_s > margin * each_s
        return self._may_draft[batch.slots] & (pays | (self._probe_left[batch.slots] > 0))

    def _trial(
        self, situation: _Situation, found: dict[Option, tuple[float, np.ndarray]], best: Option, batch: _Batch
    ) -> Option:
        """Return the best option, or another for a few steps that shall be measured."""
        steps = situation.steps
        if situation.trial is not None:
            if situation.trial in found and steps < situation.until and situation.measured < _TRIAL_STEPS:
                self._left = 1
                return situation.trial
            situation.trial, situation.until = None, steps + _BETWEEN
        if steps < situation.until:
            return best
        others = [option for option in found if option != best]
        unknown = [option for option in others if self._count(option, batch, found[option][1]) < KNOWN]
        hopeful = [option for option in unknown if self._is_hopeful(option, found, best)]
        if not hopeful:  # what is known gets old
            situation.until = steps + situation.pause
            situation.pause = min(2 * situation.pause, _LONGEST_PAUSE)
            hopeful = [option for option in others if found[option][0] > _NEAR * found[best][0]]
            hopeful.sort(key=lambda option: situation.seen.get(option, 0), reverse=True)
        if not hopeful:
            return best
        option = REST if REST in unknown else hopeful[-1]
        value, drafted = found[option]
        cost = _TRIAL_STEPS * self._seconds(option, batch, drafted) * max(0.0, 1 - value / found[best][0])
        if not self._may_spend(cost):
            situation.until = steps + _FIRST_PAUSE
            return best
        self._spent_s += cost
        situation.trial, situation.until, situation.measured = option, steps + _LONGEST_TRIAL, 0
        self._left = 1
        return option

    def _is_hopeful(self, option: Option, found: dict[Option, tuple[float, np.ndarray]], best: Option) -> bool:
        """Return whether an option that was not measured here may be the best; doing nothing is always measured."""
        return option == REST or _HOPE * found[option][0] > found[best][0]

    def observe(
        self,
        decision: Decision,
        req_ids: list[str],
        drafted: np.ndarray,
        num_tokens: np.ndarray,
        is_chain: bool,
        seconds: float | None,
        is_steady: bool = True,
        reading: frozenset[str] = frozenset(),
        reading_s: float = 0.0,
        num_steps: int = 1,
    ) -> None:
        """Take in what a step has put out, or several steps that were alike.

        Args:
            decision: What it drafted by, for the step after it.
            req_ids: Its requests.
            drafted: `[n]` drafts that were verified of each; 0 where there was none.
            num_tokens: `[n]` tokens that each has got.
            is_chain: Whether the verified drafts were chains.
            seconds: How long it took; None where it has read prompts.
            is_steady: Whether the step before it drafted by the same decision, so that it has verified what it says.
            reading: Requests whose prompts the draft has read on in this step.
            reading_s: What that took of the host, at least.
            num_steps: How many there were; `seconds` is what each took.
        """
        slots = self._slots_of(req_ids)
        is_known = slots >= 0
        if not is_known.all():
            slots, drafted, num_tokens = slots[is_known], drafted[is_known], num_tokens[is_known]
        self._tokens[slots] += num_tokens
        had = (drafted > 0) & (num_tokens > 0)
        if had.any():
            some = slots[had]
            self.acceptance.observe(some, drafted[had], num_tokens[had] - 1, is_chain)
            self._probe_left[some] = np.maximum(self._probe_left[some] - 1, 0)
            self._verify_steps[some] += 1
            self._verify_tokens[some] += num_tokens[had]
        self._left -= num_steps
        if reading:
            if seconds is not None:
                reading_s = max(reading_s, seconds - self._seconds(decision.option, self._batch(slots), had))
            places = self._slots_of(reading)
            places = places[places >= 0]
            self._start_s[places] += reading_s / max(len(places), 1)
        if seconds is None:
            return
        self._elapsed_s += num_steps * seconds
        self._unmeasured += num_steps
        if self._unmeasured < _MEASURE_EVERY and self._is_measured and not reading:
            return
        batch = self._batch(slots)
        situation = self._situations.get(batch.place)
        if situation is not None:
            situation.steps += self._unmeasured
        self._unmeasured = 0
        if reading or not is_steady or (decision.option.num_tokens > 0) != had.any():
            return  # drafts are on their way, or out of it
        kind = self._kind(decision.option, batch, int(np.count_nonzero(had)))
        self.costs.observe(kind, self._features(decision.option, batch, had), seconds)
        is_trial = situation is not None and situation.trial is not None
        self._is_measured = self.costs.count(kind) > 2 * _MEASURE_EVERY and not is_trial
        if situation is not None:
            situation.seen[decision.option] = situation.steps
            situation.measured += decision.option == situation.trial

    def cannot_draft(self, req_ids: Iterable[str]) -> None:
        """Take note of requests that run without speculation for good."""
        for req_id in req_ids:
            if req_id in self._slots:
                self._may_draft[self._slots[req_id]] = False
                self._left = 0

    # ---- what a step takes -----------------------------------------------------------------------------------------

    def _slots_of(self, req_ids: Iterable[str]) -> np.ndarray:
        find = self._slots.get
        return np.array([find(req_id, -1) for req_id in req_ids], dtype=np.int64)

    def _batch(self, slots: np.ndarray) -> _Batch:
        gained = 1e-3 * self._tokens[slots]
        context, num_reqs = self._context[slots] + gained, len(slots)
        mean = 1e3 * float(context.sum()) / max(num_reqs, 1)
        place = max(0, num_reqs - 1).bit_length(), (int(mean) // 256).bit_length()
        return _Batch(slots, place, context, self._draft_context[slots] + gained)

    @staticmethod
    def _kind(option: Option, batch: _Batch, num_drafted: int) -> tuple:
        """Return what steps of one record have in common: situation, option, and quarters that are drafted for."""
        share = -(-4 * num_drafted // max(len(batch.slots), 1)) if option.num_tokens else 0
        return (*batch.place, option, share)

    def _features(self, option: Option, batch: _Batch, drafted: np.ndarray) -> np.ndarray:
        """Return `[len(FEATURES)]` of a step, given `[n]` bool for whom it drafts."""
        context, most, num_reqs = batch.context, option.num_tokens, len(batch.slots)
        num_drafted, total = int(np.count_nonzero(drafted)), float(context.sum())
        if not most or not num_drafted:
            return np.array([1.0, num_reqs, total, 0, 0, 0, 0, 0])
        verified, verified_context = (num_reqs, total) if self._pads else (num_drafted, float(context @ drafted))
        is_here, levels = option.num_levels > 0, option.num_levels
        draft_context = levels * float(batch.draft_context @ drafted)
        rows = (most * verified, most * verified_context, levels, most * num_drafted * is_here, draft_context)
        return np.array([1.0, num_reqs, total, *rows])

    def _count(self, option: Option, batch: _Batch, drafted: np.ndarray) -> int:
        return self.costs.count(self._kind(option, batch, int(np.count_nonzero(drafted))))

    def _seconds(self, option: Option, batch: _Batch, drafted: np.ndarray) -> float:
        kind = self._kind(option, batch, int(np.count_nonzero(drafted)))
        return self.costs.seconds(kind, self._features(option, batch, drafted))
