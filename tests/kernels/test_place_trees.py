"""place_trees: literal facts, kernel and reference against a loop, at awkward sizes and layouts."""

import dataclasses

import pytest
import torch

from tests.kernels.refusals import changes, first_two, int32, long, transposed
from vidspec_kernels import TreePlaces, place_trees
from vidspec_kernels.place_trees.api import _BLOCK_TOKENS

SENTINEL = -(10**6)


def chain_tables(max_rows, num_cols, device):
    """Depths and ancestors of chains."""
    depths = torch.arange(num_cols, dtype=torch.int32, device=device).repeat(max_rows, 1)
    words = [(1 << node) - 1 for node in range(num_cols)]
    words = torch.tensor([word - (1 << 64) if word >> 63 else word for word in words], device=device)
    return depths, words.repeat(max_rows, 1)


def make_inputs(counts, device, num_cols=6, num_axes=3, spare=3, seed=0, out_of_place=False):
    """Requests of so many query rows, at random persistent rows, of which every third is a chain."""
    generator = torch.Generator().manual_seed(seed)

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
    return {
        "idx_mapping": torch.randperm(max_rows, generator=generator)[: len(counts)].to(device),
        "query_start_loc": bounds.to(device),
        "seq_lens": (counts + ints(0, 3000, counts.shape, torch.int32)).to(device), "depths": depths,
        "ancestors": ancestors, "positions": positions, "out_positions": out if out_of_place else None,
    }  # fmt: skip


def make_places(max_reqs, num_cols, device):
    """Places that hold a batch of before."""
    places = TreePlaces.empty(max_reqs, num_cols, device)
    for tensor in vars(places).values():
        tensor.fill_(SENTINEL)
    return places


def tensors(places):
    """The places by name."""
    return {field.name: getattr(places, field.name) for field in dataclasses.fields(places)}


def oracle(idx_mapping, query_start_loc, seq_lens, depths, ancestors, positions, places, size, out_positions):
    """A loop over requests and nodes."""
    num_cols, old = depths.shape[1], positions.clone()
    out_positions = positions if out_positions is None else out_positions
    for req_idx in range(size):
        row = dict.fromkeys(("query_start", "num_queries", "prefix_lens", "roots"), 0)
        words = [0] * num_cols
        if req_idx < len(idx_mapping):
            state, start, end = int(idx_mapping[req_idx]), *query_start_loc[req_idx : req_idx + 2].tolist()
            out_positions[:, start:end] = old[:, start:end]
            row["roots"] = int(seq_lens[req_idx]) - (end - start)
            if end - start <= num_cols:
                row |= {"query_start": start, "num_queries": end - start, "prefix_lens": row["roots"] + 1}
                for node in range(end - start):
                    words[node] = int(ancestors[state, node])
                    if depths[state, node] != node:
                        out_positions[:, start + node] = old[:, start] + int(depths[state, node])
        for name, value in row.items():
            getattr(places, name)[req_idx] = value
        places.masks[req_idx] = torch.tensor(words)


def check(inputs, impl, size, max_reqs):
    """Assert that an implementation leaves what the loop leaves."""
    device, num_cols = inputs["depths"].device, inputs["depths"].shape[1]
    mine, theirs = ({name: value if value is None else value.clone() for name, value in inputs.items()} for _ in "ab")
    got, expected = (make_places(max_reqs, num_cols, device) for _ in "ab")
    place_trees(**mine, places=got, size=size, impl=impl)
    oracle(**theirs, places=expected, size=size)
    assert all(map(torch.equal, tensors(got).values(), tensors(expected).values()))
    for name in ("positions", "out_positions"):
        assert mine[name] is None or torch.equal(mine[name], theirs[name]), name
    return got


