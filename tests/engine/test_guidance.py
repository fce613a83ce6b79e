"""Guidance against a float64 reference in every scheduling situation; videos in parts are the whole, bit for bit."""

import dataclasses
from unittest import mock

import numpy as np
import pytest
import torch

from tests.engine import float64, harness
from tests.engine.harness import CHUNK_SIZES, FAMILIES, LLAVA, NO_CACHE, QWEN, QWEN3, in_place_of
from tests.engine.random_models import QWEN2, build
from vllm_vidspec.engine.hooks.attention import AttentionGuidance
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.families import adapter_for
from vllm_vidspec.pruning import PruneInputs, budget, get_pruner
from vllm_vidspec.tools import pairs

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4  # relative, of every single token
LONG_QUESTION = "describe the video please , what happens in this clip ? tell me about color and shape and move"
ATTENTION = {"pruner": "specvlm", "guidance_layers": "all"}


def ask(family: str, *videos: np.ndarray, question: str = pairs.DEFAULT_QUESTION, max_tokens: int = 2) -> tuple:
    return pairs.media_prompt(family, question, videos=list(videos)), {"max_tokens": max_tokens}


def check_scores(family: str, outputs: list, videos: list[list[np.ndarray]], records: list[dict], layer: int | None):
    """Every prompt's scores equal the reference; `layer` None: attention, else UV at that layer."""
    by_req = {record["req_id"].split("-")[0]: record for record in records}
    assert len(by_req) == len(outputs)
    for output, shown in zip(outputs, videos, strict=True):
        record = by_req[output.request_id.split("-")[0]]
        for grid, kept, own in zip(record["grids"], record["kept_indices"], record["scores"], strict=True):
            assert len(kept) == budget(grid.num_tokens, 0.9) and torch.equal(kept, kept.unique())
            # By its own scores, not by those of another video of the prompt.
            assert layer is None or torch.equal(kept, get_pruner("uv")(PruneInputs(grid, len(kept), own)))
        scores = torch.cat(record["scores"])
        assert float64.guidance_error(scores, family, list(output.prompt_token_ids), shown, layer) <= TOLERANCE


def check_parts(engine: harness.Engine) -> None:
    """Over 1, 2, 3 and more frames at a time a draft's tower says what it says of the whole."""
    rows, draft = engine.runner.requests, engine.draft
    with mock.patch.object(rows, "add", side_effect=rows.add) as add:
        engine.generate(harness.videos(engine.family, 2, max_tokens=2))
    encode = torch.inference_mode()(draft.encode)
    features = [feature for call in add.call_args_list for feature in call.args[0].features]
    assert len(features) == 2
    for feature in features:
        data = {key: element.data for key, element in feature.data.items()}
        grid = adapter_for(draft.hf_config).frames(feature.modality, data, draft.hf_config)
        (whole,) = encode([feature], [None])
        assert grid.num_frames > 3 and len(whole) == grid.num_tokens
        for size in (1, 2, 3, grid.num_frames - 1):
            cuts = [range(i, min(i + size, grid.num_frames)) for i in range(0, grid.num_frames, size)]
            parts = [encode([feature], [cut])[0] for cut in cuts]
            sizes = [len(cut) * grid.tokens_per_frame + grid.num_trailing for cut in cuts]
            assert [len(part) for part in parts] == sizes
            own = [part[: len(part) - grid.num_trailing] for part in parts[:-1]]
            assert torch.equal(torch.cat([*own, parts[-1]]), whole)
        # Not every part would do.
        assert not torch.equal(*(encode([feature], [range(i, i + 1)])[0] for i in range(2)))


def test_parts_of_an_untrained_familys_video(tmp_path):
    with harness.engine(QWEN, "target", {"model": build(QWEN2, tmp_path)}, pruner="none") as engine:
        check_parts(engine)


@pytest.mark.parametrize("family", [*FAMILIES, QWEN3])
def test_scores_equal_the_reference(family):
    """Several prompts in many chunks: one video, two, a long question; the tower encodes in parts, too."""
    one, two, three = harness.shown(3)
    shown = [[one], [two, three], [two]]
    # In small chunks the draft's tower takes several steps, in which the answers go on.
    asked = (((one,), {}), ((two, three), {}), ((two,), {"question": LONG_QUESTION}))
    requests = [ask(family, *videos, max_tokens=16, **question) for videos, question in asked]
    overrides = NO_CACHE | {"max_num_batched_tokens": CHUNK_SIZES[family]}
    with harness.engine(family, "draft", overrides, pruner="auto", guidance_layers="all") as engine:
        check_parts(engine)
        for pruner, layer in (("specvlm", None), ("uv", 3)):
            engine.retune(pruner=pruner)
            engine.speculator.backend.forget_media()
            with engine.watched() as records:
                outputs, counted = engine.measured(requests)
            assert counted["guided_prompts"] == 3 and counted["guidance_us"] > 0
            check_scores(family, outputs, shown, records, layer)


