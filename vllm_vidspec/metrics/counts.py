"""Counts in memory: of a worker on another host than the server, whose outputs carry them there, and of a drafter."""

import numpy as np

from vllm_vidspec.metrics.catalogue import GAUGE_NAMES, NAMES, SLOT

Changes = dict[str, int]  # by name what a counter gained between two readings; of a gauge its value


class Counts:
    """Counters and gauges of one writer, `[len(NAMES)]` int64; `KeyError` for a name outside `NAMES`."""

    def __init__(self, values: np.ndarray | None = None) -> None:
        self._values: np.ndarray = np.zeros(len(NAMES), dtype=np.int64) if values is None else values

    def add(self, name: str, value: int = 1) -> None:
        """Add to a counter."""
        self._values[SLOT[name]] += value

    def set(self, name: str, value: int) -> None:
        """Set a gauge."""
        self._values[SLOT[name]] = value

    def add_all(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Add `[n]` integers to the counters in `[n]` distinct `slots_of` them; readers see all of it or nothing."""
        self._values[slots] += counts


class CarriedCounts(Counts):
    """Stands in for a `MetricsFile` where a worker counts that has none."""

    def __init__(self) -> None:
        super().__init__()
        self._taken = self._values.copy()

    def take(self) -> Changes | None:
        """Return what an output is to carry to the server's file: what was counted since the last call, if anything."""
        before, self._taken = self._taken, self._values.copy()
        return changes(before, self._taken) or None


def changes(before: np.ndarray, after: np.ndarray) -> Changes:
    """Return what changed between two readings, `[len(NAMES)]` int64 each."""
    names = ((slot, NAMES[slot]) for slot in np.flatnonzero(before != after).tolist())
    return {name: int(after[slot] - (0 if name in GAUGE_NAMES else before[slot])) for slot, name in names}
