"""begin_step and next_level: kernel against loop, and what was worked out by hand."""

import pytest
import torch

from tests.kernels.agreement import agree, tensors_in
from tests.kernels.step_case import BLOCK_SIZE, MAX_DRAFTS, MAX_POSITION, SENTINEL, begin_case, level_case
from vidspec_kernels import LevelBuffers
from vidspec_kernels.draft_step.begin_step import _BLOCK as TABLE_BLOCK
from vidspec_kernels.draft_step.next_level import _BLOCK as PLACE_BLOCK


@pytest.mark.parametrize("in_trees", [False, True])
@pytest.mark.parametrize(("num_reqs", "num_picked"), [(0, None), (1, None), (1, 1), (7, None), (9, 4), (20, 17)])
def test_begin_equals_the_loop(device, in_trees, num_reqs, num_picked):
    """Catches: batch rows for persistent ones, missing or repeated tokens, `fed` kept, padding with a slot."""
    left = agree(begin_case, device, num_reqs, num_picked, in_trees)
    if num_reqs == 20:
        slots = left[".out.slot_mapping"][: 2 * num_picked].view(-1, 2)
        assert (slots[:, 0] == 0).any() and (slots[:, 0] > 0).any() and (slots == -1).any()
        assert (left[".out.positions"] == MAX_POSITION).any()


@pytest.mark.parametrize(
    ("max_blocks", "num_axes", "heats"),
    [(0, 1, False), (1, 3, True), (TABLE_BLOCK, 3, False), (TABLE_BLOCK + 1, 1, True)],
)
def test_block_tables(device, max_blocks, num_axes, heats):
    """Catches: columns that no program copies, reads of an empty table, an axis skipped, a temperature that is kept."""
    left = agree(begin_case, device, 5, 3, max_blocks=max_blocks, num_axes=num_axes, heats=heats)
    assert heats or (left[".out.temperature"][:5] == 0).all()


@pytest.mark.parametrize("in_trees", [False, True])
def test_a_draft_over_verified_entries_feeds_none_again(device, in_trees):
    """Catches: a verified entry that the draft writes over."""
    left = agree(begin_case, device, 20, 17, in_trees, has_fed=False)
    slots = left[".out.slot_mapping"][:34].view(-1, 2)
    assert (slots[:, 0] == 0).all() and (slots[:, 1] > 0).any()


