"""The language pair's captions, training and export, on a made-up language model of three layers."""

import json
import re

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.language import export, measure, train, world
from benchmarks.language import model as language_model
from vllm_vidspec import assets
from vllm_vidspec.families import adapter_for

MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<video>", "<image>"]


def captions(num: int) -> list[tuple[world.Text, tuple[world.Scene, ...]]]:
    found = []
    for i in range(num):
        _, scenes, rng = world.held_out(i)
        found += [(world.caption(rng, scenes), scenes), (world.ask(rng, scenes), scenes)]
    return found


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """A folder as `fetch` writes it: byte-level words learned from captions, and random weights."""
    folder = tmp_path_factory.mktemp("language")
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False)
    words.train_from_iterator([f"{text.question} {text.answer}" for text, _ in captions(200)], trainer)
    tokens = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token=MARKS[1],
        eos_token=MARKS[2],
        pad_token=MARKS[2],
        additional_special_tokens=MARKS,
    )
    tokens.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokens), hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


ROLE = train.Role((0, 2), "draft", 4, 5, 6, 3)


def run(language, folder) -> train.Run:
    model = language_model.build(language, ROLE.layers, ROLE.tower, ROLE.rank, ROLE.seed)
    return train.Run(model, language_model.tokenizer(language), ROLE, folder)


def test_every_fact_of_a_text_is_where_it_says_and_in_the_video():
    for text, scenes in captions(300):
        marked = [text.answer[start:end] for start, end, _, _ in text.facts]
        assert marked == [value for *_, value in text.facts]
        assert all(value in world.VALUES[kind] for *_, kind, value in text.facts)
        assert all(world.claims(text.answer, scenes)), text
        assert not re.search(r"\b[Aa] [aeiou]|\[|\]|  ", text.answer), text
        told = [value for *_, kind, value in text.facts if kind == "background"]
        assert not text.question.startswith(("Desc", "Summ")) or told == [scene.background for scene in scenes]


def test_a_claim_that_is_not_of_the_video_is_found():
    thing = world.Thing("one", "small", "red", "ring", "", "left", "remains")
    scenes = (world.Scene("teal", "plain", (thing,)),)
    told = "A small red ring and a large red ring and a red cross on a teal wall, then a pink wall."
    assert world.claims(told, scenes) == [True, False, False, True, False]


def test_a_thing_is_drawn_where_and_how_its_facts_say():
    thing = world.Thing("two", "large", "red", "square", "", "left", "turns", "white")
    frames = world.render(np.random.default_rng(0), (world.Scene("navy", "plain", (thing,)),), 8).astype(int)
    red = (frames[..., 0] > 170) & (frames[..., 1] < 90)
    white = frames.min(-1) > 170
    assert red[0].any() and not red[-1].any() and white[-1].any() and not white[0].any()
    assert np.argwhere(red[0])[:, 1].mean() > np.argwhere(white[-1])[:, 1].mean() + 30
    rows = np.flatnonzero(red[0].any(1))
    assert (np.diff(rows) > 1).sum() == 1  # two squares, one above the other


def test_facts_are_found_among_a_texts_tokens(language):
    tokens = language_model.tokenizer(language)
    firsts = language_model.first_tokens(tokens)
    texts = [text for text, _ in captions(30)]
    packed = language_model.pack(tokens, texts)
    for i, text in enumerate(texts):
        here = (packed.text == i) & (packed.kind >= 0)
        assert [language_model.KINDS[kind] for kind in packed.kind[here]] == [kind for *_, kind, _ in text.facts]
        for kind, label, (*_, value) in zip(packed.kind[here], packed.label[here], text.facts, strict=True):
            assert label == firsts[kind][world.VALUES[language_model.KINDS[kind]].index(value)]


def test_texts_that_share_a_video_do_not_see_each_other(language, tmp_path):
    training = run(language, tmp_path)
    frames, scenes, rng = world.held_out(0, 4)
    texts = [world.caption(rng, scenes), world.ask(rng, scenes)]
    tokens = training.tokens
    with torch.no_grad():
        both = language_model.hidden(training.model.float(), tokens, language_model.pack(tokens, texts), frames)
        alone = language_model.hidden(training.model, tokens, language_model.pack(tokens, texts[1:]), frames)
    torch.testing.assert_close(both[-len(alone) :], alone, atol=2e-2, rtol=2e-2)


def test_a_run_in_two_parts_ends_in_the_weights_of_one(language, tmp_path):
    torch.set_num_threads(1)
    whole, first = run(language, tmp_path / "whole"), run(language, tmp_path / "parts")
    for _ in range(4):
        whole.one_step()
    for _ in range(2):
        first.one_step()
    first.save()
    second = run(language, tmp_path / "parts")
    assert second.step == 2
    for _ in range(2):
        second.one_step()
    for name, weight in whole.trained.items():
        assert torch.equal(weight, second.trained[name]), name
    moved = [
        name for name, weight in whole.trained.items() if weight.grad is None and name.endswith("up") and weight.any()
    ]
    assert len(moved) == 2 * 7  # every linear map of both layers learned


def test_an_exported_checkpoint_computes_what_was_trained(language, tmp_path):
    training = run(language, tmp_path / "run")
    training.one_step()
    training.save()
    file, folder = tmp_path / "draft.safetensors", tmp_path / "draft"
    export.write_trained(tmp_path / "run" / "state.safetensors", file)
    assert not [name for name in load_file(file) if "exp_avg" in name or "embed_tokens" in name]
    model = language_model.build(language, ROLE.layers, ROLE.tower, ROLE.rank, ROLE.seed)
    export.write_checkpoint(export.merged(model, file), language, folder)
    assert {name for name in load_file(folder / "model.safetensors") if "vision" in name} == {
        name
        for name in load_file(assets.checkpoint("llava-onevision", "draft") / "model.safetensors")
        if "vision" in name
    }  # as vLLM wants them
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert adapter_for(config).name == "llava-onevision"
    frames, scenes, rng = world.held_out(0, 4)
    tokens, text = training.tokens, world.caption(rng, scenes)
    packed = language_model.pack(tokens, [text])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = language_model.hidden(loaded, tokens, packed, frames)
        wanted = language_model.hidden(training.model, tokens, packed, frames)
    torch.testing.assert_close(found, wanted, atol=0.1, rtol=0.1)
    # The processor writes the prompt that was trained on.
    processor = transformers.AutoProcessor.from_pretrained(folder)
    content = [{"type": "video"}, {"type": "text", "text": text.question}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    assert prompt == language_model.BEFORE + "<video>" + language_model.ASKED.format(text.question)
    ids = processor(text=prompt, videos=[frames], return_tensors="pt")
    assert (ids["input_ids"] == config.video_token_index).sum() == 4 * language_model.TOKENS_PER_FRAME + 1
    torch.testing.assert_close(ids["pixel_values_videos"], language_model.pixels(frames), atol=0.02, rtol=0)
    assert isinstance(measure.answer(loaded, tokens, frames, text.question, 3), str)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
