"""DraftKV: who owns which block, and what is left of drafts once the target has committed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulated_device.fakes import StagedWrites
from vidspec_kernels import CacheList
from vllm_vidspec.engine.draft import kv as kv_module
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
    kv.forget(1)
    assert reserve(kv, r0=12) == [True] and reserve(kv, r0=13) == [False]  # the table is full


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, 40)), max_size=40))
def test_no_block_has_two_owners(calls):
    """Random growth and ends (0): every block is free or one row's, none is the null block, the device's table agrees.

    Catches: a block that is handed out twice, lost, or left in the table of nobody's row and of somebody's.
    """
    kv = make(num_blocks=16)
    for row, num_slots in calls:
        if num_slots == 0:
            kv.forget(row)
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


def step(rows, num_accepted, path=None, num_tokens=None) -> SimpleNamespace:
    """Return what of a `DraftMessage` the memory reads."""
    return SimpleNamespace(
        idx_mapping=torch.tensor(rows),
        idx_mapping_np=np.array(rows),
        num_accepted=torch.tensor(num_accepted, dtype=torch.int32),
        path=None if path is None else torch.tensor(path, dtype=torch.int32),
        num_tokens=None if num_tokens is None else torch.tensor(num_tokens, dtype=torch.int32),
        num_tokens_upper_bound=None if num_tokens is None else np.array(num_tokens)[rows] + 2,
    )


def test_entries_follow_the_committed_length():
    """Rollback: what a step reads and writes depends on the committed length alone, whatever was drafted before."""
    kv = make()
    kv.begin(1, 6, 3)
    kv.begin(3, 0, -2)
    kv.apply()
    message = step([3, 1], [0, 0], num_tokens=[0, 20, 0, 9, 0])
    assert kv.num_slots(message)[message.idx_mapping].tolist() == [8, 13]
    assert kv.slots_bound(message).tolist() == [11, 16]
    assert kv.num_dropped.tolist() == [0, 6, 0, 0, 0] and kv.pos_delta.tolist() == [0, 3, 0, -2, 0]


@pytest.mark.parametrize("num_fed", [0, 1, 4, 63])
def test_a_chain_lacks_its_last_draft_alone(num_fed):
    """Catches: a token fed twice over a good entry, or never; an accepted end of a chain taken for fed."""
    kv = make()
    kv.remember_fed(torch.tensor([4, 2]), num_fed)
    for num_accepted in {0, 1, num_fed, num_fed + 1}:
        missing = kv.is_missing(step([2, 4], [num_accepted] * 2)).tolist()
        assert missing == [num_accepted == num_fed + 1] * 2 or num_accepted not in (0, num_fed, num_fed + 1)
    kv.forget(2)
    assert kv.fed[2] == 0 and kv.fed[4] == (1 << num_fed) - 1


def test_a_tree_lacks_the_leaves_that_were_not_fed():
    kv = make()
    levels = [torch.tensor([[1, 2], [3, 0]]), torch.tensor([[4], [0]])]
    kv.remember_fed_nodes(torch.tensor([0, 3]), levels)
    assert kv.fed[[0, 3]].tolist() == [0b1011, 0b100]
    path = [[0, 2, 4, 5], [0, 3, 6, 0]]
    by_accepted = [kv.is_missing(step([0, 3], [n, min(n, 2)], path)).tolist() for n in range(4)]
    assert by_accepted == [[False, False], [False, False], [False, True], [True, True]]
    kv.remember_fed_nodes(torch.tensor([0, 3]), [])
    assert not kv.fed.any()


def test_accepted_nodes_move_together_behind_the_last_root():
    """Catches: a root that is off by one or by the tokens that the draft does not see, paths of other rows."""
    cache = torch.arange(20 * BLOCK).view(20, BLOCK, 1, 1).float()
    kv = make(caches=CacheList([(cache, cache.clone())]))
    reserve(kv, r1=16, r3=16)
    kv.begin(1, 5, 0)
    kv.begin(3, 0, 0)
    kv.apply()

    def entries(row: int) -> list[float]:
        flat = cache.flatten()
        return [float(flat[slot]) for slot in kv.slots([row], [0], [16])]

    before = {row: entries(row) for row in (1, 3)}
    # Row 1: root at entry 14 - 2 - 2 - 5 = 5, nodes 3 and 6 stand; row 3: root at entry 8, node 4 stands.
    kv.gather_accepted(step([3, 1], [1, 2], [[0, 4, 0], [0, 3, 6]], [0, 14, 0, 11, 0]))
    expected = {row: list(values) for row, values in before.items()}
    expected[1][6:8] = before[1][8], before[1][11]
    expected[3][9] = before[3][12]
    assert {row: entries(row) for row in (1, 3)} == expected
