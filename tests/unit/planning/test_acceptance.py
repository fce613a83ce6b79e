"""Acceptance: closed forms by hand; what is published is met again."""

import pytest

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.planning import acceptance
from vllm_vidspec.planning.acceptance import Agreement, default_agreement

LIST = Agreement((0.9, 0.7, 0.5), 0.4)


def test_lengths_by_hand():
    """1 + p + p^2; then a list whose last rate goes on. Catches: K off by one, the target's own token not counted; of
    runner-ups s of everything instead of s of what is left.
    """
    assert Agreement((0.5,)).chain_length(2) == 1.75
    assert LIST.chain_length(4) == pytest.approx(1 + 0.9 + 0.63 + 0.315 + 0.1575)
    assert LIST.chain_length(0) == 1.0
    assert LIST.at(1, 1) == pytest.approx(0.1 * 0.4)
    assert LIST.at(2, 2) == pytest.approx(0.3 * 0.4 * 0.6)
    assert LIST.at(7) == 0.5
    # Root with two children, the better of which has one.
    assert LIST.tree_length(((0,), (1,), (0, 0))) == pytest.approx(1 + 0.9 + 0.04 + 0.63)


def test_rates_are_found_again():
    for rate in (0.3, 0.8, 0.95):
        assert acceptance.rate_of_chain(Agreement((rate,)).chain_length(5), 5) == pytest.approx(rate)
        assert acceptance.rate_of_tree(Agreement((rate,), 0.3).tree_length(), 0.3) == pytest.approx(rate)
    assert acceptance.rate_of_chain(9.0, 5) == pytest.approx(1.0), "longer than any: the nearest"


def test_positions_as_vllm_prints_them():
    """docs/benchmarks.md: 84.8, 81.9, 68.6 %. Catches: shares of all drafts taken for those after the one before."""
    agreement = acceptance.agreement_of_positions([0.848, 0.8186, 0.6863])
    assert agreement.rates == pytest.approx((0.848, 0.8186 / 0.848, 0.6863 / 0.8186))
    assert agreement.chain_length(3) == pytest.approx(1 + 0.848 + 0.8186 + 0.6863)
    for wrong in ([], [0.0], [1.1], [0.5, -0.1], [0.5, 0.6], [float("nan")]):
        with pytest.raises(VidSpecError, match="--acceptance"):
            acceptance.agreement_of_positions(wrong)


def test_published_lengths_are_met():
    """What the defaults are backed out of, they give again. Catches: tau without the target's own token; another r."""
    llava = default_agreement("llava-onevision", 0.9)
    assert llava.chain_length(5) == pytest.approx(3.79, abs=1e-6)
    assert llava.tree_length() == pytest.approx(4.48, abs=1e-6)
    assert default_agreement("qwen2.5-vl", 0.9).tree_length() == pytest.approx(4.23, abs=1e-6)
    assert default_agreement("llava-onevision", 0.0).chain_length(5) == pytest.approx(4.12, abs=1e-6)
    # Held out: SD-Tree is not part of the fit (3.68 without the target's own).
    assert default_agreement("llava-onevision", 0.0).tree_length() == pytest.approx(4.68, rel=0.02)
    assert abs(acceptance.RUNNER_UP - 0.40) < 0.01
    # Streams: 1 / (1 - p) between rejections, misses by r as published.
    misses = [1 - default_agreement("qwen2.5-vl", ratio).rates[0] for ratio in (0.9, 1.0)]
    assert misses[1] / misses[0] == pytest.approx(6.82 / 4.53)


@pytest.mark.parametrize("family", ["llava-onevision", "qwen2.5-vl", "qwen2-vl", "qwen3-vl"])
@pytest.mark.parametrize("is_self", [False, True])
def test_defaults_fall_with_the_ratio_and_say_where_they_come_from(family, is_self):
    """Catches: a hole in the lines between ratios; a source not said; a draft that beats drafting for itself."""
    found = [default_agreement(family, number / 100, is_self) for number in range(101)]
    rates = [one.rates[0] for one in found]
    assert rates == sorted(rates, reverse=True) and rates[-1] > 0 and rates[0] < 1
    assert all("published" in one.source for one in found)
    assert default_agreement(family, 0.9, True).rates[0] > default_agreement(family, 0.9).rates[0]
