"""VisualMap: turns a target's visual embeddings, as they enter its language model, into what its draft's tower makes.

Where towers make several embeddings of a token (deepstack), as many as each other, each level is mapped by itself: they
are made at like depths, and a map of all to all would be larger by their number. Else each is of all.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.nn as nn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from vllm_vidspec.errors import VidSpecError

_KEY = "vidspec_visual_map"  # of a file's metadata


class Shape(NamedTuple):
    """What a map's weights are sized by."""

    width_in: int  # of the target's embeddings, a level
    width_out: int  # of the draft's
    levels_in: int  # embeddings of a token that the target's tower makes
    levels_out: int  # and the draft's
    num_hidden: int  # units of each level's hidden layer; 0: linear

    @property
    def inputs(self) -> tuple[slice, ...]:
        """By level of the draft's, which of the target's columns it is made of."""
        if self.levels_in != self.levels_out:
            return (slice(0, self.levels_in * self.width_in),) * self.levels_out
        starts = range(0, self.levels_in * self.width_in, self.width_in)
        return tuple(slice(start, start + self.width_in) for start in starts)


class _Level(nn.Module):
    """`y = A x + b`, and with a hidden layer `+ C gelu(B x + d)`."""

    def __init__(self, shape: Shape):
        super().__init__()
        width = shape.inputs[0].stop
        self.linear = nn.Linear(width, shape.width_out)
        self.up = nn.Linear(width, shape.num_hidden) if shape.num_hidden else None
        self.down = nn.Linear(shape.num_hidden, shape.width_out, bias=False) if shape.num_hidden else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[m, width_out]` of the level's inputs."""
        y = self.linear(x)
        if self.up is not None and self.down is not None:
            y += self.down(nn.functional.gelu(self.up(x)))
        return y


class VisualMap(nn.Module):
    """One map a level."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.levels = nn.ModuleList(_Level(shape) for _ in range(shape.levels_out))

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the draft's `[m, levels_out * width_out]` of a target's `[m, levels_in * width_in + n]`; what comes
        behind the levels, as the positions of a target that prunes videos, is passed over.
        """
        parts = zip(self.levels, self.shape.inputs, strict=True)
        return torch.cat([level(embeddings[:, columns]) for level, columns in parts], dim=1)

    def save(self, path: Path, about: dict[str, Any]) -> None:
        """Write a file; `about` says between which towers it maps, and whatever else JSON can."""
        tensors = {name: tensor.contiguous().cpu() for name, tensor in self.state_dict().items()}
        path.write_bytes(save(tensors, metadata={_KEY: json.dumps({"shape": self.shape, **about})}))

    @classmethod
    def load(cls, path: Path, dtype: torch.dtype, device: torch.device) -> Self:
        """Read a file of `save`; a VidSpecError if it is none."""
        shape = Shape(*read_about(path)["shape"])
        with torch.device("meta"):
            made = cls(shape).to(dtype)
        with safe_open(path, framework="pt", device=str(device)) as file:
            # `safe_open` is asked by name: its keys are no dictionary's.
            tensors = {name: file.get_tensor(name).to(dtype) for name in made.state_dict()}
        made.load_state_dict(tensors, assign=True)
        return made.requires_grad_(False)


def read_about(path: Path) -> dict[str, Any]:
    """Return what a file of `VisualMap.save` says of itself, `shape` among it; a VidSpecError if it is none."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()[_KEY])
        Shape(*about["shape"])
        return about
    except OSError as error:
        raise VidSpecError(f"{path}: {error.strerror or 'no such file'}") from None
    except (SafetensorError, KeyError, TypeError, ValueError):
        raise VidSpecError(f"{path} is not a visual map of `vidspec calibrate --eyes`") from None
