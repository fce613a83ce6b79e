"""Shape world: deterministic, well-formed, and its captions say exactly its facts."""

import dataclasses

import numpy as np
import pytest

from vllm_vidspec.shapeworld import world

SEEDS = range(8)


@pytest.fixture(scope="module")
def samples() -> list[world.Sample]:
    return [world.held_out(i) for i in SEEDS]


def test_equal_seeds_give_equal_samples() -> None:
    first, second = world.make_sample(17), world.make_sample(17)
    assert np.array_equal(first.frames, second.frames)
    assert (first.caption, first.facts) == (second.caption, second.facts)
    assert all(np.array_equal(first.labels[name], second.labels[name]) for name in world.LABELS)
    assert not np.array_equal(first.frames, world.make_sample(18).frames)


def test_held_out_starts_at_its_seed() -> None:
    assert world.held_out(3).caption == world.make_sample(world.HELD_OUT_SEED + 3).caption


def test_shapes_and_ranges(samples: list[world.Sample]) -> None:
    cells = (world.NUM_FRAMES, world.GRID_SIZE**2)
    for sample in samples:
        assert sample.frames.shape == (32, 112, 112, 3) and sample.frames.dtype == np.uint8
        assert 80 <= len(sample.caption.split()) <= 200
        assert 2 <= len(sample.facts) <= 4
        assert set(sample.labels) == set(world.LABELS)
        for name, num_classes in world.LABELS.items():
            assert sample.labels[name].shape == cells
            assert sample.labels[name].min() >= 0 and sample.labels[name].max() < num_classes
        assert np.array_equal(np.unique(sample.scene_of_frame), np.arange(len(sample.facts)))


def test_vocabulary_is_closed(samples: list[world.Sample]) -> None:
    words = {word for sample in samples for word in sample.caption.split()}
    assert words <= set(world.vocabulary())
    assert len(world.vocabulary()) == len(set(world.vocabulary())) <= 1024


def test_a_caption_says_all_its_facts(samples: list[world.Sample]) -> None:
    for sample in samples:
        assert world.parse_caption(sample.caption) == list(sample.facts)
        assert all(right == total for right, total in world.score_caption(sample.caption, sample.facts).values())


def test_a_wrong_word_costs_its_attribute(samples: list[world.Sample]) -> None:
    sample = samples[0]
    scene = sample.facts[0]
    wrong = next(shape for shape in world.SHAPES if shape != scene.objects[0].shape)
    other = dataclasses.replace(scene.objects[0], shape=wrong)
    facts = (dataclasses.replace(scene, objects=(other, *scene.objects[1:])), *sample.facts[1:])
    scores = world.score_caption(sample.caption, facts)
    assert scores["shape"] == (scores["shape"][1] - 1, scores["shape"][1])
    assert all(right == total for name, (right, total) in scores.items() if name != "shape")


def test_an_empty_caption_scores_nothing(samples: list[world.Sample]) -> None:
    assert all(right == 0 for right, _ in world.score_caption("", samples[0].facts).values())


def test_every_motion_and_event_moves_pixels() -> None:
    """A moving object's centre travels at least a pixel per frame on average, so that motion can be seen."""
    rng = np.random.default_rng(0)
    for motion in world.MOTIONS:
        fact = world.ObjectFact("left", "large", "red", "circle", motion, "remains")
        path = world._draw_path(rng, fact, 16)
        assert (np.abs(np.diff(path, axis=0)).sum() >= 15) == (motion != "nowhere")


def test_what_a_caption_tells_is_in_few_tokens(samples: list[world.Sample]) -> None:
    """A tenth of the cells holds (nearly) all shapes: a good choice of a tenth loses little, a random one much."""
    for sample in samples:
        shows = (sample.labels["color"] > 0).sum()
        assert 0.03 <= shows / sample.labels["color"].size <= 0.12


def test_a_shape_is_seen_from_its_first_frame_to_its_last(samples: list[world.Sample]) -> None:
    """Every described shape is on screen for VISIBLE_FRAMES frames of its scene, and no longer."""
    for sample in samples:
        for scene_idx, scene in enumerate(sample.facts):
            shown = (sample.labels["color"][sample.scene_of_frame == scene_idx] > 0).any(1).sum()
            assert world.VISIBLE_FRAMES <= shown <= world.VISIBLE_FRAMES * len(scene.objects)


def test_lasting_shapes_are_a_choice() -> None:
    """The denser videos that vision towers are trained on show each shape for its whole scene."""
    pairs = [[world.make_sample(seed, brief) for brief in (True, False)] for seed in SEEDS]
    assert all(brief.facts == lasting.facts for brief, lasting in pairs)
    brief, lasting = (sum((pair[i].labels["color"] > 0).sum() for pair in pairs) for i in (0, 1))
    assert lasting > 1.5 * brief
