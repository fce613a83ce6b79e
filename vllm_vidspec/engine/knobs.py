"""Knobs: the one place where the engine's parts read the configuration that holds at the moment."""

from collections.abc import Callable
from typing import Any

from vllm_vidspec.config import AUTO, VidSpecConfig
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.pruning import SCORE_NEEDS, needs_of

# What may change while the engine runs: pruning, to what is observed; verification where a request can be loose.
_PRUNING = {"pruner", "lambda_r", "guidance_layers", "prune_ratio", "image_prune_ratio", "frames_as_video"}
_RULES = {"scorer", "lambda_loose", "position_shift", "relevance_rows", "fly_entropy", "protected_tokens"}

NO_FEATURES = 'with "model": "self" no tower encodes for the draft, and it compares what one puts out; use specvlm'

# The scheduler's side changes these; the workers change all others.
LIMIT, SHAPE = SCHEDULER_KNOBS = ("num_speculative_tokens", "draft_shape")


class Knobs:
    """The configuration, which tools may change between requests."""

    def __init__(self, config: VidSpecConfig):
        self.current = self._first = config
        self._callbacks: list[Callable[[VidSpecConfig], None]] = []

    @property
    def pruning(self) -> dict[str, Any]:
        return self.current.model_dump(include=_PRUNING)

    def on_change(self, observe: Callable[[VidSpecConfig], None]) -> None:
        """Call `observe` with every later configuration, for what is derived from knobs once and kept."""
        self._callbacks.append(observe)

    def retune(self, changes: dict[str, Any]) -> None:
        """Change some knobs by name; a VidSpecError for one that cannot change at run time, or a wrong value."""
        config = self.current.changed(changes)
        tunable = _PRUNING | (_RULES if self._first.scorers != {"strict"} else set())
        if fixed := sorted(set(changes) - tunable):
            raise VidSpecError(f"{fixed[0]} cannot change while the engine runs")
        if config.pruner == AUTO != self._first.pruner:
            raise VidSpecError("pruner cannot change to auto: start the engine with it")
        if unobserved := SCORE_NEEDS & (needs_of(config) - needs_of(self._first)):
            raise VidSpecError(
                f"pruner cannot change to {config.pruner}: this engine does not observe the target's "
                f"{' and '.join(sorted(unobserved))}"
            )
        if config.is_self_draft and "features" in needs_of(config):
            raise VidSpecError(f"pruner {config.pruner}: {NO_FEATURES}")
        if "loose" in config.scorers - self._first.scorers:
            raise VidSpecError("scorer cannot change to loose: the engine keeps no hidden states")
        self.change(config)

    def change(self, config: VidSpecConfig) -> None:
        """Let another configuration hold from here on; a part may refuse it by an exception: then nothing changes."""
        before, self.current = self.current, config
        try:
            for observe in self._callbacks:
                observe(config)
        except Exception:
            self.current = before
            for observe in self._callbacks:
                observe(before)
            raise
