"""Pruners: a grid, a budget and optional scores -> kept_indices; vectorised torch, touches no model and no vLLM.

SpecVLM's score-free baselines (METHODS 1): `uniform`, `random`, `window`, `frame`. Guided pruners set `needs_scores`
and join through `register_pruner`.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.pruning.grid import TokenGrid


class Pruner(Protocol):
    """Chooses the visual tokens of one image or video that the draft sees."""

    @property
    def name(self) -> str:
        """The name in the configuration."""
        ...

    @property
    def needs_scores(self) -> bool:
        """Whether a call without `scores` is refused."""
        ...

    def __call__(self, grid: TokenGrid, num_keep: int, *, scores: Tensor | None = None, seed: int = 0) -> Tensor:
        """Return the kept tokens.

        Args:
            grid: Layout of the item.
            num_keep: Exact number of tokens to keep, in [0, grid.num_tokens].
            scores: float32 [grid.num_tokens], higher = more important; None where there is no guidance.
            seed: Seed of a random choice; the same seed, grid and budget give the same tokens on every device.

        Returns:
            int64 [num_keep], ascending, unique, in [0, grid.num_tokens); on the scores' device, else on the CPU.

        Raises:
            ValueError: The budget or the scores do not fit the grid, scores are NaN, or needed and missing.
        """
        ...


# (grid, num_keep, scores, seed, device) -> kept_indices; the arguments are already checked and num_keep >= 1.
SelectFn = Callable[[TokenGrid, int, Tensor | None, int, torch.device], Tensor]


@dataclass(frozen=True)
class FunctionPruner:
    """A `Pruner` made of a selection function: the checks, the empty budget and the device are handled here."""

    name: str
    select: SelectFn
    needs_scores: bool = False

    def __call__(self, grid: TokenGrid, num_keep: int, *, scores: Tensor | None = None, seed: int = 0) -> Tensor:
        """Return the kept tokens; see `Pruner`."""
        if not 0 <= num_keep <= grid.num_tokens:
            raise ValueError(f"pruner {self.name}: num_keep must be in [0, {grid.num_tokens}], got {num_keep}")
        if scores is not None:
            self._check_scores(grid, scores)
        elif self.needs_scores:
            raise ValueError(f"pruner {self.name} needs scores, got none")
        device = torch.device("cpu") if scores is None else scores.device
        if num_keep == 0:
            return torch.empty(0, dtype=torch.int64, device=device)
        return self.select(grid, num_keep, scores, seed, device)

    def _check_scores(self, grid: TokenGrid, scores: Tensor) -> None:
        if scores.shape != (grid.num_tokens,) or scores.dtype != torch.float32:
            raise ValueError(
                f"pruner {self.name}: scores must be float32 [{grid.num_tokens}], "
                f"got {scores.dtype} {list(scores.shape)}"
            )
        if bool(scores.isnan().any()):
            raise ValueError(f"pruner {self.name}: scores contain NaN")


def linspace_indices(num_candidates: int, num_keep: int, device: torch.device | str = "cpu") -> Tensor:
    """Return `num_keep` indices at regular intervals over `num_candidates`, both ends included.

    SpecVLM eq. 7 as its code has it, integer linspace(0, n - 1, k), in exact integers: index i is i (n - 1) // (k - 1).
    One index alone is 0.

    Args:
        num_candidates: n >= num_keep.
        num_keep: k >= 0.
        device: Where the result lives.

    Returns:
        int64 [num_keep], strictly ascending.
    """
    steps = torch.arange(num_keep, dtype=torch.int64, device=device)
    return steps * (num_candidates - 1) // max(num_keep - 1, 1)


def _select_none(grid: TokenGrid, num_keep: int, scores: Tensor | None, seed: int, device: torch.device) -> Tensor:
    # Keeps everything whatever the (positive) budget: VidSpecConfig.ratio_for gives this pruner ratio 0.
    return torch.arange(grid.num_tokens, dtype=torch.int64, device=device)


def _select_uniform(grid: TokenGrid, num_keep: int, scores: Tensor | None, seed: int, device: torch.device) -> Tensor:
    return linspace_indices(grid.num_tokens, num_keep, device)


def _select_random(grid: TokenGrid, num_keep: int, scores: Tensor | None, seed: int, device: torch.device) -> Tensor:
    # Drawn on the CPU on every device, so that one seed is one choice on every machine and rank.
    generator = torch.Generator(device="cpu").manual_seed(seed)
    drawn = torch.randperm(grid.num_tokens, generator=generator, dtype=torch.int64)[:num_keep]
    return drawn.sort().values.to(device)


def _window(share_before: tuple[int, int]) -> SelectFn:
    numerator, denominator = share_before

    def select(grid: TokenGrid, num_keep: int, scores: Tensor | None, seed: int, device: torch.device) -> Tensor:
        start = (grid.num_tokens - num_keep) * numerator // denominator
        return torch.arange(start, start + num_keep, dtype=torch.int64, device=device)

    return select


def _select_frame(grid: TokenGrid, num_keep: int, scores: Tensor | None, seed: int, device: torch.device) -> Tensor:
    """Keep whole frames at regular intervals; what exceeds the budget is cut from the end of the last chosen frame.

    As few frames as can hold the budget, first and last included (a single one is frame 0). The trailing tokens are
    the end of the last frame, hence the first to go.
    """
    per_frame = grid.tokens_per_frame
    if per_frame == 0 or grid.num_frames == 0:
        return torch.arange(num_keep, dtype=torch.int64, device=device)
    if num_keep <= per_frame or grid.num_frames == 1:
        num_chosen = 1
    else:
        num_chosen = max(2, -(-(num_keep - grid.num_trailing) // per_frame))
    frames = linspace_indices(grid.num_frames, num_chosen, device)
    # [num_chosen * per_frame + num_trailing]; where the last frame is not chosen the cut removes the trailing ones.
    within = torch.arange(per_frame, dtype=torch.int64, device=device)
    tokens = (frames[:, None] * per_frame + within).flatten()
    trailing = torch.arange(grid.num_frames * per_frame, grid.num_tokens, dtype=torch.int64, device=device)
    return torch.cat((tokens, trailing))[:num_keep]


_REGISTRY: dict[str, Pruner] = {}


def register_pruner(pruner: Pruner) -> Pruner:
    """Add a pruner under its name and return it.

    Raises:
        ValueError: The name is taken.
    """
    if pruner.name in _REGISTRY:
        raise ValueError(f"pruner {pruner.name!r} is registered twice")
    _REGISTRY[pruner.name] = pruner
    return pruner


def pruner_names() -> tuple[str, ...]:
    """Return the names that `get_pruner` knows, in order of registration."""
    return tuple(_REGISTRY)


def get_pruner(name: str) -> Pruner:
    """Return the pruner of that name.

    Raises:
        VidSpecError: No such pruner; the line names the nearest one and all known ones.
    """
    if name not in _REGISTRY:
        match = difflib.get_close_matches(name, _REGISTRY, n=1)
        hint = f" (did you mean {match[0]!r}?)" if match else ""
        raise VidSpecError(f"unknown pruner {name!r}{hint}; known: {', '.join(_REGISTRY)}")
    return _REGISTRY[name]


for _pruner in (
    FunctionPruner("none", _select_none),
    FunctionPruner("uniform", _select_uniform),
    FunctionPruner("random", _select_random),
    FunctionPruner("window:front", _window((0, 1))),
    FunctionPruner("window:middle", _window((1, 2))),
    FunctionPruner("window:end", _window((1, 1))),
    FunctionPruner("frame", _select_frame),
):
    register_pruner(_pruner)
