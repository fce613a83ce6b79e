"""Speed: the papers' formulas by hand, streams followed beside a world that has real tokens, and bounds of both."""

import itertools
import random

import pytest

from vidspec_tools.planning import Agreement, StreamTimes, rounds_speedup, run_streams, speedup, window_of
from vllm_vidspec.parallel import WindowRule


def test_speed_model_by_hand():
    """SpecVLM eq. 3; LLaVA-OneVision 7B with 0.5B as published: 4.89 x 78.3 / (5 x 25.8 + 78.3) = 1.85."""
    assert speedup(4.0, 10.0, 5.0, 12.0, 3.0) == 2.0
    assert speedup(4.89, 78.3, 5 * 25.8, 78.3) == pytest.approx(1.847, abs=1e-3)
    assert speedup(1.0, 7.0, 0.0, 7.0) == 1.0, "no drafts"


def test_speedup_is_at_most_the_length():
    """Where verifying takes as long as decoding at least. Catches: a term that is taken away."""
    rng = random.Random(3)
    for _ in range(200):
        length, target = rng.uniform(1, 9), rng.uniform(1, 50)
        found = speedup(length, target, rng.uniform(0, 20), target * rng.uniform(1, 3), rng.uniform(0, 5))
        assert found <= length


def walk_rounds(rate, window, target, draft, number, rng):
    """Algorithm 1, round by round: post-verify looks at a whole window, pre-verify at the first token of the next."""
    emitted, is_post = 0, True
    for _ in range(number):
        if is_post:
            stood = next((place for place in range(window) if rng.random() >= rate), window)
            is_post = stood == window
            emitted += stood + (not is_post)
        else:
            is_post = rng.random() < rate
            emitted += 1
    return emitted * target / (number * max(window * draft, target))


@pytest.mark.parametrize(
    ("rate", "window", "target", "draft"), [(0.85, 9, 420, 46.6), (0.6, 5, 203, 39.8), (0.93, 2, 78, 47)]
)
def test_rounds_agree_with_a_walk(rate, window, target, draft):
    """100,000 rounds. Catches: pre-verify rounds left out, a rejected round without the target's token."""
    walked = walk_rounds(rate, window, target, draft, 100_000, random.Random(5))
    assert rounds_speedup(rate, window, target, draft) == pytest.approx(walked, rel=0.01)


def test_rounds_at_the_ends():
    """p = 1: theorem 3, c where the window is c, and no more where it is longer. p = 0: a token a round."""
    assert rounds_speedup(1.0, 5, 50, 10) == pytest.approx(5.0)
    assert rounds_speedup(1.0, 8, 50, 10) == pytest.approx(5.0)
    assert rounds_speedup(1.0, 3, 50, 10) == pytest.approx(3.0)
    assert rounds_speedup(0.0, 5, 50, 10) == pytest.approx(1.0)
    rates = [rounds_speedup(number / 40, 9, 420, 46.6) for number in range(41)]
    assert rates == sorted(rates)


def test_the_window_is_the_engines():
    """`WindowRule`, heard until it is sure. Catches: rounding up, or without the acceptance rate."""
    for step, draft, rate in ((420, 46.6, 0.8), (78.3, 25.8, 0.5), (203, 39.8, 0.95), (10, 40, 0.5), (900, 10, 0.9)):
        rule = WindowRule(16)
        for _ in range(400):
            rule.hear_step(1, step)
            rule.hear_acceptance(round(100 * rate), 100)
        assert window_of(step, draft, rate, 16) == rule.window(1, draft)


