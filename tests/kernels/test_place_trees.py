"""place_trees: literal facts, and kernel against loop at awkward sizes and layouts."""

import pytest
import torch

from tests.kernels.agreement import agree
from vidspec_kernels import TreePlaces, place_trees
from vidspec_kernels.place_trees.api import _BLOCK_TOKENS

SENTINEL = -(10**6)


def chain_tables(max_rows, num_cols, device):
    depths = torch.arange(num_cols, dtype=torch.int32, device=device).repeat(max_rows, 1)
    words = [(1 << node) - 1 for node in range(num_cols)]
    words = torch.tensor([word - (1 << 64) if word >> 63 else word for word in words], device=device)
    return depths, words.repeat(max_rows, 1)


def make_places(max_reqs, num_cols, device):
    """Places that hold a batch of before."""
    places = TreePlaces.empty(max_reqs, num_cols, device)
    for tensor in vars(places).values():
        tensor.fill_(SENTINEL)
    return places


def case(device, counts=(6, 2, 6), num_cols=6, num_axes=3, spare=3, out_of_place=False, padding=2):
    """Requests of so many query rows, at random persistent rows, of which every third is a chain."""
    generator = torch.Generator().manual_seed(len(counts))

    def ints(low, high, shape, dtype=torch.int64):
        return torch.randint(low, high, shape, generator=generator, dtype=dtype)

    max_rows, total = len(counts) + 4, sum(counts)
    depths, ancestors = chain_tables(max_rows, num_cols, device)
    for row in range(max_rows):
        if row % 3:
            depths[row, 1:] = ints(1, max(num_cols, 2), (num_cols - 1,), torch.int32)
            ancestors[row, 1:] = ints(-(2**62), 2**62, (num_cols - 1,))
    counts = torch.tensor(counts, dtype=torch.int32)
    bounds = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int(), torch.full((2,), 10**6).int()))
    positions = ints(0, 5000, (num_axes, total + spare + 1)).to(device)[:, : total + spare]
    out = torch.full((num_axes, total + spare + 9), SENTINEL, device=device)[:, : total + spare + 2]
    return place_trees, {
        "idx_mapping": torch.randperm(max_rows, generator=generator)[: len(counts)].to(device),
        "query_start_loc": bounds.to(device),
        "seq_lens": (counts + ints(0, 3000, counts.shape, torch.int32)).to(device), "depths": depths,
        "ancestors": ancestors, "positions": positions, "out_positions": out if out_of_place else None,
        "places": make_places(len(counts) + padding + 3, num_cols, device), "size": len(counts) + padding,
    }  # fmt: skip


@pytest.mark.parametrize("form", ["in place", "out of place", "a vector"])
def test_hand_computed(device, impl, form):
    """Catches: prefix or root off by one, batch rows, positions that are no depth, padding or tails left alone."""
    depths, ancestors = chain_tables(3, 4, device)
    depths[2] = torch.tensor([0, 1, 1, 2])
    ancestors[2] = torch.tensor([0, 0b001, 0b010, 0b101])
    places = make_places(5, 4, device)
    positions = torch.tensor([[50, 51, 52, 53, 7, 7, 8, 1, 2, 3, 4, 5, 9]] * 2, device=device) + 10
    positions[0] -= 10
    given, out = (positions[0] if form == "a vector" else positions), None
    out = torch.full_like(given, SENTINEL) if form == "out of place" else None
    place_trees(
        torch.tensor([2, 0, 1], device=device), torch.tensor([0, 4, 7, 12, 7, 7], dtype=torch.int32, device=device),
        torch.tensor([24, 9, 30], dtype=torch.int32, device=device), depths, ancestors, given, places,
        size=4, out_positions=out, impl=impl,
    )  # fmt: skip
    assert {name: getattr(places, name).tolist() for name in places.__dataclass_fields__} == {
        "query_start": [0, 4, 0, 0, SENTINEL], "num_queries": [4, 3, 0, 0, SENTINEL],
        "prefix_lens": [21, 7, 0, 0, SENTINEL], "roots": [20, 6, 25, 0, SENTINEL],
        "masks": [[0, 0b001, 0b010, 0b101], [0, 0b001, 0b011, 0], [0] * 4, [0] * 4, [SENTINEL] * 4],
    }  # fmt: skip
    expected = [50, 51, 51, 52, 7, 7, 8, 1, 2, 3, 4, 5]
    written = given if out is None else out
    rest = [SENTINEL] if out is not None else [9]
    assert written.view(-1, 13)[0].tolist() == expected + rest
    if form != "a vector":
        assert written[1].tolist() == [pos + 10 for pos in expected] + ([SENTINEL] if out is not None else [19])


# Full grids, mixed batches, one that is cut, prompts around the kernel's block of tokens.
BATCHES = {
    "nothing": [], "grid": [6] * 5, "shorter grid": [4] * 3, "one": [6], "cut": [6, 6, 3, 1],
    "prompts": [6, 7, 40, 1, _BLOCK_TOKENS + 8, _BLOCK_TOKENS + 9],
}  # fmt: skip


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("num_axes", [1, 3])
@pytest.mark.parametrize("out_of_place", [False, True])
def test_equals_the_loop(device, batch, num_axes, out_of_place):
    """Catches: a missing mask, an axis or a prompt's tail skipped, writes past `size` or of nobody's columns."""
    counts = BATCHES[batch]
    left = agree(case, device, counts, num_axes=num_axes, out_of_place=out_of_place)
    expected = [count if count <= 6 else 0 for count in counts]
    assert left[".places.num_queries"].tolist() == [*expected, 0, 0, *[SENTINEL] * 3]


@pytest.mark.parametrize(("num_cols", "num_reqs"), [(1, 3), (2, 3), (26, 64), (64, 3), (65, 3)])
def test_widths_of_trees(device, num_cols, num_reqs):
    """Catches: a number of nodes taken for a power of two, bit 63 lost; a real grid."""
    agree(case, device, [num_cols] * num_reqs, num_cols=num_cols, padding=0)
