"""make_guidance: which of the two kinds of guidance the configured pruner needs, installed on the loaded target."""

from typing import Any

import torch

from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.hooks.attention import AttentionGuidance
from vllm_vidspec.engine.hooks.hidden_states import HiddenStateGuidance
from vllm_vidspec.engine.hooks.prompts import Guidance, PendingScores
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.pruning import needs_of


class GuidanceByWay:
    """Both kinds, one of which observes a request: the one that its own pruner needs (`pruner: auto`)."""

    def __init__(self, *kinds: Guidance):
        self.kinds = kinds
        self.attention = next((kind.attention for kind in kinds if kind.attention), {})
        self.reads_hidden_states = any(kind.reads_hidden_states for kind in kinds)

    def take(self, req_state_idx: int) -> PendingScores | None:
        return next((pending for kind in self.kinds if (pending := kind.take(req_state_idx)) is not None), None)

    def remove(self, req_state_idx: int) -> None:
        for kind in self.kinds:
            kind.remove(req_state_idx)

    def forget_scores(self) -> None:
        for kind in self.kinds:
            kind.forget_scores()


def make_guidance(
    knobs: Knobs, target: torch.nn.Module, vllm_config: Any, counters: Counters, agreement: Agreement
) -> Guidance | GuidanceByWay | None:
    """Install what the configured pruner needs on the loaded target; None if it needs nothing of it.

    Raises:
        VidSpecError: The target's attention backend or model class cannot be observed, or a layer does not exist.
    """
    needs, kinds = needs_of(knobs.current.prune), list[Guidance]()
    if "attention" in needs:
        kinds.append(AttentionGuidance(knobs, vllm_config, counters, agreement))
    if "uv" in needs:
        kinds.append(HiddenStateGuidance(knobs, target, vllm_config, counters, agreement))
    return GuidanceByWay(*kinds) if len(kinds) > 1 else next(iter(kinds), None)
