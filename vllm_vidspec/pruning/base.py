"""What a pruner is: its inputs and their checks. Pure torch, touches no model and no vLLM."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_vidspec.pruning.grid import TokenGrid

# What the target measures for a pruner; either arrives as `scores`, so a pruner needs one of them at most.
SCORE_NEEDS = frozenset({"attention", "uv"})

_FEATURE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, eq=False)
class PruneInputs:
    """One item to prune: its layout, its budget and its measurements. Checked when a pruner is called."""

    grid: TokenGrid  # Layout of the item
    num_keep: int  # Exact number of tokens to keep, in [0, grid.num_tokens]
    scores: Tensor | None = None  # float32 [grid.num_tokens], finite, higher = more important; None: no guidance
    # float16, bfloat16 or float32 [grid.num_tokens, dim >= 1], finite, on the device of `scores`: tower's embeddings
    features: Tensor | None = None
    lambda_r: float = 0.4  # Share of the total score that SpecVLM's stage I retains, in [0, 1]
    seed: int = 0  # Seed of a random choice; the same seed, grid and budget give the same tokens on every device

    @property
    def device(self) -> torch.device:
        """Where the kept indices go: the device of the scores, else of the features, else the CPU."""
        return next((one.device for one in (self.scores, self.features) if one is not None), torch.device("cpu"))


SelectFn = Callable[[PruneInputs], Tensor]  # of checked inputs with num_keep >= 1; returns the kept indices


@dataclass(frozen=True)
class Pruner:
    """Chooses the visual tokens of one image or video that the draft sees."""

    name: str  # The name in the configuration
    select: SelectFn  # Returns the kept indices of checked inputs with a positive budget
    needs: frozenset[str] = frozenset()  # what is measured for it: "attention" or "uv" scores, or "features"
    refuses_negative: bool = False  # whether negative scores are an error: sums of them mean nothing to `select`

    def __call__(self, inputs: PruneInputs) -> Tensor:
        """Return the kept tokens: int64 [num_keep], ascending, unique, in [0, grid.num_tokens); on `inputs.device`.

        A ValueError for inputs that do not fit the grid or each other, are not finite, or are needed and missing.
        """
        try:
            self._check(inputs)
        except ValueError as error:
            raise ValueError(f"pruner {self.name}: {error}") from None
        if inputs.num_keep == 0:
            return torch.empty(0, dtype=torch.int64, device=inputs.device)
        return self.select(inputs)

    def _check(self, inputs: PruneInputs) -> None:
        num_tokens, scores, features = inputs.grid.num_tokens, inputs.scores, inputs.features
        if not 0 <= inputs.num_keep <= num_tokens:
            raise ValueError(f"num_keep must be in [0, {num_tokens}], got {inputs.num_keep}")
        if not 0.0 <= inputs.lambda_r <= 1.0:
            raise ValueError(f"lambda_r must be in [0, 1], got {inputs.lambda_r}")
        if scores is None and self.needs & SCORE_NEEDS:
            raise ValueError(f"needs scores ({', '.join(sorted(self.needs & SCORE_NEEDS))}), got none")
        if features is None and "features" in self.needs:
            raise ValueError("needs features, got none")
        if scores is not None and features is not None and scores.device != features.device:
            raise ValueError(f"scores are on {scores.device}, features on {features.device}")
        if scores is not None:
            if scores.shape != (num_tokens,) or scores.dtype != torch.float32:
                raise ValueError(f"scores must be float32 [{num_tokens}], got {scores.dtype} {list(scores.shape)}")
            _check_range("scores", scores, self.refuses_negative)
        if features is not None:
            fits = features.ndim == 2 and features.shape[0] == num_tokens and features.shape[1] > 0
            if not fits or features.dtype not in _FEATURE_DTYPES:
                raise ValueError(
                    f"features must be float16, bfloat16 or float32 [{num_tokens}, dim], "
                    f"got {features.dtype} {list(features.shape)}"
                )
            _check_range("features", features)


def _check_range(what: str, values: Tensor, refuses_negative: bool = False) -> None:
    if values.numel() == 0:
        return
    # Two scalars that carry NaN, instead of a mask of the size of the values.
    low, high = torch.stack(values.aminmax()).tolist()
    if not (abs(low) < float("inf") and abs(high) < float("inf")):
        raise ValueError(f"{what} must be finite, got NaN or inf")
    if refuses_negative and low < 0:
        raise ValueError(f"{what} must be >= 0, got {low}")
