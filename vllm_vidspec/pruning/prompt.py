"""The draft's view of a prompt: text in full, visual tokens pruned, positions as in the full prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_vidspec.config import PruneKnobs
from vllm_vidspec.pruning import SCORE_NEEDS, PruneInputs, TokenGrid, budget, get_pruner
from vllm_vidspec.pruning.frames import PruneUnit, pruned_together, run_grid


class UnsupportedPrompt(Exception):
    """A prompt that the draft cannot follow. The request runs without speculation."""


@dataclass(frozen=True)
class PromptItem:
    """An image or video of a prompt, as the vision tower encodes it. Its `PruneUnit` says what is kept of it."""

    feature: Any  # vLLM's, with its pixels
    where: torch.Tensor  # `[m]` int64 prompt indices that its embeddings fill
    grid: TokenGrid  # Its layout
    seen: torch.Tensor | None = None  # which of the tower's embeddings the target has kept, `[m]` int64; None: all

    @property
    def name(self) -> str:
        """See `content_name`."""
        return content_name(self.feature)

    @property
    def num_tokens(self) -> int:
        """Its number of embeddings."""
        return len(self.where)


@dataclass(frozen=True)
class PromptPlan:
    """A prompt before any of its items is pruned."""

    token_ids: torch.Tensor  # `[num_tokens]` int32, the full prompt, and after a preemption the output so far
    positions: torch.Tensor | None  # `[num_axes, num_tokens]` int64, of the full prompt; None where it is renumbered
    num_axes: int  # Of the rope positions
    items: tuple[PromptItem, ...]  # Its images and videos in prompt order
    units: tuple[PruneUnit, ...]  # The items that are pruned together, in the same order; every item is in one unit
    pos_delta: int  # Rope position minus logical position of the tokens after the prompt

    @property
    def num_tokens(self) -> int:
        """Of the full prompt."""
        return len(self.token_ids)

    @property
    def num_visual(self) -> int:
        """Visual tokens of the full prompt."""
        return sum(item.num_tokens for item in self.items)

    @property
    def num_dropped(self) -> int:
        """Tokens of the prompt that the draft does not hold."""
        return sum(unit.num_tokens - unit.num_keep for unit in self.units)

    @property
    def num_kept(self) -> int:
        """Tokens that the draft prefills."""
        return self.num_tokens - self.num_dropped


@dataclass(frozen=True)
class PrunedPrompt:
    """A pruned prompt."""

    token_ids: torch.Tensor  # `[num_kept]` int32, those of visual tokens too
    positions: torch.Tensor  # `[num_axes, num_kept]` int64 rope positions
    media_at: torch.Tensor  # `[num_media]` int64, where the visual tokens are, ascending


def content_name(feature: Any) -> str:
    """Return the content hash of a feature, without the target's LoRA adapter, which the draft does not have."""
    return feature.mm_hash or feature.identifier


def plan_prompt(
    token_ids: list[int],
    features: list[Any],
    knobs: PruneKnobs,
    item_grid: Callable[[str, dict[str, Any], int], TokenGrid],
    full_positions: Callable[[list[int], list[Any]], tuple[torch.Tensor, int]],
) -> PromptPlan:
    """Plan the pruning of a prompt, on the host. Every image or video has a budget of its own, and so has a run of
    images that count as one video.

    `token_ids` are the full prompt, and after a preemption the output so far, `features` vLLM's multimodal features in
    prompt order. `item_grid`, of `(modality, data, num_tokens)`, is the family's geometry; `full_positions` returns the
    positions `[num_axes, num_tokens]` int64 of a full prompt, and their delta.
    """
    items = []
    for feature in features:
        where = embedding_indices(feature)
        data = {key: element.data for key, element in feature.data.items()}
        grid = item_grid(feature.modality, data, len(where))
        items.append(PromptItem(feature, where, grid))
    units = []
    modalities, grids = [item.feature.modality for item in items], [item.grid for item in items]
    for places, modality in pruned_together(modalities, [item.where for item in items], grids, knobs):
        grid = grids[places[0]] if len(places) == 1 else run_grid(grids[places[0]], len(places))
        units.append(PruneUnit(places, grid, budget(grid.num_tokens, knobs.ratio_for(modality))))
    if knobs.draft_positions == "original":
        positions, delta = full_positions(token_ids, features)
        num_axes = positions.shape[0]
    else:
        positions, num_axes = None, full_positions(token_ids[:1], [])[0].shape[0]
        delta = sum(unit.num_keep - unit.num_tokens for unit in units)
    ids = torch.tensor(token_ids, dtype=torch.int32)
    plan = PromptPlan(ids, positions, num_axes, tuple(items), tuple(units), int(delta))
    if plan.num_kept <= 0:
        raise UnsupportedPrompt("pruning leaves nothing of its prompt")
    return plan


def kept_tokens(plan: PromptPlan, kept_indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return which tokens of a prompt stay, `[num_tokens]` bool, given one `[k_i]` int64 tensor of kept embeddings per
    item.
    """
    keep = torch.ones(plan.num_tokens, dtype=torch.bool)
    for item, kept in zip(plan.items, kept_indices, strict=True):
        keep[item.where] = False
        keep[item.where[kept]] = True
    return keep


def prune(plan: PromptPlan, kept_indices: Sequence[torch.Tensor]) -> PrunedPrompt:
    """Return the pruned prompt; see `kept_tokens`."""
    keep = kept_tokens(plan, kept_indices)
    is_media = torch.zeros(plan.num_tokens, dtype=torch.bool)
    for item in plan.items:
        is_media[item.where] = True
    if plan.positions is None:
        positions = torch.arange(plan.num_kept).expand(plan.num_axes, -1)
    else:
        positions = plan.positions[:, keep].to(torch.int64)
    return PrunedPrompt(plan.token_ids[keep], positions, media_at=is_media[keep].nonzero()[:, 0])


def choose_kept(
    unit: PruneUnit, knobs: PruneKnobs, scores: torch.Tensor | None, embeddings: torch.Tensor | None
) -> torch.Tensor:
    """Return the kept embeddings of a unit, `[num_keep]` int64 on the CPU; uniform where guidance is missing.

    That is float32 `[m]` scores on the CPU; pruners that compare embeddings take the draft's own, `[m, hidden_size]`.
    """
    pruner = get_pruner(knobs.pruner)
    if not unit.is_choice or (pruner.needs & SCORE_NEEDS and scores is None):
        pruner = get_pruner("uniform")
    inputs = PruneInputs(unit.grid, unit.num_keep, scores, embeddings, knobs.lambda_r)
    return pruner(inputs).cpu()


def embedding_indices(feature: Any) -> torch.Tensor:
    """Return the prompt indices `[m]` that the item's embeddings fill. Separators inside its range are text."""
    if feature.modality not in ("image", "video"):
        raise UnsupportedPrompt(f"it has an input of modality {feature.modality!r}")
    if feature.data is not None and any("embeds" in key for key in feature.data):
        raise UnsupportedPrompt("it brings embeddings of its own, made for the target")
    if feature.data is None or not any("pixel_values" in key for key in feature.data):
        raise UnsupportedPrompt("the engine no longer holds its visual input")
    return torch.from_numpy(visual_indices(feature))


def visual_indices(feature: Any) -> np.ndarray:
    """Return the prompt indices `[m]` int64 of an item's embeddings, whether or not its pixels are still held."""
    place = feature.mm_position
    if place.is_embed is None:
        return np.arange(place.offset, place.offset + place.length)
    return np.flatnonzero(np.asarray(place.is_embed)) + place.offset
