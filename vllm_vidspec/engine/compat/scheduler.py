"""Patches of the scheduler: what it tells the workers of a request, in engines that use our method."""

from typing import Any

from vllm_vidspec.config import METHOD
from vllm_vidspec.engine.compat.contract import wrap

_SALT = "_vidspec_cache_salt"


def tell_workers_more() -> None:
    """Hand workers the pixels of images and videos that the prefix cache covers, and every request's `cache_salt`.

    Why: the target needs no encoder run for cached media, so the scheduler strips their data; the draft has a cache of
    its own, which knows nothing of the target's, and needs to see them: the second turn of every conversation about a
    video. And the salt, which keeps tenants apart in vLLM's prefix cache, stays with the scheduler; our listeners, in
    the workers, remember things of prompts too.
    """
    from vllm.v1.core.sched import output
    from vllm.v1.core.sched.scheduler import Scheduler

    ours = False  # whether this process's engine, of which there is one at a time, uses our method

    def noting(init, self, vllm_config, *args, **kwargs):
        nonlocal ours
        ours = METHOD in (vllm_config.additional_config or {})
        init(self, vllm_config, *args, **kwargs)

    def unless_ours(strip, mm_features, num_computed_tokens, uses_mrope=False):
        return mm_features if ours else strip(mm_features, num_computed_tokens, uses_mrope=uses_mrope)

    def salted(make, request, *args, **kwargs):
        made = make(request, *args, **kwargs)
        if ours and request.cache_salt:
            setattr(made, _SALT, request.cache_salt)  # travels with the dataclass's own fields
        return made

    wrap(Scheduler, "__init__", noting, "self", "vllm_config")
    wrap(output, "strip_covered_mm_data", unless_ours, "mm_features", "num_computed_tokens", "uses_mrope")
    wrap(output.NewRequestData, "from_request", salted, "request", "block_ids")


def salt_of(request: Any) -> str:
    """Return the `cache_salt` of vLLM's `NewRequestData`, "" for none."""
    return getattr(request, _SALT, "")
