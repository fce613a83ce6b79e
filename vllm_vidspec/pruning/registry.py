"""Every pruner by its name in the configuration."""

from vllm_vidspec.config import PRUNERS, PruneKnobs
from vllm_vidspec.errors import VidSpecError, nearest
from vllm_vidspec.pruning.base import Pruner
from vllm_vidspec.pruning.guided import GUIDED
from vllm_vidspec.pruning.temporal import TEMPORAL
from vllm_vidspec.pruning.unguided import UNGUIDED

ALL_PRUNERS = {pruner.name: pruner for pruner in (*UNGUIDED, *GUIDED, *TEMPORAL)}


def get_pruner(name: str) -> Pruner:
    """Return the pruner of that name.

    Raises:
        VidSpecError: No such pruner; the line names the nearest one and all known ones.
    """
    if name not in ALL_PRUNERS:
        raise VidSpecError(f"unknown pruner {name!r}{nearest(name, PRUNERS)}; known: {', '.join(PRUNERS)}")
    return ALL_PRUNERS[name]


def needs_of(knobs: PruneKnobs) -> frozenset[str]:
    """Return what must be measured for the pruners that knobs choose from: one, or with `auto` several."""
    return frozenset().union(*(get_pruner(variant.pruner).needs for variant in knobs.variants))