@pytest.mark.parametrize("in_trees", [False, True])
def test_begin_by_hand(device, impl, in_trees):
    """Two of its drafts stand of which the last was never fed; none; none that were verified, at slots past 2 ** 31."""
    step, given = begin_case(device, 4, 3, in_trees, extra=1)
    tables, out, rows = given["tables"], given["out"], [6, 2, 7]
    given["batch_rows"][:], given["picked"][:] = torch.tensor([6, 0, 2, 7]), torch.tensor([0, 2, 3])
    given["is_verified"][:], given["num_sampled"][:] = torch.tensor([True, True, False]), torch.tensor([3, 9, 1, 5])
    tables.num_tokens[rows] = torch.tensor([3041, 3018, 3003], dtype=torch.int32, device=device)
    tables.num_dropped[:], tables.pos_delta[:] = 3000, torch.tensor([-2900] * 7 + [9000, 0])
    tables.fed[rows] = torch.tensor([0b10101, 0, 0], device=device)
    tables.block_table[7] = 2**31 - 1
    last = 2
    if in_trees:
        tables.path[6, :3], last = torch.tensor([0, 1, 4]), 4
        tables.path[7, 4] = 2
    assert not int(tables.fed[6]) >> (last - 1) & 1
    others = tables.fed.clone()
    step(**given, impl=impl)
    others[rows] = 0
    assert torch.equal(tables.fed, others)
    expected = {
        "rows": [*rows, 9], "num_accepted": [2, 0, -1, -1], "root_slot": [40, 17, 2, 0],
        "root_pos": [3040, 3017, 3002, 0], "pos_delta": [-2900, -2900, 9000, 0], "last_root": [37, 16, 1, 0],
        "seq_lens": [41, 18, 3, 0], "seeds": [*given["seeds"][rows].tolist(), 0],
        "temperature": [*given["temperature"][rows].tolist(), 0.0],
    }  # fmt: skip
    assert {name: getattr(out, name)[:4].tolist() for name in expected} == expected
    slots = [int(tables.block_table[row, entry // 16]) * 16 + entry % 16 for row, entry in ((6, 39), (6, 40), (2, 17))]
    high = (2**31 - 1) * 16
    assert out.slot_mapping[:8].tolist() == [*slots[:2], 0, slots[2], high + 1, high + 2, -1, -1]
    tokens = [[int(tables.text[row, tables.num_tokens[row] - 2]), int(tables.last_sampled[row, 0])] for row in rows]
    assert out.input_ids[:8].tolist() == [token for pair in tokens for token in pair] + [0, 0]
    pair = [139, 140, 116, 117, MAX_POSITION, MAX_POSITION, 0, 0]
    assert out.positions[:, :8].tolist() == [pair] * 3 and out.level.item() == 0
    for b, (row, root) in enumerate(zip(rows, (40, 17, 2), strict=True)):
        needed = (root + MAX_DRAFTS) // BLOCK_SIZE + 1
        assert torch.equal(out.batch_table[b, :needed], tables.block_table[row, :needed])
        assert out.path is None or torch.equal(out.path[b], tables.path[row])
    assert all((tensor[..., 8 if len(tensor) > 4 else 4 :] == SENTINEL).all() for tensor in (out.rows, out.seq_lens))


def test_buffers_of_another_shape(device):
    """Catches: tables of unequal widths, trees without room for masks or nodes, a warm-up of other strides."""
    step, given = begin_case(device, 3)
    for sizes, message in ((dict(max_blocks=9), "other widths"), (dict(in_trees=True), "path")):
        with pytest.raises(AssertionError, match=message):
            step(**given | {"out": begin_case(device, 3, **sizes)[1]["out"]})
    level, given = level_case(device, 3, 2)
    with pytest.raises(AssertionError, match="buffers of chains"):
        level(**given | {"out": level_case(device, 3, 0)[1]["out"]})
    room = {name: getattr(given["out"], name) for name in ("positions", "seq_lens", "masks")}
    short = {name: getattr(given["out"], name)[:5] for name in ("logical_pos", "slot_mapping", "input_ids")}
    with pytest.raises(AssertionError, match="no room"):
        level(**given | {"out": LevelBuffers(**room, **short)})
    for name, tensor in tensors_in(given["out"].as_meta()).items():
        real = tensors_in(given["out"])[name]
        assert tensor.is_meta and (tensor.shape, tensor.stride()) == (real.shape, real.stride()), name


# Batch rows and places of each, 0: chains. Around the places of one program, requests that two programs share.
SIZES = [(0, 0), (1, 0), (PLACE_BLOCK - 1, 0), (PLACE_BLOCK, 0), (PLACE_BLOCK + 1, 0)]
SIZES += [(0, 4), (1, 1), (1, 8), (PLACE_BLOCK, 1), (43, 3), (25, 10), (3, 63)]


@pytest.mark.parametrize(("size", "frontier"), SIZES)
def test_level_equals_the_loop(device, size, frontier):
    """Catches: a missing tail mask, a wrong grid, an axis skipped, padding that has anything, earlier bits lost."""
    left = agree(level_case, device, size, frontier, level=2)
    if size >= 20:
        slots = left[".out.slot_mapping"][left[".out.slot_mapping"] != SENTINEL]
        assert (slots == -1).any() and (slots > 2**34).any() and (slots == 0).any() == bool(frontier)
        assert (left[".out.positions"] == MAX_POSITION).any() and (left[".out.seq_lens"] == 0).any()


@pytest.mark.parametrize("max_blocks", [0, 4])
@pytest.mark.parametrize("level", [1, 62])
@pytest.mark.parametrize("frontier", [0, 3])
def test_level_on_the_device(device, frontier, level, max_blocks):
    """Catches: a level read as a number of the launch, reads past a block table, tokens of chains replaced in trees."""
    sizes = dict(max_blocks=max_blocks, level=level, width=5)
    as_number, on_device = (agree(level_case, device, 20, frontier, **sizes, on_device=x) for x in (False, True))
    assert all(torch.equal(tensor, on_device[name]) for name, tensor in as_number.items() if name != ".level")
    assert frontier or ((on_device[".out.input_ids"] == SENTINEL).all() and (on_device[".out.masks"] == SENTINEL).all())


@pytest.mark.parametrize("in_trees", [False, True])
def test_level_by_hand(device, impl, in_trees):
    """Roots at entries 14 and 30 and a row of padding; level 3, nodes 2, 64 (the sign bit) and none."""
    level, given = level_case(device, 3, 3 if in_trees else 0, num_axes=1, level=3)
    step, out, fed = given["step"], given["out"], given["fed"].zero_()
    step.rows[:3], step.root_slot[:3] = torch.tensor([4, 10, 1]), torch.tensor([14, 7, 30], dtype=torch.int32)
    step.root_pos[:3], step.pos_delta[:3] = torch.tensor([100, 7, 200]), torch.tensor([-50, 7, 9000])
    step.batch_table[:3] = torch.tensor([[70, 71, 72, 73, 74, 75, 76, 77]] * 2 + [[80] * 8], dtype=torch.int32)
    if in_trees:
        given["nodes"] = torch.tensor([[2, 64, 0]] * 3, device=device)
        given["ancestors"] = torch.arange(65, device=device).repeat(3, 1) + 500
    level(**given, impl=impl)
    count = 3 if in_trees else 1
    assert out.logical_pos[: 3 * count].tolist() == [103] * count + [0] * count + [203] * count
    assert out.positions[0, : 3 * count].tolist() == [53] * count + [0] * count + [MAX_POSITION] * count
    if in_trees:
        assert out.seq_lens[:3].tolist() == [15, 0, 31]
        assert out.slot_mapping[:9].tolist() == [71 * 16, 74 * 16 + 14, 0, -1, -1, -1, 80 * 16, 80 * 16 + 14, 0]
        assert out.masks[:3, :3].tolist() == [[502, 564, 0], [0] * 3, [502, 564, 0]]
        tokens = given["tokens"]
        assert out.input_ids[:9].view(3, 3).tolist() == [
            [*tokens[0, :2].tolist(), 0], [0] * 3, [*tokens[2, :2].tolist(), 0]
        ]  # fmt: skip
    else:
        assert out.seq_lens[:3].tolist() == [18, 0, 34]
        assert out.slot_mapping[:3].tolist() == [71 * 16 + 1, -1, 80 * 16 + 1]
    bits = 2 - (1 << 63) if in_trees else 4
    assert fed.tolist() == [bits if row in (1, 4) else 0 for row in range(11)]


def test_positions_of_any_strides(device, impl):
    """Catches: ignored strides, by a transposed buffer."""
    level, given = level_case(device, 20, 0)
    _, other = level_case(device, 20, 0)
    memory = torch.full((2 * len(given["out"].logical_pos), 3), SENTINEL, device=device)
    values = {name: getattr(given["out"], name) for name in ("logical_pos", "slot_mapping", "seq_lens")}
    level(**given | {"out": LevelBuffers(positions=memory[::2].T, **values)}, impl=impl)
    level(**other, impl=impl)
    assert torch.equal(memory[::2].T, other["out"].positions[:, : len(memory) // 2])
    assert (memory[1::2] == SENTINEL).all()
