"""How many videos fit on a card, by hand."""

import pytest

from vidspec_tools import planning
from vidspec_tools.planning.fit import Fit, fit

BIG, SMALL = planning.target_shape("Qwen2.5-VL-32B"), planning.target_shape("Qwen2.5-VL-7B")


def test_what_fits_by_hand():
    """141 GB: 126.9 usable, 66.9 and 16.6 of weights; a request has 25,512 x 262,144 bytes. Catches: a pool that is
    forgotten, or taken out twice; ranks that do not share weights or KV.
    """
    found = fit(BIG, SMALL, 1, 141e9)
    request = 25_512 * 262_144
    assert found.vanilla == int((0.9 * 141e9 - 2 * BIG.params) / request) == 8
    left = 0.97 * (0.9 * 141e9 - 2 * BIG.params - 2 * SMALL.params)
    pool = left * 0.3 * 57_344 / (262_144 + 0.3 * 57_344)
    assert found.drafted == int((left - pool) / request) == 5
    assert found.pool_tokens == pytest.approx(pool / 57_344, abs=17)
    halves = fit(BIG, SMALL, 2, 141e9)
    assert halves.vanilla == int((0.9 * 141e9 - BIG.params) / (request / 2))
    assert fit(BIG, SMALL, 8, 141e9).drafted is None  # 28 heads
    assert fit(BIG, SMALL, 1, 48e9) == Fit(0, 0)
    assert fit(BIG, SMALL, 1, 96e9).vanilla > fit(BIG, SMALL, 1, 96e9).drafted == 0
    assert [str(Fit(*one)) for one in ((0, 0), (3, None), (3, 1))] == ["-", "- of 3", "1 of 3"]