def test_hand_computed(device, impl):
    """Catches: an off-by-one in the prefix or the root, the batch row used for the persistent row, a position that
    counts the node instead of its depth, a chain whose media positions are overwritten, a padding row that keeps the
    queries of the batch before."""
    depths, ancestors = chain_tables(3, 4, device)
    depths[2] = torch.tensor([0, 1, 1, 2])
    ancestors[2] = torch.tensor([0, 0b001, 0b010, 0b101])
    places = make_places(4, 4, device)
    positions = torch.tensor([[50, 51, 52, 53, 7, 7, 8], [60, 61, 62, 63, 9, 5, 9]], device=device)
    place_trees(
        torch.tensor([2, 0], device=device), torch.tensor([0, 4, 7, 7, 7], dtype=torch.int32, device=device),
        torch.tensor([24, 9], dtype=torch.int32, device=device), depths, ancestors, positions, places,
        size=3, impl=impl,
    )  # fmt: skip
    assert {name: tensor.tolist() for name, tensor in tensors(places).items()} == {
        "query_start": [0, 4, 0, SENTINEL], "num_queries": [4, 3, 0, SENTINEL], "prefix_lens": [21, 7, 0, SENTINEL],
        "roots": [20, 6, 0, SENTINEL],
        "masks": [[0, 0b001, 0b010, 0b101], [0, 0b001, 0b011, 0], [0] * 4, [SENTINEL] * 4],
    }  # fmt: skip
    assert positions.tolist() == [[50, 51, 51, 52, 7, 7, 8], [60, 61, 61, 62, 9, 5, 9]]


# Full grids, mixed batches, one that is cut, prompts around the kernel's block of tokens.
BATCHES = {
    "nothing": [], "grid": [6] * 5, "shorter grid": [4] * 3, "one": [6], "cut": [6, 6, 3, 1],
    "prompts": [6, 7, 40, 1, _BLOCK_TOKENS + 8, _BLOCK_TOKENS + 9],
}  # fmt: skip


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("num_axes", [1, 3])
@pytest.mark.parametrize("out_of_place", [False, True])
def test_equals_the_loop(device, impl, batch, num_axes, out_of_place):
    """Catches: a missing mask, an axis skipped, a tail of a prompt that is not copied, padding written past `size`,
    columns that belong to no request written."""
    counts = BATCHES[batch]
    inputs = make_inputs(counts, device, num_axes=num_axes, out_of_place=out_of_place)
    places = check(inputs, impl, size=len(counts) + 2, max_reqs=len(counts) + 5)
    expected = [count if count <= 6 else 0 for count in counts]
    assert places.num_queries.tolist() == [*expected, 0, 0, *[SENTINEL] * 3]


@pytest.mark.parametrize("num_cols", [1, 2, 26, 64, 65])
def test_widths_of_trees(device, impl, num_cols):
    """Catches: a number of nodes taken for a power of two, bit 63 lost."""
    check(make_inputs([num_cols] * 3, device, num_cols=num_cols), impl, size=3, max_reqs=3)


def test_a_real_grid(device, impl):
    check(make_inputs([26] * 64, device, num_cols=26, seed=5), impl, size=72, max_reqs=256)


def test_vectors_of_positions(device, impl):
    """Catches: 1-D positions that are written through a copy."""
    inputs = make_inputs([6, 6], device, num_axes=1, spare=0, out_of_place=True)
    flat = inputs | {name: inputs[name][0] for name in ("positions", "out_positions")}
    place_trees(**flat, places=make_places(2, 6, device), size=2, impl=impl)
    got = inputs["out_positions"].clone()
    place_trees(**inputs, places=make_places(2, 6, device), size=2, impl=impl)
    assert torch.equal(got, inputs["out_positions"]) and (got[:, :12] != SENTINEL).all()


@pytest.mark.parametrize(("name", "change"), changes(
    idx_mapping=(int32,), query_start_loc=(long, lambda t: t[:3]), seq_lens=(first_two,), depths=(long, transposed),
    ancestors=(lambda t: t[:, :5].contiguous(), lambda t: t[:4]), positions=(int32, transposed),
    out_positions=(first_two, lambda t: t[:, :10]), size=(lambda size: 2, lambda size: 5),
))  # fmt: skip
def test_wrapper_refuses(device, name, change):
    """Catches: a dropped dtype, stride or length check (the kernel would write through a wrong pointer)."""
    arguments = make_inputs([6, 2, 6], device, out_of_place=True) | {"places": make_places(4, 6, device), "size": 3}
    place_trees(**arguments)
    with pytest.raises(AssertionError):
        place_trees(**arguments | {name: change(arguments[name])})


@pytest.mark.parametrize("name", ["query_start", "num_queries", "prefix_lens", "roots", "masks"])
def test_wrapper_refuses_places(device, name):
    places = make_places(3, 6, device)
    short = dataclasses.replace(places, **{name: getattr(places, name)[:2]})
    with pytest.raises(AssertionError, match=name):
        place_trees(**make_inputs([6, 2, 6], device), places=short, size=3)
