"""The bundled checkpoints: what they weigh, that they caption, and that a sighted draft beats a blind one."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, AutoTokenizer

from benchmarks.captions import accuracy, count_right
from tests import tiny_captioner
from vllm_vidspec import assets
from vllm_vidspec.pruning import linspace_indices
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools.user_files import read_video

NUM_VIDEOS = 16


@pytest.fixture(scope="module")
def samples() -> list[world.Sample]:
    return [world.held_out(i) for i in range(NUM_VIDEOS)]


@pytest.fixture(scope="module", params=assets.FAMILIES)
def family_run(request, samples):
    """(family, target, pixels, the target's greedy outputs) on the held-out videos."""
    target = tiny_captioner.load(assets.checkpoint(request.param, "target"))
    pixels = target.pixels(np.stack([sample.frames for sample in samples]))
    with torch.no_grad():
        return request.param, target, pixels, target.greedy(target.vision(pixels))


def test_all_together_are_small() -> None:
    total = sum(file.stat().st_size for file in Path(assets.__file__).parent.rglob("*") if file.is_file())
    assert total < 40 * 10**6


def test_unknown_names_are_refused() -> None:
    for family, role in (("llava", "target"), ("qwen3-vl", "near"), (assets.PLAIN, assets.FAR)):
        with pytest.raises(ValueError, match=f"no bundled checkpoint {family} / {role}; there are qwen2.5-vl / target"):
            assets.checkpoint(family, role)


@pytest.mark.parametrize("role", assets.ROLES)
@pytest.mark.parametrize("family", assets.FAMILIES)
def test_directory_is_complete(family: str, role: str) -> None:
    path = assets.checkpoint(family, role)
    names = {file.name for file in path.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert {"processor_config.json", "chat_template.jinja", "generation_config.json"} <= names
    generation = json.loads((path / "generation_config.json").read_text())
    assert not {"temperature", "top_p", "top_k", "repetition_penalty", "do_sample"} & set(generation)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocabulary = dict(tokenizer["model"]["vocab"]) | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    assert vocabulary == tiny_captioner.token_ids(family)
    shared = tiny_captioner.token_ids()
    assert list(vocabulary)[:100] == list(shared)[:100] and (vocabulary == shared) == (family != "qwen3-vl")
    config = json.loads((path / "config.json").read_text())
    assert config["text_config"]["vocab_size"] == len(vocabulary) <= 1024


def test_the_fast_forward_equals_hugging_face(family_run, samples) -> None:
    """Hidden states and video embeddings agree with the library's own modules, so accuracy here is the model's."""
    family, target, pixels, outputs = family_run
    captions, kept = torch.tensor([outputs[0]]), torch.arange(target.num_video_tokens)
    with torch.no_grad():
        video = target.vision(pixels[:1])
        ours = target.teacher_forced(video, captions, kept)
        embeds, positions, deeper, at = target.sequence(video, kept, target.segments(), captions[:, :-1])
        shows = torch.zeros(embeds.shape[:2], dtype=torch.bool).index_fill(1, at[0], True)
        theirs = target.text(
            inputs_embeds=embeds,
            position_ids=positions[0][None] if family == "llava-onevision" else positions[:, None],
            use_cache=False,
            **({"visual_pos_masks": shows, "deepstack_visual_embeds": [x[shows] for x in deeper]} if deeper else {}),
        ).last_hidden_state[:, -len(outputs[0]) :]
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(
            video[0], _library_video_embeddings(family, target, samples[0]), atol=2e-3, rtol=2e-3
        )
        if family == "qwen3-vl":
            _assert_library_positions(target, embeds, positions, at)


def _assert_library_positions(target: tiny_captioner.Captioner, embeds, positions, at) -> None:
    """Where the video's parts are, and the rotary positions, are the library's own for the same token ids."""
    kinds = torch.zeros(embeds.shape[:2], dtype=torch.int32).index_fill(1, at[0], 2)
    grid = torch.tensor([[tiny_captioner.QWEN_GROUPS, 8, 8]])
    theirs, _ = target.model.model.get_rope_index(torch.ones_like(kinds).long(), kinds, video_grid_thw=grid)
    assert torch.equal(theirs[:, 0], positions)


def _library_video_embeddings(family: str, target: tiny_captioner.Captioner, sample: world.Sample) -> torch.Tensor:
    """Video embeddings [num_video_tokens, hidden] by the checkpoint's own processor and model code."""
    processor = AutoProcessor.from_pretrained(assets.checkpoint(family, "target"))
    frames = sample.frames[tiny_captioner.LLAVA_FRAMES] if family == "llava-onevision" else sample.frames
    inputs = processor.video_processor(
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)], do_sample_frames=False, return_tensors="pt"
    )
    model = target.model.model
    if family != "llava-onevision":
        found = model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"])
        deeper = [torch.cat(tuple(level)) for level in found.deepstack_features] if family == "qwen3-vl" else []
        return torch.cat([torch.cat(list(found.pooler_output)), *deeper], -1)
    features = model.get_video_features(
        inputs["pixel_values_videos"], vision_feature_layer=-1, vision_feature_select_strategy="full"
    )
    return features.pooler_output[0]


