"""Speed: the papers' formulas by hand, streams followed beside a world that has real tokens, and bounds of both."""

import random

import pytest

from vllm_vidspec.planning.acceptance import Agreement
from vllm_vidspec.planning.speed import run_streams, speedup, window_of
from vllm_vidspec.streams import WindowRule


def test_speed_model_by_hand():
    """SpecVLM eq. 3; LLaVA-OneVision 7B with 0.5B as published: 4.89 x 78.3 / (5 x 25.8 + 78.3) = 1.85."""
    assert speedup(4.0, 10.0, 5.0, 12.0, 3.0) == 2.0
    assert speedup(4.89, 78.3, 5 * 25.8, 78.3) == pytest.approx(1.847, abs=1e-3)
    assert speedup(1.0, 7.0, 0.0, 7.0) == 1.0, "no drafts"


def test_the_window_is_the_engines():
    """`WindowRule`, heard until it is sure. Catches: rounding up, or without the acceptance rate."""
    for step, draft, rate in ((420, 46.6, 0.8), (78.3, 25.8, 0.5), (203, 39.8, 0.95), (10, 40, 0.5), (900, 10, 0.9)):
        rule = WindowRule(16)
        for _ in range(400):
            rule.observe_step(1, step)
            rule.observe_acceptance(round(100 * rate), 100)
        assert window_of(step, draft, rate, 16) == rule.window(1, draft)


def live(rate, window, step, seed, turn=1.0, answer=300, most_ahead=24):
    """Two actors over real tokens: the text is 0, 1, 2, ...; a wrong token is -1, and so is all after it."""
    rng, text, stream = random.Random(seed), [], []  # committed; the drafter's view of text and stream
    now, told, done, waits = 0.0, 0, turn, False
    result = dict.fromkeys(("steps", "drafts", "accepted", "drawn", "stale"), 0)

    def follow():
        nonlocal stream
        if stream[:told] != text[:told]:
            stream = text[:told]

    def draft():
        is_good = stream == list(range(len(stream)))
        stream.append(len(stream) if is_good and rng.random() < rate else -1)
        result["drawn"] += 1

    while len(text) < answer:
        begun = len(text)
        agrees = stream[:begun] == text if len(stream) >= begun else text[: len(stream)] == stream
        shown = stream[begun : begun + window] if agrees else []
        accepted = next((place for place, token in enumerate(shown) if token != begun + place), len(shown))
        told = begun
        if waits:
            follow()
            waits = len(stream) - told >= most_ahead
            done = now + turn
        now += step
        while not waits and done <= now:
            draft()
            follow()
            waits = len(stream) - told >= most_ahead
            done += turn
        text += list(range(begun, begun + accepted + 1))
        result["steps"] += 1
        result["drafts"] += bool(shown)
        result["accepted"] += accepted
        result["stale"] += not agrees
    return result | {"tokens": answer, "time": now}


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.85, 0.95, 1.0])
@pytest.mark.parametrize(("window", "ratio"), [(9, 9.3), (3, 2.9), (1, 0.7), (10, 40.0)])
def test_streams_are_those_of_a_world_with_tokens(rate, window, ratio):
    """Step for step the same as actors that compare real texts; the last case makes the drafter wait."""
    for seed in range(4):
        run = run_streams(Agreement((rate,)), window, ratio, 1.0, answer=300, seed=seed)
        other = live(rate, window, ratio, seed)
        assert {name: getattr(run, name) for name in other} == pytest.approx(other)


def test_depths_count_from_the_last_cut():
    """Two tokens of a stream are right, the third never; the target says the first itself while the stream begins."""
    run = run_streams(Agreement((1.0, 1.0, 0.0)), 5, 100.0, 1.0, answer=300)
    assert run.drafts > 90 and run.accepted == run.drafts
    assert run == run_streams(Agreement((1.0, 1.0, 0.0)), 5, 100.0, 1.0, answer=300), "the same seed, the same run"
    slow = run_streams(Agreement((1.0,)), 5, 100.0, 1.0)
    assert slow.speedup(100.0) == pytest.approx(6.0, rel=0.01) and slow.stale == 0
    none = run_streams(Agreement((0.9,)), 5, 1.0, 1e9)
    assert none.speedup(1.0) == none.acceptance_length == 1.0
