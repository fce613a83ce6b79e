"""Fits a visual map inside a running engine of ours: what the target's tower makes of an item, and what the draft's.

By `LLM.collective_rpc`: `begin`, then requests; `hold_out`, then requests of videos to judge by; `finish`.
"""

from pathlib import Path
from typing import Any

import torch

from vllm_vidspec.engine.compat.model import observe_encoder
from vllm_vidspec.visual_map import Fit, Shape


class Gathering:
    """Shows the draft's tower what the target's has just encoded, and gathers both."""

    def __init__(self, runner: Any):
        draft, target = runner.speculator.backend.draft_model, runner.model_config
        widths = target.get_inputs_embeds_size(), draft.media_width // draft.num_media_levels
        shape = Shape(*widths, draft.family.num_media_levels(target.hf_config), draft.num_media_levels, 0)
        self._draft, self._features = draft, runner.encoder_cache.mm_features
        self._width_in = shape.levels_in * shape.width_in
        self.fit = Fit(shape, runner.device)
        self.is_held_out = False
        observe_encoder(runner.model_state, self._add)

    def _add(self, outputs: dict[str, torch.Tensor]) -> None:
        known = {feature.identifier: feature for features in self._features.values() for feature in features}
        for identifier, output in outputs.items():
            (wanted,) = self._draft.encode([known[identifier]], [None])
            given = output.flatten(0, -2)[:, : self._width_in]
            self.fit.add(given, wanted, is_held_out=self.is_held_out)


def begin(worker: Any) -> None:
    """Gather from here on."""
    runner = worker.model_runner
    runner.gathering = Gathering(runner)


def hold_out(worker: Any) -> None:
    """Gather from here on what the fit is judged by."""
    worker.model_runner.gathering.is_held_out = True


def finish(worker: Any, path: str, about: dict[str, Any]) -> dict[str, Any]:
    """Fit both kinds of map and write the better one; return how good each is, `r2` by kind, and the rows seen."""
    runner = worker.model_runner
    fit: Fit = runner.gathering.fit
    linear = fit.linear()
    hidden = fit.with_hidden_layer(linear.map, fit.width_out)
    best = max(linear, hidden, key=lambda fitted: fitted.r2)
    found = {"r2": {"linear": linear.r2, "hidden layer": hidden.r2}, "tokens": fit.num_rows}
    if runner.agreement.is_first:
        best.map.to(runner.speculator.backend.draft_model.dtype).save(Path(path), {**about, **found})
    return found
