"""TokenGrid: how the visual tokens of one image or video are laid out, and how many are kept. Plain integers."""

from dataclasses import dataclass
from fractions import Fraction
from math import floor


@dataclass(frozen=True)
class TokenGrid:
    """The layout of one item's tokens: frame-major, raster order inside a frame, then trailing tokens."""

    num_frames: int  # Temporal steps T (after temporal patching; 1 for an image)
    height: int  # Token rows of a frame (after spatial merging or pooling)
    width: int  # Token columns of a frame
    num_trailing: int = 0  # Tokens after the last frame, to which they belong (LLaVA's `image_newline`)

    def __post_init__(self) -> None:
        if min(self.num_frames, self.height, self.width, self.num_trailing) < 0:
            raise ValueError(f"negative extent in {self}")

    @property
    def tokens_per_frame(self) -> int:
        """Tokens of one frame, without the trailing ones."""
        return self.height * self.width

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole item, with the trailing ones."""
        return self.num_frames * self.tokens_per_frame + self.num_trailing


def budget(num_tokens: int, prune_ratio: float) -> int:
    """Return how many of `num_tokens` visual tokens the draft keeps; 0 only for `prune_ratio` 1.0 or no tokens.

    (1 - prune_ratio) * num_tokens rounded down, because the draft's memory is promised as an upper bound; with the
    ratio taken as the decimal that the user wrote: binary floating point would turn 10 tokens at 0.9 into 0.99... and
    keep none (as SpecVLM's code does). Where the budget is positive at all, at least one token stays.
    """
    if num_tokens < 0:
        raise ValueError(f"num_tokens must be >= 0, got {num_tokens}")
    if not 0.0 <= prune_ratio <= 1.0:
        raise ValueError(f"prune_ratio must be in [0, 1], got {prune_ratio}")
    if num_tokens == 0 or prune_ratio == 1.0:
        return 0
    return max(1, floor((1 - Fraction(repr(float(prune_ratio)))) * num_tokens))