def live(rate, window, step, turn, startup, answer, seed, most_ahead=24):
    """Two actors over real tokens: the text is 0, 1, 2, ...; a wrong token is -1, and so is all after it.

    The drafter's text is a list; nothing is counted, everything is compared.
    """
    rng, text, stream = random.Random(seed), [], []  # committed; the drafter's view of text and stream
    now, heard, turns = 0.0, 0, startup + turn
    result = dict.fromkeys(("steps", "drafts", "accepted", "drawn", "late", "stale", "rejections"), 0)
    waits = False

    def follow():
        nonlocal stream
        if stream[:heard] != text[:heard]:
            stream = text[:heard]

    def draw():
        is_good = stream == list(range(len(stream)))
        good = is_good and rng.random() < rate
        stream.append(len(stream) if good else -1)
        result["drawn"] += 1

    while len(text) < answer:
        begun = len(text)
        agrees = stream[:begun] == text if len(stream) >= begun else text[: len(stream)] == stream
        shown = stream[begun : begun + window] if agrees else []
        stood = next((place for place, token in enumerate(shown) if token != begun + place), len(shown))
        heard = begun
        if waits:
            follow()
            waits = len(stream) - heard >= most_ahead
            turns = now + turn
        now += step(len(shown))
        while not waits and turns <= now:
            draw()
            follow()
            waits = len(stream) - heard >= most_ahead
            turns += turn
        text += list(range(begun, begun + stood + 1))
        result["steps"] += 1
        result["drafts"] += bool(shown)
        result["accepted"] += stood
        result["stale"] += not agrees
        result["late"] += agrees and not shown
        result["rejections"] += stood < len(shown)
    return result | {"tokens": answer, "time": now}


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.85, 0.95, 1.0])
@pytest.mark.parametrize(("window", "ratio", "startup"), [(9, 9.3, 0.0), (3, 2.9, 7.5), (1, 0.7, 2.0), (10, 40.0, 0.0)])
def test_streams_are_those_of_a_world_with_tokens(rate, window, ratio, startup):
    """Step for step the same as actors that compare real texts; the last case makes the drafter wait.

    Catches: a cut at the wrong token, a stream that a rejection does not end, a commit heard too early, the target's
    own token behind a whole window not compared, a limit of tokens ahead that is off by one; late and stale.
    """
    for seed in range(4):
        times = StreamTimes(lambda drafts: ratio + 0.2 * drafts, 1.0, startup)
        run = run_streams(Agreement((rate,)), window, times, answer=300, seed=seed)
        other = live(rate, window, times.step, 1.0, startup, 300, seed)
        assert {name: getattr(run, name) for name in other} == pytest.approx(other)


def test_a_perfect_drafter_is_all_that_counts():
    """p = 1 and a fast target: a token a turn, and the target's own between. A slow one: window + 1 a step."""
    fast = run_streams(Agreement((1.0,)), 5, StreamTimes(lambda drafts: 3.0, 1.0))
    assert 3.0 / fast.speedup(3.0) == pytest.approx(1.0, rel=0.4)
    slow = run_streams(Agreement((1.0,)), 5, StreamTimes(lambda drafts: 100.0, 1.0))
    assert slow.speedup(100.0) == pytest.approx(6.0, rel=0.01)
    assert slow.rejections == slow.stale == 0


def test_no_drafts_no_gain():
    """A drafter that is never there: one token a step. Catches: a step that emits what nobody verified."""
    run = run_streams(Agreement((0.9,)), 5, StreamTimes(lambda drafts: 1.0, 1e9))
    assert run.speedup(1.0) == 1.0 and run.late == run.steps and run.acceptance_length == 1.0


def test_streams_gain_with_agreement_and_stay_below_the_bounds():
    """Catches: more tokens than the drafter drew and the target emitted; a gain that agreement lowers."""
    times = StreamTimes(lambda drafts: 5.0, 1.0)
    found = [run_streams(Agreement((number / 20,)), 5, times, answer=4000) for number in range(21)]
    gains = [run.speedup(5.0) for run in found]
    assert all(after > before - 0.03 for before, after in itertools.pairwise(gains))
    for run in found:
        assert run.tokens <= run.steps + run.accepted and run.accepted <= run.drawn
        assert run.speedup(5.0) <= 1 + 5
    assert found[3] == run_streams(Agreement((0.15,)), 5, times, answer=4000), "the same seed, the same run"


def test_depths_count_from_the_last_cut():
    """Two tokens of a stream are right, the third never; the target says the first itself while the stream begins.

    Catches: rates by another depth, or by the depth from the answer's start.
    """
    run = run_streams(Agreement((1.0, 1.0, 0.0)), 5, StreamTimes(lambda drafts: 100.0, 1.0), answer=300)
    assert run.drafts > 90 and run.accepted == run.rejections == run.drafts
