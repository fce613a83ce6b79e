"""Counters shared by the workers and the API servers, a file an engine; stdlib, numpy and prometheus_client only."""

from vllm_vidspec.metrics.catalogue import (
    BY_LABEL,
    GAUGE_NAMES,
    GAUGES,
    GAUGES_BY_LABEL,
    GUIDANCE_FALLBACKS,
    KINDS,
    LABELLED,
    MAX_POSITIONS,
    NAMES,
    SKIP_REASONS,
    STRICT_REASONS,
    UNDRAFTED_REASONS,
    Kind,
    decision_text,
    difference,
    exposed,
    summarize,
)
from vllm_vidspec.metrics.file import MetricsFile, path_for, read_metrics, slots_of
from vllm_vidspec.metrics.prometheus import Collector, register_collector
