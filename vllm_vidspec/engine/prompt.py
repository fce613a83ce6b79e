"""The draft's view of a prompt: text in full, visual tokens pruned, positions as in the full prompt."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.families import FamilyAdapter
from vllm_vidspec.pruning import SCORE_NEEDS, PruneInputs, TokenGrid, budget, get_pruner


class UnsupportedPrompt(Exception):
    """A prompt that the draft cannot follow; the request runs without speculation."""


@dataclass(frozen=True)
class PrunedPrompt:
    """What is left of one prompt.

    Attributes:
        token_ids: `[num_kept]` int32.
        positions: `[num_axes, num_kept]` int64 rope positions.
        is_media: `[num_kept]` bool, True where an embedding of a vision tower goes.
        kept_indices: One `[k]` int64 tensor per media item: which of its embeddings stay.
        grids: The items' layouts.
        pos_delta: Rope position minus logical position of the tokens after the prompt.
        num_dropped: Tokens of the prompt that the draft does not hold.
        num_visual: Visual tokens of the full prompt.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    is_media: torch.Tensor
    kept_indices: tuple[torch.Tensor, ...]
    grids: tuple[TokenGrid, ...]
    pos_delta: int
    num_dropped: int
    num_visual: int

    @property
    def num_kept(self) -> int:
        """Tokens that the draft prefills."""
        return len(self.token_ids)


def prune_prompt(
    token_ids: list[int],
    features: list[Any],
    config: VidSpecConfig,
    adapter: FamilyAdapter,
    hf_config: Any,
    full_positions: Callable[[list[int], list[Any]], tuple[torch.Tensor, int]],
    scores: list[torch.Tensor] | None = None,
    embeddings: list[torch.Tensor] | None = None,
) -> PrunedPrompt:
    """Choose what the draft sees of a prompt. Every image or video has a budget of its own.

    Args:
        token_ids: The full prompt, and after a preemption the output so far.
        features: vLLM's multimodal features in prompt order.
        config: Pruner, ratios and position rule.
        adapter: The family's geometry.
        hf_config: The draft's Hugging Face configuration.
        full_positions: `(token_ids, features) -> ([num_axes, num_tokens] int64, delta)` of the full prompt.
        scores: The target's guidance, one float32 `[m]` CPU tensor per item. None for a pruner that wants it: uniform.
        embeddings: The draft's vision embeddings `[m, hidden_size]` per item, for the pruners that compare them.

    Raises:
        UnsupportedPrompt: A feature's data is gone or is no image or video; nothing would be left.
    """
    num_tokens = len(token_ids)
    keep = torch.ones(num_tokens, dtype=torch.bool)
    is_media = torch.zeros(num_tokens, dtype=torch.bool)
    kept_indices, grids = [], []
    for i, feature in enumerate(features):
        where = embedding_indices(feature)  # [m]
        grid = adapter.item_grid(feature.modality, _plain(feature.data), len(where), hf_config)
        num_keep = budget(len(where), config.ratio_for(feature.modality))
        inputs = PruneInputs(
            grid,
            num_keep,
            scores=None if scores is None else scores[i],
            features=None if embeddings is None else embeddings[i],
            lambda_r=config.lambda_r,
            seed=config.prune_seed,
        )
        kept = _choose(config.pruner, inputs).cpu()
        grids.append(grid)
        is_media[where] = True
        keep[where] = False
        keep[where[kept]] = True
        kept_indices.append(kept)
    num_kept = int(keep.sum())
    if num_kept == 0:
        raise UnsupportedPrompt("pruning leaves nothing of its prompt")
    if config.draft_positions == "original":
        positions, delta = full_positions(token_ids, features)
        positions = positions[:, keep]
    else:
        axes = full_positions(token_ids[:1], [])[0].shape[0]
        positions, delta = torch.arange(num_kept).expand(axes, -1), num_kept - num_tokens
    return PrunedPrompt(
        token_ids=torch.tensor(token_ids, dtype=torch.int32)[keep],
        positions=positions.to(torch.int64),
        is_media=is_media[keep],
        kept_indices=tuple(kept_indices),
        grids=tuple(grids),
        pos_delta=int(delta),
        num_dropped=num_tokens - num_kept,
        num_visual=int(is_media.sum()),
    )


def _choose(name: str, inputs: PruneInputs) -> torch.Tensor:
    """Return the kept indices `[num_keep]`; a pruner that chooses nothing, or lacks its guidance, keeps uniformly."""
    pruner = get_pruner(name)
    is_choice = 0 < inputs.num_keep < inputs.grid.num_tokens
    if not is_choice or (pruner.needs & SCORE_NEEDS and inputs.scores is None):
        pruner = get_pruner("uniform")
    return pruner(inputs)


def embedding_indices(feature: Any) -> torch.Tensor:
    """Return the prompt indices `[m]` that the item's embeddings fill; separators inside its range are text."""
    if feature.modality not in ("image", "video"):
        raise UnsupportedPrompt(f"it has an input of modality {feature.modality!r}")
    if feature.data is None or not any("pixel_values" in key or "embeds" in key for key in feature.data):
        raise UnsupportedPrompt("the engine no longer holds its visual input")
    return torch.from_numpy(visual_indices(feature))


def visual_indices(feature: Any) -> np.ndarray:
    """Return the prompt indices `[m]` int64 of an item's embeddings, whether or not its pixels are still held."""
    place = feature.mm_position
    if place.is_embed is None:
        return np.arange(place.offset, place.offset + place.length)
    return np.flatnonzero(np.asarray(place.is_embed)) + place.offset


def _plain(item: Any) -> dict[str, Any]:
    """Return a multimodal item's fields as plain values."""
    return {key: element.data for key, element in item.items()}
