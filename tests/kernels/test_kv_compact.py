"""kv_compact: kernel and loop against plain moves, layouts and groups."""

import pytest
import torch

from tests.kernels.agreement import CPU, agree
from vidspec_kernels import CacheList, kv_compact

LAYOUTS = ("NHD", "HND", "transposed keys")


def make_base(device, shape, layout="NHD", dtype=torch.float32, seed=0):
    """A whole cache of random bytes, NaNs and all; `shape` is that of a view."""
    num_blocks, block_size, num_kv_heads, head_size = shape
    size = (block_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, block_size)
    num_bytes = 2 * head_size * torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 256, (num_blocks, *size, num_bytes), generator=generator, dtype=torch.uint8)
    return words.view(dtype).to(device)


def split(base, layout):
    """Keys and values of a cache as views `[num_blocks, block_size, num_kv_heads, head_size]`."""
    head_size = base.shape[-1] // 2
    if layout == "transposed keys":  # a block holds K as [head_size, block_size], then V
        num_blocks, num_kv_heads, block_size, _ = base.shape
        keys, values = base.view(num_blocks, num_kv_heads, 2, -1).unbind(2)
        shape = (num_blocks, num_kv_heads, head_size, block_size)
        return keys.view(shape).permute(0, 3, 1, 2), values.unflatten(2, (block_size, head_size)).transpose(1, 2)
    view = base if layout == "NHD" else base.transpose(1, 2)
    return view[..., :head_size], view[..., head_size:]


