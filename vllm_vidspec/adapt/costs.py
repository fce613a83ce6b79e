"""StepCosts: how long a step of the engine takes, learned from its own steps; numpy only.

A step is described by a few sums over its batch (`FEATURES`), and a non-negative linear fit through all measured kinds
of steps predicts every other kind: no table is needed, and what is known of one batch size or number of draft tokens
informs the next. A kind that was measured moves from the fit to its own mean, the further the more often it was seen.

An engine's first steps are slow, and a machine's speed changes: where steps of one option follow one another, a change
of what they take is the machine's, and holds for all kinds; only an option's first steps after others are its own. What
requests cost shows where they come and go between such steps.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_vidspec.adapt.requests import Batch

# What a step's time is a sum of: a constant, requests, context of the target (thousands of tokens, summed over
# requests), whether anything is drafted, draft tokens to verify and the context that they attend to, forwards of the
# draft one after another, rows of these forwards and their context.
FEATURES = ("step", "requests", "context", "drafts", "rows", "row_context", "levels", "draft_rows", "draft_context")
# Before anything is measured, in steps: a draft forward takes a sixth of a step, the rest is free; and the standard
# deviation of each of these guesses.
_PRIOR = np.array([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1 / 6, 0.0, 0.0])
_PRIOR_SPREAD = np.array([1.0, 0.1, 0.1, 0.5, 0.05, 0.05, 0.2, 0.05, 0.05])
_NOISE = 0.15  # relative standard deviation of one step
_MISFIT = 0.08  # and of the mean of a kind from the fit
_REFIT_AT, _REFIT_EVERY = (1, 3, 8, 20), 64  # steps of one kind, and of all, after which the weights are fitted
_FIRST = 5  # steps of a kind of which the median is taken
_COLD, _COLD_COUNTS = 2, 0.1  # first steps of a kind, which may be slow once; what they count for together
_OWN_STEPS = 8  # measured steps of an option after another's that tell its own cost; later ones the machine's speed
_SHIFT_STEPS, _SHIFT = 3, 0.3  # the first of these, which are believed if all differ by so much from what was known
_SPEED = 0.1  # share of a step in the machine's speed
_LEAST = 0.1  # of the fastest kind of step that was measured: no step is predicted to take less
_NEW = 0.05  # share of a new step in the means of its kind, once it has many
_OLD = 64  # steps of other kinds after which what comes of a kind counts more than what was
_HALF_LIFE = 1024  # steps after which what was measured of a kind, or compared, counts half
_DRIFT = 5e-4  # share by which what a kind takes may have changed, a step since it was measured last,
_SAME, _STEADIEST = 0.15, 4.0  # where that was not within so much of what was known; else a half, a fourth at last


@dataclass
class _Record:
    """The steps of one kind."""

    x: np.ndarray  # `[len(FEATURES)]` means
    # Of a step, were the machine as fast as at first: the median of the first few, then a mean in which a step that
    # waited counts little.
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)  # Seconds of these first few
    count: int = 0  # How many there were
    seen: int = 0  # Step of all kinds in which the last was
    steadiness: float = 1.0  # By how much less than `_DRIFT` it changes with time
    factor: float = 1.0  # By how much more such a step takes than the fit says, as far as its number is to be trusted

    def correct(self, fitted_s: float, known: float) -> None:
        """Compare with what the fit says of it, given how many steps its mean is worth."""
        self.factor = (self.seconds / fitted_s) ** (known / (known + (_NOISE / _MISFIT) ** 2))


def features(batch: Batch, most: np.ndarray, levels: np.ndarray, drafted: np.ndarray, pads: bool) -> np.ndarray:
    """Return `[m, len(FEATURES)]` of steps of a batch.

    Args:
        batch: Its requests.
        most: `[m]` draft tokens of each request that is drafted for.
        levels: `[m]` forwards of the draft one after another.
        drafted: `[m, n]` bool: who is.
        pads: Whether all have as many rows as those.
    """
    num_drafted, num_reqs = drafted.sum(axis=1), len(batch.slots)
    drafts = num_drafted > 0
    most, levels = most * drafts, levels * drafts
    x = np.empty((len(most), len(FEATURES)))
    x[:, 0], x[:, 1], x[:, 2], x[:, 3] = 1.0, num_reqs, batch.total, drafts
    x[:, 4] = most * (num_reqs if pads else num_drafted)
    x[:, 5] = most * (batch.total if pads else drafted @ batch.context)
    x[:, 6], x[:, 7] = levels, most * (levels > 0) * num_drafted
    x[:, 8] = levels * (drafted @ batch.draft_context)
    return x


class StepCosts:
    """Seconds of a step by its features.

    Attributes:
        weights: `[len(FEATURES)]` seconds of one unit of each.
        is_fitted: Whether anything was measured; until then the weights are guesses, in steps.
    """

    def __init__(self) -> None:
        self._records: dict[Hashable, _Record] = {}
        self._num_steps = self._fitted_at = 0
        self.weights, self._covariance = _PRIOR, np.diag(_PRIOR_SPREAD**2)
        self.is_fitted, self._least_s = False, _LEAST
        self._slowness = 1.0  # by how much longer steps take by now
        self._last: tuple[int | None, int] = (None, 0)  # option of the last steps, and how many there were
        self._own: list[float] = []  # the first of these over what was known of them,
        self._is_old = False  # and whether that was long ago
        # Means of the features of these steps and of their seconds, the late ones above all; and products of what steps
        # differ by from such means, over these seconds.
        self._late, self._compared = np.zeros(len(FEATURES) + 1), np.zeros((len(FEATURES) + 1, len(FEATURES) + 1))

    def observe(self, kind: Hashable, x: np.ndarray, seconds: float, option: int) -> None:
        """Take in a step.

        Args:
            kind: Steps of equal kind share a record.
            x: `[len(FEATURES)]` float64.
            seconds: What it took.
            option: Place of what it drafted by.
        """
        self._num_steps += 1
        record = self._records.get(kind)
        if record is None:
            record = self._records[kind] = _Record(x.copy())
        is_old = record.count > 0 and self._num_steps - record.seen > _OLD
        self._last = option, 1 + (self._last[1] if option == self._last[0] else 0)
        if self._last[1] == 1:
            self._own, self._is_old = [], is_old
        if self._last[1] > _OWN_STEPS and record.count > _COLD + _FIRST:
            expected_s = self._slowness * self._fitted_of_one(x) * record.factor
            self._slowness *= (min(seconds, 2 * expected_s) / expected_s) ** _SPEED
        self._compare(x, seconds)
        seconds /= self._slowness
        if is_old:
            record.count = min(record.count, _COLD + _FIRST + 1)
        record.count, record.seen = record.count + 1, self._num_steps
        if record.count == _COLD + 1:
            record.first = []
        share, known_s = max(_NEW, 1 / max(1, record.count - _COLD)), record.seconds
        is_first, is_own = record.count <= _COLD + _FIRST, self._last[1] <= _OWN_STEPS
        if is_first or is_own:
            record.x += share * (x - record.x)
        if is_first:
            record.first = sorted((*record.first, seconds))
            record.seconds = record.first[(len(record.first) - 1) // 2]
        elif is_own:
            record.seconds += share * (min(seconds, 2 * record.seconds) - record.seconds)
        if is_own and known_s:
            self._shift(record, seconds, known_s)
        if record.count in _REFIT_AT or self._num_steps - self._fitted_at >= _REFIT_EVERY:
            self._fit()
        record.correct(self._fitted_of_one(record.x), self._known(record))

    def _shift(self, record: _Record, seconds: float, known_s: float) -> None:
        """Compare the first steps of an option after others with what was known: where all of them took far more, or
        less, what else the machine does has changed since, and they are believed; where they took the same a long time
        after, the kind is steady.
        """
        self._own.append(seconds / known_s)
        if len(self._own) != _SHIFT_STEPS:
            return
        least, middle, most = sorted(self._own)
        if abs(middle - 1) > _SAME:
            record.steadiness = 1.0
        elif self._is_old:
            record.steadiness = min(2 * record.steadiness, _STEADIEST)
        if least > 1 + _SHIFT or most < 1 - _SHIFT:
            record.seconds = seconds * middle / self._own[-1]
            record.count, record.first = _COLD + 1, [record.seconds]

    def _compare(self, x: np.ndarray, seconds: float) -> None:
        """Learn what requests cost that have come, gone or grown since the steps just before this one, which were of
        the same option: whatever the machine's speed, and its share in the whole step. The seconds are the clock's: the
        speed that is believed follows what requests cost where that is not known yet.
        """
        num, late_s = self._last[1], self._late[-1]
        more = np.empty_like(self._late)
        more[:-1], more[-1] = x, seconds if num == 1 else min(seconds, 2 * late_s)
        more -= self._late
        self._late += max(_SPEED, 1 / num) * more
        if num > 1:
            more[:-1] *= self._slowness  # weights are those of the machine at first
            more /= late_s
            self._compared *= 0.5 ** (1 / _HALF_LIFE)
            self._compared += more[:, None] * more

    @staticmethod
    def _known(record: _Record) -> float:
        """Return how many steps the mean of a kind is worth."""
        return max(record.count - _COLD, _COLD_COUNTS)

    def count(self, kind: Hashable) -> int:
        """Return how many steps of a kind were measured."""
        record = self._records.get(kind)
        return 0 if record is None else record.count

    def seconds(self, kinds: Sequence[Hashable], x: np.ndarray) -> np.ndarray:
        """Return `[m]` seconds of steps of these kinds, given `[m, len(FEATURES)]`."""
        found = self._slowness * self._fitted(x)
        for place, kind in enumerate(kinds):
            record = self._records.get(kind)
            if record is not None:
                found[place] *= record.factor
        return found

    def worth(self, batch: Batch) -> np.ndarray:
        """Return `[n]` seconds that a token of each request takes without drafts, over their mean: an equal share of
        the step, and what its context adds to it: a standard error more than is known, as drafts for those of short
        contexts may cost the others more than they save, and steps without drafts tell.
        """
        step_s, request_s, context_s = self.weights[:3].tolist()
        num, total_s = len(batch.slots), step_s + len(batch.slots) * request_s + context_s * batch.total
        if not total_s:
            return np.ones(num)
        context_s = min(context_s + float(np.sqrt(self._covariance[2, 2])), total_s / batch.total)
        return 1 + context_s * (batch.context - batch.total / num) * (num / total_s)

    def doubt(self, kinds: Sequence[Hashable], x: np.ndarray, known: int) -> np.ndarray:
        """Return `[m]` relative standard errors of the seconds of steps, compared with those of one of them.

        What all of them have in common, as the batch, is in doubt for none. A kind that was measured long ago is in
        more doubt than one that was measured now.
        """
        shares = x / self._fitted(x)[:, None]
        shares = shares - shares[known]
        variance = np.einsum("mi,ij,mj->m", shares, self._covariance, shares) + _MISFIT**2
        for place, kind in enumerate(kinds):
            record = self._records.get(kind)
            if record is not None:
                count = min(self._known(record), 1 / _NEW) * 0.5 ** ((self._num_steps - record.seen) / _HALF_LIFE)
                variance[place] = 1 / (1 / variance[place] + count / _NOISE**2)
        return np.sqrt(variance) + self.drift(kinds)

    def drift(self, kinds: Sequence[Hashable]) -> np.ndarray:
        """Return `[m]` by how much less steps of these kinds may take than when they were measured last, relative."""
        records = [self._records.get(kind) for kind in kinds]
        ages = [0 if record is None else (self._num_steps - record.seen) / record.steadiness for record in records]
        return _DRIFT * np.array(ages)

    def _fitted(self, x: np.ndarray) -> np.ndarray:
        return np.maximum(x @ self.weights, self._least_s)

    def _fitted_of_one(self, x: np.ndarray) -> float:
        return max(float(x @ self.weights), self._least_s)

    def _fit(self) -> None:
        """Fit the weights to all records, each by its relative error; none of them is negative."""
        self._fitted_at, self.is_fitted = self._num_steps, True
        records = list(self._records.values())
        x, seconds = np.stack([record.x for record in records]), np.array([record.seconds for record in records])
        counts = np.array([self._known(record) for record in records])
        scale = float(np.median(seconds / np.maximum(x @ _PRIOR, 1e-9)))
        precision = 1 / (_MISFIT**2 + _NOISE**2 / counts)
        design = x / seconds[:, None]
        prior_precision = 1 / (scale * _PRIOR_SPREAD) ** 2
        gram = (design * precision[:, None]).T @ design + np.diag(prior_precision)
        wanted = design.T @ precision + prior_precision * scale * _PRIOR
        gram += self._compared[:-1, :-1] / _NOISE**2
        wanted += self._compared[:-1, -1] / _NOISE**2
        self.weights, self._covariance = _non_negative(gram, wanted), np.linalg.inv(gram)
        self._least_s = _LEAST * float(seconds.min())
        for record in records:
            record.correct(self._fitted_of_one(record.x), self._known(record))


def _non_negative(gram: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Solve `[n, n]` equations for non-negative `[n]` weights: the most negative ones are dropped one by one."""
    kept = np.arange(len(wanted))
    while True:
        found = np.linalg.solve(gram[np.ix_(kept, kept)], wanted[kept])
        if (found >= 0).all():
            weights = np.zeros(len(wanted))
            weights[kept] = found
            return weights
        kept = np.delete(kept, found.argmin())
