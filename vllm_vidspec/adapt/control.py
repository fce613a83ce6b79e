"""Controller: how many draft tokens a request gets in a step, 0 to K, by expected tokens over expected time.

Three decisions, none of which changes a token of the output:

    a request comes            is it shown to the draft at all, given what requests like it have gained so far?
    the batch has changed, or  which option (shape and number of draft tokens), and which requests rest (get none), so
    some steps have passed     that tokens a second, each counted as what it takes without drafts, are the most?
    now and then               an option (`trials.py`) or a class of requests that was not measured lately is tried

`StepCosts` predicts the time of a step, `AcceptanceTable` how many draft tokens are accepted. Numpy only.
"""

import statistics
from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np

from vllm_vidspec.adapt.acceptance import AcceptanceTable
from vllm_vidspec.adapt.classes import Ended, RequestClass
from vllm_vidspec.adapt.costs import FEATURES, Batch, StepCosts, Steps, features
from vllm_vidspec.adapt.options import REST, Decision, Option, StepKind
from vllm_vidspec.adapt.trials import UNMEASURED, Situation, Trials, is_doubtful

_DECIDE_FIRST, _DECIDE_LAST = 4, 64  # steps between two decisions about a batch: ever more while they are alike
_FEW, _FOLLOW = 4, 16  # where fewer than one in so many has come or gone, a decision holds for so many steps more
_MEASURE_EVERY = 4  # steps of a kind that is known, of which one is measured
_QUIET = 15  # steps at rest of which nothing is to be learned, between two that are looked at
_TOGETHER = 64  # steps that are taken in together, at most: a step's work evicts this code from the caches
_GAIN_HOLDS = 32  # steps for which what a class gains is not asked again
_STICKY = 1.25  # by how much a request's drafts must be worth more than they cost until it changes what it gets
_MARGIN = 1.02  # an option must be so much faster than rest or the one in use, drafting for some than for all
_LEAST_KNOWN = 3.0  # verify steps of a class before it may rest
_PROBE_STEPS = 8  # verify steps of a request of a resting class that is drafted for nevertheless
_OVER = -1  # steps left of a probe that is over: where its batch rests, nothing is drafted for it any more
_PROBE_EVERY = 8  # requests of a resting class between two probes, at least
_SETTLE = 4  # first steps without drafts after others: the caches have lost what they need
_NEW_SIZE = 0.05  # share of a step in the usual size of a batch


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
        self._places = {option: place for place, option in enumerate(self.options)}
        self._num_tokens = np.array([option.num_tokens for option in options])  # [m]
        self._num_levels = np.array([option.num_levels for option in options])  # [m]
        self._is_prefix = np.array([option.is_prefix for option in options])  # [m]
        self._has_trees, self._has_chains = not self._is_prefix.all(), bool(self._num_tokens[self._is_prefix].any())
        most = int(self._num_tokens[self._is_prefix].max(initial=1))
        self.acceptance, self.costs, self._trials = AcceptanceTable(num_slots, max(most, 1)), StepCosts(), Trials()
        self._slots: dict[str, int] = {}
        self._free = list(range(num_slots))[::-1]
        # By slot; contexts are thousands of tokens.
        self._context, self._draft_context, self._start_s = np.zeros((3, num_slots))
        self._tokens, self._verify_steps, self._verify_tokens, self._probe_left = np.zeros((4, num_slots), np.int64)
        self._may_draft, self._is_drafted = np.zeros((2, num_slots), dtype=bool)
        self._class_of: dict[tuple, int] = {}
        self.classes: list[RequestClass] = []
        self._situations: dict[tuple[int, int], Situation] = {}
        # The requests that were decided for last, `[n]` their slots, -1 of one nobody has taken in, and those known.
        self._last: tuple[list[str], np.ndarray, np.ndarray] = ([], *np.zeros((2, 0), dtype=np.int64))
        self._decision, self._chosen_for = Decision(REST, frozenset(), 0, pads), frozenset[str]()
        self._left, self._wait, self._limit, self._unmeasured = 0, _DECIDE_FIRST, -1, 0
        self._is_measured = False  # what the last step measured is known
        self._is_hopeless = False  # nobody of the batch may be drafted for
        self._trial_left = 0  # steps of a trial that are to come
        self._option, self._settled = REST, 0  # of the last steps, and how many there were
        self._usual_size = 0.0  # requests of a step, the mean of late
        # What is yet to be taken in: steps, alike ones together (their kind, `[n]` slots, `[n]` tokens of each step,
        # seconds of each that is timed), and requests that have ended.
        self._waiting: list[tuple[StepKind, np.ndarray, list[np.ndarray], list[float]]] = []
        self._ending: list[str] = []
        self._num_steps = self._num_waiting = 0
        # Quiet steps that are yet to be taken in, what they took, and `[n]` slots of their batch.
        self._num_passed, self._passed_s, self._quiet_slots = 0, 0.0, self._last[2]
        self.ended: list[Ended] = []  # what there is to tell of the requests that have ended; who tells it empties it

    # ---- a request's life ------------------------------------------------------------------------------------------

    def add(
        self,
        req_id: str,
        label: int,
        kind: tuple,
        num_tokens: int,
        num_draft_tokens: int,
        running: Iterable[str] = (),
    ) -> bool:
        """Take a request in; return whether it is shown to the draft.

        Args:
            req_id: Its id.
            label: Place in CLASS_LABELS.
            kind: What else tells its class from others.
            num_tokens: Of its prompt.
            num_draft_tokens: Of its prompt as the draft would see it.
            running: Ids of those beside which it will run, as far as any run.
        """
        if req_id in self._ending or not self._free:
            self.learn()
        if req_id in self._slots:  # it was preempted
            return bool(self._may_draft[self._slots[req_id]])
        if not self._free:
            return True
        index = self._class_of.setdefault((label, *kind), len(self.classes))
        if index == len(self.classes):
            self.classes.append(RequestClass(label))
        slot = self._slots[req_id] = self._free.pop()
        self.acceptance.begin(slot, index)
        self._context[slot], self._draft_context[slot] = num_tokens / 1e3, num_draft_tokens / 1e3
        for of_slots in (self._start_s, self._tokens, self._verify_steps, self._verify_tokens, self._probe_left):
            of_slots[slot] = 0
        self._is_drafted[slot] = True
        self._may_draft[slot] = self._is_shown(self.classes[index], index, slot, running)
        return bool(self._may_draft[slot])

    def remove(self, req_ids: Iterable[str]) -> None:
        """Forget requests that have ended, and learn from their lengths."""
        self._ending.extend(req_id for req_id in req_ids if req_id in self._slots)

    def remove_all(self) -> None:
        """Forget every request, and learn from what they got so far."""
        self._ending = list(self._slots)
        self.learn()

    def _end(self, req_id: str) -> None:
        self._free.append(slot := self._slots.pop(req_id))
        known = self.classes[self.acceptance.classes[slot]]
        known.learn(int(self._tokens[slot]), float(self._start_s[slot]))
        self.ended.append(Ended(known.label, int(self._verify_steps[slot]), int(self._verify_tokens[slot])))

    def cannot_draft(self, req_ids: Iterable[str]) -> None:
        """Take note of requests that run without speculation for good."""
        for req_id in req_ids:
            if req_id in self._slots:
                self._may_draft[self._slots[req_id]] = False
                self._left = 0

    def expected_length(self, class_index: int) -> float:
        """Return the tokens of a verify step of a class, its own included, that are expected of the longest draft."""
        chains, tree = self.acceptance.expected_of_class(class_index)
        return 1 + (float(chains[-1]) if self._has_chains else tree)

    def _is_shown(self, known: RequestClass, index: int, slot: int, running: Iterable[str]) -> bool:
        """Return whether a request that has just got its slot is shown to the draft; keep its class's state."""
        if self.acceptance.tries(index) < _LEAST_KNOWN or not self.costs.is_fitted:
            known.rests = False
            return True
        if known.gain_at < self._num_steps:
            self.learn()
            known.gain, known.hope, known.probe_s = self._gain(known, slot, self._slots_of(running))
            known.gain_at = self._num_steps + _GAIN_HOLDS
        if known.rests and known.gain <= _MARGIN:
            if not known.to_show and known.hope > _MARGIN:
                size = max(1, round(self._usual_size))
                known.to_show = size * self._trials.owe(size * known.start_s, "probes")
            if known.to_show:
                known.to_show -= 1
                return True
            known.since_probe += 1
            cost_s = known.start_s + _PROBE_STEPS * known.probe_s
            if known.since_probe < _PROBE_EVERY or not self._trials.owe(cost_s, "probes"):
                return False
            known.since_probe, self._probe_left[slot] = 0, _PROBE_STEPS
            self.acceptance.forget(index)
            return True
        if known.rests or known.gain < 1.0:  # it changes
            known.rests, known.since_probe, known.gain_at = not known.rests, 0, -1
            if known.rests:
                self.acceptance.forget(index)
        return not known.rests

    def _gain(self, known: RequestClass, slot: int, running: np.ndarray) -> tuple[float, float, float]:
        """Return the time of whole answers without drafts over that with the best of them, the draft's reading of the
        prompts included, of such requests beside those of these `[n]` slots, as many as usually run and in the shares
        that they will have; the same as it may be, as what drafts take may have changed since they were measured; and
        what those of one request cost a step.
        """
        index = int(self.acceptance.classes[slot])
        chains, tree = self.acceptance.expected_of_class(index)
        size = max(1, round(self._usual_size))
        running = running[(running >= 0) & (running != slot)]
        is_other = self.acceptance.classes[running] != index
        num_own, others = 1.0 + np.count_nonzero(~is_other), running[is_other]
        if known.rests:  # once they are drafted for they end sooner, and others take their places
            num_own /= self.expected_length(index)
        num_others = size - max(1, round(size * num_own / (num_own + len(others))))
        batch = self._batch(np.concatenate((np.resize(others, num_others), np.full(size - num_others, slot))))
        of_class = np.arange(size) >= num_others
        steps = self._steps(batch, np.arange(len(self.options)), (self._num_tokens[:, None] > 0) & of_class)
        lengths = np.where(self._is_prefix, chains[np.where(self._is_prefix, self._num_tokens, 0)], tree)
        rest = self._places[REST]
        rest_s = steps.seconds[rest]
        seconds = np.maximum(np.stack((steps.seconds, steps.seconds / (1 + self.costs.drift(steps.kinds)))), rest_s)
        num_steps = known.answer_tokens / (1 + lengths)
        answers_s = num_steps * seconds + of_class.sum() * known.start_s
        gains = num_steps * (1 + lengths * (self.costs.worth(batch) @ of_class) / size) * rest_s / answers_s
        gains[:, rest] = 0.0
        gain, hope = gains.max(axis=1).tolist()
        of_one = self._step(batch, int(gains[0].argmax()), np.arange(size) == size - 1).seconds[0]
        return gain, hope, float(max(0.0, of_one - rest_s))

    # ---- a step ----------------------------------------------------------------------------------------------------

    def decide(self, req_ids: list[str], most: int | None = None) -> Decision:
        """Return what the requests that a step decodes are to get.

        Args:
            req_ids: Of the step; those that nobody has taken in get what all get.
            most: Draft tokens that none may exceed, None for as many as there are.
        """
        limit = -1 if most is None else most
        if limit == self._limit and self._left > 0 and req_ids == self._last[0]:
            return self._decision
        is_alike = limit == self._limit and _FEW * len(self._chosen_for.symmetric_difference(req_ids)) < len(req_ids)
        if req_ids != self._last[0]:
            slots = self._slots_of(req_ids)
            self._last = list(req_ids), slots, slots[slots >= 0]
            if is_alike and self._left > 0:
                self._left = min(self._left, _FOLLOW)
                slots = self._last[2]
                may_draft = self._may_draft[slots]
                self._is_hopeless = self._is_hopeless and not may_draft.any()
                return self._decided(self._decision.option, self._is_drafted[slots] & may_draft)
        self.learn()
        self._wait = min(2 * self._wait, _DECIDE_LAST) if is_alike else _DECIDE_FIRST
        self._chosen_for = frozenset(req_ids)
        self._left, self._limit = self._wait, limit
        before = self._decision
        if self._decided(*self._choose(self._last[2], most)) is not before:
            self._left = self._wait = min(self._left, _DECIDE_FIRST)
        self._left = self._trial_left or self._left
        return self._decision

    def _decided(self, option: Option, drafted: np.ndarray) -> Decision:
        """Return the decision to draft for `[n]` bool of the last requests, the same as before if it is."""
        resting = frozenset[str]()
        if option.num_tokens and not drafted.all():
            slots = set(self._last[2][~drafted].tolist())
            resting = frozenset(req_id for req_id in self._last[0] if self._slots.get(req_id) in slots)
        if (option, resting) != self._decision[:2]:
            self._decision = Decision(option, resting, self._decision.number + 1, self._pads)
        return self._decision

    def _choose(self, slots: np.ndarray, most: int | None) -> tuple[Option, np.ndarray]:
        """Return what is drafted, and `[n]` bool for whom."""
        self._is_hopeless, self._trial_left = False, 0
        if not len(slots):
            return (self.options[0] if most is None else REST), np.zeros(0, dtype=bool)
        self._is_hopeless = not self._may_draft[slots].any()
        if self._is_hopeless:
            return REST, np.zeros(len(slots), dtype=bool)
        batch = self._batch(slots)
        situation = self._situations.setdefault(batch.place, Situation())
        places = np.arange(len(self.options)) if most is None else np.flatnonzero(self._num_tokens <= most)
        rest = int(np.flatnonzero(self._num_tokens[places] == 0)[0])
        lengths = self._lengths(batch, places)
        # For all that may be drafted for, or for those alone whose drafts pay: what one costs is known less well.
        everyone = self._may_draft[slots] & (self._num_tokens[places] > 0)[:, None]
        both = np.concatenate((everyone, everyone & self._paying(batch, places, lengths, situation)))
        steps = self._steps(batch, np.concatenate((places, places)), both)
        num_tokens = len(slots) + (np.concatenate((lengths, lengths)) * both).sum(axis=1)
        # No step with drafts is faster than one without.
        seconds = np.maximum(steps.seconds, steps.seconds[rest])
        rates = np.where(both.any(axis=1), num_tokens / seconds, 0.0)
        rates[rest] = len(slots) / seconds[rest]
        num = len(places)
        rows = np.arange(num) + num * (rates[num:] > _MARGIN * rates[:num])
        rates, seconds, drafted = rates[rows], seconds[rows], both[rows]
        self._trials.step_s = float(seconds[rest])
        favour = np.where((places == situation.in_use) | (places == places[rest]), _MARGIN, 1.0)
        best = int((rates * favour).argmax())
        situation.use(int(places[best]), float(rates[best]))
        if best == rest:
            self._may_draft[slots[self._probe_left[slots] == _OVER]] = False
        is_probed = (self._probe_left[slots] > 0) & self._may_draft[slots]
        if best == rest and is_probed.any() and len(places) > 1:
            rates[rest] = 0.0
            rates[places == self._places[self._decision.option]] *= _STICKY  # a few steps of one teach more
            self._left = min(self._left, int(self._probe_left[slots[is_probed]].min()))
            return self.options[places[rates.argmax()]], is_probed
        chosen = best
        # What all else is compared with must not be a guess, or what it took while the engine was new.
        if self._trials.is_due(situation) and (situation.rest_wait or best != rest):
            hoped = self._lengths(batch, places, int(self._num_tokens[places[best]]))
            doubt = self.costs.doubt([steps.kinds[row] for row in rows.tolist()], steps.features[rows], best)
            fastest = np.where(places == places[rest], 0.0, seconds[rest])
            hopes = (len(slots) + (hoped * drafted).sum(axis=1)) / np.maximum(seconds / (1 + doubt), fastest)
            hopes *= rates > 0
            if situation.is_rest_due(self._num_steps, float(rates[rest] / rates[best])):
                hopes[rest] = np.inf
            hopes[(places == situation.checked()) & is_doubtful(rates / rates[best])] = np.inf
            chosen = self._trials.begin(situation, rates, hopes, seconds, best)
            situation.trial = int(places[chosen]) if chosen != best else None
        elif situation.trial is not None and ((places == situation.trial) & (rates > 0)).any():
            chosen = int(np.flatnonzero(places == situation.trial)[0])
        if situation.trial is not None:
            # To decide takes its time, too: none of what is measured.
            is_on = self.options[places[chosen]] == self._decision.option
            self._trial_left = situation.to_come(0 if is_on else UNMEASURED if chosen != rest else _SETTLE)
            self._is_measured &= is_on
        self._is_drafted[slots] = drafted[chosen]
        return self.options[places[chosen]], drafted[chosen]

    def _lengths(self, batch: Batch, places: np.ndarray, hopeful_from: int | None = None) -> np.ndarray:
        """Return `[m, n]` draft tokens that are expected to be accepted, or hoped for beyond a number that is verified
        anyway. A token counts as what it takes without drafts: many of short contexts do not make up for few long ones.
        """
        slots, is_prefix = batch.slots, self._is_prefix[places]
        found = self.acceptance.expected(slots, hopeful_from)[:, np.where(is_prefix, self._num_tokens[places], 0)].T
        if self._has_trees:
            found[~is_prefix] = self.acceptance.expected_tree(slots, hopeful_from is not None)
        return found * self.costs.worth(batch)

    def _paying(self, batch: Batch, places: np.ndarray, lengths: np.ndarray, situation: Situation) -> np.ndarray:
        """Return `[m, n]` bool: the requests whose drafts are worth more than they cost by themselves, given what a
        token costs in seconds; what all of them cost together is the option's.
        """
        rates = dict(zip(FEATURES, self.costs.weights.tolist(), strict=True))
        most, levels = self._num_tokens[places, None], self._num_levels[places, None]
        each_s = most * (levels > 0) * rates["draft_rows"] + levels * rates["draft_context"] * batch.draft_context
        if not self._pads:
            each_s = each_s + most * (rates["rows"] + rates["row_context"] * batch.context)
        token_s = 1 / situation.rate if situation.rate else self._trials.step_s / len(batch.slots)
        # Who is drafted for goes on until it is clearly not worth it, and the other way round.
        margin = np.where(self._is_drafted[batch.slots], 1 / _STICKY, _STICKY)
        return (lengths * token_s > margin * each_s) | (self._probe_left[batch.slots] > 0)

    def observe(self, kind: StepKind, num_tokens: np.ndarray, seconds: float | None) -> None:
        """Take note of the output of a step, and of several at a time take them in.

        Args:
            kind: What it is told of; the same object as of the step before if they are alike.
            num_tokens: `[n]` tokens that each request has got.
            seconds: How long it took; None where it has read prompts.
        """
        timed = [] if seconds is None else [seconds]
        if self._waiting and self._waiting[-1][0] is kind and bool(self._waiting[-1][3]) == bool(timed):
            self._waiting[-1][2].append(num_tokens)
            self._waiting[-1][3].extend(timed)
        else:
            slots = self._last[1] if kind.req_ids == self._last[0] else self._slots_of(kind.req_ids)
            self._waiting.append((kind, slots, [num_tokens], timed))
        self._left -= 1
        self._num_steps += 1
        self._num_waiting += 1
        if self._num_waiting >= _TOGETHER:
            self.learn()

    @property
    def num_quiet(self) -> int:
        """How many steps like the last have nothing to teach, at most: nothing is drafted, and their time is known."""
        if not self._is_measured or self._option != REST:
            return 0
        if self._is_hopeless:
            return _QUIET
        return max(0, min(_QUIET, self._left - 1)) if self._decision.option == REST else 0

    def pass_over(self, num_steps: int, seconds: float) -> None:
        """Take note of so many quiet steps, of so many seconds each, that nobody has looked at."""
        self._tokens[self._last[2]] += num_steps
        self._num_steps += num_steps
        if self._quiet_slots is not self._last[2]:
            self._learn_quiet()
        self._quiet_slots = self._last[2]
        self._num_passed += num_steps
        self._passed_s += num_steps * seconds
        if not self._is_hopeless:
            self._left -= num_steps

    def _learn_quiet(self) -> None:
        """Learn how long quiet steps took."""
        if self._num_passed:
            slots, step_s = self._quiet_slots, self._passed_s / self._num_passed
            self._elapse(len(slots), self._num_passed, self._num_passed, self._passed_s)
            self._measure(self._places[REST], slots, np.zeros(len(slots), dtype=bool), step_s, self._num_passed)
            self._num_passed, self._passed_s = 0, 0.0

    def _elapse(self, num_reqs: int, num_steps: int, num_timed: int, seconds: float) -> None:
        """Take note of steps of a batch of so many requests, how many of them are timed, and what these took."""
        self._usual_size += (1 - (1 - _NEW_SIZE) ** num_steps) * (num_reqs - self._usual_size)
        self._trials.elapse(seconds)
        self._unmeasured += num_timed

    def learn(self) -> None:
        """Take in the steps that wait for it, and the ends of requests."""
        steps = [(kind, slots, np.array(those), each) for kind, slots, those, each in self._waiting]
        for is_chain in (True, False):
            self._count([of_kind for of_kind in steps if of_kind[0].is_chain == is_chain], is_chain)
        for of_kind in steps:
            self._time(*of_kind)
        self._learn_quiet()
        for req_id in self._ending:
            self._end(req_id)
        self._waiting.clear()
        self._ending.clear()
        self._num_waiting = 0

    def _count(self, steps: list[tuple[StepKind, np.ndarray, np.ndarray, list[float]]], is_chain: bool) -> None:
        """Learn what was accepted, given steps of chains or of trees: their kind, `[n]` slots, `[s, n]` tokens."""
        if not steps:
            return
        slots = np.concatenate([each for _, slots, those, _ in steps for each in [slots] * len(those)])
        tokens = np.concatenate([those.ravel() for _, _, those, _ in steps])
        # Placeholders are no draft tokens.
        drafted = np.concatenate([each for k, _, those, _ in steps for each in [k.drafted * k.is_real] * len(those)])
        is_verified, num_slots = (slots >= 0) & (drafted > 0) & (tokens > 0), len(self._tokens)
        self._tokens += np.bincount(slots + 1, tokens, num_slots + 1)[1:].astype(np.int64)
        if not is_verified.any():
            return
        slots, tokens = slots[is_verified], tokens[is_verified]
        self.acceptance.observe(slots, drafted[is_verified], tokens - 1, is_chain)
        verified = np.bincount(slots, minlength=num_slots)
        is_probed = self._probe_left > 0
        self._probe_left -= verified * is_probed
        self._probe_left[is_probed & (self._probe_left <= 0)] = _OVER
        self._verify_steps += verified
        self._verify_tokens += np.bincount(slots, tokens, num_slots).astype(np.int64)

    def _time(self, kind: StepKind, slots: np.ndarray, num_tokens: np.ndarray, seconds: list[float]) -> None:
        """Learn how long steps of a kind took, given `[n]` slots, `[s, n]` tokens, and the seconds that are known."""
        is_known = slots >= 0
        slots = slots[is_known]
        self._elapse(len(slots), len(num_tokens), len(seconds), sum(seconds))
        before = self._settled if kind.decision.option == self._option else 0
        self._option, self._settled = kind.decision.option, before + len(num_tokens)
        if not kind.reading and (not seconds or (self._is_measured and self._unmeasured < _MEASURE_EVERY)):
            return
        had = ((kind.drafted > 0) & num_tokens.any(axis=0))[is_known]  # placeholders cost as much as real draft tokens
        place = self._places.get(kind.decision.option, self._places[REST])
        if kind.reading:
            reading_s, step = kind.reading_s, self._step(self._batch(slots), place, had)
            if seconds and self.costs.count(step.kinds[0]) > _MEASURE_EVERY:  # else it is not known what it adds
                reading_s = max(reading_s, seconds[0] - step.seconds[0])
            starting = self._slots_of(kind.reading)
            starting = starting[starting >= 0]
            # A prompt's part of it is as long as it is: a short one beside long ones is not dear.
            read = self._context[starting]
            self._start_s[starting] += reading_s * read / max(float(read.sum()), 1e-9)
        settled = seconds if had.any() else seconds[max(0, _SETTLE - before) :]
        if not kind.is_steady or kind.reading or (kind.decision.option.num_tokens > 0) != had.any():
            settled = []
        self._measure(place, slots, had, statistics.median(settled or [0.0]), len(settled))

    def _measure(self, place: int, slots: np.ndarray, drafted: np.ndarray, seconds: float, num_steps: int) -> None:
        """Let the costs learn of steps that followed one another.

        Args:
            place: Their option.
            slots: `[n]` their requests.
            drafted: `[n]` bool: which of them had draft tokens.
            seconds: How long one took: their median, as one may have waited.
            num_steps: How many there were; 0 where they have not verified what they draft: drafts are on their way, or
                out of it.
        """
        batch = self._batch(slots)
        situation = self._situations.get(batch.place, Situation())
        situation.steps += self._unmeasured
        self._unmeasured = 0
        if not num_steps:
            return
        step = self._step(batch, place, drafted)
        num = -(-num_steps // _MEASURE_EVERY) if self._is_measured else num_steps
        for _ in range(num):
            self.costs.observe(step.kinds[0], step.features[0], seconds, place)
        if not self._num_tokens[place]:
            situation.rest_measured(self._num_steps)
        is_tried = situation.trial is not None or bool((self._probe_left[slots] > 0).any())
        self._is_measured = self.costs.count(step.kinds[0]) > 2 * _MEASURE_EVERY and not is_tried
        situation.measured += num * (place == situation.trial)

    # ---- what a step takes -----------------------------------------------------------------------------------------

    def _slots_of(self, req_ids: Iterable[str]) -> np.ndarray:
        return np.fromiter(map(self._slots.get, req_ids, repeat(-1)), dtype=np.int64)

    def _batch(self, slots: np.ndarray) -> Batch:
        gained = 1e-3 * self._tokens[slots]
        context, num_reqs = self._context[slots] + gained, len(slots)
        total = float(context.sum())
        place = max(0, num_reqs - 1).bit_length(), (int(1e3 * total / max(num_reqs, 1)) // 256).bit_length()
        return Batch(slots, place, context, total, self._draft_context[slots] + gained)

    def _step(self, batch: Batch, place: int, drafted: np.ndarray) -> Steps:
        """Return a step of one option, given `[n]` bool for whom it drafts."""
        return self._steps(batch, np.array([place]), drafted[None])

    def _steps(self, batch: Batch, places: np.ndarray, drafted: np.ndarray) -> Steps:
        """Return a step of each of these options, given `[m, n]` bool for whom it drafts."""
        x = features(batch, self._num_tokens[places], self._num_levels[places], drafted, self._pads)
        # Steps of one kind: size and context of the batch, option, and quarters of the batch that are drafted for.
        quarters = -(-4 * drafted.sum(axis=1) // max(len(batch.slots), 1))
        kinds = [(*batch.place, place, share) for place, share in zip(places.tolist(), quarters.tolist(), strict=True)]
        return Steps(kinds, x, self.costs.seconds(kinds, x))
