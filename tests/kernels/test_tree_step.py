"""tree_step: literal facts, kernel against reference at awkward sizes, layouts and block boundaries, dispatch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from vidspec_kernels.chain_step import chain_step
from vidspec_kernels.tree_step import _BLOCK, tree_step, tree_step_reference

SENTINEL = -77


def make_inputs(num_rows, frontier, device, block_size=16, max_blocks=8, seed=0, level=1):
    """Random persistent rows (a permutation: no row twice) whose last entries cross the end of the block table."""
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
        "nodes": nodes[:, :frontier],
        "block_size": block_size,
        "level": level,
        "max_position": 4500,
    }


def make_outputs(num_rows, frontier, device, num_pos_axes=3, spare=2):
    """Sentinel-filled persistent buffers that are `spare` entries longer than the level."""
    size = num_rows * frontier + spare
    return {
        "positions": torch.full((num_pos_axes, size), SENTINEL, dtype=torch.int64, device=device),
        "logical_pos": torch.full((size,), SENTINEL, dtype=torch.int64, device=device),
        "slot_mapping": torch.full((size,), SENTINEL, dtype=torch.int64, device=device),
        "prefix_lens": torch.full((num_rows + spare,), SENTINEL, dtype=torch.int32, device=device),
    }


def assert_same(got, expected):
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize(
    ("level", "nodes", "position", "logical", "slots"),
    [
        (1, [1, 2, 3], 14, 10, [5 * 4 + 3, 9 * 4 + 0, 9 * 4 + 1]),  # entries 7, 8, 9: a block boundary after the first
        (2, [4, 0, 5], 15, 11, [9 * 4 + 2, 0, 9 * 4 + 3]),  # no node in the middle: the null block
        (3, [6, 7, 0], 16, 12, [-1, -1, 0]),  # past the table, but nothing is past nothing
        (4, [0, 0, 0], 16, 13, [0, 0, 0]),  # 17 is past the highest position
    ],
)
def test_hand_computed_levels(device, impl, level, nodes, position, logical, slots):
    """Catches: an off-by-one in the noise position, in prefix_lens or in the slot; a position that counts the node
    instead of its depth; a noise position that is clamped or moved by pos_delta; a missing clamp; the root's slot
    where no node is; the batch row used for the persistent row."""
    out = make_outputs(2, 3, device, spare=0)
    tree_step(
        torch.tensor([2, 1], device=device),
        torch.tensor([90, 6, 0], dtype=torch.int32, device=device),
        torch.tensor([70, 10, 1], dtype=torch.int32, device=device),
        torch.tensor([50, 4, 0], device=device),
        torch.tensor([[1, 2, 3], [8, 5, 9], [7, 7, 7]], dtype=torch.int32, device=device),
        torch.tensor([[1, 1, 1], nodes], device=device),
        block_size=4,
        level=level,
        max_position=16,
        impl=impl,
        **out,
    )
    assert out["positions"].tolist() == [[level] * 3 + [position] * 3] * 3
    assert out["logical_pos"].tolist() == [level] * 3 + [logical] * 3
    assert out["slot_mapping"].tolist() == [29, 29, 29, *slots]
    assert out["prefix_lens"].tolist() == [1, 7]


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_a_chain_is_a_tree(device, impl):
    """Catches: any difference from chain_step where node i is at level i."""
    inputs = make_inputs(50, 1, device)
    for level in (1, 2, 9):
        inputs |= {"level": level, "max_position": 2500, "nodes": torch.full((50, 1), level, device=device)}
        got, expected = make_outputs(50, 1, device), make_outputs(50, 1, device)
        tree_step(**inputs, **got, impl=impl)
        expected["seq_lens"] = expected.pop("prefix_lens")
        chain_step(**{k: v for k, v in inputs.items() if k != "nodes"}, **expected, impl=impl)
        seq_lens = expected.pop("seq_lens")
        assert_same(got, expected)
        assert torch.equal(got["prefix_lens"][:50] + level, seq_lens[:50])


@pytest.mark.parametrize(
    ("num_rows", "frontier"),
    [(0, 4), (1, 1), (1, 8), (_BLOCK - 1, 1), (_BLOCK, 1), (_BLOCK // 4, 4), (43, 3), (100, 7), (3, 64)],
)
@pytest.mark.parametrize("level", [1, 9])
@pytest.mark.parametrize("num_pos_axes", [1, 3])
def test_kernel_equals_reference(device, num_rows, frontier, level, num_pos_axes):
    """Catches: a missing tail mask (entries past R * F, or past R, must keep the sentinel), a wrong grid size, one axis
    skipped, a request that spans two programs handled wrongly."""
    inputs = make_inputs(num_rows, frontier, device, level=level, seed=num_rows)
    got = make_outputs(num_rows, frontier, device, num_pos_axes)
    expected = make_outputs(num_rows, frontier, device, num_pos_axes)
    tree_step(**inputs, **got, impl="triton")
    tree_step_reference(**inputs, **expected)
    assert_same(got, expected)
    for name, tensor in got.items():
        written = num_rows if name == "prefix_lens" else num_rows * frontier
        assert (tensor[..., written:] == SENTINEL).all(), name
        assert (tensor[..., :written] != SENTINEL).all(), name
    if num_rows == 100:
        reached = got["slot_mapping"][: num_rows * frontier]
        assert (reached == -1).any() and (reached == 0).any() and (reached > 0).any()
        assert (got["positions"] == 4500).any() and (got["logical_pos"] > 4500).any()


@pytest.mark.parametrize("block_size", [1, 16, 48])
@pytest.mark.parametrize("max_blocks", [0, 1, 4])
def test_block_sizes(device, block_size, max_blocks):
    """Catches: a block size taken for a power of two, reads of an empty block table."""
    inputs = make_inputs(33, 5, device, block_size=block_size, max_blocks=max_blocks, level=2)
    got, expected = make_outputs(33, 5, device), make_outputs(33, 5, device)
    tree_step(**inputs, **got, impl="triton")
    tree_step_reference(**inputs, **expected)
    assert_same(got, expected)


def test_non_contiguous_positions(device):
    """Catches: ignored strides. One buffer [3, N + 1] sliced (vLLM's M-RoPE layout), and a transposed one."""
    inputs = make_inputs(5, 4, device)
    expected = make_outputs(5, 4, device, spare=0)
    tree_step_reference(**inputs, **expected)
    sliced = torch.full((3, 65), SENTINEL, dtype=torch.int64, device=device)
    transposed = torch.full((40, 3), SENTINEL, dtype=torch.int64, device=device)
    for impl in ("triton", "torch"):
        for buffer, view in ((sliced, sliced[:, 5:25]), (transposed, transposed[::2].T)):
            buffer.fill_(SENTINEL)
            got = make_outputs(5, 4, device, spare=0) | {"positions": view}
            tree_step(**inputs, **got, impl=impl)
            assert_same(got, expected)
        assert (sliced[:, :5] == SENTINEL).all() and (sliced[:, 25:] == SENTINEL).all()
        assert (transposed[1::2] == SENTINEL).all()


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_vector_of_positions(device, impl):
    """Catches: a plain [N] position buffer (1-D RoPE) written through a copy."""
    inputs = make_inputs(7, 3, device)
    got, expected = make_outputs(7, 3, device, 1), make_outputs(7, 3, device, 1)
    tree_step(**inputs, **(got | {"positions": got["positions"][0]}), impl=impl)
    tree_step_reference(**inputs, **expected)
    assert_same(got, expected)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_slots_beyond_int32(device, impl):
    """Catches: the physical slot computed in 32 bits (a pool of 2**27 blocks of 64)."""
    out = make_outputs(1, 1, device, spare=0)
    one = torch.tensor([1], dtype=torch.int32, device=device)
    table = torch.full((1, 1), 2**27, dtype=torch.int32, device=device)
    rows = torch.tensor([0], device=device)
    nodes = torch.tensor([[2]], device=device)
    tree_step(rows, one, one, rows, table, nodes, block_size=64, level=1, max_position=9, impl=impl, **out)
    assert out["slot_mapping"].tolist() == [2**33 + 3]


@pytest.mark.parametrize("impl", ["auto", "triton", "torch"])
def test_dispatch(device, branches, impl):
    """Catches: a forced branch that silently runs the other, and a wrong automatic choice."""
    ran = branches("tree_step")
    tree_step(**make_inputs(3, 2, device), **make_outputs(3, 2, device), impl=impl)
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
        ("positions", lambda t: t[:, :5]),
        ("logical_pos", lambda t: t[:5]),
        ("slot_mapping", lambda t: t.int()),
        ("slot_mapping", lambda t: t[:5]),
        ("prefix_lens", lambda t: t.long()),
        ("prefix_lens", lambda t: t[:2]),
        ("level", lambda level: 0),
    ],
)
def test_wrapper_refuses(device, name, change):
    """Catches: a dropped dtype, stride or length check (the kernel would write through a wrong pointer)."""
    arguments = make_inputs(3, 2, device) | make_outputs(3, 2, device)
    arguments[name] = change(arguments[name])
    with pytest.raises(AssertionError, match=name):
        tree_step(**arguments)


def test_unknown_impl(device):
    """Catches: a typo in `impl` that runs something."""
    with pytest.raises(ValueError, match="auto, triton or torch"):
        tree_step(**make_inputs(3, 2, device), **make_outputs(3, 2, device), impl="cuda")


COMPILE = """
import importlib
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

kernel = importlib.import_module("vidspec_kernels.tree_step")._tree_step_kernel
narrow = {"num_slots_ptr", "num_tokens_ptr", "block_table_ptr", "prefix_lens_ptr"}
types = {name: "*i32" if name in narrow else "*i64" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
for num_pos_axes in (1, 3):
    constants = {"NUM_POS_AXES": num_pos_axes, "BLOCK": 128}
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
"""


@pytest.mark.skipif(
    not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").exists(), reason="this Triton has no ptxas"
)
def test_kernel_compiles_for_hopper(tmp_path):
    """Catches: what the interpreter forgives and the compiler does not."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
