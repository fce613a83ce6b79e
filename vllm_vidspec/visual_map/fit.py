"""Fit: a VisualMap from pairs of embeddings of the same tokens; ridge regression, and a hidden layer on what it leaves.

Whole videos go into the ridge regression's sums, and leave no trace of their own. Of each a few hundred rows are kept:
those of videos that are held out choose its penalty and say how good it is, the others train the hidden layer.
"""

import math
from typing import NamedTuple

import torch

from vllm_vidspec.visual_map.maps import Shape, VisualMap

PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # of the mean square of an input
_ROWS_A_VIDEO = 256
_BATCH, _MOST_STEPS, _LEARNING_RATE = 1024, 3000, 1e-3
_PATIENCE, _CHECK_EVERY = 5, 100  # checks on the held-out rows without a gain, after which the training ends


class Fitted(NamedTuple):
    """A map and how well it does on the rows of videos that it has not seen."""

    map: VisualMap
    r2: float  # 1 - squared error over variance, all channels together


class Fit:
    """Gathers pairs, then solves; deterministic."""

    def __init__(self, shape: Shape, device: torch.device):
        self._shape, self._device = shape._replace(num_hidden=0), device
        double, width = {"dtype": torch.float64, "device": device}, shape.inputs[0].stop + 1
        # Of each level the sums of x x', x y' over all rows, an input of ones included.
        self._xx = torch.zeros(shape.levels_out, width, width, **double)
        self._xy = torch.zeros(shape.levels_out, width, shape.width_out, **double)
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._held_out: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_rows = 0  # of the sums
        self._generator = torch.Generator().manual_seed(0)

    @property
    def width_out(self) -> int:
        """Of the draft's embeddings, a level."""
        return self._shape.width_out

    def add(self, x: torch.Tensor, y: torch.Tensor, *, is_held_out: bool) -> None:
        """Take a video's `[m, levels_in * width_in]` and `[m, levels_out * width_out]`."""
        some = torch.randperm(len(x), generator=self._generator)[:_ROWS_A_VIDEO].to(x.device)
        rows = self._held_out if is_held_out else self._seen
        rows.append((x[some].float().cpu(), y[some].float().cpu()))
        if is_held_out:
            return
        self.num_rows += len(x)
        parts = zip(self._shape.inputs, y.chunk(self._shape.levels_out, dim=1), strict=True)
        for level, (columns, b) in enumerate(parts):
            a = torch.nn.functional.pad(x[:, columns].to(self._device).double(), (0, 1), value=1.0)
            self._xx[level] += a.T @ a
            self._xy[level] += a.T @ b.to(self._device).double()

    def linear(self) -> Fitted:
        """Return the ridge regression whose penalty is best on the held-out rows."""
        held_out = self._joined(self._held_out)
        return max((self._ridge(penalty, *held_out) for penalty in PENALTIES), key=lambda fitted: fitted.r2)

    def _ridge(self, penalty: float, *held_out: torch.Tensor) -> Fitted:
        made = VisualMap(self._shape).to(self._device).requires_grad_(False)
        for level, xx, xy in zip(made.levels, self._xx, self._xy, strict=True):
            strength = penalty * xx.diagonal()[:-1].mean()
            added = torch.full((len(xx),), float(strength), dtype=xx.dtype, device=xx.device)
            added[-1] = 0  # the constant is free
            found = torch.linalg.solve(xx + torch.diag(added), xy)  # [width_in + 1, width_out]
            level.linear.weight.copy_(found[:-1].T)
            level.linear.bias.copy_(found[-1])
        return Fitted(made, _r2(made, *held_out))

    @torch.inference_mode(False)  # a worker's calls are under it
    @torch.enable_grad()
    def with_hidden_layer(self, linear: VisualMap, num_hidden: int) -> Fitted:
        """Return `linear` with a hidden layer, trained on what it leaves and then together with it."""
        made = VisualMap(self._shape._replace(num_hidden=num_hidden)).to(self._device)
        torch.manual_seed(0)
        with torch.no_grad():
            for level, given in zip(made.levels, linear.levels, strict=True):
                level.linear.load_state_dict({name: it.clone() for name, it in given.linear.state_dict().items()})
                torch.nn.init.normal_(level.up.weight, std=1 / math.sqrt(level.up.in_features))
                torch.nn.init.zeros_(level.up.bias)
                torch.nn.init.zeros_(level.down.weight)
        (x, y), held_out = self._joined(self._seen), self._joined(self._held_out)
        # Embeddings of a real tower have channels of very different size: one step suits all once they have one.
        size = [x[:, columns].square().mean().sqrt().item() or 1.0 for columns in self._shape.inputs]
        with torch.no_grad():
            for level, one in zip(made.levels, size, strict=True):
                level.up.weight /= one
        optimizer = torch.optim.Adam(made.parameters(), lr=_LEARNING_RATE)
        best = Fitted(linear, _r2(linear, *held_out))
        num_stale = 0
        for step in range(_MOST_STEPS):
            some = torch.randint(len(x), (_BATCH,), generator=self._generator).to(self._device)
            error = torch.nn.functional.mse_loss(made(x[some]), y[some])
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
            if (step + 1) % _CHECK_EVERY:
                continue
            if (r2 := _r2(made, *held_out)) > best.r2:
                copy = VisualMap(made.shape).to(self._device)
                copy.load_state_dict(made.state_dict())
                best, num_stale = Fitted(copy.requires_grad_(False), r2), 0
            else:
                num_stale += 1
            if num_stale == _PATIENCE:
                break
        return best

    def _joined(self, videos: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        """Return the rows of videos together, inputs and outputs, on the device."""
        return tuple(torch.cat(part).to(self._device) for part in zip(*videos, strict=True))


@torch.no_grad()
def _r2(made: VisualMap, x: torch.Tensor, y: torch.Tensor) -> float:
    error, spread = (y - made(x)).square().sum(), (y - y.mean(dim=0)).square().sum()
    return float(1 - error / spread)
