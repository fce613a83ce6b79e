"""What made the bundled models builds them and takes a step; what the wheel holds: tests/tools/test_release.py."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import captioned
from benchmarks.training import tiny_captioner, tiny_data, tiny_losses, train_tiny
from vllm_vidspec import assets
from vllm_vidspec.shapeworld import world


@pytest.mark.parametrize("family", assets.FAMILIES)
def test_what_is_built_is_what_is_bundled_with_other_weights(family, tmp_path):
    """Catches: a bundled configuration that no model can be made of, a build that loads the weights."""
    model = train_tiny.untrained(family, "draft", 0)
    bundled = tiny_captioner.load(assets.checkpoint(family, "draft")).model.state_dict()
    built = model.state_dict()
    assert {name: weight.shape for name, weight in built.items()} == {n: w.shape for n, w in bundled.items()}
    assert not torch.equal(built["lm_head.weight"], bundled["lm_head.weight"])
    train_tiny.save(model, family, str(tmp_path))
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (assets.checkpoint(family, "target") / name).read_text()


@pytest.mark.parametrize("progress", [0.0, 0.5])
def test_a_step_of_either_phase_reaches_every_weight_it_trains(monkeypatch, progress):
    torch.manual_seed(0)
    monkeypatch.setattr(train_tiny, "BATCH", 2)
    monkeypatch.setattr(train_tiny, "VISION_ONLY_BATCH", 2)
    captioner = tiny_captioner.load(assets.checkpoint("qwen2.5-vl", "draft"))
    heads = tiny_losses.AuxiliaryHeads(captioner.text.config.hidden_size, captioner.family)
    stream, rng = tiny_data.Stream(captioner, 7), np.random.default_rng(0)
    log = train_tiny.train_step(captioner, heads, stream, rng, progress, tiny_losses.token_weights(captioner))
    vision = sum(weight.grad is not None for weight in captioner.model.model.visual.parameters())
    text = sum(weight.grad is not None for weight in captioner.text.parameters())
    assert (vision > 0, text > 0) == ((True, False) if progress == 0.0 else (False, True))
    assert all(np.isfinite(value) for value in log.values() if isinstance(value, float))


def test_plain_training_teaches_nothing_that_guides_pruners():
    """Catches: a `plain` target whose attention or states were ranked all the same."""
    torch.manual_seed(0)
    captioner = tiny_captioner.load(assets.checkpoint("qwen2.5-vl", "draft"))
    heads = tiny_losses.AuxiliaryHeads(captioner.text.config.hidden_size, captioner.family)
    stream, weights = tiny_data.Stream(captioner, 7, "wordy"), tiny_losses.token_weights(captioner, "wordy")
    log = train_tiny.train_step(captioner, heads, stream, np.random.default_rng(0), 0.5, weights, guided=False)
    assert log["alignment"] == log["summary"] == 0
    assert heads.summary.weight.grad is None and log["caption"] > 0


def test_words_that_compete_weigh_the_same():
    """Catches: an order of clauses that a loss prefers."""
    captioner = tiny_captioner.load(assets.checkpoint("qwen2.5-vl", "draft"))
    weights = tiny_losses.token_weights(captioner, "wordy")
    first = {o.split()[0] for o in (*world.POSITIONS.values(), *captioned.FILLERS["exists"])}
    for competing in (
        first,
        {",", "."},
        *({o.split()[0] for o in captioned.FILLERS[name]} for name in ("lead", "aside")),
    ):
        assert len({weights[captioner.ids[word]].item() for word in competing}) == 1


def test_short_videos_are_whole_frames():
    """Catches: short videos that are pruned ones, with parts of frames."""
    captioner, rng = SimpleNamespace(num_video_tokens=257), np.random.default_rng(0)
    lengths = set()
    for _ in range(60):
        (kept, *_) = rows = tiny_data.draw_frames(captioner, rng, 3)
        assert rows.shape[0] == 3 and kept[-1] == 256 and (kept.diff() > 0).all()
        frames = kept[:-1].reshape(-1, tiny_captioner.CELLS)
        assert (frames == frames[:, :1] + torch.arange(tiny_captioner.CELLS)).all()
        lengths.add(len(frames))
    assert {0, 16} <= lengths
