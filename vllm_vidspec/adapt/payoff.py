"""Payoff: how many draft tokens a step pay for at a batch size, by what steps take and what comes out of them.

A step with k drafts emits A(k) tokens for each request and takes T(k): what counts is A(k) / T(k). T is measured: that
of the number in use all the time, that of the others in short trials, ever rarer while they lose. A is measured where
most drafts are proposed, and follows for fewer of a chain: as many stand, up to k. Nothing here changes what is said.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

# A trial is so many steps; the first of them belong to the change (graphs, text that the draft has to catch up on).
_TRIAL_STEPS, _SETTLING_STEPS = 12, 4
# The same where drafting is tried again: the draft may first have to read prompts that it has not seen.
_RESUME_STEPS, _RESUME_SETTLING = 40, 24
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 8192  # steps between trials
_FAR = 0.8  # of the value in use: what is worse than that is not tried again soon
_MARGIN = 1.05  # by how much another number must be better,
_WINS = 2  # and in how many trials running: what is nearly equal is left alone
_NEW_TIME, _NEW_STANDING = 0.1, 0.02  # share of a new step in the running means
_NEW_TRIAL = 0.5  # share of a trial in the mean of the drafts that stand where nothing else tells of it


@dataclass
class _Load:
    """What is known at one class of batch sizes.

    Attributes:
        in_use: Place of the number of drafts in `Payoff.choices`.
        times: By place the seconds that a step takes; 0: not known.
        standing: By place the drafts that stand per request and step.
        trial: Place of the number on trial, None between trials.
        left: Steps until the trial ends, or the next one begins.
        pause: Steps between trials.
        wins: Trials running that the place in `challenger` has won.
    """

    in_use: int
    times: np.ndarray
    standing: np.ndarray
    trial: int | None = None
    left: int = _FIRST_PAUSE
    pause: int = _FIRST_PAUSE
    wins: int = 0
    challenger: int = 0
    heard: list[float] = field(default_factory=list)  # seconds of the trial's steps
    stood: list[np.ndarray] = field(default_factory=list)  # `[num_reqs]` drafts that stood in them


class Payoff:
    """Chooses the number of draft tokens by batch size.

    Args:
        choices: Numbers that may be proposed, the most first and 0 last.
        is_prefix: Whether k drafts are the first k of more: chains are, trees are not.
    """

    def __init__(self, choices: Sequence[int], is_prefix: bool = True):
        self.choices = tuple(choices)
        self._is_prefix = is_prefix
        self._loads: dict[int, _Load] = {}
        self.num_changes = 0  # of the number in use, at any batch size

    @staticmethod
    def load_of(num_reqs: int) -> int:
        """Return the class of a batch size: 1, 2, 3 to 4, 5 to 8, ..."""
        return max(0, num_reqs - 1).bit_length()

    @staticmethod
    def sizes_of(load: int) -> range:
        """Return the batch sizes of a class."""
        return range((1 << load) // 2 + 1, (1 << load) + 1)

    def choose(self, num_reqs: int) -> int:
        """Return how many draft tokens a step of so many requests is to propose."""
        load = self._load(self.load_of(num_reqs))
        return self.choices[load.in_use if load.trial is None else load.trial]

    def in_use(self, num_reqs: int) -> int:
        """Return the same but for trials."""
        return self.choices[self._load(self.load_of(num_reqs)).in_use]

    def hear(self, num_reqs: int, num_drafts: int, accepted: np.ndarray, seconds: float) -> bool:
        """Take in a step of pure decoding that followed one like it.

        Args:
            num_reqs: Its requests.
            num_drafts: Draft tokens that it verified of each.
            accepted: `[num_reqs]` how many of them stood.
            seconds: How long after the step before it ended.

        Returns:
            Whether `choose` may answer something else for this batch size from here on.
        """
        if num_drafts not in self.choices:
            return False
        load, place = self._load(self.load_of(num_reqs)), self.choices.index(num_drafts)
        if place != (load.in_use if load.trial is None else load.trial):
            return False  # it was scheduled before the last change
        if load.trial is None or place > load.in_use:
            self._hear_standing(load, place, accepted, _NEW_STANDING)
        if load.trial is None:
            known = load.times[place]
            # What takes ten times as long has waited for something else.
            if not known or seconds < 10 * known:
                load.times[place] = seconds if not known else known + _NEW_TIME * (seconds - known)
        else:
            load.heard.append(seconds)
            load.stood.append(accepted)
        load.left -= 1
        if load.left > 0:
            return False
        if load.trial is None:
            self._begin_trial(load)
        else:
            self._end_trial(load)
        return True

    def _hear_standing(self, load: _Load, place: int, accepted: np.ndarray, share: float) -> None:
        """Move the means of the drafts that stand, of this number and of those that it tells of."""
        last = len(self.choices) if self._is_prefix else place + 1
        for smaller in range(place, last):
            mean = float(np.minimum(accepted, self.choices[smaller]).mean())
            known = load.standing[smaller]
            load.standing[smaller] = mean if known < 0 else known + share * (mean - known)

    def _begin_trial(self, load: _Load) -> None:
        others = [place for place in range(len(self.choices)) if place != load.in_use]
        load.trial = (
            others[(others.index(load.challenger) + (load.wins == 0)) % len(others)]
            if (load.challenger in others)
            else others[-1]
        )
        if load.trial != load.challenger:
            load.challenger, load.wins = load.trial, 0
        resumes = self.choices[load.in_use] == 0
        load.left, load.heard, load.stood = _RESUME_STEPS if resumes else _TRIAL_STEPS, [], []

    def _end_trial(self, load: _Load) -> None:
        place, load.trial = load.trial, None
        assert place is not None
        settling = _RESUME_SETTLING if self.choices[load.in_use] == 0 else _SETTLING_STEPS
        load.times[place] = float(np.median(load.heard[settling:]))
        if place < load.in_use:  # of more drafts than are in use, only a trial tells how many stand
            self._hear_standing(load, place, np.concatenate(load.stood[settling:]), _NEW_TRIAL)
        value, in_use = self._value(load, place), self._value(load, load.in_use)
        if value > _MARGIN * in_use:
            load.wins += 1
            load.pause = _FIRST_PAUSE
        else:
            load.wins = 0
            load.pause = min((2 if value > _FAR * in_use else 4) * load.pause, _LONGEST_PAUSE)
        if load.wins >= _WINS:
            load.in_use, load.wins = place, 0
            self.num_changes += 1
        load.left = load.pause

    @staticmethod
    def _value(load: _Load, place: int) -> float:
        """Return tokens per request and second."""
        return (1 + max(0.0, load.standing[place])) / load.times[place] if load.times[place] else 0.0

    def _load(self, number: int) -> _Load:
        if number not in self._loads:
            count = len(self.choices)
            self._loads[number] = _Load(0, np.zeros(count), np.full(count, -1.0))
        return self._loads[number]
