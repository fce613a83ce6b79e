"""Knobs: the one place where the engine's parts read the configuration that holds at the moment."""

from collections.abc import Callable
from typing import Any

from vllm_vidspec.config import AUTO, VidSpecConfig, flatten
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.pruning import SCORE_NEEDS, needs_of

# What may change while the engine runs: pruning always, to what is listened for; verification where any request can be
# loose.
_PRUNING = {"pruner", "lambda_r", "guidance_layers", "prune_ratio", "image_prune_ratio", "frames_as_video"}
_RULES = {
    *("scorer", "lambda_loose", "top_n", "position_shift", "relevance_rows"),
    *("fly_entropy", "fly_window", "fly_top_k", "protected_tokens"),
}


class Knobs:
    """The configuration, which tools may change between requests.

    Args:
        config: The one that the engine starts with.
    """

    def __init__(self, config: VidSpecConfig):
        self.now = self._first = config
        self._hearers: list[Callable[[VidSpecConfig], None]] = []

    @property
    def pruning(self) -> dict[str, Any]:
        """What may always change, by flat name."""
        return {name: value for name, value in self.now.flat().items() if name in _PRUNING}

    def on_change(self, hear: Callable[[VidSpecConfig], None]) -> None:
        """Call `hear` with every later configuration, for what is derived from knobs once and kept."""
        self._hearers.append(hear)

    def retune(self, changes: dict[str, Any]) -> None:
        """Change some knobs by name.

        Raises:
            VidSpecError: A knob that cannot change at run time, or a wrong value.
        """
        changes = flatten(changes)
        tunable = _PRUNING | (_RULES if self._first.score.scorers != {"strict"} else set())
        if fixed := sorted(set(changes) - tunable):
            raise VidSpecError(f"{fixed[0]} cannot change while the engine runs")
        config = self.now.changed(changes)
        if config.prune.pruner == AUTO != self._first.prune.pruner:
            raise VidSpecError("pruner cannot change to auto: start the engine with it")
        if unheard := SCORE_NEEDS & (needs_of(config.prune) - needs_of(self._first.prune)):
            raise VidSpecError(
                f"pruner cannot change to {config.prune.pruner}: this engine does not listen to the target's "
                f"{' and '.join(sorted(unheard))}"
            )
        if "loose" in config.score.scorers - self._first.score.scorers:
            raise VidSpecError("scorer cannot change to loose: the engine keeps no hidden states")
        self.change(config)

    def change(self, config: VidSpecConfig) -> None:
        """Let another configuration hold from here on. What hears of it may refuse it, and then nothing changes.

        Raises:
            VidSpecError: A part cannot follow.
        """
        before, self.now = self.now, config
        try:
            for hear in self._hearers:
                hear(config)
        except Exception:
            self.now = before
            for hear in self._hearers:
                hear(before)
            raise
