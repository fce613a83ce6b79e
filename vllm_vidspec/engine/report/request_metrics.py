"""What a response says of its own request: the draft tokens that stood exactly, loosened and shifted."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput

from vllm_vidspec import metrics
from vllm_vidspec.engine.compat.scheduler import StepReport, attach
from vllm_vidspec.metrics.counts import Changes
from vllm_vidspec.metrics.files import CounterFiles

logger = init_logger("vllm.vidspec")


@dataclass
class RequestMetrics(RequestSpecDecodeMetrics):
    """vLLM's acceptance statistics of one request, and why its drafts stood (see `to_dict`)."""

    num_exact: int = 0
    num_loosened: int = 0
    num_shifted: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the response's `metrics.speculative_decoding`, with counts of draft tokens by kind."""
        kinds = {f"num_{kind}_draft_tokens": getattr(self, f"num_{kind}") for kind in metrics.KINDS}
        return super().to_dict() | kinds


class RequestMetricsReader:
    """Adds to a finished request's statistics what the worker counted for it; never raises: no figure is worth that."""

    def __init__(self, files: CounterFiles):
        self._files = files
        self._has_failed = False

    def __call__(self, found: RequestSpecDecodeMetrics, req_id: str) -> RequestSpecDecodeMetrics:
        """Return the statistics with our counts, or as they are if the worker no longer knows the request."""
        try:
            counts = self._files.request(req_id)
            if counts is None:
                return found
            return RequestMetrics(**asdict(found), **{f"num_{kind}": count for kind, count in counts.items()})
        except Exception:
            if not self._has_failed:
                logger.exception("vidspec: responses go without our counts (further failures are not logged)")
            self._has_failed = True
            return found


class PublishingOutput(AsyncModelRunnerOutput):
    """A step's output that publishes our counts when the device has finished it, before anybody sees the tokens, and
    brings the scheduler what came with the step (`compat.scheduler.Told`).
    """

    def __init__(
        self,
        inner: AsyncModelRunnerOutput,
        publish: Callable[[], None] | None,
        report: StepReport | None,
        carried: Changes | None,
        records: Callable[[], dict[str, Any]] | None,
    ):
        self._inner, self._publish = inner, publish
        self._report, self._carried, self._records = report, carried, records

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step, then publish."""
        return self.finish(self._inner.get_output())

    def finish(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Publish a step that the device has finished, and return its output with what it brings."""
        if self._publish is not None:
            self._publish()
        attach(output, self._report, self._carried, None if self._records is None else self._records())
        return output

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """Return what a KV connector did in a step whose output has failed; vLLM asks from 0.33 on."""
        return self._inner.get_kv_connector_output()
