"""Controller: how many draft tokens a request gets in a step, 0 to K, by expected tokens over expected time.

Three decisions, none of which changes a token of the output:

    a request comes            is it shown to the draft at all, given what requests like it have gained so far?
    the batch has changed, or  which option (shape and number of draft tokens), and which requests rest (get none), so
    some steps have passed     that tokens a second, each counted as what it takes without drafts, are the most?
    now and then               an option (`trials.py`) or a class of requests that was not measured lately is tried

`Forecast` says what an option is expected to give and to take, `Learning` takes in what steps showed. Numpy only.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vllm_vidspec.adapt.classes import Ended, RequestClass
from vllm_vidspec.adapt.forecast import Forecast, Steps, useful
from vllm_vidspec.adapt.learning import PROBE_FIRST, PROBE_STEPS, Learning
from vllm_vidspec.adapt.options import REST, Decision, Option, StepKind
from vllm_vidspec.adapt.requests import Batch, Requests
from vllm_vidspec.adapt.trials import UNMEASURED, Situation, Trials, is_doubtful

_DECIDE_FIRST, _DECIDE_LAST = 4, 64  # steps between two decisions about a batch: ever more while they are alike
_FEW, _FOLLOW = 4, 16  # where fewer than one in so many has come or gone, a decision holds for so many steps more
_QUIET = 15  # steps at rest of which nothing is to be learned, between two that are looked at
_GAIN_HOLDS = 32  # steps for which what a class gains is not asked again
_STICKY = 1.25  # by how much a request's drafts must be worth more than they cost until it changes what it gets
_MARGIN = 1.02  # an option must be so much faster than rest or the one in use, drafting for some than for all
_ALIKE = 0.3  # classes whose tokens per verify step differ by less, relative, gain together
_LEAST_KNOWN = 3.0  # verify steps of a class before it may rest
# Requests of a resting class between two probes, at least: twice as many after each, as the first tokens of all that
# come at the same time wait for what the draft reads of one.
_PROBE_EVERY, _PROBE_SELDOM = 8, 48


class _Candidates(NamedTuple):
    """What may be drafted for a batch."""

    places: np.ndarray  # `[m]` of options
    rest: int  # Row of `REST`
    drafted: np.ndarray  # `[m, n]` bool: for whom
    steps: Steps  # `[m]`, none faster than `REST`'s
    rates: np.ndarray  # `[m]` tokens a second; 0 where nobody would be drafted for


class Controller:
    """Decides for one engine.

    Args:
        options: What may be drafted, `REST` included.
        num_slots: Requests that run at the same time, at most.
        pads: Whether every request of a step has as many rows as those that are drafted for, as CUDA graphs of whole
            forwards need it: then a resting request saves the draft's work and none of the target's.

    Attributes:
        requests: Those that were taken in and have not ended.
        classes: Of requests, by place.
        ended: What there is to tell of requests that have ended; who tells it empties it.
        forecast: What is expected of steps.
    """

    def __init__(self, options: Sequence[Option], num_slots: int, pads: bool):
        self.options, self._pads = tuple(options), pads
        self.requests, self._trials = Requests(num_slots), Trials()
        self.forecast = Forecast(options, num_slots, pads)
        self._learning = Learning(self.forecast, self.requests, self._trials)
        self._class_of: dict[tuple, int] = {}
        self.classes: list[RequestClass] = []
        # The requests that were decided for last, `[n]` their slots, -1 of one nobody has taken in, and those known.
        self._last: tuple[list[str], np.ndarray, np.ndarray] = ([], *np.zeros((2, 0), dtype=np.int64))
        self._decision, self._chosen_for = Decision(REST, frozenset(), 0, pads), frozenset[str]()
        self._left, self._wait, self._limit = 0, _DECIDE_FIRST, -1
        self._is_hopeless = False  # nobody of the batch may be drafted for
        self._trial_left = 0  # steps of a trial that are to come
        # Requests that have ended, and are yet to be taken in, and the tokens of their answers; 0: not known.
        self._ending: dict[str, int] = {}
        self.ended: list[Ended] = []

    # ---- a request's life ------------------------------------------------------------------------------------------

    def add(
        self,
        req_id: str,
        label: int,
        kind: tuple,
        num_tokens: int,
        num_draft_tokens: int,
        most_tokens: int,
        running: Iterable[str] = (),
    ) -> bool:
        """Take a request in; return whether it is shown to the draft.

        Args:
            req_id: Its id.
            label: Place in CLASS_LABELS.
            kind: What else tells its class from others.
            num_tokens: Of its prompt.
            num_draft_tokens: Of its prompt as the draft would see it.
            most_tokens: Of its answer.
            running: Ids of those beside which it will run, as far as any run.
        """
        requests = self.requests
        if req_id in self._ending or requests.is_full:
            self.learn()
        if req_id in requests:  # it was preempted
            return bool(requests.may_draft[requests.slot(req_id)])
        if requests.is_full:
            return True
        index = self._class_of.setdefault((label, *kind), len(self.classes))
        if index == len(self.classes):
            self.classes.append(RequestClass(label))
        known = self.classes[index]
        slot = requests.begin(req_id, num_tokens, num_draft_tokens, min(known.answer_tokens, most_tokens))
        self.forecast.acceptance.begin(slot, index)
        requests.may_draft[slot] = self._is_shown(known, index, slot, running)
        return bool(requests.may_draft[slot])

    def remove(self, num_tokens: Mapping[str, int]) -> None:
        """Forget requests that have ended, and learn from their answers' lengths, by id: drafts may be accepted beyond
        the end.
        """
        self._ending |= {req_id: num for req_id, num in num_tokens.items() if req_id in self.requests}

    def remove_all(self) -> None:
        """Forget every request, and learn from what was verified of them."""
        self._ending = dict.fromkeys(self.requests, 0)
        self.learn()

    def _end(self, req_id: str, num_tokens: int) -> None:
        requests, slot = self.requests, self.requests.end(req_id)
        known = self.classes[self.forecast.acceptance.classes[slot]]
        known.learn(num_tokens, float(requests.start_s[slot]))
        self.ended.append(Ended(known.label, int(requests.verify_steps[slot]), int(requests.verify_tokens[slot])))

    def cannot_draft(self, req_ids: Iterable[str]) -> None:
        """Take note of requests that run without speculation for good."""
        for req_id in req_ids:
            if req_id in self.requests:
                self.requests.may_draft[self.requests.slot(req_id)] = False
                self._left = 0

    def _is_shown(self, known: RequestClass, index: int, slot: int, running: Iterable[str]) -> bool:
        """Return whether a request that has just got its slot is shown to the draft; keep its class's state."""
        forecast, learning = self.forecast, self._learning
        if self._is_new(index) or not forecast.costs.is_fitted:
            known.rests = False
            return True
        if known.gain_at < learning.num_steps:
            self.learn()
            known.gain, known.hope, known.probe_s = self._gain(known, slot, self.requests.slots(running))
            known.gain_at = learning.num_steps + _GAIN_HOLDS
        if known.rests and known.gain <= _MARGIN:
            if not known.to_show and known.hope > _MARGIN:
                size = learning.usual_size
                known.to_show = size * self._trials.owe(size * known.start_s, "probes")
            if known.to_show:
                known.to_show -= 1
                return True
            known.since_probe += 1
            cost_s = known.start_s + PROBE_STEPS * known.probe_s
            if known.since_probe < known.probe_every or not self._trials.owe(cost_s, "probes"):
                return False
            known.since_probe, known.probe_every = 0, min(2 * known.probe_every, _PROBE_SELDOM)
            self.requests.probe_left[slot] = PROBE_FIRST
            forecast.acceptance.forget(index)
            return True
        if known.rests or known.gain < 1.0:  # it changes
            known.rests, known.since_probe, known.probe_every, known.gain_at = not known.rests, 0, _PROBE_EVERY, -1
            if known.rests:
                forecast.acceptance.forget(index)
        return not known.rests

    def _is_new(self, index: int) -> bool:
        """Return whether too little is known of a class for it to rest."""
        return self.forecast.acceptance.tries(index) < _LEAST_KNOWN

    def _gain(self, known: RequestClass, slot: int, running: np.ndarray) -> tuple[float, float, float]:
        """Return the time of whole answers without drafts over that with the best of them, the draft's reading of the
        prompts included, of requests such as that of this slot beside those of these `[n]` slots; the same as it may
        be, as what drafts take may have changed since they were measured; and what those of one request cost a step.
        Classes whose drafts are about as good, and those of which nothing is known, are drafted for with it: what
        drafting takes, whoever it is for, they share.
        """
        forecast, classes = self.forecast, self.forecast.acceptance.classes
        batch = self._usual_batch(known.rests, slot, running)
        index, size = int(classes[slot]), len(batch.slots)
        indices, members = np.unique(classes[batch.slots], return_inverse=True)
        longest = np.array([forecast.longest_of_class(each) for each in indices.tolist()])
        own = longest[members[-1]]
        is_new = np.array([self._is_new(each) for each in indices.tolist()])
        is_alike = (is_new | (abs(longest - own) < _ALIKE * own))[members]
        start_s = is_alike @ np.array([self.classes[each].start_s for each in indices.tolist()])[members]
        steps = forecast.steps(batch, np.arange(len(self.options)), (forecast.num_tokens[:, None] > 0) & is_alike)
        lengths, rest_s = forecast.lengths_of_class(index), steps.seconds[forecast.rest]
        seconds = np.maximum(np.stack((steps.seconds, steps.seconds / (1 + forecast.costs.drift(steps.kinds)))), rest_s)
        answer_tokens = float(batch.answer_tokens[-1])
        lengths = useful(lengths, answer_tokens)
        num_steps = answer_tokens / (1 + lengths)
        answers_s = num_steps * seconds + start_s
        gains = num_steps * (1 + lengths * (forecast.costs.worth(batch) @ is_alike) / size) * rest_s / answers_s
        gains[:, forecast.rest] = 0.0
        gain, hope = gains.max(axis=1).tolist()
        of_one = forecast.step(batch, int(gains[0].argmax()), np.arange(size) == size - 1).seconds[0]
        return gain, hope, float(max(0.0, of_one - rest_s))

    def _usual_batch(self, rests: bool, slot: int, running: np.ndarray) -> Batch:
        """Return as many requests as usually run: such as that of this slot, the last of them, in the share that they
        will have beside those of these `[n]` slots.
        """
        classes = self.forecast.acceptance.classes
        running = running[(running >= 0) & (running != slot)]
        others = running[classes[running] != classes[slot]]
        num_own, size = 1.0 + len(running) - len(others), self._learning.usual_size
        if rests:  # once they are drafted for they end sooner, and others take their places
            num_own /= self.forecast.longest_of_class(int(classes[slot]))
        num_others = size - max(1, round(size * num_own / (num_own + len(others))))
        return self.requests.batch(np.concatenate((np.resize(others, num_others), np.full(size - num_others, slot))))

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
            slots = self.requests.slots(req_ids)
            self._last = list(req_ids), slots, slots[slots >= 0]
            if is_alike and self._left > 0:
                self._left = min(self._left, _FOLLOW)
                slots = self._last[2]
                may_draft = self.requests.may_draft[slots]
                self._is_hopeless = self._is_hopeless and not may_draft.any()
                return self._decided(self._decision.option, self.requests.is_drafted[slots] & may_draft)
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
            req_ids, slots, known = self._last
            at_rest = set(known[~drafted].tolist())
            resting = frozenset(req_id for req_id, slot in zip(req_ids, slots.tolist(), strict=True) if slot in at_rest)
        if (option, resting) != self._decision[:2]:
            self._decision = Decision(option, resting, self._decision.number + 1, self._pads)
        return self._decision

    def _choose(self, slots: np.ndarray, most: int | None) -> tuple[Option, np.ndarray]:
        """Return what is drafted, and `[n]` bool for whom."""
        requests = self.requests
        self._is_hopeless, self._trial_left = False, 0
        if not len(slots):
            return (self.options[0] if most is None else REST), np.zeros(0, dtype=bool)
        self._is_hopeless = not requests.may_draft[slots].any()
        if self._is_hopeless:
            return REST, np.zeros(len(slots), dtype=bool)
        batch = requests.batch(slots)
        situation = self._trials.situations.setdefault(batch.place, Situation())
        found = self._candidates(batch, most, situation)
        places, rates, rest = found.places, found.rates, found.rest
        self._trials.step_s = float(found.steps.seconds[rest])
        favour = np.where((places == situation.in_use) | (places == places[rest]), _MARGIN, 1.0)
        best = int((rates * favour).argmax())
        situation.use(int(places[best]), float(rates[best]))
        if best == rest:
            requests.may_draft[slots[requests.probe_left[slots] == requests.OVER]] = False
            if not requests.may_draft[slots].any():
                return REST, np.zeros(len(slots), dtype=bool)
        is_probed = (requests.probe_left[slots] > 0) & requests.may_draft[slots]
        if best == rest and is_probed.any() and len(places) > 1:
            rates[rest] = 0.0
            rates[places == self.forecast.place(self._decision.option)] *= _STICKY  # a few steps of one teach more
            self._left = min(self._left, int(requests.probe_left[slots[is_probed]].min()))
            return self.options[places[rates.argmax()]], is_probed
        chosen = self._try(batch, situation, found, best)
        option = self.options[places[chosen]]
        if situation.trial is not None:
            # To decide takes its time, too: none of what is measured.
            is_on = option == self._decision.option
            self._trial_left = situation.to_come(0 if is_on else UNMEASURED if chosen != rest else situation.settle)
            self._learning.is_measured &= is_on
        requests.is_drafted[slots] = found.drafted[chosen]
        return option, found.drafted[chosen]

    def _candidates(self, batch: Batch, most: int | None, situation: Situation) -> _Candidates:
        """Return what may be drafted: each option for all that may be drafted for, or for those alone whose drafts pay
        where that is clearly better, as what one costs is known less well.
        """
        forecast, num_reqs = self.forecast, len(batch.slots)
        places = np.arange(len(self.options)) if most is None else np.flatnonzero(forecast.num_tokens <= most)
        rest = int(np.flatnonzero(places == forecast.rest)[0])
        lengths = forecast.lengths(batch, places)
        everyone = self.requests.may_draft[batch.slots] & (places != forecast.rest)[:, None]
        both = np.concatenate((everyone, everyone & self._paying(batch, places, lengths, situation)))
        steps = forecast.steps(batch, np.concatenate((places, places)), both)
        num_tokens = num_reqs + (np.concatenate((lengths, lengths)) * both).sum(axis=1)
        # No step with drafts is faster than one without.
        seconds = np.maximum(steps.seconds, steps.seconds[rest])
        rates = np.where(both.any(axis=1), num_tokens / seconds, 0.0)
        rates[rest] = num_reqs / seconds[rest]
        num = len(places)
        rows = np.arange(num) + num * (rates[num:] > _MARGIN * rates[:num])
        steps = Steps([steps.kinds[row] for row in rows.tolist()], steps.features[rows], seconds[rows])
        return _Candidates(places, rest, both[rows], steps, rates[rows])

    def _paying(self, batch: Batch, places: np.ndarray, lengths: np.ndarray, situation: Situation) -> np.ndarray:
        """Return `[m, n]` bool: the requests whose drafts are worth more than they cost by themselves, given what a
        token costs in seconds.
        """
        token_s = 1 / situation.rate if situation.rate else self._trials.step_s / len(batch.slots)
        # Who is drafted for goes on until it is clearly not worth it, and the other way round.
        margin = np.where(self.requests.is_drafted[batch.slots], 1 / _STICKY, _STICKY)
        pays = lengths * token_s > margin * self.forecast.own_seconds(batch, places)
        return pays | (self.requests.probe_left[batch.slots] > 0)

    def _try(self, batch: Batch, situation: Situation, found: _Candidates, best: int) -> int:
        """Return which of the candidates is tried from now on, or goes on being tried; the best where none is."""
        places, rest, drafted, steps, rates = found
        # What all else is compared with must not be a guess, or what it took while the engine was new.
        if self._trials.is_due(situation) and (situation.rest_wait or best != rest):
            hoped = self.forecast.lengths(batch, places, int(self.forecast.num_tokens[places[best]]))
            doubt = self.forecast.costs.doubt(steps.kinds, steps.features, best)
            fastest = np.where(places == places[rest], 0.0, steps.seconds[rest])
            num_tokens = len(batch.slots) + (hoped * drafted).sum(axis=1)
            hopes = (rates > 0) * num_tokens / np.maximum(steps.seconds / (1 + doubt), fastest)
            if situation.is_rest_due(float(rates[rest] / rates[best])):
                hopes[rest] = np.inf
            hopes[(places == situation.checked()) & is_doubtful(rates / rates[best])] = np.inf
            chosen = self._trials.begin(situation, rates, hopes, steps.seconds, best, rest)
            situation.trial = int(places[chosen]) if chosen != best else None
            return chosen
        if situation.trial is not None and ((places == situation.trial) & (rates > 0)).any():
            return int(np.flatnonzero(places == situation.trial)[0])
        return best

    def observe(self, kind: StepKind, num_tokens: np.ndarray, seconds: float | None) -> None:
        """Take note of the output of a step, and of several at a time take them in.

        Args:
            kind: What it is told of; the same object as of the step before if they are alike.
            num_tokens: `[n]` tokens that each request has got.
            seconds: How long it took; None where it has read prompts.
        """
        self._left -= 1
        slots = self._last[1] if kind.req_ids == self._last[0] else self.requests.slots(kind.req_ids)
        if self._learning.observe(kind, slots, num_tokens, seconds):
            self.learn()

    @property
    def num_quiet(self) -> int:
        """How many steps like the last have nothing to teach, at most: nothing is drafted, and their time is known."""
        if not self._learning.is_measured or self._learning.option != REST or not self._learning.is_steady:
            return 0
        if self._is_hopeless:
            return _QUIET
        return max(0, min(_QUIET, self._left - 1)) if self._decision.option == REST else 0

    def pass_over(self, num_steps: int, seconds: float) -> None:
        """Take note of so many quiet steps, of so many seconds each, that nobody has looked at."""
        self._learning.pass_over(self._last[2], num_steps, seconds)
        if not self._is_hopeless:
            self._left -= num_steps

    def learn(self) -> None:
        """Take in the steps that wait for it, and the ends of requests."""
        self._learning.learn()
        for req_id, num_tokens in self._ending.items():
            self._end(req_id, num_tokens)
        self._ending.clear()