def test_target_names_the_attributes(family_run, samples) -> None:
    """Of assets/sample.mp4 too, which is the held-out video 0: compression must not change what it says by much."""
    _, target, _, outputs = family_run
    right = count_right([target.decode(ids) for ids in outputs], [sample.facts for sample in samples])
    assert accuracy(right) >= 0.90
    with torch.no_grad():
        [ids] = target.greedy(target.vision(target.pixels(read_video(assets.SAMPLE_VIDEO)[None])))
    assert accuracy(count_right([target.decode(ids)], [samples[0].facts])) >= 0.85


@torch.no_grad()
def agreement(draft, pixels: torch.Tensor, outputs: list[list[int]], kept: torch.Tensor) -> list[list[bool]]:
    """Per token of the target's outputs, whether it is what a draft that sees `kept` finds most likely."""
    captions = torch.full((len(outputs), max(map(len, outputs))), -100)
    for row, ids in enumerate(outputs):
        captions[row, : len(ids)] = torch.tensor(ids)
    hidden = draft.teacher_forced(draft.vision(pixels)[:, kept], captions, kept)
    match = draft.lm_head(hidden).argmax(-1) == captions
    return [match[i, : len(ids)].tolist() for i, ids in enumerate(outputs)]


@pytest.mark.parametrize(
    ("role", "least", "most", "than_tenth", "than_blind"),
    [("draft", 0.86, 0.985, 0.05, 0.05), (assets.FAR, 0.70, 0.83, 0.05, 0.03)],
)
def test_a_sighted_draft_beats_a_blind_one(family_run, role, least, most, than_tenth, than_blind) -> None:
    """The far draft is wrong as often as large models' drafts. Catches: one that is near, one that only ever saw whole
    videos, one that is right without looking.
    """
    family, _, pixels, outputs = family_run
    draft = tiny_captioner.load(assets.checkpoint(family, role))
    num_tokens = draft.num_video_tokens
    seen = (torch.arange(num_tokens), linspace_indices(num_tokens, round(num_tokens * 0.1)), torch.arange(0))
    full, tenth, blind = (np.mean(np.concatenate(agreement(draft, pixels, outputs, kept))) for kept in seen)
    assert least <= full <= most and full > tenth + than_tenth and tenth > blind + than_blind


def test_the_plain_pair_needs_no_losses_that_guide(samples) -> None:
    """Catches: a plain target that is bad at captions, so that its attention says nothing for another reason."""
    few = samples[:8]
    target, draft = (tiny_captioner.load(assets.checkpoint(assets.PLAIN, role)) for role in assets.PAIR)
    pixels = target.pixels(np.stack([sample.frames for sample in few]))
    with torch.no_grad():
        outputs = target.greedy(target.vision(pixels))
    right = count_right([target.decode(ids) for ids in outputs], [sample.facts for sample in few])
    assert accuracy(right) >= 0.95
    match = agreement(draft, pixels, outputs, torch.arange(draft.num_video_tokens))
    assert 0.70 <= np.mean(np.concatenate(match)) <= 0.83


@pytest.mark.parametrize("family", assets.FAMILIES)
@pytest.mark.parametrize("item_type", ["video", "video_url"])
def test_chat_template(family: str, item_type: str) -> None:
    """A chat is the prompt that the model was trained with, token by token."""
    tokenizer = AutoTokenizer.from_pretrained(assets.checkpoint(family, "target"))
    content = [{"type": item_type}, {"type": "text", "text": world.QUESTION}]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    ids, words = tokenizer(prompt).input_ids, tiny_captioner.token_ids(family)
    before, after = tiny_captioner.PROMPTS[family]
    # Of Qwen3-VL's parts of a video each has markers of its own, in their place.
    video = {"llava-onevision": "<video>", "qwen3-vl": "<|vision_start|> <|video_pad|> <|vision_end|>"}
    assert ids == [words[word] for word in f"{before} {video.get(family, '<|video_pad|>')} {after}".split()]
