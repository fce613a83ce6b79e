"""The tables of a draft in the target's own cache, over random lives of rows, and what of a prompt is copied for it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.engine.fakes import CPU, staged
from vllm_vidspec.engine.draft.kv import NULL_BLOCK
from vllm_vidspec.engine.draft.prefill_job import PrefillJob
from vllm_vidspec.engine.draft.target_kv import TargetBlocks, TargetKV
from vllm_vidspec.engine.draft.target_prefill import TargetPrefill

SIZE, ROWS, NUM_BLOCKS, NUM_OWN, LONGEST = 4, 3, 30, 5, 40


@pytest.fixture(autouse=True, scope="module")
def staged_writes():
    with pytest.MonkeyPatch.context() as patch:
        staged(patch)
        yield


class Target:
    """A cache whose entry of a row's token is a number that no other has, and a scheduler that hands out its blocks."""

    def __init__(self) -> None:
        self.cache = torch.zeros(NUM_BLOCKS + NUM_OWN, SIZE, 1, 1)
        self.free, self.blocks = list(range(1, NUM_BLOCKS)), {}
        own = range(NUM_BLOCKS, NUM_BLOCKS + NUM_OWN)
        self.kv = TargetKV(TargetBlocks(own, [(self.cache, self.cache)]), SIZE, ROWS, LONGEST, CPU)
        self.seen: dict[int, np.ndarray] = {}  # by row what its draft sees of the first tokens
        self.num_given = 0

    def give(self, row: int, num_blocks: int, is_new: bool) -> None:
        if is_new:
            self.end(row)
        elif row not in self.blocks:
            return
        num_blocks = min(num_blocks, len(self.free), LONGEST // SIZE - len(self.blocks.get(row, ())))
        new = [self.free.pop() for _ in range(num_blocks)]
        self.blocks[row] = self.blocks.get(row, []) + new
        for block in new:
            self.num_given += 1
            self.cache[block, :, 0, 0] = torch.arange(SIZE) + SIZE * self.num_given
        self.kv.append(row, new, is_new)

    def take(self, row: int, keep: list[bool]) -> None:
        whole = np.array(keep[: len(keep) // SIZE * SIZE][: SIZE * len(self.blocks.get(row, ()))], dtype=bool)
        if row not in self.blocks or row in self.seen:
            return
        missing = np.flatnonzero(~whole)[: -int(whole.sum()) % SIZE]
        whole[missing] = True
        before = self.kv.num_free_blocks
        if self.kv.take(row, whole):
            self.seen[row] = whole
        else:
            assert self.kv.num_free_blocks == before

    def end(self, row: int) -> None:
        self.kv.remove(row)
        self.free += self.blocks.pop(row, [])
        self.seen.pop(row, None)

    def check(self) -> None:
        self.kv.apply()
        tables = self.kv.block_tables.numpy()
        used = [block for row in self.seen for block in tables[row] if block >= NUM_BLOCKS]
        assert len(used) == len(set(used)) == self.kv.num_used_blocks
        for row, keep in self.seen.items():
            blocks = self.blocks[row]
            theirs = self.cache[blocks].flatten().numpy()
            visible = np.concatenate((theirs[: len(keep)][keep], theirs[len(keep) :]))
            num_blocks = len(visible) // SIZE
            assert len(visible) % SIZE == 0 and (tables[row, num_blocks:] == NULL_BLOCK).all()
            ours = self.cache[tables[row, :num_blocks]].flatten().numpy()
            assert (np.sort(ours) == np.sort(visible)).all()
            behind = len(visible) - (len(theirs) - len(keep))  # past the prompt entries are in order
            assert (ours[behind:] == visible[behind:]).all()


ROW = st.integers(0, ROWS - 1)
GIVEN = st.tuples(st.just("give"), ROW, st.integers(0, 6), st.booleans())
TAKEN = st.tuples(st.just("take"), ROW, st.lists(st.booleans(), max_size=6 * SIZE))
LIVES = st.lists(st.one_of(GIVEN, TAKEN, st.tuples(st.just("end"), ROW), st.tuples(st.just("check"))), max_size=30)


HALF = [True, False] * (3 * SIZE)
ROW_AGAIN = [("give", 0, 6, True), ("take", 0, [True] * 24), ("check",), ("give", 0, 3, True), ("take", 0, HALF)]
FULL_POOL = [step for row in range(ROWS) for step in (("give", row, 6, True), ("take", row, HALF))]


@given(LIVES)
@example(ROW_AGAIN)
@example(FULL_POOL)
@settings(max_examples=300, deadline=None)
def test_a_table_is_what_the_draft_sees_and_nothing_else(life):
    """Catches: a block of another row or of an earlier request, one handed out twice, a column that the device misses;
    an entry out of place past the prompt; blocks taken for a row that is refused.
    """
    target = Target()
    for name, *arguments in life:
        getattr(target, name)(*arguments)
    target.check()
    for row in range(ROWS):
        target.end(row)
    assert target.kv.num_used_blocks == 0 and not list(np.flatnonzero(target.kv.capacity_np))


def test_bytes_are_copied_as_they_are():
    """Catches: float8 that is rounded, or that torch cannot index."""
    cache = torch.arange(8 * SIZE, dtype=torch.uint8).view(torch.float8_e4m3fn).view(8, SIZE, 1, 1)
    kv = TargetKV(TargetBlocks(range(6, 8), [(cache, cache)]), SIZE, ROWS, LONGEST, CPU)
    kv.append(0, [3, 1, 2], True)
    assert kv.take(0, np.array([True, False] * SIZE))
    assert cache.view(torch.uint8)[6].flatten().tolist() == [12, 14, 4, 6]


@pytest.mark.parametrize("has_scores", [True, False])
def test_whole_blocks_are_filled_with_the_next_best(has_scores):
    """A prompt of 4 tokens of text, 12 of a video of which 3 are kept, and 3 of text, one of them in the last block.

    Catches: text that is dropped, a token of the last block that is, a fill by place, one where nothing is missing.
    """
    where = torch.arange(4, 16)
    scores = torch.tensor([0.9, 0.8, 0.1, 0.2, 0.3, 0.7, 0.1, 0.1, 0.1, 0.1, 0.1, 0.95])
    unit = SimpleNamespace(places=range(1))
    plan = SimpleNamespace(
        num_tokens=19, items=(SimpleNamespace(where=where),), units=(unit,), num_kept=10, num_dropped=9, pos_delta=0,
        num_axes=1,
    )  # fmt: skip
    kept = torch.tensor([0, 1, 11])
    job = PrefillJob("r", 0, plan, [scores] if has_scores else None, kept=[kept])
    prefill = SimpleNamespace(_kv=SimpleNamespace(block_size=SIZE))
    keep = TargetPrefill._visible(prefill, job)
    assert keep[:4].all() and keep[16:].all() and keep[where[kept]].all()
    assert int(keep[:16].sum()) == 8
    assert not has_scores or keep[where].nonzero()[:, 0].tolist() == [0, 1, 5, 11]
    assert torch.equal(keep, TargetPrefill._visible(prefill, job)), "ranks would see different tokens"
    job.kept = [torch.arange(12)]
    assert TargetPrefill._visible(prefill, job).all()
