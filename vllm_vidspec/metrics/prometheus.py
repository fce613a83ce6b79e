"""The counters on /metrics: a prometheus_client collector that reads the files at every scrape."""

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_vidspec.metrics.catalogue import COUNTERS, GAUGES, GAUGES_BY_LABEL, LABELLED, MAX_POSITIONS, exposed
from vllm_vidspec.metrics.file import MetricsFile


def register_collector(files: Mapping[int, MetricsFile], model_name: str) -> Any:
    """Expose the files, by engine, on prometheus_client's default registry, which vLLM serves on /metrics."""
    from prometheus_client import REGISTRY

    with _register_lock:
        previous = _registered.pop("collector", None)
        if previous is not None:  # a later engine of the same process takes the earlier one's place
            REGISTRY.unregister(previous)
        collector = _registered["collector"] = Collector(files, model_name)
        REGISTRY.register(collector)
    return collector


_registered: dict[str, Any] = {}
_register_lock = threading.Lock()

_LENGTHS = (*range(1, 13), 16, 24, 32, 48, 64)  # upper bounds of the histogram: the usual lengths, then ever fewer


class Collector:
    """A prometheus_client custom collector that reads the files at every scrape."""

    def __init__(self, files: Mapping[int, MetricsFile], model_name: str) -> None:
        self._files, self._model_name = files, model_name

    def describe(self) -> Iterator[Any]:
        """Return nothing: registering must not read the files."""
        return iter(())

    def collect(self) -> Iterator[Any]:
        """Yield the metric families."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        engines = {(self._model_name, str(engine)): file.values() for engine, file in self._files.items()}
        labels = ["model_name", "engine"]
        for kind, texts in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for name, text in texts.items():
                family = kind(f"vidspec:{exposed(name)}", text, labels=labels)
                for engine, values in engines.items():
                    family.add_metric(engine, values[name] / (1e6 if name.endswith("_us") else 1))
                yield family
        # Leading positions up to the last that ever stood, at least one.
        stood = (i for i in range(MAX_POSITIONS) for values in engines.values() if values[f"accepted_at_pos_{i}"])
        num_positions = 1 + max(stood, default=0)
        for metric, (text, label, all_values, name) in LABELLED.items():
            kind = GaugeMetricFamily if metric in GAUGES_BY_LABEL else CounterMetricFamily
            family = kind(f"vidspec:{metric}", text, labels=[*labels, label])
            shown = all_values[: num_positions if label == "position" else None]
            for engine, values in engines.items():
                for value in shown:
                    family.add_metric((*engine, str(value)), values[name.format(value)])
            yield family
        lengths = HistogramMetricFamily(
            "vidspec:acceptance_length", "Tokens that a verify step emits, the target's own included.", labels=labels
        )
        for engine, values in engines.items():
            # A step emits more than n tokens where its draft token n - 1, counted from 0, stands.
            bounds = [(f"{n:.1f}", values["drafts"] - values[f"accepted_at_pos_{n - 1}"]) for n in _LENGTHS]
            total = values["drafts"]
            lengths.add_metric(engine, [*bounds, ("+Inf", total)], total + values["accepted_tokens"])
        yield lengths
