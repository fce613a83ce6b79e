"""make_guidance: which of the two kinds of guidance the configured pruner needs, installed on the loaded target."""

from typing import Any

import torch

from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.listen.attention import AttentionGuidance
from vllm_vidspec.engine.listen.hidden_states import HiddenStateGuidance
from vllm_vidspec.engine.listen.prompts import Guidance
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.pruning import get_pruner


def make_guidance(
    knobs: Knobs, target: torch.nn.Module, vllm_config: Any, counters: Counters, agreement: Agreement
) -> Guidance | None:
    """Install what the configured pruner needs on the loaded target; None if it needs nothing of it.

    Raises:
        VidSpecError: The target's attention backend or model class cannot be listened to, or a layer does not exist.
    """
    needs = get_pruner(knobs.now.prune.pruner).needs
    if "attention" in needs:
        return AttentionGuidance(knobs, vllm_config, counters, agreement)
    if "uv" in needs:
        return HiddenStateGuidance(knobs, target, vllm_config, counters, agreement)
    return None
