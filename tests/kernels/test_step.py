"""step: literal facts, kernel and reference against oracles at awkward sizes, layouts and block boundaries."""

import pytest
import torch

from tests.kernels import oracles
from vidspec_kernels import step, step_reference
from vidspec_kernels.step import _BLOCK

SENTINEL = -(10**6)  # no position, length or slot
IMPLS = ["triton", "torch"]
# Requests and places of each, 0: chains. Around the places of one program, requests that two programs share.
SIZES = [(0, 0), (1, 0), (_BLOCK - 1, 0), (_BLOCK, 0), (_BLOCK + 1, 0), (300, 0)]
SIZES += [(0, 4), (1, 1), (1, 8), (_BLOCK - 1, 1), (_BLOCK, 1), (_BLOCK // 4, 4), (43, 3), (100, 7), (3, 64)]


def make_inputs(num_rows, frontier, device, block_size=16, max_blocks=8, seed=0, level=1):
    """Random persistent rows (a permutation: no row twice) whose last entries cross the end of the block table.

    `frontier` is the number of places a request; 0: chains.
    """
    generator = torch.Generator().manual_seed(seed)
    max_reqs = num_rows + 5
    longest = block_size * max_blocks + 3

    def ints(low, high, shape, dtype):
        return torch.randint(low, high, shape, generator=generator, dtype=dtype).to(device)

    # Non-contiguous rows: the block table and the nodes are slices of wider buffers.
    wide = ints(1, 1000, (max_reqs, max_blocks + 7), torch.int32)
    nodes = ints(1, 65, (num_rows, frontier + 3), torch.int64)
    nodes[ints(0, 4, nodes.shape, torch.int64) == 0] = 0
    return {
        "rows": torch.randperm(max_reqs, generator=generator)[:num_rows].to(device),
        "num_slots": ints(0, longest, (max_reqs,), torch.int32),
        "num_tokens": ints(1, 5000, (max_reqs,), torch.int32),
        "pos_delta": ints(-4000, 4000, (max_reqs,), torch.int64),
        "block_table": wide[:, :max_blocks],
        "nodes": nodes[:, :frontier] if frontier else None,
        "block_size": block_size,
        "level": level,
        "max_position": 4500,  # some pass it
    }


def make_outputs(num_rows, frontier, device, num_pos_axes=3, spare=2):
    """Sentinel-filled persistent buffers that are `spare` entries longer than the level."""
    size = num_rows * max(frontier, 1) + spare

    def full(*shape, dtype=torch.int64):
        return torch.full(shape, SENTINEL, dtype=dtype, device=device)

    return {
        "positions": full(num_pos_axes, size),
        "logical_pos": full(size),
        "seq_lens": full(num_rows + spare, dtype=torch.int32),
        "slot_mapping": full(size),
    }


def oracle(nodes, **arguments):
    """The special case for chains or for trees."""
    if nodes is None:
        oracles.step_chains(**arguments)
    else:
        oracles.step_trees(nodes=nodes, **arguments)


def check(inputs, got, expected, impl="triton"):
    """Assert that an implementation writes what the oracle writes, and nothing else."""
    step(**inputs, **got, impl=impl)
    oracle(**inputs, **expected)
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


HAND = {
    "num_slots": torch.tensor([90, 6, 0], dtype=torch.int32),
    "num_tokens": torch.tensor([70, 10, 1], dtype=torch.int32),
    "pos_delta": torch.tensor([50, 4, 0]),
    "block_table": torch.tensor([[1, 2, 3], [8, 5, 9], [7, 7, 7]], dtype=torch.int32),
}


def by_hand(device, impl, rows, nodes, level, **sizes):
    """Run a level of the tables above."""
    nodes = None if nodes is None else torch.tensor(nodes, device=device)
    out = make_outputs(len(rows), 0 if nodes is None else nodes.shape[1], device, spare=0)
    tables = {name: tensor.to(device) for name, tensor in HAND.items()}
    step(torch.tensor(rows, device=device), **tables, nodes=nodes, level=level, block_size=4, impl=impl, **sizes, **out)
    return {name: tensor.tolist() for name, tensor in out.items()}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("level", "position", "logical", "seq_len", "slot"),
    [
        (0, 13, 9, 7, 5 * 4 + 2),  # entry 6: second block (5), offset 2
        (1, 14, 10, 8, 5 * 4 + 3),  # entry 7: the last of its block
        (2, 15, 11, 9, 9 * 4 + 0),  # entry 8: the first of the third block (9)
        (5, 17, 14, 12, 9 * 4 + 3),  # entry 11: the table's last; position 18 does not exist
        (6, 17, 15, 13, -1),  # entry 12: past the table
    ],
)
def test_hand_computed_levels_of_chains(device, impl, level, position, logical, seq_len, slot):
    """Catches: an off-by-one in the noise position (num_tokens + level), in seq_lens or in the slot; a missing
    pos_delta; the batch row used for the persistent row; a clamped block index instead of -1; a rope position past the
    highest, or a logical one cut to it."""
    out = by_hand(device, impl, [1], None, level, max_position=17)
    expected = {"positions": [[position]] * 3, "logical_pos": [logical], "seq_lens": [seq_len], "slot_mapping": [slot]}
    assert out == expected


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("level", "nodes", "position", "logical", "slots"),
    [
        (1, [1, 2, 3], 14, 10, [5 * 4 + 3, 9 * 4 + 0, 9 * 4 + 1]),  # entries 7, 8, 9: a block boundary after the first
        (2, [4, 0, 5], 15, 11, [9 * 4 + 2, 0, 9 * 4 + 3]),  # no node in the middle: the null block
        (3, [6, 7, 0], 16, 12, [-1, -1, 0]),  # past the table, but nothing is past nothing
        (4, [0, 0, 0], 16, 13, [0, 0, 0]),  # 17 is past the highest position
    ],
)
def test_hand_computed_levels_of_trees(device, impl, level, nodes, position, logical, slots):
    """Catches: an off-by-one in the noise position, in seq_lens or in the slot; a position that counts the node instead
    of its depth; a noise position that is clamped or moved by pos_delta; a missing clamp; the root's slot where no node
    is; the batch row used for the persistent row."""
    out = by_hand(device, impl, [2, 1], [[1, 1, 1], nodes], level, max_position=16)
    assert out == {
        "positions": [[level] * 3 + [position] * 3] * 3,
        "logical_pos": [level] * 3 + [logical] * 3,
        "seq_lens": [1, 7],
        "slot_mapping": [29, 29, 29, *slots],
    }


