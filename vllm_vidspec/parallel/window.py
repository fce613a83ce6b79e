"""WindowRule: how many tokens the target verifies a step, from what a step and a draft forward are measured to take."""

import numpy as np

_NEW_SHARE = 0.1  # of a new measurement in the mean that is kept
_MOST_TIMES = 4  # the mean: what a longer time counts as
_HYSTERESIS = 0.75  # a window holds while the rule is less than this away from its middle
_NUM_BUCKETS = 12  # batch sizes 1, 2, 3-4, 5-8, ...


def running_mean(mean: float, new: float) -> float:
    """Return a mean of times that a new one has entered; 0 stands for none yet.

    A step takes what it usually takes: one that a prompt or a pause has stretched says little.
    """
    return mean + _NEW_SHARE * (min(new, _MOST_TIMES * mean) - mean) if mean else new


class WindowRule:
    """The paper's window, c* = T_t / T_d: what the draft draws while the target verifies (ParallelVLM section 4.3).

    The paper rounds down where few drafts stand and up where most do; here the acceptance rate is added before rounding
    down, which does both. Batch sizes are told apart by powers of two.

    Args:
        most: K, the greatest window.
    """

    def __init__(self, most: int):
        self._most = most
        self._step_us = np.zeros(_NUM_BUCKETS)
        self._windows = np.full(_NUM_BUCKETS, most)
        self._acceptance = 1.0

    @staticmethod
    def _bucket(num_reqs: int) -> int:
        return min(max(num_reqs - 1, 0).bit_length(), _NUM_BUCKETS - 1)

    def observe_step(self, num_reqs: int, step_us: float) -> None:
        """Take the time of one of the target's steps, over `num_reqs` requests."""
        bucket = self._bucket(num_reqs)
        self._step_us[bucket] = running_mean(self._step_us[bucket], step_us)

    def observe_acceptance(self, num_accepted: int, num_drafts: int) -> None:
        """Take how many of a step's drafts stand."""
        if num_drafts:
            self._acceptance += _NEW_SHARE * (num_accepted / num_drafts - self._acceptance)

    def window(self, num_reqs: int, draft_us: float) -> int:
        """Return the window of a step over `num_reqs` requests, where a draft forward takes `draft_us`; 0: unknown."""
        bucket = self._bucket(num_reqs)
        step_us = self._step_us[bucket]
        if not step_us or not draft_us:
            return int(self._windows[bucket])
        wanted = step_us / draft_us + self._acceptance
        if abs(wanted - (self._windows[bucket] + 0.5)) > _HYSTERESIS:
            self._windows[bucket] = min(max(int(wanted), 1), self._most)
        return int(self._windows[bucket])
