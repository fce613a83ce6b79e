"""DrafterCounters: what the drafter counts, in the shared tables; the target's process publishes it."""

import numpy as np

from vllm_vidspec import metrics

_SLOT = {name: slot for slot, name in enumerate(metrics.NAMES)}


class DrafterCounters:
    """Stands in the place of `Counters` in the drafter's process.

    Args:
        values: int64 `[len(metrics.NAMES)]`, the tables' own; None on every rank but the first.
    """

    def __init__(self, values: np.ndarray | None):
        self._values = values
        self._reasons: dict[str, tuple[str, str]] = {}  # by request id

    def add(self, name: str, value: int = 1) -> None:
        if self._values is not None:
            self._values[_SLOT[name]] += value

    def set(self, name: str, value: int) -> None:
        if self._values is not None:
            self._values[_SLOT[name]] = value

    def skip(self, reason: str, req_id: str, detail: str) -> None:
        """Note why a request is not drafted for; the target's process counts it."""
        self._reasons[req_id] = (reason, detail)

    def reason_for(self, req_id: str) -> tuple[str, str]:
        """Return why a request is not drafted for, and what to say of it."""
        return self._reasons.pop(req_id, ("draft_error", "the draft failed"))
