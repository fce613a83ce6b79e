"""chain_step: literal facts, kernel against reference at awkward sizes, layouts and block boundaries, dispatch."""

import pytest
import torch

from vidspec_kernels.chain_step import _BLOCK, chain_step, chain_step_reference

SENTINEL = -77


def make_inputs(num_rows, device, block_size=16, max_blocks=4, seed=0, level=0):
    """Random persistent rows (a permutation: no row twice) whose last entries cross the end of the block table."""
    generator = torch.Generator().manual_seed(seed)
    max_reqs = num_rows + 5
    longest = block_size * max_blocks + 3

    def ints(low, high, shape, dtype):
        return torch.randint(low, high, shape, generator=generator, dtype=dtype).to(device)

    # Non-contiguous rows: the block table is a slice of a wider buffer.
    wide = ints(0, 1000, (max_reqs, max_blocks + 7), torch.int32)
    return {
        "rows": torch.randperm(max_reqs, generator=generator)[:num_rows].to(device),
        "num_slots": ints(0, longest, (max_reqs,), torch.int32),
        "num_tokens": ints(1, 5000, (max_reqs,), torch.int32),
        "pos_delta": ints(-4000, 4000, (max_reqs,), torch.int64),
        "block_table": wide[:, :max_blocks],
        "block_size": block_size,
        "level": level,
        "max_position": 5000,  # some pass it
    }


def make_outputs(num_rows, device, num_pos_axes=3, spare=2):
    """Sentinel-filled persistent buffers that are `spare` entries longer than the batch."""
    size = num_rows + spare
    return {
        "positions": torch.full((num_pos_axes, size), SENTINEL, dtype=torch.int64, device=device),
        "logical_pos": torch.full((size,), SENTINEL, dtype=torch.int64, device=device),
        "seq_lens": torch.full((size,), SENTINEL, dtype=torch.int32, device=device),
        "slot_mapping": torch.full((size,), SENTINEL, dtype=torch.int64, device=device),
    }


def assert_same(got, expected):
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


@pytest.mark.parametrize("impl", ["triton", "torch"])
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
def test_hand_computed_levels(device, impl, level, position, logical, seq_len, slot):
    """Catches: an off-by-one in the noise position (num_tokens + level), in seq_lens or in the slot; a missing
    pos_delta; the batch row used for the persistent row; a clamped block index instead of -1; a rope position past the
    highest, or a logical one cut to it."""
    out = make_outputs(1, device, spare=0)
    chain_step(
        torch.tensor([1], device=device),
        torch.tensor([90, 6], dtype=torch.int32, device=device),
        torch.tensor([70, 10], dtype=torch.int32, device=device),
        torch.tensor([50, 4], device=device),
        torch.tensor([[1, 2, 3], [8, 5, 9]], dtype=torch.int32, device=device),
        block_size=4,
        level=level,
        max_position=17,
        impl=impl,
        **out,
    )
    assert out["positions"].tolist() == [[position]] * 3
    assert out["logical_pos"].tolist() == [logical]
    assert out["seq_lens"].tolist() == [seq_len]
    assert out["slot_mapping"].tolist() == [slot]


@pytest.mark.parametrize("num_rows", [0, 1, _BLOCK - 1, _BLOCK, _BLOCK + 1, 300])
@pytest.mark.parametrize("level", [0, 1, 9])
@pytest.mark.parametrize("num_pos_axes", [1, 3])
def test_kernel_equals_reference(device, num_rows, level, num_pos_axes):
    """Catches: a missing tail mask (entries past R must keep the sentinel), a wrong grid size, one axis skipped."""
    inputs = make_inputs(num_rows, device, level=level, seed=num_rows)
    got, expected = make_outputs(num_rows, device, num_pos_axes), make_outputs(num_rows, device, num_pos_axes)
    chain_step(**inputs, **got, impl="triton")
    chain_step_reference(**inputs, **expected)
    assert_same(got, expected)
    for name, tensor in got.items():
        assert (tensor[..., num_rows:] == SENTINEL).all(), name
    if num_rows == 300:
        reached = got["slot_mapping"][:num_rows]
        assert (reached == -1).any() and (reached >= 0).any()


