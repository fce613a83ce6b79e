"""Counts of a worker on another host than the server: a step's output carries them to the server's file."""

from typing import NamedTuple

import numpy as np

from vllm_vidspec.metrics.catalogue import NAMES, SLOT


class Carried(NamedTuple):
    """What was counted since the last output, by name; of a gauge its value."""

    counts: dict[str, int]
    gauges: dict[str, int]


class CarriedCounts:
    """Stands in for a `MetricsFile` where a worker counts; `take` what its next output is to carry."""

    def __init__(self) -> None:
        self._counts: np.ndarray = np.zeros(len(NAMES), dtype=np.int64)  # [len(NAMES)]
        self._gauges: dict[str, int] = {}

    def add(self, name: str, value: int = 1) -> None:
        self._counts[SLOT[name]] += value

    def set(self, name: str, value: int) -> None:
        self._gauges[name] = value

    def add_all(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Add `[n]` integers to the counters in `[n]` distinct `slots_of` them."""
        self._counts[slots] += counts

    def take(self) -> Carried | None:
        """Return what was counted, and begin anew; None for nothing."""
        slots = np.flatnonzero(self._counts)
        if not len(slots) and not self._gauges:
            return None
        found = Carried({NAMES[slot]: int(self._counts[slot]) for slot in slots}, self._gauges)
        self._counts[:], self._gauges = 0, {}
        return found
