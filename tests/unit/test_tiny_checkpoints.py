"""The bundled checkpoints: what they weigh, that they caption, and that a sighted draft beats a blind one."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from training import tiny_captioner
from vllm_vidspec import assets
from vllm_vidspec.shapeworld import world
from vllm_vidspec.shapeworld.captions import accuracy, count_right
from vllm_vidspec.tools.user_files import read_video

NUM_VIDEOS = 16


@pytest.fixture(scope="module")
def samples() -> list[world.Sample]:
    return [world.held_out(i) for i in range(NUM_VIDEOS)]


@pytest.fixture(scope="module", params=assets.FAMILIES)
def family_run(request, samples):
    """(family, target, pixels, the target's greedy outputs) on the held-out videos."""
    torch.set_num_threads(1)
    target = tiny_captioner.load(assets.checkpoint(request.param, "target"))
    pixels = target.pixels(np.stack([sample.frames for sample in samples]))
    with torch.no_grad():
        return request.param, target, pixels, target.greedy(target.vision(pixels))


def test_all_together_are_small() -> None:
    total = sum(file.stat().st_size for file in Path(assets.__file__).parent.rglob("*") if file.is_file())
    assert total < 35 * 2**20


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no bundled checkpoint"):
        assets.checkpoint("llava", "target")


@pytest.mark.parametrize("family", assets.FAMILIES)
@pytest.mark.parametrize("role", assets.ROLES)
def test_directory_is_complete(family: str, role: str) -> None:
    path = assets.checkpoint(family, role)
    names = {file.name for file in path.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert {"processor_config.json", "chat_template.jinja", "generation_config.json"} <= names
    generation = json.loads((path / "generation_config.json").read_text())
    assert not {"temperature", "top_p", "top_k", "repetition_penalty", "do_sample"} & set(generation)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocabulary = dict(tokenizer["model"]["vocab"]) | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    assert vocabulary == tiny_captioner.token_ids(), "all four share one"
    config = json.loads((path / "config.json").read_text())
    assert config["text_config"]["vocab_size"] == len(vocabulary) <= 1024


def test_the_fast_forward_equals_hugging_face(family_run, samples) -> None:
    """Hidden states and video embeddings agree with the library's own modules, so accuracy here is the model's."""
    family, target, pixels, outputs = family_run
    captions, kept = torch.tensor([outputs[0]]), torch.arange(target.num_video_tokens)
    before, after = target.prompt()
    with torch.no_grad():
        video = target.vision(pixels[:1])
        ours, _, _ = target.teacher_forced(video, captions, kept)
        pieces = [target.embed(torch.tensor([before])), video, target.embed(torch.tensor([after + outputs[0][:-1]]))]
        positions = target.positions(len(before), len(after) + len(outputs[0]) - 1, kept)[:, None]
        theirs = target.text(
            inputs_embeds=torch.cat(pieces, 1),
            position_ids=positions if family == "qwen2.5-vl" else positions[0],
            use_cache=False,
        ).last_hidden_state[:, -len(outputs[0]) :]
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(
            video[0], _library_video_embeddings(family, target, samples[0]), atol=2e-3, rtol=2e-3
        )


def _library_video_embeddings(family: str, target: tiny_captioner.Captioner, sample: world.Sample) -> torch.Tensor:
    """Video embeddings [num_video_tokens, hidden] by the checkpoint's own processor and model code."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(assets.checkpoint(family, "target"))
    frames = sample.frames if family == "qwen2.5-vl" else sample.frames[tiny_captioner.LLAVA_FRAMES]
    inputs = processor.video_processor(videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)], return_tensors="pt")
    model = target.model.model
    if family == "qwen2.5-vl":
        return torch.cat(
            list(model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"]).pooler_output)
        )
    features = model.get_video_features(
        inputs["pixel_values_videos"], vision_feature_layer=-1, vision_feature_select_strategy="full"
    )
    return features.pooler_output[0]


def test_target_names_the_attributes(family_run, samples) -> None:
    _, target, _, outputs = family_run
    right = count_right([target.decode(ids) for ids in outputs], [sample.facts for sample in samples])
    assert accuracy(right) >= 0.90


def test_a_sighted_draft_beats_a_blind_one(family_run) -> None:
    family, _, pixels, outputs = family_run
    draft = tiny_captioner.load(assets.checkpoint(family, "draft"))
    num_tokens = draft.num_video_tokens
    full, tenth, blind = (
        tiny_captioner.acceptance_length(draft, pixels, outputs, kept)
        for kept in (torch.arange(num_tokens), tiny_captioner.uniform_kept(num_tokens, 0.1), torch.arange(0))
    )
    assert full > tenth + 0.1 and tenth > blind + 0.3
    assert 4.0 <= full <= 5.6


def test_target_captions_the_sample_video(family_run, samples) -> None:
    """assets/sample.mp4 is the held-out video 0; compression must not change what the target says by much."""
    _, target, _, _ = family_run
    with torch.no_grad():
        [ids] = target.greedy(target.vision(target.pixels(read_video(assets.SAMPLE_VIDEO)[None])))
    assert accuracy(count_right([target.decode(ids)], [samples[0].facts])) >= 0.85


@pytest.mark.parametrize(
    "family,rendered",
    [
        (
            "qwen2.5-vl",
            "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>describe the video<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        ("llava-onevision", "<|im_start|>user <video>\ndescribe the video<|im_end|><|im_start|>assistant\n"),
    ],
)
@pytest.mark.parametrize("item_type", ["video", "video_url"])
def test_chat_template(family: str, rendered: str, item_type: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets.checkpoint(family, "target"))
    content = [{"type": item_type}, {"type": "text", "text": world.QUESTION}]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == rendered
    ids, words = tokenizer(prompt).input_ids, tiny_captioner.token_ids()
    before, after = tiny_captioner.PROMPTS[family]
    video = "<|video_pad|>" if family == "qwen2.5-vl" else "<video>"
    assert ids == [words[word] for word in f"{before} {video} {after}".split()]