@pytest.mark.parametrize("block_size", [1, 16, 48])
@pytest.mark.parametrize("max_blocks", [0, 1, 4])
def test_block_sizes(device, block_size, max_blocks):
    """Catches: a block size taken for a power of two, reads of an empty block table."""
    inputs = make_inputs(33, device, block_size=block_size, max_blocks=max_blocks, level=2)
    got, expected = make_outputs(33, device), make_outputs(33, device)
    chain_step(**inputs, **got, impl="triton")
    chain_step_reference(**inputs, **expected)
    assert_same(got, expected)


def test_non_contiguous_positions(device):
    """Catches: ignored strides. One buffer [3, N + 1] sliced (vLLM's M-RoPE layout), and a transposed one."""
    inputs = make_inputs(20, device)
    expected = make_outputs(20, device, spare=0)
    chain_step_reference(**inputs, **expected)
    sliced = torch.full((3, 65), SENTINEL, dtype=torch.int64, device=device)
    transposed = torch.full((40, 3), SENTINEL, dtype=torch.int64, device=device)
    for view in (sliced[:, 5:25], transposed[::2].T):
        got = make_outputs(20, device, spare=0) | {"positions": view}
        chain_step(**inputs, **got, impl="triton")
        assert_same(got, expected)
    assert (sliced[:, :5] == SENTINEL).all() and (sliced[:, 25:] == SENTINEL).all()
    assert (transposed[1::2] == SENTINEL).all()


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_vector_of_positions(device, impl):
    """Catches: a plain [N] position buffer (1-D RoPE) written through a copy."""
    inputs = make_inputs(7, device)
    got, expected = make_outputs(7, device, 1), make_outputs(7, device, 1)
    chain_step(**inputs, **(got | {"positions": got["positions"][0]}), impl=impl)
    chain_step_reference(**inputs, **expected)
    assert_same(got, expected)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_slots_beyond_int32(device, impl):
    """Catches: the physical slot computed in 32 bits (a pool of 2**27 blocks of 64)."""
    out = make_outputs(1, device, spare=0)
    one = torch.tensor([1], dtype=torch.int32, device=device)
    table = torch.full((1, 1), 2**27, dtype=torch.int32, device=device)
    rows = torch.tensor([0], device=device)
    chain_step(rows, one, one, rows, table, block_size=64, level=0, max_position=2**40, impl=impl, **out)
    assert out["slot_mapping"].tolist() == [2**33 + 1]


@pytest.mark.parametrize("impl", ["auto", "triton", "torch"])
def test_dispatch(device, branches, impl):
    """Catches: a forced branch that silently runs the other, and a wrong automatic choice."""
    ran = branches("chain_step")
    inputs = make_inputs(3, device)
    chain_step(**inputs, **make_outputs(3, device), impl=impl)
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
        ("positions", lambda t: t[:2]),
        ("positions", lambda t: t[:, :2]),
        ("logical_pos", lambda t: t[:2]),
        ("seq_lens", lambda t: t.long()),
        ("slot_mapping", lambda t: t.int()),
    ],
)
def test_wrapper_refuses(device, name, change):
    """Catches: a dropped dtype, stride or length check (the kernel would write through a wrong pointer)."""
    arguments = make_inputs(3, device) | make_outputs(3, device)
    arguments[name] = change(arguments[name])
    with pytest.raises(AssertionError, match=name):
        chain_step(**arguments)


def test_unknown_impl(device):
    """Catches: a typo in `impl` that runs something."""
    with pytest.raises(ValueError, match="auto, triton or torch"):
        chain_step(**make_inputs(3, device), **make_outputs(3, device), impl="cuda")
