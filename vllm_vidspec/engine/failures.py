"""DraftFailures: an exception on the draft side costs its requests their drafts on all ranks, never their answers."""

from collections.abc import Callable

import numpy as np
from vllm.logger import init_logger

from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.draft_backend import Step
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.requests import RequestRows

logger = init_logger("vllm.vidspec")


class DraftFailures:
    """Runs parts of a step, and gives requests up."""

    def __init__(self, knobs: Knobs, agreement: Agreement, requests: RequestRows, counters: Counters):
        self._knobs, self._agreement, self._requests, self._counters = knobs, agreement, requests, counters
        self._callbacks: list[Callable[[], None]] = []

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call `callback` after a failure: what earlier requests have left, one rank may have and another not."""
        self._callbacks.append(callback)

    def run(
        self, phase: str, part: Callable[..., None], step: Step, indices: np.ndarray, *args, is_careful: bool = False
    ) -> None:
        """Run `part(step, indices, *args)` for some of a step's requests; `is_careful` see `Agreement.run`."""
        if not len(indices):
            return
        error = self._agreement.run(phase, part, step, indices, *args, is_careful=is_careful)
        if error is None:
            return
        if self._knobs.current.on_draft_error == "raise":
            raise error
        logger.error("vidspec: the draft failed; these requests go on without speculation", exc_info=error)
        self._counters.add("draft_failures")
        for callback in self._callbacks:
            callback()
        for i in indices:
            self.give_up(step, i, "draft_error", "the draft failed")

    def give_up(self, step: Step, i: int, reason: str, detail: str) -> None:
        self._requests.skip(int(step.batch.idx_mapping_np[i]), reason)
        self._counters.skip(reason, step.batch.req_ids[i], detail)
