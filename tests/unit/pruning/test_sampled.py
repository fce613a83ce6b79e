"""Which tokens of a video a target has kept, found again from the rope positions that it gave them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_vidspec.pruning import TokenGrid
from vllm_vidspec.pruning.sampled import kept_places

GRID = TokenGrid(4, 3, 2)


def positions_of(places: torch.Tensor, grid: TokenGrid, ticks_per_frame: float, start: int) -> torch.Tensor:
    """Return what vLLM gives these places of a video that begins at a position."""
    frames, spots = places // grid.tokens_per_frame, places % grid.tokens_per_frame
    return start + torch.stack(((frames * ticks_per_frame).long(), spots // grid.width, spots % grid.width))


@given(
    st.sets(st.integers(GRID.tokens_per_frame, GRID.num_tokens - 1)),
    st.sampled_from([1, 2, 2.5, 50]),
    st.integers(0, 9),
)
def test_places_are_found_again(more, ticks_per_frame, start):
    """Any choice beside the first frame. Catches: a place off by one, by a frame, or by where the video begins."""
    places = torch.tensor([*range(GRID.tokens_per_frame), *sorted(more)])
    positions = positions_of(places, GRID, ticks_per_frame, start)
    assert kept_places(positions, GRID, ticks_per_frame).tolist() == places.tolist()


def test_frames_of_one_tick_go_by_the_order_of_their_tokens():
    """Several frames a tick: every token is in place where the choice has no gap, and in order in any case."""
    places = torch.arange(GRID.num_tokens)
    assert kept_places(positions_of(places, GRID, 0, 5), GRID, 0).tolist() == places.tolist()
    sparse = torch.tensor([0, 1, 2, 3, 4, 5, 7, 19])
    found = kept_places(positions_of(sparse, GRID, 0.5, 5), GRID, 0.5)
    assert (found.diff() > 0).all() and (found % 6 == sparse % 6).all()


@pytest.mark.parametrize(
    "positions",
    [
        torch.tensor([[0, 0, 9], [0, 1, 1], [0, 0, 0]]),  # no frame is there
        torch.tensor([[0, 0, 1], [0, 3, 1], [0, 0, 0]]),  # no such row
        torch.zeros(3, 0, dtype=torch.int64),
        torch.zeros(1, 4, dtype=torch.int64),
    ],
)
def test_positions_of_something_else_are_refused(positions):
    assert kept_places(positions, GRID, 1) is None
