"""What holds for every registered pruner, on random grids, budgets and measurements."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_vidspec.names import PRUNERS
from vllm_vidspec.pruning import PruneInputs, TokenGrid, get_pruner

CHOOSING = [name for name in PRUNERS if name != "none"]

# Without tokens, frames or rows; of one token, one frame, one row; with trailing tokens alone.
ODD_GRIDS = [
    TokenGrid(*extents)
    for extents in (
        *((0, 0, 0, 0), (0, 0, 0, 1), (1, 1, 0), (1, 1, 1), (1, 1, 7), (1, 1, 1, 1), (1, 2, 3, 1), (5, 1, 2, 1)),
        *((2, 1, 1), (0, 2, 2, 2), (3, 0, 4, 2), (9, 1, 1, 3)),
    )
]
grids = st.sampled_from(ODD_GRIDS) | st.builds(
    TokenGrid, st.integers(0, 9), st.integers(0, 6), st.integers(1, 6), st.integers(0, 2)
)
quick = settings(max_examples=100, deadline=None)


def measure(num_tokens, seed, kind="real", dtype=torch.float32):
    """Return scores and features: "real" ones, "ties" (three values, zero vectors among them), or "zeros"."""
    generator = torch.Generator().manual_seed(seed)
    scores, features = torch.rand(num_tokens, generator=generator), torch.randn(num_tokens, 3, generator=generator)
    if kind == "ties":
        scores = torch.randint(0, 3, (num_tokens,), generator=generator).float()
        features = torch.randint(0, 2, (num_tokens, 2), generator=generator).float()
    elif kind == "zeros":
        scores, features = torch.zeros_like(scores), torch.zeros_like(features)
    return {"scores": scores, "features": features.to(dtype)}


@st.composite
def inputs(draw):
    grid = draw(grids)
    kind = draw(st.sampled_from(["real", "ties", "zeros"]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return PruneInputs(
        grid,
        draw(st.integers(0, grid.num_tokens)),
        **measure(grid.num_tokens, draw(st.integers(0, 2**32)), kind, dtype),
        lambda_r=draw(st.sampled_from([0.0, 0.4, 0.5, 1.0]) | st.floats(0, 1)),
        seed=draw(st.integers(0, 2**32)),
    )


def check_choice(pruner, inputs):
    """Assert what every choice of exactly `num_keep` tokens must be."""
    before = [tensor.clone() for tensor in (inputs.scores, inputs.features)]
    torch.manual_seed(inputs.seed)
    kept = pruner(inputs)
    assert kept.dtype == torch.int64 and kept.ndim == 1
    assert len(kept) == inputs.num_keep, "not the budget"
    assert (kept.diff() > 0).all(), "not ascending"
    assert inputs.num_keep == 0 or (kept[0] >= 0 and kept[-1] < inputs.grid.num_tokens)
    torch.manual_seed(inputs.seed + 1)  # the global generator must not matter
    assert torch.equal(kept, pruner(inputs))
    assert torch.equal(before[0], inputs.scores) and torch.equal(before[1], inputs.features)


@pytest.mark.parametrize("name", PRUNERS)
@quick
@given(inputs=inputs())
def test_invariants(name, inputs):
    """Catches: wrong size, order or indices, an unseeded choice, changed inputs, lost ends, a division by zero."""
    for num_keep in (0, inputs.grid.num_tokens, *([inputs.num_keep] if name in CHOOSING else [])):
        check_choice(get_pruner(name), replace(inputs, num_keep=num_keep))
