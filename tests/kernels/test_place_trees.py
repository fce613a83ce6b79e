"""place_trees: kernel and loop against a request at a time, at awkward sizes and layouts."""

import pytest
import torch

from vidspec_kernels import TreePlaces, place_trees
from vidspec_kernels.place_trees.api import _BLOCK_TOKENS

SENTINEL = -(10**6)


def case(device, counts=(6, 2, 6), num_cols=6, num_axes=3, spare=3, out_of_place=False, padding=2):
    """Requests of so many query rows, at random persistent rows, of which every third is a chain."""
    generator = torch.Generator().manual_seed(len(counts))

    def ints(low, high, shape, dtype=torch.int64):
        return torch.randint(low, high, shape, generator=generator, dtype=dtype)

    max_rows, total = len(counts) + 4, sum(counts)
    bits = torch.ones(num_cols, dtype=torch.int64) << torch.arange(num_cols)
    depths, ancestors = torch.arange(num_cols).int().repeat(max_rows, 1), (bits.cumsum(0) - bits).repeat(max_rows, 1)
    for row in range(max_rows):
        if row % 3:
            depths[row, 1:] = ints(1, max(num_cols, 2), (num_cols - 1,), torch.int32)
            ancestors[row, 1:] = ints(-(2**62), 2**62, (num_cols - 1,))
    counts = torch.tensor(counts, dtype=torch.int32)
    bounds = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int(), torch.full((2,), 10**6).int()))
    positions = ints(0, 5000, (num_axes, total + spare + 1)).to(device)[:, : total + spare]
    out = torch.full((num_axes, total + spare + 9), SENTINEL, device=device)[:, : total + spare + 2]
    places = TreePlaces.empty(len(counts) + padding + 3, num_cols, device)  # which hold a batch of before
    for tensor in vars(places).values():
        tensor.fill_(SENTINEL)
    return place_trees, {
        "idx_mapping": torch.randperm(max_rows, generator=generator)[: len(counts)].to(device),
        "query_start_loc": bounds.to(device),
        "seq_lens": (counts + ints(0, 3000, counts.shape, torch.int32)).to(device), "depths": depths.to(device),
        "ancestors": ancestors.to(device), "positions": positions, "out_positions": out if out_of_place else None,
        "places": places, "size": len(counts) + padding,
    }  # fmt: skip


def placed(given):
    """What must be left of places and positions, a request at a time; prompts are no trees, and keep theirs."""
    depths, ancestors, bounds = given["depths"].cpu(), given["ancestors"].cpu(), given["query_start_loc"].tolist()
    positions, out = given["positions"].cpu(), given["out_positions"]
    out = (positions if out is None else out.cpu()).clone()
    places = {name: tensor.cpu().clone() for name, tensor in vars(given["places"]).items()}
    for tensor in places.values():
        tensor[: given["size"]] = 0
    for b, row in enumerate(given["idx_mapping"].tolist()):
        start, count = bounds[b], bounds[b + 1] - bounds[b]
        places["roots"][b] = int(given["seq_lens"][b]) - count
        own = positions[..., start : start + count]
        if count <= depths.shape[1]:
            places["query_start"][b], places["num_queries"][b] = start, count
            places["prefix_lens"][b], places["masks"][b, :count] = places["roots"][b] + 1, ancestors[row, :count]
            # A node behind the root by its depth; where that is its slot it has its own, as media of a prompt may.
            is_moved = depths[row, :count] != torch.arange(count)
            own = torch.where(is_moved, own[..., :1] + depths[row, :count], own)
        out[..., start : start + count] = own
    return places, out


# Full grids, mixed batches, one that is cut, prompts around the kernel's block of tokens; trees of any width.
BATCHES = {
    "nothing": ([], 6), "grid": ([6] * 5, 6), "shorter grid": ([4] * 3, 6), "one": ([6], 6), "cut": ([6, 6, 3, 1], 6),
    "prompts": ([6, 7, 40, 1, _BLOCK_TOKENS + 8, _BLOCK_TOKENS + 9], 6),
    **{f"{n} columns": ([n] * num_reqs, n) for n, num_reqs in ((1, 3), (2, 3), (26, 64), (64, 3), (65, 3))},
}  # fmt: skip
FORMS = {"axes in place": (3, False), "one axis": (1, False), "out of place": (3, True), "a vector": (1, True)}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_loop(device, impl, batch, form):
    """Catches: prefix or root off by one, batch rows, positions that are no depth, an axis or a prompt's tail skipped,
    padding left alone, writes past `size` or of nobody's columns, a width taken for a power of two, bit 63 lost."""
    (counts, num_cols), (num_axes, out_of_place) = BATCHES[batch], FORMS[form]
    place, given = case(device, counts, num_cols, num_axes, out_of_place=out_of_place)
    if form == "a vector":
        given |= {name: given[name][0] for name in ("positions", "out_positions")}
    places, expected = placed(given)
    place(**given, impl=impl)
    for name, tensor in places.items():
        assert torch.equal(getattr(given["places"], name).cpu(), tensor), name
    assert torch.equal(given["out_positions" if out_of_place else "positions"].cpu(), expected)
