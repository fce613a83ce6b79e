"""Budgets by hand: what fits, tiles, windows that are steps old, and a step's parts."""

from dataclasses import replace

import pytest

from vidspec_tools import planning
from vidspec_tools.planning import budget
from vidspec_tools.planning.candidates import CHAIN, PARALLEL, TREE, Candidates
from vllm_vidspec.planning.shapes import FP8

BIG, SMALL = planning.target_shape("Qwen2.5-VL-32B"), planning.target_shape("Qwen2.5-VL-7B")
H200, L40S = budget.Setting(BIG, SMALL, "h200"), budget.Setting(BIG, SMALL, "l40s", 4)


def test_what_fits_by_hand():
    """141 GB: 126.9 usable, 66.9 and 16.6 of weights; a request has 25,512 x 262,144 bytes. Catches: a pool that is
    forgotten, or taken out twice; ranks that do not share weights or KV.
    """
    found = budget.fit(BIG, SMALL, 1, 141e9)
    request = 25_512 * 262_144
    assert found.vanilla == int((0.9 * 141e9 - 2 * BIG.params) / request) == 8
    left = 0.97 * (0.9 * 141e9 - 2 * BIG.params - 2 * SMALL.params)
    pool = left * 0.3 * 57_344 / (262_144 + 0.3 * 57_344)
    assert found.drafted == int((left - pool) / request) == 5
    assert found.pool_tokens == pytest.approx(pool / 57_344, abs=17)
    halves = budget.fit(BIG, SMALL, 2, 141e9)
    assert halves.vanilla == int((0.9 * 141e9 - BIG.params) / (request / 2))
    assert budget.fit(BIG, SMALL, 8, 141e9).drafted is None  # 28 heads
    assert budget.fit(BIG, SMALL, 1, 48e9) == budget.Fit(0, 0)
    assert budget.fit(BIG, SMALL, 1, 96e9).vanilla > budget.fit(BIG, SMALL, 1, 96e9).drafted == 0


@pytest.mark.parametrize(
    ("rows", "group", "large", "small"),
    [(26, 5, 256, 192), (26, 7, 256, 192), (25, 5, 128, 128), (26, 4, 128, 128), (2, 5, 16, 16), (6, 5, 32, 32)],
)
def test_tiles_by_hand(rows, group, large, small):
    """26 rows of a group of 5 are 130, in tiles of 128 two. Catches: a second tile of two rows."""
    assert budget.tile_rows(rows, group, budget.MAX_TILE) == large
    assert budget.tile_rows(rows, group, budget.SMALL_TILE) == small
    assert rows * group <= small <= large


def test_after_is_what_the_planner_plans_with():
    """The parts of a chain that splits keys add up to the planner's own step, but for sampling. Catches: a part that is
    left out or counted twice; another number of forwards."""
    for setting in (H200, L40S):
        planned = Candidates(
            planning.Question(BIG, SMALL.quantised(FP8), planning.GPUS[setting.gpu], setting.ranks, draft_gpus=0)
        ).chain(1, 5, 0.9)
        parts = budget.parts(setting, CHAIN, budget.AFTER)
        sampling = parts.pop("target: sampling")
        assert sum(parts.values()) == pytest.approx(planned.verify_s + planned.draft_s + 0.3e-3)
        assert 0 < sampling < 0.01 * sum(parts.values())
        assert budget.tokens(setting, CHAIN, budget.AFTER) == pytest.approx(planned.acceptance_length)


def test_each_change_changes_its_own_part_alone():
    """Catches: a change that is credited to another; a before that is as good as the after."""

    def differ(setting, shape, **changed):
        before, after = (
            budget.parts(setting, shape, ways) for ways in (budget.BEFORE, replace(budget.BEFORE, **changed))
        )
        assert all(after[part] < before[part] + 1e-9 for part in budget.PARTS)
        return {part for part in budget.PARTS if after[part] < before[part] - 1e-9}

    assert differ(L40S, CHAIN, splits_keys=True) == {"target: attention", "draft: attention"}
    assert differ(L40S, TREE, splits_keys=True) == {"draft: attention"}  # the first forward; levels were trees
    assert differ(H200, CHAIN, splits_keys=True) == set()
    assert differ(replace(H200, gpu="a100"), TREE, small_tiles=True) == {"target: attention"}
    assert differ(L40S, TREE, small_tiles=True) == set()  # bound by memory either way
    assert differ(H200, TREE, small_tiles=True) == set()
    assert differ(H200, TREE, kernel_penalties=True) == {"target: sampling"}
    assert differ(H200, CHAIN, kernel_penalties=True) == set()
    assert differ(H200, CHAIN, quantisation=FP8) == {"draft: weights"}
    assert differ(H200, PARALLEL, stale_steps=0) == set()
    fresh = budget.tokens(H200, PARALLEL, replace(budget.BEFORE, stale_steps=0))
    old = budget.tokens(H200, PARALLEL, budget.BEFORE)
    assert 1 < old < 0.75 * fresh


def test_windows_that_are_steps_old():
    """A drafter that is always right, three tokens a step: what a window lacks is what was drawn since. Catches: a
    window that is taken when it is verified, whatever its age; a drafter that is never wrong and yet stale."""
    sure, times = planning.Agreement((1.0,)), planning.StreamTimes(lambda _: 3.0, 1.0)
    fresh = planning.run_streams(sure, 8, times)
    assert planning.run_streams(sure, 8, times, age=0) == fresh
    older = planning.run_streams(sure, 8, times, age=1)
    assert older.stale == fresh.stale == 0
    unsure = planning.Agreement((0.76,))
    lengths = [planning.run_streams(unsure, 8, times, age=age) for age in (0, 1, 2)]
    assert [one.tokens / one.steps for one in lengths] == sorted(
        (one.tokens / one.steps for one in lengths), reverse=True
    )
    assert lengths[0].stale < lengths[1].stale < lengths[2].stale
