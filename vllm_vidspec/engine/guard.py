"""Guard: runs what only listens to the target's forward, so that an exception in it never costs the forward."""

from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

from vllm_vidspec.config import VidSpecConfig

logger = init_logger("vllm.vidspec")


class Guard:
    """Runs steps, and survives them.

    Args:
        config: Its `on_draft_error` says whether an exception is let through.
        message: For the log, with the first exception.
    """

    def __init__(self, config: VidSpecConfig, message: str):
        self._raises = config.on_draft_error == "raise"
        self._message = message
        self._has_failed = False

    def __call__(self, step: Callable[..., None], *args: Any) -> bool:
        """Run a step; return whether it went well."""
        try:
            step(*args)
            return True
        except Exception:
            if self._raises:
                raise
            if not self._has_failed:
                logger.exception("vidspec: %s", self._message)
            self._has_failed = True
            return False
