"""A target that prunes videos itself (`--video-pruning-rate`): whether it does, and where it has put a prompt."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Placed(NamedTuple):
    """Where such a target has put a prompt: it decides as it encodes."""

    positions: torch.Tensor  # [num_axes, num_tokens] int64 rope positions, on the host
    delta: int  # rope position minus logical position of the text after the prompt


def prunes_videos(model_config: Any) -> bool:
    """Return whether a target prunes videos itself, given vLLM's `ModelConfig`."""
    multimodal = model_config.multimodal_config
    return multimodal is not None and bool(multimodal.video_pruning_rate)


def places_of(runner: Any) -> Callable[[int, int], Placed] | None:
    """Return what finds out where such a target has put the prompt of a row, of so many tokens; None for other targets.

    vLLM writes it as each video passes the target's forward; reading waits for the device, once a prompt.
    """
    if not prunes_videos(runner.vllm_config.model_config):
        return None
    rope = runner.model_state.rope_state

    def placed(req_state_idx: int, length: int) -> Placed:
        positions = rope.read_prefill_positions(req_state_idx, length).cpu().long()
        return Placed(positions, int(rope.prefill_delta.np[req_state_idx]))

    return placed
