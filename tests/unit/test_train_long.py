"""The long pairs' training: its forward is the library's, its labels are right, and a step trains its part."""

import numpy as np
import pytest
import torch
from transformers import AutoProcessor

from benchmarks import reel
from benchmarks.training import train_long
from vllm_vidspec import assets
from vllm_vidspec.tools import pairs

TOKENS = 512


@pytest.fixture(scope="module", params=assets.LONG_PAIRS)
def path(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("long")
    arguments = ["build", "draft", "--family", request.param, "--out", str(folder)]
    train_long.build(train_long.parser().parse_args(arguments))
    return folder


def test_every_question_is_answered_from_the_vocabulary():
    known = set(reel.vocabulary())
    for i in range(60):
        frames, question, scenes = reel.held_out(i, TOKENS)
        assert len(frames) * 32 == TOKENS
        assert {*question.text.split(), *question.answer.split()} <= known
        assert all(f"scene {scenes[told].digits}" in question.answer for told in question.scenes)


def test_labels_are_where_the_frames_differ_from_the_background():
    """Catches: labels of another scene, another row of cells, or frames of another order."""
    rng = np.random.default_rng(0)
    frames, labels = reel.render(rng, reel.draw_reel(rng, 12))
    cells = frames[::2].astype(int).reshape(12, 8, 28, 8, 28, 3).transpose(0, 1, 3, 2, 4, 5).reshape(12, 64, -1, 3)
    uneven = cells.std(2).sum(-1)
    shows = (labels["color"] > 0) | (labels["digit"] > 0)
    plain = labels["pattern"] == 0
    # A shape that fades, or that has the colour of what is around it, is told by less.
    assert (uneven[shows & plain] > 20).mean() > 0.9 and (uneven[~shows & plain] < 20).mean() > 0.97


def test_many_questions_at_once_equal_one_at_a_time_in_the_library(path):
    """Catches: a question that sees another, wrong positions, pixels in another order than the processor's."""
    reader, processor = train_long.Reader(path), AutoProcessor.from_pretrained(path)
    frames, _, scenes = reel.held_out(0, TOKENS)
    rng = np.random.default_rng(0)
    asked = [[*before, *answer] for before, answer in map(reader.encode, train_long.draw_questions(rng, scenes, 3, 1))]
    length = max(map(len, asked))
    texts = torch.tensor([ids + [0] * (length - len(ids)) for ids in asked])
    with torch.no_grad():
        video = reader.vision(frames)
        ours = reader.hidden(video[None], texts[None])[0]
        is_flat = reader.newline is not None
        sampled, _ = pairs.sample_frames(f"{reader.captioner.family}-long", frames)
        shown = torch.from_numpy(sampled).permute(0, 3, 1, 2)
        inputs = processor.video_processor(videos=[shown], do_sample_frames=False, return_tensors="pt")
        model = reader.captioner.model.model
        found = model.get_video_features(**inputs).pooler_output
        found = found[0] if is_flat else torch.cat(list(found))
        video = torch.cat([video, reader.newline[None]]) if is_flat else video
        torch.testing.assert_close(video, found, atol=2e-3, rtol=2e-3)
        of_video, of_text = reader.positions(TOKENS, 1, length)
        before = reader.captioner.embed(torch.tensor(reader.before))
        for row, ids in enumerate(asked):
            embeds = torch.cat([before, video, reader.captioner.embed(texts[row])])[None]
            at = torch.cat([of_video, of_text], 1)[:, None]
            at = at[0] if is_flat else at
            theirs = reader.captioner.text(inputs_embeds=embeds, position_ids=at, use_cache=False)
            theirs = theirs.last_hidden_state[0, -length:]
            torch.testing.assert_close(ours[row, : len(ids)], theirs[: len(ids)], atol=2e-3, rtol=2e-3)


def test_each_phase_trains_its_part(path, monkeypatch):
    monkeypatch.setattr(train_long, "STEP_VIDEO_TOKENS", 256)
    monkeypatch.setattr(train_long, "STEP_TEXT_TOKENS", 64)
    reader, rng = train_long.Reader(path), np.random.default_rng(0)
    model = reader.captioner.model.model
    parts = (model.visual if reader.newline is None else model.vision_tower, reader.captioner.text)
    train_long.answer_step(reader, rng, 0.2)
    trained = [any(weight.grad is not None for weight in part.parameters()) for part in parts]
    assert trained == [False, True]


@pytest.mark.parametrize(
    ("family", "role", "facts"),
    [
        ("qwen2.5-vl-long", "target", 0.8),
        ("qwen2.5-vl-long", "draft", 0.65),
        ("llava-onevision-long", "target", 0.7),
        ("llava-onevision-long", "draft", 0.65),
    ],
)
def test_a_long_pair_answers_from_the_video(family, role, facts):
    """Catches: a checkpoint that was not trained, or whose tower or positions are not those it was trained with."""
    reader = train_long.Reader(assets.checkpoint(family, role))
    found = train_long.validate(reader, 512, 4)
    assert found["facts"] > facts, found
