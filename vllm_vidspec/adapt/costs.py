"""StepCosts: how long a step of the engine takes, learned from its own steps; numpy only.

A step is described by a few sums over its batch (`FEATURES`). Steps of one kind (batch size, context, what is drafted)
are averaged in one record; a record that has been measured predicts itself, and a non-negative linear fit through all
records predicts what has not been measured yet. So a table is never needed, and what is known of one batch size says
something of the next.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

# What a step's time is a sum of: a constant, requests, context of the target (thousands of tokens, summed over
# requests), drafts to verify and the context that they attend to, levels of the draft, draft rows and their context.
FEATURES = ("step", "requests", "context", "rows", "row_context", "levels", "draft_rows", "draft_context")
# Before anything is measured: a level of the draft takes a sixth of a step, the rest is free.
_PRIOR = np.array([1.0, 0.0, 0.0, 0.0, 0.0, 1 / 6, 0.0, 0.0])
_REFIT_FIRST, _REFIT_LAST = 16, 512  # observations between two fits: ever more, unless there is something new
_NEW = 0.1  # share of a new observation in the means of a record, once it has a few
_MOST_WEIGHT = 32  # observations of one record that count in the fit
KNOWN = 3  # observations after which a record predicts its own kind


@dataclass
class _Record:
    """Means of the steps of one kind: `x` `[len(FEATURES)]`, `seconds`, and how many there were."""

    x: np.ndarray
    seconds: float
    count: int = 1


class StepCosts:
    """Seconds of a step by its features."""

    def __init__(self) -> None:
        self._records: dict[Hashable, _Record] = {}
        self._since_fit, self._refit_every = 0, _REFIT_FIRST
        self.weights = _PRIOR  # [len(FEATURES)] seconds of one unit of each, those of the prior until there is a fit
        self.is_fitted = False

    def observe(self, kind: Hashable, x: np.ndarray, seconds: float) -> None:
        """Take in a step.

        Args:
            kind: Steps of equal kind share a record.
            x: `[len(FEATURES)]` float64.
            seconds: What it took.
        """
        record = self._records.get(kind)
        if record is None:
            self._records[kind] = _Record(x.copy(), seconds)
        else:
            # One step that waited for something else is not what the next will take.
            seconds = min(seconds, 3 * record.seconds) if record.count >= KNOWN else seconds
            record.count += 1
            share = max(_NEW, 1 / record.count)
            record.x += share * (x - record.x)
            record.seconds += share * (seconds - record.seconds)
            if record.count == KNOWN:
                self._refit_every = _REFIT_FIRST
        self._since_fit += 1
        if self._since_fit >= self._refit_every or not self.is_fitted:
            self._refit_every = min(2 * self._refit_every, _REFIT_LAST)
            self._fit()

    def count(self, kind: Hashable) -> int:
        """Return how many steps of a kind were measured."""
        record = self._records.get(kind)
        return 0 if record is None else record.count

    def seconds(self, kind: Hashable, x: np.ndarray) -> float:
        """Return what a step of a kind with `[len(FEATURES)]` features takes."""
        fitted = float(self.weights @ x)
        record = self._records.get(kind)
        if record is None or record.count < KNOWN:
            return fitted
        own = float(self.weights @ record.x)
        return record.seconds * fitted / own if own > 0 else record.seconds

    def _fit(self) -> None:
        """Fit the weights to all records, each by its relative error; none of them is negative."""
        self._since_fit = 0
        records = list(self._records.values())
        seconds = np.array([record.seconds for record in records])
        weight = np.sqrt([min(record.count, _MOST_WEIGHT) for record in records]) / seconds
        design = np.stack([record.x for record in records]) * weight[:, None]
        # The prior's proportions, at the scale of what was measured, decide what the records leave open.
        scale = float(np.median(seconds / np.maximum([_PRIOR @ record.x for record in records], 1e-9)))
        prior = scale * _PRIOR
        spread = 0.05 * np.sqrt(np.maximum((design**2).mean(axis=0), 1e-12))
        self.weights = _non_negative(
            np.vstack((design, np.diag(spread))), np.concatenate((seconds * weight, spread * prior))
        )
        self.is_fitted = True


def _non_negative(design: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return non-negative `[n]` weights that fit `[m, n]` rows of full rank to `[m]` values: the worst goes first."""
    gram, target = design.T @ design, design.T @ wanted
    kept = np.arange(len(target))
    while True:
        found = np.linalg.solve(gram[np.ix_(kept, kept)], target[kept])
        if (found >= 0).all():
            weights = np.zeros(len(target))
            weights[kept] = found
            return weights
        kept = np.delete(kept, found.argmin())
