"""kv_compact: literal moves, kernel and reference against a plain loop, layouts and groups, planted mistakes."""

import functools

import pytest
import torch

from tests.kernels.impls import branch
from tests.kernels.refusals import changes, first_two, int32, long, transposed
from vidspec_kernels import CacheList, kv_compact
from vidspec_kernels.kv_compact.api import _BLOCK_MOVES

LAYOUTS = ("NHD", "HND", "transposed keys")


def make_bases(device, num_layers, shape, layout="NHD", dtype=torch.float32, seed=0):
    """Whole caches of random bytes, NaNs and all; `shape` is that of a view."""
    num_blocks, block_size, num_kv_heads, head_size = shape
    if layout == "NHD":
        size = (num_blocks, block_size, num_kv_heads, 2 * head_size)
    else:
        size = (num_blocks, num_kv_heads, block_size, 2 * head_size)
    generator = torch.Generator().manual_seed(seed)
    num_bytes = torch.empty((), dtype=dtype).element_size()
    return [
        torch.randint(0, 256, (*size[:-1], size[-1] * num_bytes), generator=generator, dtype=torch.uint8)
        .view(dtype)
        .to(device)
        for _ in range(num_layers)
    ]


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


def make_inputs(num_reqs, max_drafts, device, block_size=4, max_blocks=None, seed=0):
    """Ascending random paths from random roots; every request its own blocks, in shuffled rows of a wider table."""
    generator = torch.Generator().manual_seed(seed)

    def ints(low, high, size=1):
        return torch.randint(low, high, (size,), generator=generator).tolist()

    max_blocks = max_blocks or -(-max_drafts // block_size) + 3
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
    starts = ints(0, max_blocks * block_size - max_drafts, num_reqs)
    return {
        "block_table": table.int().to(device)[:, :max_blocks], "rows": rows.to(device),
        "starts": torch.tensor(starts, dtype=torch.int32, device=device), "path": path.int().to(device),
        "num_accepted": torch.tensor(counts, dtype=torch.int32, device=device),
    }  # fmt: skip


def num_moves(inputs):
    node = inputs["path"][:, 1:]
    j = torch.arange(1, node.shape[1] + 1, device=node.device)
    return int(((node != j) & (j <= inputs["num_accepted"][:, None])).sum())


def num_blocks_of(inputs):
    return inputs["block_table"].numel() + 1


def moved(bases, layout, *, block_table, rows, starts, path, num_accepted):
    """The caches after the moves, one entry at a time, each read from the caches as they were."""
    after = [base.clone() for base in bases]
    for base, new in zip(bases, after, strict=True):
        for old_view, new_view in zip(split(base, layout), split(new, layout), strict=True):
            block_size = old_view.shape[1]
            for req_idx, row in enumerate(rows.tolist()):
                table, start = block_table[row].tolist(), int(starts[req_idx])
                for j in range(1, int(num_accepted[req_idx]) + 1):
                    source, target = start + int(path[req_idx, j]), start + j
                    new_view[table[target // block_size], target % block_size] = old_view[
                        table[source // block_size], source % block_size
                    ]
    return after


def check(compact, bases, layout, inputs):
    """Assert that `compact` leaves, byte for byte, what the loop leaves, in all of the caches' memory."""
    assert num_moves(inputs) > 0 or inputs["path"].shape[1] == 2  # a single draft is in place
    expected = moved(bases, layout, **inputs)
    compact(CacheList([split(base, layout) for base in bases]), **inputs)
    for base, want in zip(bases, expected, strict=True):
        assert torch.equal(base.view(torch.uint8), want.view(torch.uint8))


def compact_with(impl):
    return lambda caches, **inputs: kv_compact(caches, **inputs, impl=impl)


def one_request(device, path, start=0, table=(1, 2, 3, 4)):
    return {
        "block_table": torch.tensor([table], dtype=torch.int32, device=device),
        "rows": torch.tensor([0], device=device),
        "starts": torch.tensor([start], dtype=torch.int32, device=device),
        "path": torch.tensor([path], dtype=torch.int32, device=device),
        "num_accepted": torch.tensor([len(path) - 1], dtype=torch.int32, device=device),
    }


@pytest.mark.parametrize(
    ("path", "start", "after"),
    [
        ([0, 1, 2, 3], 0, [0, 1, 2, 3, 4, 5, 6, 7]),  # in place already
        ([0, 2, 3, 5], 0, [0, 2, 3, 5, 4, 5, 6, 7]),  # each source but the last is overwritten after it was read
        ([0, 1, 3], 0, [0, 1, 3, 3, 4, 5, 6, 7]),  # the first stays
        ([0, 4], 3, [0, 1, 2, 3, 7, 5, 6, 7]),  # from the last block, behind a root that is not entry 0
        ([0], 2, [0, 1, 2, 3, 4, 5, 6, 7]),  # nothing accepted
    ],
)
def test_hand_computed_moves(device, impl, path, start, after):
    """Catches: a path counted from the wrong entry, an entry overwritten before it is read, the block table ignored,
    tail entries changed."""
    base = torch.arange(5 * 2, dtype=torch.float32, device=device).view(5, 2, 1, 1).repeat(1, 1, 3, 4)
    table = (3, 1, 4, 2)
    kv_compact(CacheList([split(base, "NHD")]), **one_request(device, path, start, table), impl=impl)
    entries = base[torch.tensor(table, device=device)].flatten(0, 1)  # [8, 3, 4]
    was = [6, 7, 2, 3, 8, 9, 4, 5]
    assert (entries == entries[:, :1, :1]).all()
    assert entries[:, 0, 0].tolist() == [was[e] for e in after]
    assert base[0].unique().tolist() == [0, 1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("max_drafts", [1, 7, 25, 64])
def test_equals_the_loop(device, impl, max_drafts, layout):
    """Catches: strides mixed up, a layer or head left out, batch rows taken for table rows, paths read beyond
    num_accepted, a K beyond one turn of the kernel moved in a wrong order, any other entry touched."""
    inputs = make_inputs(12, max_drafts, device, seed=max_drafts)
    bases = make_bases(device, 2, (num_blocks_of(inputs), 4, 2, 8), layout)
    check(compact_with(impl), bases, layout, inputs)


SHAPES = [  # blocks and heads of no power of two; words of every size, whose bit patterns survive
    *((4, 1, 16, layout, dtype) for layout in LAYOUTS
      for dtype in (torch.bfloat16, torch.float16, torch.uint8, torch.float64)),
    *((size, 3, head_size, "NHD", torch.bfloat16) for size, head_size in ((1, 8), (3, 5), (16, 80), (48, 1))),
]  # fmt: skip


@pytest.mark.parametrize(("block_size", "num_heads", "head_size", "layout", "dtype"), SHAPES)
def test_shapes_and_dtypes(device, impl, block_size, num_heads, head_size, layout, dtype):
    """Catches: a size taken for a power of two, columns past the head written; a word of the wrong size, values
    converted on the way."""
    inputs = make_inputs(5, 12, device, block_size=block_size, seed=2)
    bases = make_bases(device, 1, (num_blocks_of(inputs), block_size, num_heads, head_size), layout, dtype)
    check(compact_with(impl), bases, layout, inputs)


@pytest.mark.parametrize("first", [2, 3, 30])
def test_longest_overlaps(device, impl, first):
    """Catches: turns of the kernel out of order. 2 -> 1, 3 -> 2, ... 64 -> 63 is four turns, each writing what another
    has read."""
    inputs = one_request(device, [0, *range(first, 65)], start=5, table=tuple(range(1, 19)))
    assert 65 - first > 2 * _BLOCK_MOVES
    check(compact_with(impl), make_bases(device, 1, (19, 4, 1, 8)), "NHD", inputs)


def test_what_accept_returns(device, impl):
    """Catches: a request without rows (num_sampled 0, so -1 accepted) or an identity path beyond the count moved; a
    block id read from the next row of the table (entries 8 and up have no block; 7 -> 6 still moves)."""
    inputs = one_request(device, [0, 2, 4, 3, 4], start=1) | {
        "rows": torch.tensor([1, 0], device=device),
        "starts": torch.tensor([3, 1], dtype=torch.int32, device=device),
        "block_table": torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32, device=device),
        "path": torch.tensor([[0, 1, 2, 3, 4], [0, 2, 4, 3, 4]], dtype=torch.int32, device=device),
        "num_accepted": torch.tensor([-1, 2], dtype=torch.int32, device=device),
    }
    check(compact_with(impl), make_bases(device, 1, (7, 4, 1, 8)), "NHD", inputs)
    inputs = one_request(device, [0, 2, 3, 4], start=5, table=(1, 2))
    inputs["block_table"] = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device=device)
    bases = make_bases(device, 1, (5, 4, 1, 8))
    expected = bases[0].clone()
    expected[2, 2] = bases[0][2, 3]
    kv_compact(CacheList([split(bases[0], "NHD")]), **inputs, impl=impl)
    assert torch.equal(bases[0].view(torch.uint8), expected.view(torch.uint8))


def test_paths_by_rows_of_their_own(device, impl):
    """Catches: paths or counts read in the requests' order, or by the rows of the block table."""
    inputs = make_inputs(6, 10, device, seed=5)
    path_rows = torch.tensor([3, 8, 0, 5, 1, 7], device=device)
    path = torch.full((9, 11), 10, dtype=torch.int32, device=device)
    num_accepted = torch.full((9,), 10, dtype=torch.int32, device=device)
    path[path_rows], num_accepted[path_rows] = inputs["path"], inputs["num_accepted"]
    tables = {"path": path, "num_accepted": num_accepted, "path_rows": path_rows}

    def by_rows(caches, **inputs):
        kv_compact(caches, **inputs | tables, impl=impl)

    check(by_rows, make_bases(device, 2, (num_blocks_of(inputs), 4, 2, 8)), "NHD", inputs)


def test_nothing_moves(device, impl):
    """Catches: an entry touched where paths are identities; an empty batch or a path of the root alone refused."""
    inputs = make_inputs(3, 6, device)
    inputs["path"] = torch.arange(7, dtype=torch.int32, device=device).repeat(3, 1)
    bases = make_bases(device, 1, (num_blocks_of(inputs), 4, 1, 8))
    before = bases[0].view(torch.uint8).clone()
    caches = CacheList([split(bases[0], "NHD")])
    none = {name: tensor if name == "block_table" else tensor[:0] for name, tensor in inputs.items()}
    for arguments in (inputs, none, inputs | {"path": inputs["path"][:, :1]}):
        kv_compact(caches, **arguments, impl=impl)
    assert torch.equal(bases[0].view(torch.uint8), before)


def test_layers_of_several_shapes(device, branches, impl):
    """Catches: layers of other shapes, strides or dtypes left out or moved with another group's strides; more than one
    launch a group; a cache that two layers share moved twice."""
    inputs = make_inputs(4, 10, device, seed=4)
    num_blocks = num_blocks_of(inputs)
    kinds = [
        (layout, make_bases(device, num_layers, (num_blocks, 4, *shape), layout, dtype))
        for layout, num_layers, shape, dtype in (
            ("NHD", 3, (2, 8), torch.float32),
            ("HND", 1, (2, 8), torch.float32),
            ("NHD", 1, (1, 16), torch.float32),
            ("transposed keys", 2, (2, 8), torch.bfloat16),
        )
    ]
    expected = [moved(bases, layout, **inputs) for layout, bases in kinds]
    layers = [split(base, layout) for layout, bases in kinds for base in bases]
    caches = CacheList([*layers, *layers[:2]])
    assert [len(group.views) for group in caches.groups] == [6, 2, 2, 2, 2]
    ran = branches("kv_compact")
    kv_compact(caches, **inputs, impl=impl)
    assert ran == (["triton"] * 5 if impl == "triton" else [branch(impl, device)])
    for (_, bases), want in zip(kinds, expected, strict=True):
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(bases, want, strict=True))


def test_caches_live_as_long_as_the_list(device):
    """Catches: addresses of freed memory."""
    caches = CacheList(split(base, "NHD") for base in make_bases(device, 2, (3, 4, 1, 8)))
    (group,) = caches.groups
    assert [view.data_ptr() for view in group.views] == group.addresses.tolist() and len(group.views) == 4


def in_place(order, caches, block_table, rows, starts, path, num_accepted):
    """Entries copied one after the other in the caches themselves, as the order has it."""
    for view in (view for group in caches.groups for view in group.views):
        for req_idx, row in enumerate(rows.tolist()):
            table, start = block_table[row].tolist(), int(starts[req_idx])
            for j in order(range(1, int(num_accepted[req_idx]) + 1)):
                source, target = start + int(path[req_idx, j]), start + j
                view[table[target // 4], target % 4] = view[table[source // 4], source % 4]


def half_of(left_out):
    """Only keys are moved, or only values."""

    def compact(caches, **inputs):
        views = [group.views for group in caches.groups]  # in turn, or in a group each
        kept = views[0][1 - left_out :: 2] if len(views) == 1 else views[1 - left_out]
        kv_compact(CacheList([(view, view) for view in kept]), **inputs)

    return compact


def shifted_by(wrong):
    """The path counted from the entry before or after the root."""
    return lambda caches, starts, **inputs: kv_compact(caches, starts=starts + wrong, **inputs)


MUTATIONS = {
    "the deepest first": functools.partial(in_place, reversed),
    **{f"half {left_out} forgotten": half_of(left_out) for left_out in (0, 1)},
    **{f"off by {wrong}": shifted_by(wrong) for wrong in (-1, 1)},
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations(device, name):
    """Each is seen to fail where a source is a target too; moves in ascending order in place pass, which is why the
    kernel may take turns."""
    inputs = one_request(device, [0, 2, 3, 5], start=4)
    for layout in LAYOUTS:
        with pytest.raises(AssertionError):
            check(MUTATIONS[name], make_bases(device, 1, (5, 4, 1, 8), layout), layout, inputs)
    for order, path in ((list, [0, 2, 3, 5]), (reversed, [0, 2]), (reversed, [0, 4, 5, 6])):
        run = functools.partial(in_place, order)
        check(run, make_bases(device, 1, (5, 4, 1, 8)), "NHD", one_request(device, path))


@pytest.mark.parametrize(("name", "change"), changes(
    block_table=(long, transposed, lambda t: t[0]), rows=(int32,), starts=(long, first_two),
    path=(long, transposed, first_two), num_accepted=(lambda t: t.repeat(2)[::2], lambda t: t.repeat(2)),
))  # fmt: skip
def test_wrapper_refuses(device, name, change):
    """Catches: a dropped dtype, stride or shape check (the kernel would read through a wrong pointer)."""
    inputs = make_inputs(3, 6, device)
    caches = CacheList([split(base, "NHD") for base in make_bases(device, 1, (num_blocks_of(inputs), 4, 1, 8))])
    inputs[name] = change(inputs[name])
    with pytest.raises(AssertionError, match=name):
        kv_compact(caches, **inputs)


def test_cache_list_refuses(device):
    """Catches: views that no block table fits."""
    keys, values = split(make_bases(device, 1, (5, 4, 1, 8))[0], "NHD")
    for layers, message in (
        ([], "layers"), ([(keys, values[0])], "four dimensions"),
        ([(keys, values), (keys[:, :2], values[:, :2])], "block size"), ([(keys, values.to("meta"))], "device"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=message):
            CacheList(layers)
