"""What a response says of its own request: the draft tokens that stood exactly, loosened and shifted."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput

from vllm_vidspec import metrics
from vllm_vidspec.engine.compat.scheduler import Attached, attach


@dataclass
class RequestMetrics(RequestSpecDecodeMetrics):
    """vLLM's acceptance statistics of one request, and why its drafts stood."""

    by_kind: tuple[int, ...] = (0,) * len(metrics.KINDS)  # draft tokens

    @classmethod
    def of(cls, found: RequestSpecDecodeMetrics, kinds: Sequence[int]) -> "RequestMetrics":
        """Return the statistics with counts of the answer's `Kind`s."""
        return cls(**asdict(found), by_kind=tuple(kinds.count(kind) for kind in metrics.Kind if kind))

    def to_dict(self) -> dict[str, Any]:
        """Return the response's `metrics.speculative_decoding`, with counts of draft tokens by kind."""
        kinds = zip(metrics.KINDS, self.by_kind, strict=True)
        return super().to_dict() | {f"num_{kind}_draft_tokens": count for kind, count in kinds}


class PublishingOutput(AsyncModelRunnerOutput):
    """A step's output that brings the scheduler what came with the step, made once the device has finished it."""

    def __init__(self, inner: AsyncModelRunnerOutput, make: Callable[[], Attached]):
        self._inner, self._make = inner, make

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step, then return its output with what it brings."""
        return self.finish(self._inner.get_output())

    def finish(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Return the output of a step that the device has finished with what it brings."""
        attach(output, self._make())
        return output

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """Return what a KV connector did in a step whose output has failed; vLLM asks from 0.33 on."""
        return self._inner.get_kv_connector_output()
