"""Guard: runs what only listens to the target's forward, so that an exception in it never costs the forward."""

from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.agreement import Agreement

logger = init_logger("vllm.vidspec")


class Guard:
    """Runs steps, and survives them.

    Args:
        config: Its `on_draft_error` says whether an exception is let through.
        message: For the log, with the first exception.
        agreement: Ends the engine where an exception is let through and other ranks would wait for this one.
    """

    def __init__(self, config: VidSpecConfig, message: str, agreement: Agreement):
        self._agreement = agreement
        self._raises = config.on_draft_error == "raise"
        self._message = message
        self._has_failed = False

    def __call__(self, step: Callable[..., None], *args: Any) -> bool:
        """Run a step; return whether it went well."""
        try:
            step(*args)
            return True
        except Exception as error:
            self.survive(error)
            return False

    def survive(self, error: Exception) -> None:
        """Log the first exception, or let it through."""
        if self._raises and self._agreement.is_alone:
            raise error
        if self._raises or not self._has_failed:
            logger.error("vidspec: %s", self._message, exc_info=error)
        if self._raises:
            self._agreement.abort(str(error))
        self._has_failed = True
