"""What a response says of its own request: the draft tokens that stood exactly, loosened and shifted."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_vidspec import metrics


@dataclass
class RequestMetrics(RequestSpecDecodeMetrics):
    """vLLM's acceptance statistics of one request, and why its drafts stood; see `to_dict`."""

    num_exact: int = 0
    num_loosened: int = 0
    num_shifted: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the response's `metrics.speculative_decoding`, with counts of draft tokens by kind."""
        kinds = {f"num_{kind}_draft_tokens": getattr(self, f"num_{kind}") for kind in metrics.KINDS}
        return super().to_dict() | kinds


def extend(found: RequestSpecDecodeMetrics, req_id: str, path: Any) -> RequestSpecDecodeMetrics:
    """Return a finished request's statistics with what the worker counted for it, if it still knows."""
    counts = metrics.MetricsFile.open(path).request(req_id)
    if counts is None:
        return found
    return RequestMetrics(**asdict(found), **{f"num_{kind}": count for kind, count in counts.items()})


class PublishingOutput(AsyncModelRunnerOutput):
    """A step's output that publishes our counts when the device has finished it, before anybody sees the tokens."""

    def __init__(self, inner: AsyncModelRunnerOutput, publish: Callable[[], None]):
        self._inner = inner
        self._publish = publish

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step; see vLLM's."""
        output = self._inner.get_output()
        self._publish()
        return output
