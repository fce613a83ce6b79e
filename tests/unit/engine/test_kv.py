"""DraftKV: who owns which block, and what is left of drafts once the target has committed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.fakes import StagedWrites
from vidspec_kernels import CacheList, StepTables, begin_step
from vllm_vidspec.engine.draft import kv as kv_module
from vllm_vidspec.engine.draft.forwards import DraftBuffers, Forwards
from vllm_vidspec.engine.draft.kv import NULL_BLOCK, DraftKV

CPU = torch.device("cpu")
BLOCK, ROWS = 4, 5


@pytest.fixture(autouse=True, scope="module")
def staged_writes():
    """vLLM's go through memory that the device maps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_module, "StagedWriteTensor", StagedWrites)
        yield


def make(num_blocks: int = 20, max_slots: int = 32, caches=None) -> DraftKV:
    return DraftKV(num_blocks, BLOCK, ROWS, max_slots, CPU, caches)


def reserve(kv: DraftKV, **num_slots: int) -> list[bool]:
    rows = [int(name[1:]) for name in num_slots]
    return kv.reserve(np.array(rows), np.array(list(num_slots.values()))).tolist()


def owned(kv: DraftKV) -> list[list[int]]:
    return [list(blocks) for blocks in kv._blocks]


def test_a_row_that_does_not_fit_keeps_what_it_had():
    """Catches: blocks taken for a row that is then refused, a table that is longer than its width."""
    kv = make(num_blocks=6, max_slots=12)
    assert reserve(kv, r0=5, r1=9) == [True, True] and kv.num_used_blocks == 5
    before = owned(kv)
    assert reserve(kv, r0=9, r1=9) == [False, True] and owned(kv) == before
    kv.remove(1)
    assert reserve(kv, r0=12) == [True] and reserve(kv, r0=13) == [False]  # the table is full


def test_blocks_are_taken_ahead_of_need_and_never_where_another_may_need_them():
    """Catches: a row that grows in every step; more ahead than an eighth of a pool, past a table, of a full pool."""
    kv = make(num_blocks=161, max_slots=400)
    assert reserve(kv, r0=1) == [True] and len(kv._blocks[0]) == 1 + 161 // (8 * ROWS)
    assert reserve(kv, r0=5 * BLOCK) == [True] and len(kv._blocks[0]) == 5
    assert reserve(kv, r1=80 * BLOCK) == [True] and len(kv._blocks[1]) == 80  # half of the pool
    assert reserve(kv, r0=5 * BLOCK + 1) == [True] and len(kv._blocks[0]) == 6
    short = make(num_blocks=161, max_slots=2 * BLOCK)
    assert reserve(short, r0=1) == [True] and len(short._blocks[0]) == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, 40)), max_size=40))
def test_no_block_has_two_owners(calls):
    """Random growth and ends (0): every block is free or one row's, none is the null block, the device's table agrees.

    Catches: a block that is handed out twice, lost, or left in the table of nobody's row and of somebody's.
    """
    kv = make(num_blocks=16)
    for row, num_slots in calls:
        if num_slots == 0:
            kv.remove(row)
        elif reserve(kv, **{f"r{row}": num_slots})[0]:
            assert len(kv._blocks[row]) * BLOCK >= num_slots
        kv.apply()
    blocks = [block for row in owned(kv) for block in row]
    assert sorted(blocks + kv._free) == list(range(1, 16)) and NULL_BLOCK not in blocks
    assert kv.num_used_blocks == len(blocks)
    for row, mine in enumerate(owned(kv)):
        assert kv.block_tables[row, : len(mine)].tolist() == mine


def test_slots_follow_the_table():
    kv = make()
    reserve(kv, r2=9, r0=5)
    kv.apply()
    table = kv.block_tables
    expected = [int(table[row, i // BLOCK]) * BLOCK + i % BLOCK for row, i in ((0, 3), (0, 4), (2, 7), (2, 8))]
    assert kv.slots([0, 2], [3, 7], [2, 2]).tolist() == expected


def test_a_request_that_ends_has_fed_nothing():
    """Catches: the next owner of a row whose last draft looks fed, and its padding row touched."""
    kv = make()
    kv.fed.fill_(7)
    kv.remove(2)
    assert kv.fed.tolist() == [7, 7, 0, 7, 7, 7]


def test_accepted_nodes_move_together_behind_the_last_root():
    """Catches: a root that is off by one or by the tokens that the draft does not see, paths of other rows."""
    cache = torch.arange(20 * BLOCK).view(20, BLOCK, 1, 1).float()
    kv = make(caches=CacheList([(cache, cache.clone())]))
    reserve(kv, r1=16, r3=16)
    kv.add(1, 5, 0)
    kv.add(3, 0, 0)
    kv.apply()
    model = SimpleNamespace(
        device=torch.device("cpu"), num_axes=1, hidden_size=1, dtype=torch.float32, num_positions=99, max_num_tokens=99,
        embed=lambda ids, *_: ids[:, None].float(), forward=lambda embeds, *_, **__: embeds,
    )  # fmt: skip
    buffers = DraftBuffers(model, kv, 5, tree_width=2, max_drafts=2)
    path = torch.zeros(5, 3, dtype=torch.int32)
    path[3], path[1] = torch.tensor([0, 4, 0]), torch.tensor([0, 3, 6])
    num_tokens = torch.tensor([2, 14, 2, 11, 2], dtype=torch.int32)
    text, last = torch.zeros(5, 20, dtype=torch.int32), torch.zeros(5, 1, dtype=torch.int64)
    tables = StepTables(num_tokens, text, last, kv.num_dropped, kv.pos_delta, kv.block_tables, kv.fed, path)

    def entries(row: int) -> list[float]:
        flat = cache.flatten()
        return [float(flat[slot]) for slot in kv.slots([row], [0], [16])]

    before = {row: entries(row) for row in (1, 3)}
    num_sampled = torch.tensor([2, 3], dtype=torch.int32)
    sizes = {"size": 3, "block_size": BLOCK, "max_position": 98, "max_drafts": 2}
    seeds = torch.zeros(5, dtype=torch.int64)
    begin_step(torch.tensor([3, 1]), None, num_sampled, None, None, seeds, tables, buffers.step, **sizes)
    Forwards(model, kv, buffers, None).roots(3)
    # Row 1: root at entry 14 - 2 - 2 - 5 = 5, nodes 3 and 6 stand; row 3: root at entry 8, node 4 stands.
    expected = {row: list(values) for row, values in before.items()}
    expected[1][6:8] = before[1][8], before[1][11]
    expected[3][9] = before[3][12]
    assert {row: entries(row) for row in (1, 3)} == expected
