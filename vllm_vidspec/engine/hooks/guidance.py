"""make_guidance: which of the two kinds of guidance the configured pruner needs, installed on the loaded target."""

from typing import Any

import torch

from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.hooks.attention import AttentionGuidance
from vllm_vidspec.engine.hooks.hidden_states import HiddenStateGuidance
from vllm_vidspec.engine.hooks.prompts import Guidance, PendingScores
from vllm_vidspec.engine.hooks.protocol import Forward
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.requests import NewRequest
from vllm_vidspec.pruning import get_pruner, needs_of


def make_guidance(
    knobs: Knobs, target: torch.nn.Module, vllm_config: Any, counters: Counters, agreement: Agreement
) -> Guidance | None:
    """Install what the configured pruner needs on the loaded target; None if it needs nothing of it.

    Raises:
        VidSpecError: The target's attention backend or model class cannot be observed, or a layer does not exist.
    """
    needs = needs_of(knobs.current.prune)
    kinds: dict[str, Guidance] = {}
    if "attention" in needs:
        kinds["attention"] = AttentionGuidance(knobs, vllm_config, counters, agreement)
    if "uv" in needs:
        kinds["uv"] = HiddenStateGuidance(knobs, target, vllm_config, counters, agreement)
    if len(knobs.current.prune.variants) == 1:
        return next(iter(kinds.values()), None)
    return GuidanceByWay(knobs, vllm_config, counters, agreement, kinds) if kinds else None


class GuidanceByWay(Guidance):
    """Observes each request by what its own pruner needs (`pruner: auto`), and to none whose pruner needs nothing.

    Args:
        knobs: The configuration.
        vllm_config: vLLM's.
        counters: Records how long observing took; `agreement` as in `Guidance`.
        kinds: By what a pruner needs, who observes it.
    """

    def __init__(
        self, knobs: Knobs, vllm_config: Any, counters: Counters, agreement: Agreement, kinds: dict[str, Guidance]
    ):
        super().__init__(knobs, counters, vllm_config.device_config.device, agreement)
        self._kinds = kinds
        self._observers: dict[int, Guidance] = {}  # by persistent row
        self.attention = next((kind.attention for kind in kinds.values() if kind.attention), {})
        self.reads_hidden_states = any(kind.reads_hidden_states for kind in kinds.values())

    def reserve(self, available_bytes: int) -> int:
        """Return the memory that all of them take; see `TargetHook`."""
        taken = 0
        for kind in self._kinds.values():
            taken += kind.reserve(available_bytes - taken)
        return taken

    def init_kv(self, runner: Any) -> None:
        """Let each take its memory; see `TargetHook`."""
        for kind in self._kinds.values():
            kind.init_kv(runner)

    def add(self, request: NewRequest) -> None:
        """Let the hook observe the request that its pruner needs."""
        way = self.knobs.current.prune.variant(request.prune_variant)
        for need in get_pruner(way.pruner).needs & self._kinds.keys():
            self._observers[request.req_state_idx] = self._kinds[need]
            self._kinds[need].add(request)

    def before_forward(self, batch: Any) -> None:
        """Let each plan a step."""
        for kind in self._kinds.values():
            kind.before_forward(batch)

    def after_forward(self, forward: Forward) -> None:
        """Let each collect what the step showed."""
        for kind in self._kinds.values():
            kind.after_forward(forward)

    def take(self, req_state_idx: int) -> PendingScores | None:
        """Send a prefilled request's scores to the host and forget it; None where nothing was observed."""
        kind = self._observers.pop(req_state_idx, None)
        return None if kind is None else kind.take(req_state_idx)

    def remove(self, req_state_idx: int) -> None:
        """Forget a request, whose prefill may not be done."""
        self._observers.pop(req_state_idx, None)
        for kind in self._kinds.values():
            kind.remove(req_state_idx)

    def forget_kv(self) -> None:
        """Give up what lies in KV memory."""
        for kind in self._kinds.values():
            kind.forget_kv()

    def fail(self, error: Exception) -> None:
        """Give up all prompts that are being observed: a step that failed may have been of either kind."""
        for kind in self._kinds.values():
            kind.fail(error)

    def forget_scores(self) -> None:
        """Forget what earlier prompts have shown."""
        for kind in self._kinds.values():
            kind.forget_scores()