def case(
    device, num_reqs=12, max_drafts=25, block_size=4, seed=0, kinds=(("NHD", 2, (2, 8), torch.float32),), by_rows=False,
    shares=False,
):  # fmt: skip
    """Ascending random paths from random roots, blocks shuffled; all memory of the caches of `kinds` is a result."""
    generator = torch.Generator().manual_seed(seed)

    def ints(low, high, size=1):
        return torch.randint(low, high, (size,), generator=generator).tolist()

    max_blocks = -(-max_drafts // block_size) + 3
    num_rows = num_reqs + 2
    blocks = torch.randperm(num_rows * max_blocks, generator=generator).view(num_rows, max_blocks) + 1
    table = torch.full((num_rows, max_blocks + 3), 2**30)
    table[:, :max_blocks] = blocks
    rows = torch.randperm(num_rows, generator=generator)[:num_reqs]
    path = torch.randint(0, max_drafts + 1, (num_reqs, max_drafts + 1), generator=generator)  # mostly not to be read
    counts = ints(-1, max_drafts + 1, num_reqs)
    for req_idx, count in enumerate(counts):
        prefix = min(ints(0, 4)[0], max(count, 0))  # stays in place
        rest = prefix + 1 + torch.randperm(max_drafts - prefix, generator=generator)[: max(count, 0) - prefix]
        path[req_idx, 1 : max(count, 0) + 1] = torch.cat((torch.arange(1, prefix + 1), rest.sort().values))
    counts = torch.tensor(counts, dtype=torch.int64)
    starts = ints(0, max_blocks * block_size - max_drafts // 2, num_reqs)
    column = torch.arange(max_drafts + 1)
    assert num_reqs == 0 or max_drafts == 1 or ((path != column) & (column <= counts[:, None]))[:, 1:].any()
    path_rows = None
    if by_rows:  # paths in rows of their own, between others that are not to be read
        path_rows = torch.randperm(num_reqs + 3, generator=generator)[:num_reqs]
        wide, many = torch.full((num_reqs + 3, max_drafts + 1), max_drafts), torch.full((num_reqs + 3,), max_drafts)
        wide[path_rows], many[path_rows] = path, counts
        path, counts = wide, many
    bases, layers = [], []
    for layout, num_layers, shape, dtype in kinds:
        made = [make_base(device, (num_rows * max_blocks + 1, block_size, *shape), layout, dtype, len(bases) + i)
                for i in range(num_layers)]  # fmt: skip
        bases += [base.view(torch.uint8) for base in made]
        layers += [split(base, layout) for base in made]
    caches = CacheList(layers + (layers[:2] if shares else []))
    caches.bases = bases
    return kv_compact, {
        "caches": caches, "block_table": table.int().to(device)[:, :max_blocks], "rows": rows.to(device),
        "starts": torch.tensor(starts, dtype=torch.int32, device=device), "path": path.int().to(device),
        "num_accepted": counts.int().to(device), "path_rows": None if path_rows is None else path_rows.to(device),
    }  # fmt: skip


def moved(view, given):
    """What a view must hold: each accepted node's entry behind its root, as it was before anything was written."""
    table, size = given["block_table"].cpu().long(), view.shape[1]
    before, after = view.cpu(), view.cpu().clone()
    for i, (row, start) in enumerate(zip(given["rows"].tolist(), given["starts"].tolist(), strict=True)):
        path_row = i if given["path_rows"] is None else int(given["path_rows"][i])
        for j in range(1, int(given["num_accepted"][path_row]) + 1):
            source, target = start + int(given["path"][path_row, j]), start + j
            if source < table.shape[1] * size:  # entries behind have no block
                after[table[row, target // size], target % size] = before[table[row, source // size], source % size]
    return after


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_reqs", "max_drafts"), [(0, 7), (12, 1), (12, 7), (12, 25), (12, 64)])
@pytest.mark.parametrize("by_rows", [False, True])
def test_equals_the_loop(device, impl, num_reqs, max_drafts, layout, by_rows):
    """Catches: an entry overwritten unread, strides mixed up, a layer or head left out, other rows, paths past
    num_accepted (-1: no rows) or past the block table."""
    kinds = [(layout, 2, (2, 8), torch.float32)]
    compact, given = case(device, num_reqs, max_drafts, seed=max_drafts, kinds=kinds, by_rows=by_rows)
    views = [view for group in given["caches"].groups for view in group.views]
    expected = [moved(view, given) for view in views]
    compact(**given, impl=impl)
    compact(**given | {"path": given["path"][:, :1]}, impl=impl)  # of roots alone: nothing moves
    for view, after in zip(views, expected, strict=True):
        assert torch.equal(view.cpu().contiguous().view(torch.uint8), after.contiguous().view(torch.uint8))


SHAPES = [  # blocks and heads of no power of two; words of every size, whose bit patterns survive
    *((4, layout, (1, 16), dtype) for layout in LAYOUTS
      for dtype in (torch.bfloat16, torch.float16, torch.uint8, torch.float64)),
    *((size, "NHD", (3, head_size), torch.bfloat16) for size, head_size in ((1, 8), (3, 5), (16, 80), (48, 1))),
]  # fmt: skip


@pytest.mark.parametrize(("block_size", "layout", "shape", "dtype"), SHAPES)
def test_shapes_and_dtypes(device, block_size, layout, shape, dtype):
    """Catches: a size taken for a power of two, columns past the head, a word of the wrong size, values converted."""
    agree(case, device, 5, 12, block_size, seed=2, kinds=[(layout, 1, shape, dtype)])


def test_layers_of_several_shapes(device, branches):
    """Catches: layers of other shapes left out, another group's strides, a shared cache moved twice."""
    f32 = torch.float32
    kinds = [("NHD", 3, (2, 8), f32), ("HND", 1, (2, 8), f32), ("NHD", 1, (1, 16), f32),
             ("transposed keys", 2, (2, 8), torch.bfloat16)]  # fmt: skip
    _, arguments = case(CPU, 4, 10, kinds=kinds, shares=True)
    assert [len(group.views) for group in arguments["caches"].groups] == [6, 2, 2, 2, 2]
    ran = branches("kv_compact")
    agree(case, device, 4, 10, seed=4, kinds=kinds, shares=True)
    assert ran == ["triton"] * 5 + ["numba"]


def test_cache_list_refuses(device):
    """Catches: views that no block table fits."""
    keys, values = split(make_base(device, (5, 4, 1, 8)), "NHD")
    for layers, message in (
        ([], "layers"), ([(keys, values[0])], "four dimensions"),
        ([(keys, values), (keys[:, :2], values[:, :2])], "block size"), ([(keys, values.to("meta"))], "device"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=message):
            CacheList(layers)
