"""What of a prompt is pruned together: an image, a video, or a run of images that are a video's frames. Pure torch."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from vllm_vidspec.config import PruneKnobs
from vllm_vidspec.pruning.grid import TokenGrid

# Text between two frames of a video, in tokens, at most: a chat template's markers, and a client's label such as "Frame
# 12 (0:01:12.5):". More than that is text about the images themselves, which are then no frames.
MAX_TEXT_BETWEEN = 16


@dataclass(frozen=True)
class PruneUnit:
    """A set of items with one budget, from which a pruner chooses at once."""

    places: range  # Which of the prompt's items are in it: one, or a run of images of one size
    grid: TokenGrid  # The layout of its tokens, item after item; of a run one frame an image
    num_keep: int  # How many of them are kept

    @property
    def num_tokens(self) -> int:
        """Its embeddings."""
        return self.grid.num_tokens

    @property
    def is_choice(self) -> bool:
        """Whether pruning has anything to choose in it."""
        return 0 < self.num_keep < self.num_tokens

    def joined(self, measured: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the measurements of its tokens, `[num_tokens, ...]`, given each item's `[m_i, ...]`."""
        parts = [measured[place] for place in self.places]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def split(self, kept_indices: torch.Tensor) -> list[torch.Tensor]:
        """Return the kept tokens of each of its items, `[k_i]` int64, of ascending `[num_keep]` int64 on the CPU."""
        if len(self.places) == 1:
            return [kept_indices]
        size = self.num_tokens // len(self.places)
        starts = size * torch.arange(len(self.places))
        parts = kept_indices.tensor_split(torch.searchsorted(kept_indices, starts[1:]))
        return [part - start for part, start in zip(parts, starts, strict=True)]

    def merged(self, kept_indices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return its kept tokens, `[num_keep]` int64, given each item's `[k_i]`: the inverse of `split`."""
        size = self.num_tokens // len(self.places)
        return torch.cat([kept_indices[place] + size * number for number, place in enumerate(self.places)])


def pruned_together(
    modalities: Sequence[str], where: Sequence[torch.Tensor], sizes: Sequence[Hashable], knobs: PruneKnobs
) -> list[tuple[range, str]]:
    """Return which items are pruned together, each in one range, and as what: "image" or "video".

    A run of images counts as one video (`frames_as_video`): consecutive images of one size, with at most
    `MAX_TEXT_BETWEEN` tokens of text between one and the next. `where` are the prompt indices `[m_i]` int64 of each
    item's embeddings, ascending; `sizes` are equal for two images of one size.
    """

    def continues_run(i: int) -> bool:
        """Whether an item is in the same run as the one before it."""
        if modalities[i - 1] != "image" or modalities[i] != "image" or sizes[i - 1] != sizes[i]:
            return False
        if not len(where[i - 1]) or not len(where[i]):
            return False
        return int(where[i][0]) - int(where[i - 1][-1]) - 1 <= MAX_TEXT_BETWEEN

    min_run = knobs.min_run
    found: list[tuple[range, str]] = []
    start = 0
    for end in range(1, len(modalities) + 1):
        if end < len(modalities) and continues_run(end):
            continue
        if min_run is not None and end - start >= min_run:
            found.append((range(start, end), "video"))
        else:
            found += [(range(i, i + 1), modalities[i]) for i in range(start, end)]
        start = end
    return found


def run_grid(image: TokenGrid, num_images: int) -> TokenGrid:
    """Return the layout of a run of images of one layout, a frame each, or where it is no frame's a row each."""
    if image.num_frames == 1 and image.num_trailing == 0:
        return TokenGrid(num_images, image.height, image.width)
    return TokenGrid(num_images, 1, image.num_tokens)
