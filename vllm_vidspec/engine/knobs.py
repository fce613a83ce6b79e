"""Knobs: the one place where the engine's parts read the configuration that holds at the moment."""

from collections.abc import Callable

from vllm_vidspec.config import VidSpecConfig


class Knobs:
    """The configuration, which tools may change between requests.

    Args:
        config: The one that the engine starts with.
    """

    def __init__(self, config: VidSpecConfig):
        self.now = config
        self._hearers: list[Callable[[VidSpecConfig], None]] = []

    def on_change(self, hear: Callable[[VidSpecConfig], None]) -> None:
        """Call `hear` with every later configuration, for what is derived from knobs once and kept."""
        self._hearers.append(hear)

    def change(self, config: VidSpecConfig) -> None:
        """Let another configuration hold from here on; what hears of it may refuse it, and then nothing changes.

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
