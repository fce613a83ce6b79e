"""Says when drafts have stopped to stand: sustained near-zero acceptance, whatever its cause. Plain numbers only."""

from vllm.logger import init_logger

logger = init_logger("vllm.vidspec")

# Verify steps with drafts, of all requests together, that are judged at once: two short answers' worth when nothing
# stands. The mean over so many varies by about a tenth of a token.
WINDOW = 128
# Draft tokens that must stand per verify step. Speculation pays if more stand than its forwards cost in forwards
# of the target: at five forwards of a tenth of its cost, half a token. Sound drafts have one and more stand.
LOW = 0.5
# The log speaks again only after a window as good as this.
SOUND = 1.0


class AcceptanceAlarm:
    """Judges the verify steps of an engine window by window."""

    def __init__(self) -> None:
        self._steps = self._accepted = 0
        self._is_armed = True

    def observe(self, num_steps: int, num_accepted: int) -> bool:
        """Take in new verify steps with drafts; return whether they complete a window that accepted nearly none.

        A line is logged where acceptance falls from sound to near zero.
        """
        self._steps += num_steps
        self._accepted += num_accepted
        if self._steps < WINDOW:
            return False
        mean, self._steps, self._accepted = self._accepted / self._steps, 0, 0
        if mean < LOW and self._is_armed:
            logger.warning(
                "vidspec: draft acceptance is near zero (%.2f per verify step over the last %d or more): speculation "
                "costs more than it gains; see docs/troubleshooting.md, few drafts are accepted",
                mean,
                WINDOW,
            )
        self._is_armed = mean >= SOUND or (self._is_armed and mean >= LOW)
        return mean < LOW