def test_a_cached_text_counts_as_if_it_were_computed():
    """A video from the cache under a question of its own; the same prompt again, after another one too, and another
    turn behind it, of each of which the last blocks alone are computed: eq. 5 is the mean over all of the text.

    Catches: a repeated prompt that is guided by its last block; scores of it that take the place of the whole text's;
    tokens that count twice; a question led by another question's scores.
    """
    family, (video,) = QWEN, harness.shown(1)
    first, second = ask(family, video), ask(family, video, question=f"{LONG_QUESTION} {LONG_QUESTION}")
    prompt, sampling = second
    turn = (
        {**prompt, "prompt": prompt["prompt"] + " what happens then ? tell me about color and shape and move"},
        sampling,
    )
    longer = ask(family, video, question=f"{LONG_QUESTION} {LONG_QUESTION} {LONG_QUESTION}")
    # Of the first question no block is full. The last one begins as the second, and goes on otherwise.
    asked, reused = [first, second, second, first, second, turn, longer], [0, 0, 1, 0, 1, 1, 0]
    outputs = []
    with harness.engine(family, "draft", {"block_size": 32}, **ATTENTION) as engine, engine.watched() as records:
        for request, is_reused in zip(asked, reused, strict=True):
            output, counted = engine.measured([request])
            outputs.extend(output)
            assert counted["guided_prompts"] == 1 and counted["reused_guidance"] == is_reused
    assert all(output.num_cached_tokens > 200 for output in outputs[1:])
    for output, record in list(zip(outputs, records, strict=True))[:-1]:
        check_scores(family, [output], [[video]], [record], None)
    # Of a text that begins as another one and goes on otherwise what is not computed has no say.
    again, record = outputs[-1], records[-1]
    reference, is_visual, _ = float64.run(family, list(again.prompt_token_ids), [video])
    cached, end = again.num_cached_tokens, int(is_visual.nonzero()[-1]) + 1
    assert cached > end
    expected = torch.stack([weights[0, :, cached:].mean((0, 1)) for weights in reference.attentions]).mean(0)[is_visual]
    assert float64.relative_error(record["scores"][0], expected) <= TOLERANCE


def test_uv_of_a_cached_video_is_remembered():
    """Hidden states of cached tokens are not computed: the scores of the last prompt with that video stand in."""
    family, (video,) = LLAVA, harness.shown(1)
    first, second = ask(family, video), ask(family, video, question=LONG_QUESTION)
    with harness.engine(family, "draft", pruner="uv") as engine, engine.watched() as records:
        _, before = engine.measured([first])
        _, after = engine.measured([second])
        engine.guides[0].forget_scores()
        _, forgotten = engine.measured([second])
    assert before["guided_prompts"] == 1 and before["reused_guidance"] == 0
    assert after["guided_prompts"] == 1 and after["reused_guidance"] == 1
    assert torch.equal(records[0]["scores"][0], records[1]["scores"][0])
    assert forgotten["unguided_cached"] == 1 and records[2]["scores"] is None
    grid, kept = records[2]["grids"][0], records[2]["kept_indices"][0]
    assert torch.equal(kept, get_pruner("uniform")(PruneInputs(grid, len(kept))))


def test_guidance_layers_are_the_ones_asked_for():
    """Catches: layers summed by order of execution instead of index, a subset ignored; a query of one key fewer, which
    is planted."""
    family, (video,) = QWEN, harness.shown(1)
    request, original = ask(family, video), AttentionGuidance.before_forward

    def shifted(self, batch):
        original(self, batch)
        self._step = self._step and dataclasses.replace(self._step, query_pos=self._step.query_pos - 1)

    with harness.engine(family, "draft", pruner="specvlm", guidance_layers=[3, 1], overrides=NO_CACHE) as engine:
        with engine.watched() as records:
            outputs = engine.generate([request])
            engine.retune(guidance_layers=[0])
            engine.generate([request])
            with mock.patch.object(AttentionGuidance, "before_forward", shifted):
                engine.generate([request])
        with pytest.raises(VidSpecError, match="layers 0 to 3"):
            engine.runner.knobs.retune({"guidance_layers": [4]})
        with pytest.raises(VidSpecError, match="num_speculative_tokens cannot change"):
            engine.runner.knobs.retune({"num_speculative_tokens": 2})
    reference, is_visual, _ = float64.run(family, list(outputs[0].prompt_token_ids), [video])
    for record, layers, is_right in zip(records, ((1, 3), (0,), (0,)), (True, True, False), strict=True):
        expected = float64.attention_scores(reference, is_visual, layers)
        assert (float64.relative_error(record["scores"][0], expected) <= TOLERANCE) == is_right


def test_listening_changes_no_bit_of_the_target(monkeypatch):
    """Log-probabilities of one token each are bitwise those of an engine that listens to nothing."""
    requests = harness.videos(QWEN, 4, max_tokens=1, logprobs=5)
    heard, logprobs = [], []

    def answer(engine):
        outputs = engine.generate(requests)
        return [{t: v.logprob for t, v in o.outputs[0].logprobs[0].items()} for o in outputs]

    def hear(take, row):
        """After one token nobody drafts: scores are looked at where they are taken."""
        if (pending := take(row)) is not None:
            heard.append(pending.wait().scores)

    with harness.engine(QWEN, "draft", NO_CACHE, pruner="uniform") as engine:
        assert not engine.guides
        expected = answer(engine)
    with harness.engine(QWEN, "draft", NO_CACHE, pruner="auto") as engine:
        for guide in engine.guides:
            in_place_of(monkeypatch, guide, "take")(hear)
        for pruner in ("specvlm", "uv"):
            engine.retune(pruner=pruner)
            logprobs.append(answer(engine))
    assert logprobs == [expected] * 2 and len(heard) == 8 and all(scores is not None for scores in heard)
