"""Trials: when an option is tried that is not the best as far as is known; numpy only.

An option is tried if it may be `WORTH` times as fast as the best, given how much its estimate is in doubt: a few
measured steps remove the doubt. What trials are expected to lose is a debt, paid off with a share of the time that
passes, and what probes lose is another: where nothing had to be tried for long, no more may be lost afterwards.
"""

from dataclasses import dataclass

import numpy as np

WORTH = 1.03  # what cannot be so much faster than the best is not tried
TRIAL_STEPS = 4  # measured steps of a trial,
_LONGEST_TRIAL = 24  # and steps after which it ends in any case: a draft may first have to read what it missed
# First steps without drafts after others, of which nothing is learned: caches get back what drafts took from them step
# by step (60 ms on a CPU, whose fifth step takes a tenth longer). Fewer where rest was never measured, or has less of
# the best rate than this.
SETTLE, _SETTLE_SOON, _CLOSE = 12, 4, 0.8
_NEW_CATCH_UP = 0.1  # share of a new one in their mean
_BETWEEN = 4  # steps between two trials
_PAUSE = 64  # and where the allowance is used up
_REST_AGAIN, _REST_SELDOM = 64, 1024  # steps until one without drafts is measured again: twice as many each time
_NEAR = 0.6  # of the best rate: a rate without drafts that is lower is not measured again
_CHECK_AFTER = 16  # steps of another option after which the one before is measured once more, if it is in doubt
_DOUBTFUL = 0.4, 0.94  # shares of the best rate between which what else the machine did may be why it is the best
UNMEASURED = 2  # steps that a change costs: they verify what the option before has drafted
# Share of the time that they may cost: what follows a probe, as a change of what is drafted, is not counted.
_ALLOWANCE = {"trials": 0.01, "probes": 0.007}
# Steps without drafts, more than which nobody may owe who is to try something.
_DEBT_STEPS = {"trials": 20, "probes": 2}


@dataclass
class Situation:
    """What is tried at one batch size and context."""

    steps: int = 0  # How many there were
    rate: float = 0.0  # Tokens a second of the best option; 0: not known
    in_use: int | None = None  # The best option, a place in the controller's; None: not known
    trial: int | None = None  # The option that is tried; None: none is
    measured: int = 0  # Steps of the trial that were measured
    until: int = _BETWEEN  # Step at which the trial ends, or the next one may begin
    settle: int = SETTLE  # Steps without drafts after others of which nothing is learned
    rest_due: int = 0  # Step from which on one without drafts is to be measured again
    rest_wait: int = 0  # Steps between two such; 0: none was measured
    replaced: int = -1  # The option that was in use before, if it is to be measured once more; -1: none is
    check_at: int = 0  # Step from which on

    def to_come(self, unmeasured: int) -> int:
        """Return the steps of its trial that are to come, given how many of them will not be measured."""
        return max(1, TRIAL_STEPS - self.measured) + unmeasured

    def use(self, place: int, rate: float) -> None:
        """Take note of the best option and its rate."""
        if self.in_use not in (None, place):
            self.replaced, self.check_at = self.in_use, self.steps + _CHECK_AFTER
        self.in_use, self.rate = place, rate

    def checked(self) -> int:
        """Return the option that is to be measured once more by now, and forget it; -1 for none."""
        if self.steps < self.check_at:
            return -1
        place, self.replaced = self.replaced, -1
        return place

    def rest_measured(self) -> None:
        """Take note of a step without drafts that was measured."""
        if self.steps >= self.rest_due:
            self.rest_wait = min(max(2 * self.rest_wait, _REST_AGAIN), _REST_SELDOM)
            self.rest_due = self.steps + self.rest_wait

    def is_rest_due(self, share: float) -> bool:
        """Return whether one without drafts is to be measured by now, given what share it has of the best rate."""
        if self.rest_wait and share <= _NEAR:
            return False
        return self.steps >= self.rest_due


def is_doubtful(shares: np.ndarray) -> np.ndarray:
    """Return `[m]` bool: options that may be the better ones after all, given their shares of the best rate."""
    return (shares > _DOUBTFUL[0]) & (shares < _DOUBTFUL[1])


class Trials:
    """What they owe, and which option is tried.

    Attributes:
        situations: By class of batch size and context.
        step_s: Time of a step without drafts, as it was predicted last.
        catch_up_s: What the draft takes to read what came while it rested: a mean.
    """

    def __init__(self) -> None:
        self.situations: dict[tuple[int, int], Situation] = {}
        self.step_s = self.catch_up_s = 0.0
        self._debt_s = dict.fromkeys(_DEBT_STEPS, 0.0)

    def elapse(self, seconds: float) -> None:
        """Pay debts off with what has passed."""
        for of, debt_s in self._debt_s.items():
            self._debt_s[of] = max(0.0, debt_s - _ALLOWANCE[of] * seconds)

    def owe(self, seconds: float, of: str = "trials") -> bool:
        """Add what a trial, or a probe, loses to what they owe; return False if that is too much already."""
        if self._debt_s[of] > _DEBT_STEPS[of] * self.step_s:
            return False
        self._debt_s[of] += seconds
        return True

    @staticmethod
    def is_due(situation: Situation) -> bool:
        """Return whether a trial may begin; one that has run long enough ends."""
        if situation.trial is not None and (situation.steps >= situation.until or situation.measured >= TRIAL_STEPS):
            situation.trial, situation.until, situation.settle = None, situation.steps + _BETWEEN, SETTLE
        return situation.trial is None and situation.steps >= situation.until

    def caught_up(self, seconds: float) -> None:
        """Take note of what the draft took to read what came while it rested."""
        self.catch_up_s += (seconds - self.catch_up_s) * (_NEW_CATCH_UP if self.catch_up_s else 1.0)

    def begin(
        self, situation: Situation, rates: np.ndarray, hopes: np.ndarray, seconds: np.ndarray, best: int, rest: int
    ) -> int:
        """Return the row of the option that is tried from now on, or of the best.

        Args:
            situation: Whose trial it is.
            rates: `[m]` tokens a second of each option, as expected.
            hopes: `[m]` the same, as it may be.
            seconds: `[m]` of a step.
            best: Row of the best option.
            rest: Row of the one without drafts.
        """
        hopes = hopes.copy()
        hopes[best] = 0.0
        tried = int(hopes.argmax())
        if hopes[tried] <= WORTH * rates[best]:
            return best
        share = float(rates[tried] / rates[best])
        lost_s = (TRIAL_STEPS + UNMEASURED) * max(0.0, 1 - share) * float(seconds[tried])
        # Between drafts and none, there or back, the draft reads what it has missed, and caches lack what they had.
        if not self.owe(lost_s + (self.catch_up_s + self.step_s) * (rest in (tried, best))):
            situation.until = situation.steps + _PAUSE
            return best
        if tried == rest:
            situation.settle = SETTLE if situation.rest_wait and share > _CLOSE else _SETTLE_SOON
        situation.until, situation.measured = situation.steps + _LONGEST_TRIAL, 0
        return tried
