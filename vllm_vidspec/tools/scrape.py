"""What the text of a server's /metrics says: our counters and some of vLLM's own figures, by engine; no HTTP."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import GAUGE_NAMES, GAUGES, GAUGES_BY_LABEL, LABELLED, NAMES, exposed

# The Prometheus name of a counter, without its prefix, and the value of its own label, "" for none.
_SHOWN_AS = {name: (exposed(name) if name in GAUGE_NAMES else f"{exposed(name)}_total", "") for name in NAMES} | {
    name.format(value): (metric if metric in GAUGES_BY_LABEL else f"{metric}_total", str(value))
    for metric, (_, _, values, name) in LABELLED.items()
    for value in values
}
_OWN_LABELS = {label for _, label, _, _ in LABELLED.values()}  # beside those that every metric has

# vLLM's own, as they are called here. Its inter-token latency is one value per output, and an output of a verify step
# holds several tokens: its count is the number of outputs after the first, its sum the time between them.
VLLM = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:request_success_total": "finished",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:time_to_first_token_seconds_count": "first_tokens",
    "vllm:time_to_first_token_seconds_sum": "first_token_seconds",
    "vllm:inter_token_latency_seconds_count": "outputs",
    "vllm:inter_token_latency_seconds_sum": "output_seconds",
}
EXPECTED_OF_CLASSES = frozenset(GAUGE_NAMES - set(GAUGES))
VLLM_GAUGES = ("running", "waiting")

Engines = dict[str, dict[str, Any]]


def ours(text: str) -> Engines:
    """Return our counters, by the names of `metrics.NAMES`, of each engine; empty where the text has none."""
    found: dict[str, dict[tuple[str, str], float]] = {}
    for name, labels, value in _samples(text, "vidspec:"):
        own = next((labels[label] for label in labels if label in _OWN_LABELS), "")
        engine = found.setdefault(labels.get("engine", ""), {})
        key = (name.removeprefix("vidspec:"), own)
        engine[key] = engine.get(key, 0.0) + value
    return {
        engine: {name: round((1e6 if name.endswith("_us") else 1) * values.get(_SHOWN_AS[name], 0)) for name in NAMES}
        for engine, values in sorted(found.items())
    }


def vllms(text: str) -> Engines:
    """Return vLLM's own figures, by the values of `VLLM`, of each engine; what it does not show is left out."""
    found: Engines = {}
    for name, labels, value in _samples(text, "vllm:"):
        if name in VLLM:
            engine = found.setdefault(labels.get("engine", ""), {})
            engine[VLLM[name]] = engine.get(VLLM[name], 0.0) + value
    return dict(sorted(found.items()))


def from_prometheus(text: str) -> dict[str, int]:
    """Turn the text of /metrics back into the counters of `vllm_vidspec.metrics`, all of its engines together."""
    return dict.fromkeys(NAMES, 0) | together(ours(text).values())


def together(engines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Add engines up; of a size per token and of what is expected of a class, of which a sum says nothing,
    the largest; on is where all are on.
    """
    by_name: dict[str, list[Any]] = {}
    for values in engines:
        for name, value in values.items():
            by_name.setdefault(name, []).append(value)
    return {name: _added(name, values) for name, values in by_name.items()}


def _added(name: str, values: list[Any]) -> Any:
    if name == "speculation_on":
        return min(values)
    return max(values) if name.endswith("_per_token") or name in EXPECTED_OF_CLASSES else sum(values)


def _samples(text: str, prefix: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of the samples whose names begin so."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith(prefix):
                    yield sample.name, sample.labels, sample.value
    except ValueError as error:
        raise VidSpecError(f"/metrics is no Prometheus text: {' '.join(str(error).split())[:120]}") from None
