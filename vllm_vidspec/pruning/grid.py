"""TokenGrid: how the visual tokens of one image or video are laid out. Plain integers, no tensors."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenGrid:
    """The layout of one item's tokens: frame-major, raster order inside a frame, then trailing tokens.

    Args:
        num_frames: Temporal steps T (after temporal patching; 1 for an image).
        height: Token rows of a frame (after spatial merging or pooling).
        width: Token columns of a frame.
        num_trailing: Tokens after the last frame (LLaVA's `image_newline`). They count towards the budget and
            belong to the last frame.

    Raises:
        ValueError: An extent is negative.
    """

    num_frames: int
    height: int
    width: int
    num_trailing: int = 0

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
