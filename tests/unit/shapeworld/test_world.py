"""Shape world: deterministic, well-formed, and its captions say exactly its facts."""

import dataclasses

import numpy as np
import pytest

from vllm_vidspec.shapeworld import captions, world

SEEDS = range(8)


@pytest.fixture(scope="module")
def samples() -> list[world.Sample]:
    return [world.held_out(i) for i in SEEDS]


def test_samples(samples: list[world.Sample]) -> None:
    """Shapes, dtypes and ranges; a closed vocabulary; captions that say all their facts; and what is to be seen."""
    cells, vocabulary = (world.NUM_FRAMES, world.GRID_SIZE**2), set(world.vocabulary())
    assert len(world.vocabulary()) == len(vocabulary) <= 1024
    for sample in samples:
        assert sample.frames.shape == (32, 112, 112, 3) and sample.frames.dtype == np.uint8
        assert set(sample.labels) == set(world.LABELS)
        for name, num_classes in world.LABELS.items():
            assert sample.labels[name].shape == cells
            assert sample.labels[name].min() >= 0 and sample.labels[name].max() < num_classes
        assert 2 <= len(sample.facts) <= 4
        assert np.array_equal(np.unique(sample.scene_of_frame), np.arange(len(sample.facts)))
        words = sample.caption.split()
        assert 80 <= len(words) <= 200 and set(words) <= vocabulary
        assert world.parse_caption(sample.caption) == list(sample.facts)
        assert all(right == total for right, total in world.score_caption(sample.caption, sample.facts).values())
        assert all(right == 0 for right, _ in world.score_caption("", sample.facts).values())
        # A tenth of the cells holds (nearly) all shapes: a good choice of a tenth loses little, a random one much.
        is_shape = sample.labels["color"] > 0
        assert 0.03 <= is_shape.mean() <= 0.12
        # Every described shape is on screen for VISIBLE_FRAMES frames of its scene, and no longer.
        for scene_idx, scene in enumerate(sample.facts):
            shown = is_shape[sample.scene_of_frame == scene_idx].any(1).sum()
            assert world.VISIBLE_FRAMES <= shown <= world.VISIBLE_FRAMES * len(scene.objects)


@pytest.mark.parametrize("style", world.STYLES[1:])
def test_other_styles_say_the_same_facts(samples: list[world.Sample], style: str) -> None:
    """Catches: a filler that reads as a fact, a word that no tokenizer has, a style that changes what is to be seen."""
    styled = [world.make_sample(world.HELD_OUT_SEED + seed, style=style) for seed in SEEDS]
    for ours, usual in zip(styled, samples, strict=True):
        assert ours.facts == usual.facts and np.array_equal(ours.frames, usual.frames)
        assert ours.caption != usual.caption and set(ours.caption.split()) <= set(world.vocabulary())
        assert world.parse_caption(ours.caption) == list(ours.facts)


def test_wordy_captions_are_mostly_filler() -> None:
    """Catches: a style whose uncertainty lies in facts; an order of clauses that is always the same."""
    words = [w for seed in range(20) for w in world.make_sample(seed, style="wordy").caption.split()]
    telling = sum(word in captions.ATTRIBUTE_WORDS for word in words)
    assert 3 * telling < len(words)
    places = {option.split()[0] for option in world.POSITIONS.values()}
    clauses = " ".join(words).split(" , ")[1:]
    lead = {option: len(option.split()) for option in world.FILLERS["lead"]}
    first = [c.split()[next(n for option, n in lead.items() if c.startswith(option))] in places for c in clauses]
    assert 0.3 < np.mean(first) < 0.7


def test_a_wrong_word_costs_its_attribute(samples: list[world.Sample]) -> None:
    sample = samples[0]
    scene = sample.facts[0]
    wrong = next(shape for shape in world.SHAPES if shape != scene.objects[0].shape)
    other = dataclasses.replace(scene.objects[0], shape=wrong)
    facts = (dataclasses.replace(scene, objects=(other, *scene.objects[1:])), *sample.facts[1:])
    scores = world.score_caption(sample.caption, facts)
    assert scores["shape"] == (scores["shape"][1] - 1, scores["shape"][1])
    assert all(right == total for name, (right, total) in scores.items() if name != "shape")
