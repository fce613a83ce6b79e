"""`pruner: auto`: gives each request a pruner, and learns from how many tokens its verify steps emit."""

import copy
from typing import Any

from vllm_vidspec import metrics
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.pruning.bandit import Bandit
from vllm_vidspec.scoring.choices import PRUNE_VARIANT


def set_prune_variant(request: Any, variant: int | None = None) -> None:
    """Let a request's parameters name this variant alone, or none, whatever its client has put there."""
    params = request.sampling_params
    if params is None or (variant is None and PRUNE_VARIANT not in (params.extra_args or {})):
        return
    params = copy.copy(params)  # the answers of one prompt may share it
    others = {key: value for key, value in (params.extra_args or {}).items() if key != PRUNE_VARIANT}
    params.extra_args = others if variant is None else others | {PRUNE_VARIANT: variant}
    request.sampling_params = params


class AutoPruner:
    """Chooses by a bandit over the configured variants; `is_on` says whether requests are given one."""

    def __init__(self, config: VidSpecConfig, file: metrics.MetricsFile | None):
        self._config, self._file = config, file
        self._bandit = Bandit(len(config.variants))
        self.is_on = True  # whether requests are given variants
        self._running: dict[str, list[int]] = {}  # by request: its variant, tokens and verify steps

    def add(self, request: Any) -> None:
        """Give a request with images or videos a variant of pruning."""
        if not self.is_on or not request.mm_features or request.sampling_params is None:
            return
        variant = self._bandit.choose()
        set_prune_variant(request, variant)
        self._running[request.request_id] = [variant, 0, 0]

    def observe(self, scheduler_output: Any, output: Any) -> None:
        """Count the tokens of requests that had drafts."""
        for req_id in scheduler_output.scheduled_spec_decode_tokens.keys() & self._running.keys():
            place = output.req_id_to_index.get(req_id)
            if place is None or place >= len(output.sampled_token_ids):
                continue
            known = self._running[req_id]
            known[1] += len(output.sampled_token_ids[place])
            known[2] += 1

    def collect(self, requests: Any) -> None:
        """Learn from finished requests: those that are no longer among the scheduler's."""
        for req_id in self._running.keys() - requests.keys():
            variant, num_tokens, num_steps = self._running.pop(req_id)
            if not num_steps:
                continue
            self._bandit.observe(variant, num_tokens / num_steps, num_steps)
            if self._file is not None:
                pruner = self._config.variants[variant].pruner
                for name, count in (("requests", 1), ("verify_steps", num_steps), ("tokens", num_tokens)):
                    self._file.add(f"auto_{name}_{pruner}", count)
