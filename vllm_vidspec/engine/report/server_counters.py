"""The server's side of the counters: /metrics, responses, and why an engine did not start. None of it can stop one."""

import os
from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger

from vllm_vidspec import metrics
from vllm_vidspec.engine.compat import api
from vllm_vidspec.engine.report.request_metrics import RequestMetrics
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics.files import CounterFiles

logger = init_logger("vllm.vidspec")

# By which the API servers of one `vllm serve` know the engines' files: each builds a configuration of its own.
_INSTANCE = "VIDSPEC_SERVER_INSTANCE"

_current: CounterFiles | None = None


def publish(vllm_config: Any) -> None:
    """Make or open the engines' counter files and show them. Where that is impossible, say so and go on."""
    global _current
    parallel = vllm_config.parallel_config
    engines = local_engines(parallel)
    try:
        if parallel._api_process_count > 1 and parallel._api_process_rank >= 0:
            _current = CounterFiles.open(os.environ.get(_INSTANCE, ""), engines)
        else:
            _current = CounterFiles.create(vllm_config.instance_id, engines)
            os.environ[_INSTANCE] = vllm_config.instance_id
    except VidSpecError as error:
        logger.warning("vidspec: nothing is counted, neither for /metrics nor for responses: %s", error)
        return
    if parallel._api_process_count == 1 and parallel._api_process_rank < 0:
        logger.warning("vidspec: the Rust front end shows no counters of ours and checks no request's parameters")
    if num_remote := 0 if parallel.local_engines_only else parallel.data_parallel_size - len(engines):
        logger.warning("vidspec: the counters of %d engines on other hosts are not on this /metrics", num_remote)
    served_name = vllm_config.model_config.served_model_name
    api.show_to_every_api_server(metrics.register_collector(_current, served_name))
    if vllm_config.observability_config.per_request_spec_decode_metrics != "none":
        api.extend_request_metrics(RequestMetrics.of)


def local_engines(parallel: Any) -> Sequence[int]:
    """Return the indices of the data-parallel engines on this host, given vLLM's `ParallelConfig`."""
    first = parallel.data_parallel_index
    if parallel.data_parallel_rank_local is not None:  # this process is one of the ranks
        return [first]
    return range(first, first + parallel.data_parallel_size_local)


def refusal() -> str | None:
    """Return the one line that a worker of this server's refused to start with, or None."""
    return None if _current is None else _current.refusal()
