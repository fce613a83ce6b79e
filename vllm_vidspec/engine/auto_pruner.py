"""`pruner: auto`: gives each request a pruner, and learns from how many tokens its verify steps emit."""

import contextlib
import copy
import json
import os
import tempfile
from typing import Any

from vllm.logger import init_logger

from vllm_vidspec import metrics
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.pruning.bandit import Bandit
from vllm_vidspec.scoring.choices import PRUNE_VARIANT

logger = init_logger("vllm.vidspec")

_SAVE_EVERY = 64  # requests between two saves


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
        self._config, self._num_drafts, self._file = config, config.num_speculative_tokens, file
        self._bandit = Bandit([(variant.pruner, variant.prune_ratio) for variant in config.variants])
        self.is_on = True  # whether requests are given variants
        self._running: dict[str, list[int]] = {}  # by request: its variant, tokens and verify steps
        self._num_visual = self._num_media = 0  # tokens of images and videos, of so many requests that had any
        self._path, self._num_unsaved = config.auto_file, 0
        if self._path is not None and os.path.exists(self._path):
            self._restore(self._path)

    def add(self, request: Any) -> None:
        """Give a request with images or videos a variant of pruning."""
        if not self.is_on or not request.mm_features or request.sampling_params is None:
            return
        self._num_visual += sum(feature.mm_position.length for feature in request.mm_features)
        self._num_media += 1
        variant = self._bandit.choose(self._costs())
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
            self._num_unsaved += 1
            if self._file is not None:
                pruner = self._config.variants[variant].pruner
                for name, count in (("requests", 1), ("verify_steps", num_steps), ("tokens", num_tokens)):
                    self._file.add(f"auto_{name}_{pruner}", count)
        if self._num_unsaved >= _SAVE_EVERY:
            self.save()

    def _costs(self) -> list[float] | None:
        """Return by variant the bytes that a step loads, over those of a step without drafts; None if not known."""
        ratios = {variant.prune_ratio for variant in self._config.variants}
        if self._file is None or len(ratios) == 1:
            return None
        known = self._file.value
        target, draft = known("target_load_bytes"), known("draft_load_bytes")
        if not target:
            return None
        visual = self._num_visual / max(1, self._num_media)
        per_token = known("draft_kv_bytes_per_token")
        return [
            1 + self._num_drafts * (draft + per_token * visual * (1 - variant.prune_ratio)) / target
            for variant in self._config.variants
        ]

    # ---- the file ----------------------------------------------------------------------------------------------

    def _restore(self, path: str) -> None:
        try:
            with open(path, encoding="utf-8") as file:
                self._bandit.restore(json.load(file)["learned"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("vidspec: auto_file %s is not read (%s): pruners are tried anew", path, error)

    def save(self) -> None:
        """Write the file atomically."""
        self._num_unsaved = 0
        if self._path is None:
            return
        best = self._config.variants[self._bandit.best(self._costs())]
        config = {"pruner": best.pruner, "prune_ratio": best.prune_ratio}
        made = ""
        try:
            folder = os.path.dirname(os.path.abspath(self._path))
            handle, made = tempfile.mkstemp(prefix=".vidspec-auto-", dir=folder)
            with open(handle, "w", encoding="utf-8") as file:
                json.dump({"config": config, "learned": self._bandit.state()}, file, indent=1)
            os.replace(made, self._path)
        except OSError as error:
            logger.warning("vidspec: auto_file %s is not written: %s", self._path, error.strerror)
            with contextlib.suppress(OSError):
                os.unlink(made)