@pytest.mark.parametrize("impl", IMPLS)
def test_a_chain_is_a_tree(device, impl):
    """Catches: any difference of a chain from a tree of one place whose node is the level."""
    inputs = make_inputs(50, 0, device)
    for level in (1, 2, 9):
        inputs |= {"level": level, "max_position": 2500}
        tree, chain = make_outputs(50, 1, device), make_outputs(50, 0, device)
        step(**inputs | {"nodes": torch.full((50, 1), level, device=device)}, **tree, impl=impl)
        step(**inputs, **chain, impl=impl)
        assert torch.equal(tree["seq_lens"][:50] + level, chain["seq_lens"][:50])
        assert all(torch.equal(tree[name], chain[name]) for name in chain if name != "seq_lens")


@pytest.mark.parametrize(("num_rows", "frontier"), SIZES)
@pytest.mark.parametrize("level", [0, 1, 9])
@pytest.mark.parametrize("num_pos_axes", [1, 3])
def test_kernel_and_reference_equal_the_oracles(device, num_rows, frontier, level, num_pos_axes):
    """Catches: a missing tail mask (entries past R * F, or past R, must keep the sentinel), a wrong grid size, one axis
    skipped, a request that spans two programs handled wrongly."""
    if frontier and not level:
        level = 2
    inputs = make_inputs(num_rows, frontier, device, level=level, seed=num_rows)
    got, expected, reference = (make_outputs(num_rows, frontier, device, num_pos_axes) for _ in range(3))
    check(inputs, got, expected)
    if num_rows:
        step_reference(**inputs, **reference)
        assert all(torch.equal(got[name], reference[name]) for name in got)
    num_places = num_rows * max(frontier, 1)
    for name, tensor in got.items():
        written = num_rows if name == "seq_lens" else num_places
        assert (tensor[..., written:] == SENTINEL).all(), name
        assert (tensor[..., :written] != SENTINEL).all(), name
    if num_rows >= 100 and num_rows != _BLOCK - 1:
        reached = got["slot_mapping"][:num_places]
        assert (reached == -1).any() and (reached > 0).any() and (reached == 0).any() == bool(frontier)
        assert (got["positions"] == 4500).any() and (got["logical_pos"] > 4500).any()


@pytest.mark.parametrize("block_size", [1, 16, 48])
@pytest.mark.parametrize("max_blocks", [0, 1, 4])
@pytest.mark.parametrize("frontier", [0, 5])
@pytest.mark.parametrize("impl", IMPLS)
def test_block_sizes(device, impl, frontier, block_size, max_blocks):
    """Catches: a block size taken for a power of two, reads of an empty block table."""
    inputs = make_inputs(33, frontier, device, block_size=block_size, max_blocks=max_blocks, level=2)
    check(inputs, make_outputs(33, frontier, device), make_outputs(33, frontier, device), impl)


