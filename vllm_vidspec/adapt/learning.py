"""Learning: what the engine's steps teach, several of them taken in at a time; numpy only."""

import statistics

import numpy as np

from vllm_vidspec.adapt.forecast import Forecast
from vllm_vidspec.adapt.options import REST, StepKind
from vllm_vidspec.adapt.requests import Batch, Requests
from vllm_vidspec.adapt.trials import SETTLE, TRIAL_STEPS, Situation, Trials

PROBE_STEPS = 8  # verify steps of a request of a resting class that is drafted for nevertheless, at most,
PROBE_FIRST = 4  # of which these alone where none of their drafts is accepted
MEASURE_EVERY = 4  # steps of a kind that is known, of which one is measured
_TOGETHER = 64  # steps that are taken in together, at most: a step's work evicts this code from the caches
_NEW_SIZE = 0.05  # share of a step in the usual size of a batch


class Learning:
    """Tells the forecast, the requests and the trials of one engine what its steps showed.

    Attributes:
        num_steps: How many there were, those that are yet to be taken in included.
        num_waiting: How many of them are.
        is_measured: Whether what the last steps measured is known.
        option: Of the last step.
    """

    def __init__(self, forecast: Forecast, requests: Requests, trials: Trials):
        self._forecast, self._requests, self._trials = forecast, requests, trials
        self.num_steps, self.is_measured = 0, False
        self._size = self._square = 0.0  # requests of a step, and their square: means of late
        self.option, self._settled = REST, 0  # and how many of that option followed one another
        self._unmeasured = 0  # steps since one was measured
        # Alike steps together: their kind, `[n]` slots, `[n]` tokens of each step, seconds of each that is timed.
        self._waiting: list[tuple[StepKind, np.ndarray, list[np.ndarray], list[float]]] = []
        self.num_waiting = 0
        # Quiet steps, what they took, and `[n]` slots of their batch.
        self._num_passed, self._passed_s, self._quiet_slots = 0, 0.0, np.zeros(0, dtype=np.int64)

    @property
    def usual_size(self) -> int:
        """How many run beside one another of late, as they find it: steps of what is left of many count little."""
        return max(1, round(self._square / max(self._size, 1e-9)))

    @property
    def is_steady(self) -> bool:
        """Whether caches have settled since the option was another one, and as many steps were measured as of a trial:
        of later ones the mean will do.
        """
        return self._settled >= SETTLE + TRIAL_STEPS

    def observe(self, kind: StepKind, slots: np.ndarray, num_tokens: np.ndarray, seconds: float | None) -> bool:
        """Take note of a step's output, as `Controller.observe` with `[n]` slots; return whether to take them in now,
        as many wait.
        """
        timed = [] if seconds is None else [seconds]
        if self._waiting and self._waiting[-1][0] is kind and bool(self._waiting[-1][3]) == bool(timed):
            self._waiting[-1][2].append(num_tokens)
            self._waiting[-1][3].extend(timed)
        else:
            self._waiting.append((kind, slots, [num_tokens], timed))
        self.num_steps += 1
        self.num_waiting += 1
        return self.num_waiting >= _TOGETHER

    def pass_over(self, slots: np.ndarray, num_steps: int, seconds: float) -> None:
        """Take note of so many quiet steps, of so many seconds each, of `[n]` slots: nobody has looked at them.

        A batch is told of by the same array for as long as it is the same.
        """
        self._requests.tokens[slots] += num_steps
        self.num_steps += num_steps
        if self._quiet_slots is not slots:
            self._learn_quiet()
        self._quiet_slots = slots
        self._num_passed += num_steps
        self._passed_s += num_steps * seconds

    def learn(self) -> None:
        """Take in the steps that wait for it."""
        steps = [(kind, slots, np.array(those), each) for kind, slots, those, each in self._waiting]
        for is_chain in (True, False):
            self._count([of_kind for of_kind in steps if of_kind[0].is_chain == is_chain], is_chain)
        for of_kind in steps:
            self._time(*of_kind)
        self._learn_quiet()
        self._waiting.clear()
        self.num_waiting = 0

    def _learn_quiet(self) -> None:
        """Learn how long quiet steps took."""
        if self._num_passed:
            slots, step_s = self._quiet_slots, self._passed_s / self._num_passed
            self._elapse(len(slots), self._num_passed, self._num_passed, self._passed_s)
            batch, nobody = self._requests.batch(slots), np.zeros(len(slots), dtype=bool)
            self._measure(self._forecast.rest, batch, nobody, step_s, self._num_passed)
            self._num_passed, self._passed_s = 0, 0.0

    def _elapse(self, num_reqs: int, num_steps: int, num_timed: int, seconds: float) -> None:
        """Take note of steps of a batch of so many requests, how many of them are timed, and what these took."""
        share = 1 - (1 - _NEW_SIZE) ** num_steps
        self._size += share * (num_reqs - self._size)
        self._square += share * (num_reqs**2 - self._square)
        self._trials.elapse(seconds)
        self._unmeasured += num_timed

    def _count(self, steps: list[tuple[StepKind, np.ndarray, np.ndarray, list[float]]], is_chain: bool) -> None:
        """Learn what was accepted, given steps of chains or of trees: their kind, `[n]` slots, `[s, n]` tokens."""
        if not steps:
            return
        slots = np.concatenate([each for _, slots, those, _ in steps for each in [slots] * len(those)])
        tokens = np.concatenate([those.ravel() for _, _, those, _ in steps])
        # Placeholders are no draft tokens.
        drafted = np.concatenate([each for k, _, those, _ in steps for each in [k.drafted * k.is_real] * len(those)])
        requests = self._requests
        is_verified, num_slots = (slots >= 0) & (drafted > 0) & (tokens > 0), len(requests.tokens)
        requests.tokens += np.bincount(slots + 1, tokens, num_slots + 1)[1:].astype(np.int64)
        if not is_verified.any():
            return
        slots, tokens = slots[is_verified], tokens[is_verified]
        self._forecast.acceptance.observe(slots, drafted[is_verified], tokens - 1, is_chain)
        verified = np.bincount(slots, minlength=num_slots)
        requests.verify_steps += verified
        requests.verify_tokens += np.bincount(slots, tokens, num_slots).astype(np.int64)
        is_probed = requests.probe_left > 0
        requests.probe_left -= verified * is_probed
        goes_on = (requests.verify_tokens > requests.verify_steps) & (requests.verify_steps < PROBE_STEPS)
        is_over = is_probed & (requests.probe_left <= 0)
        requests.probe_left[is_over] = np.where(goes_on[is_over], PROBE_STEPS - PROBE_FIRST, requests.OVER)

    def _time(self, kind: StepKind, slots: np.ndarray, num_tokens: np.ndarray, seconds: list[float]) -> None:
        """Learn how long steps of a kind took, given `[n]` slots, `[s, n]` tokens, and the seconds that are known."""
        is_known = slots >= 0
        slots = slots[is_known]
        self._elapse(len(slots), len(num_tokens), len(seconds), sum(seconds))
        option = kind.decision.option
        before = self._settled if option == self.option else 0
        self.option, self._settled = option, before + len(num_tokens)
        had = ((kind.drafted > 0) & num_tokens.any(axis=0))[is_known]  # placeholders cost as much as real draft tokens
        self._requests.is_read[slots] |= had
        if not kind.reading and (not seconds or (self.is_measured and self._unmeasured < MEASURE_EVERY)):
            return
        place, batch = self._forecast.place(option), self._requests.batch(slots)
        if kind.reading:
            reading_s, step = kind.reading_s, self._forecast.step(batch, place, had)
            # What it adds to a step is known where such a step is.
            if seconds and self._forecast.costs.count(step.kinds[0]) > MEASURE_EVERY:
                reading_s = max(reading_s, seconds[0] - step.seconds[0])
            if not self._requests.started(kind.reading, reading_s):
                self._trials.caught_up(reading_s)
        settled = seconds if had.any() else seconds[max(0, self._situation(batch).settle - before) :]
        if not kind.is_steady or kind.reading or (option.num_tokens > 0) != had.any():
            settled = []
        self._measure(place, batch, had, statistics.median(settled or [0.0]), len(settled))

    def _situation(self, batch: Batch) -> Situation:
        return self._trials.situations.get(batch.place, Situation())

    def _measure(self, place: int, batch: Batch, drafted: np.ndarray, seconds: float, num_steps: int) -> None:
        """Let the costs learn of steps that followed one another.

        Args:
            place: Their option.
            batch: Their requests.
            drafted: `[n]` bool: which of them had draft tokens.
            seconds: How long one took: their median, as one may have waited.
            num_steps: How many there were; 0 where they have not verified what they draft: drafts are on their way, or
                out of it.
        """
        situation = self._situation(batch)
        situation.steps += self._unmeasured
        self._unmeasured = 0
        if not num_steps:
            return
        step, costs = self._forecast.step(batch, place, drafted), self._forecast.costs
        num = -(-num_steps // MEASURE_EVERY) if self.is_measured else num_steps
        for _ in range(num):
            costs.observe(step.kinds[0], step.features[0], seconds, place)
        if place == self._forecast.rest:
            situation.rest_measured()
        is_tried = situation.trial is not None or bool((self._requests.probe_left[batch.slots] > 0).any())
        self.is_measured = costs.count(step.kinds[0]) > 2 * MEASURE_EVERY and not is_tried
        situation.measured += num * (place == situation.trial)