@pytest.mark.parametrize(("num_rows", "frontier"), [(20, 0), (5, 4)])
@pytest.mark.parametrize("impl", IMPLS)
def test_non_contiguous_positions(device, impl, num_rows, frontier):
    """Catches: ignored strides. One buffer [3, N + 1] sliced (vLLM's M-RoPE layout), and a transposed one."""
    inputs = make_inputs(num_rows, frontier, device)
    sliced = torch.full((3, 65), SENTINEL, dtype=torch.int64, device=device)
    transposed = torch.full((40, 3), SENTINEL, dtype=torch.int64, device=device)
    for view in (sliced[:, 5:25], transposed[::2].T):
        got, expected = (make_outputs(num_rows, frontier, device, spare=0) for _ in range(2))
        check(inputs, got | {"positions": view}, expected, impl)
    assert (sliced[:, :5] == SENTINEL).all() and (sliced[:, 25:] == SENTINEL).all()
    assert (transposed[1::2] == SENTINEL).all()


@pytest.mark.parametrize("frontier", [0, 3])
@pytest.mark.parametrize("impl", IMPLS)
def test_vector_of_positions(device, impl, frontier):
    """Catches: a plain [N] position buffer (1-D RoPE) written through a copy."""
    inputs = make_inputs(7, frontier, device)
    got, expected = make_outputs(7, frontier, device, 1), make_outputs(7, frontier, device, 1)
    step(**inputs, **(got | {"positions": got["positions"][0]}), impl=impl)
    oracle(**inputs, **expected)
    assert all(torch.equal(got[name], expected[name]) for name in got)


@pytest.mark.parametrize("nodes", [None, [[2]]])
@pytest.mark.parametrize("impl", IMPLS)
def test_slots_beyond_int32(device, impl, nodes):
    """Catches: the physical slot computed in 32 bits (a pool of 2**27 blocks of 64)."""
    out = make_outputs(1, 1, device, spare=0)
    one = torch.tensor([1], dtype=torch.int32, device=device)
    table = torch.full((1, 1), 2**27, dtype=torch.int32, device=device)
    rows = torch.tensor([0], device=device)
    nodes = None if nodes is None else torch.tensor(nodes, device=device)
    sizes = {"block_size": 64, "level": 0 if nodes is None else 1, "max_position": 2**40}
    step(rows, one, one, rows, table, nodes, **sizes, impl=impl, **out)
    assert out["slot_mapping"].tolist() == [2**33 + 1 if nodes is None else 2**33 + 3]


@pytest.mark.parametrize("frontier", [0, 2])
@pytest.mark.parametrize("impl", ["auto", "triton", "torch"])
def test_dispatch(device, branches, impl, frontier):
    """Catches: a forced branch that silently runs the other, and a wrong automatic choice."""
    ran = branches("step")
    step(**make_inputs(3, frontier, device), **make_outputs(3, frontier, device), impl=impl)
    automatic = "triton" if device.type == "cuda" else "torch"
    assert ran == [automatic if impl == "auto" else impl]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rows", lambda t: t.int()),
        ("num_slots", lambda t: t.long()),
        ("num_tokens", lambda t: t.repeat(2)[::2]),
        ("pos_delta", lambda t: t.int()),
        ("block_table", lambda t: t.long()),
        ("block_table", lambda t: t.T.contiguous().T),
        ("nodes", lambda t: t.int()),
        ("nodes", lambda t: t[:2]),
        ("nodes", lambda t: t[0]),
        ("nodes", lambda t: t.T.contiguous().T),
        ("positions", lambda t: t[:2]),
        ("positions", lambda t: t[:, :2]),
        ("logical_pos", lambda t: t[:2]),
        ("seq_lens", lambda t: t.long()),
        ("seq_lens", lambda t: t[:2]),
        ("slot_mapping", lambda t: t.int()),
        ("slot_mapping", lambda t: t[:2]),
        ("level", lambda level: -1),
    ],
)
@pytest.mark.parametrize("frontier", [0, 2])
def test_wrapper_refuses(device, frontier, name, change):
    """Catches: a dropped dtype, stride or length check (the kernel would write through a wrong pointer)."""
    arguments = make_inputs(3, frontier, device) | make_outputs(3, frontier, device)
    if arguments[name] is None:
        return
    arguments[name] = change(arguments[name])
    with pytest.raises(AssertionError, match=name):
        step(**arguments)
    if name == "level" and frontier:
        with pytest.raises(AssertionError, match="level"):
            step(**arguments | {"level": 0})
    if name in ("logical_pos", "slot_mapping", "positions") and frontier:
        outputs = make_outputs(3, frontier, device)
        with pytest.raises(AssertionError, match=name):
            step(**arguments | outputs | {name: outputs[name][..., :5]})


def test_unknown_impl(device):
    """Catches: a typo in `impl` that runs something."""
    with pytest.raises(ValueError, match="auto, triton or torch"):
        step(**make_inputs(3, 0, device), **make_outputs(3, 0, device), impl="cuda")
