"""Everything that vLLM can return of a request is vanilla's, whether its step verifies drafts or not."""

import dataclasses
from unittest import mock

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample import sampler
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from tests.engine import harness
from tests.engine.harness import LLAVA, NO_CACHE, QWEN
from vllm_vidspec.metrics import difference
from vllm_vidspec.tools import pairs

pytestmark = pytest.mark.engine

# Parameters that ask for an output, each alone and with what vLLM lets stand beside it.
ASKS = (
    {},
    *({"logprobs": number} for number in (0, 1, 3, -1)),
    *({"logprob_token_ids": ids} for ids in ([44], [3, 44, 9, 60, 21, 7])),
    {"logprobs": 3, "logprob_token_ids": [44, 5, 6]},
    {"logprobs": 2, "flat_logprobs": True},
    *({"prompt_logprobs": number} for number in (0, 2, -1)),
    {"prompt_logprob_token_ids": [[3, 44], [5, -1]], "prompt_logprob_start": 1},
    {"logprobs": 3, "n": 2},
    {"logprobs": 2, "detokenize": False},
    {"logprobs": 2, "skip_special_tokens": False, "spaces_between_special_tokens": False},
    {"logprobs": 2, "stop": ["."], "include_stop_str_in_output": True},
)
PROMPT_TOKENS = next(i for i, ask in enumerate(ASKS) if "prompt_logprob_token_ids" in ask)  # a row for each token
# All others say how tokens are drawn, or where a text ends (test_identity.py, test_matrix.py), or are vLLM's own notes.
ASK_FOR_NO_OUTPUT = """
    presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop_token_ids
    ignore_eos max_tokens min_tokens logit_bias allowed_token_ids bad_words structured_outputs thinking_token_budget
    repetition_detection extra_args output_kind stream_interval skip_clone output_text_buffer_length _eos_token_id
    _all_stop_token_ids _bad_words_token_ids skip_reading_prefix_cache _watermarking_skipped"""
# Refused (watermarks by us, traces by vLLM wherever there are drafts), or of experts, which its forward tells of.
NOT_HERE = {"watermarking", "trace_decode_token_ids", "routed_experts_prompt_start"}
# What says who asked and when, not what was answered.
OF_THE_RUN = {"request_id", "metrics", "spec_decode_metrics"}
MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
ALONE = [
    i for i, ask in enumerate(ASKS) if ask in ({"logprobs": 3}, {"logprob_token_ids": [44]}, {"prompt_logprobs": 2})
]


def requests(family, **sampling):
    """Return one request for each of ASKS, greedy and sampled in turn, of texts and images; short answers."""
    frames, text = harness.shown(1)[0], pairs.media_prompt(family, "describe the video")
    image = pairs.media_prompt(family, "describe the video", images=[frames[0]])
    common = [{"temperature": 0.9 * (i % 2), "seed": i, "max_tokens": 9, "ignore_eos": True} for i in range(len(ASKS))]
    prompts = {3: image, PROMPT_TOKENS: {"prompt_token_ids": [5, 6, 7, 8]}}
    return [(prompts.get(i, text), {**common[i], **ask, **sampling}) for i, ask in enumerate(ASKS)]


def plain(value):
    """Return a value that can be compared, floats as arrays."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def assert_same(expected, got, path):
    if isinstance(expected, float | np.ndarray):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4, err_msg=path)
    elif isinstance(expected, dict):
        assert list(got) == list(expected), path  # the order too
        for key in expected:
            assert_same(expected[key], got[key], f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(got) == len(expected), path
        for i, (one, other) in enumerate(zip(expected, got, strict=True)):
            assert_same(one, other, f"{path}[{i}]")
    else:
        assert got == expected, path


def told(output):
    """Return all that one of vLLM's outputs says, but OF_THE_RUN."""
    parts = {name: value for name, value in vars(output).items() if name not in OF_THE_RUN}
    parts["outputs"] = [
        {name: value for name, value in plain(one).items() if name not in OF_THE_RUN} for one in output.outputs
    ]
    return plain(parts)


def answers(engine, asked, alone=()):
    """Return what is told of requests beside each other, then of some alone."""
    batches = [asked, *([asked[i]] for i in alone)]
    return [told(output) for batch in batches for output in engine.generate(batch)]


def everything(engine, family):
    """Yield what is told of all requests, by mode; in the first of some alone, too."""
    for mode in MODES:
        engine.runner.sampler.logprobs_mode = mode
        yield mode, answers(engine, requests(family), ALONE if mode == MODES[0] else ())


def test_every_parameter_is_asked_or_said_to_ask_nothing():
    """Catches: a parameter of a new vLLM that asks for an output, which no test compares."""
    asked = {name for ask in ASKS for name in ask}
    known = set(SamplingParams.__struct_fields__) - {*ASK_FOR_NO_OUTPUT.split()} - NOT_HERE
    assert known == asked


@pytest.mark.parametrize(("family", "shape"), [(QWEN, "chain"), (LLAVA, "tree-static")])
def test_outputs_are_vanillas(family, shape):
    """Every request for an output beside all others, some alone, in every `logprobs_mode`, in one chunk of logits and
    in several. Catches: entries of other tokens, an entry too few, a tree's rows in node order.
    """
    overrides = {**NO_CACHE, "max_logprobs": -1}
    with harness.engine(family, overrides=overrides) as engine:
        expected = dict(everything(engine, family))
    with harness.engine(family, "draft", overrides, drafting=shape) as engine:
        before = engine.counters()
        for mode, got in everything(engine, family):
            assert_same(expected[mode], got, mode)
        counted = difference(before, engine.counters())
        assert 0 < counted["accepted_tokens"] < counted["draft_depth"]
        with mock.patch.object(rejection_sampler, "get_max_chunk_logits", lambda vocab_size: 13):
            assert_same(expected[mode], answers(engine, requests(family)), "in chunks")


@pytest.mark.parametrize(
    ("family", "shape"), [pytest.param(LLAVA, "chain", marks=pytest.mark.slow), (QWEN, "tree-static")]
)
def test_sampling_masks_are_vanillas(family, shape):
    """Catches: the tokens that could be drawn at another node, or after a rejected one."""
    overrides = {**NO_CACHE, "return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}
    asked = harness.videos(family, 3, temperature=1.0, top_k=7, top_p=0.9, logprobs=2, max_tokens=12)
    with harness.engine(family, overrides=overrides) as engine:
        expected = answers(engine, asked)
    with harness.engine(family, "draft", overrides, drafting=shape) as engine:
        assert_same(expected, answers(engine, asked), shape)
        assert engine.counters()["accepted_tokens"]
    assert all(output["outputs"][0]["sampling_mask"] for output in expected)


def test_counts_of_nan_are_of_their_own_request():
    """Where all drafts stand, each row of logits counts for the token that it gives. Catches: row i's for request i."""
    asked = [
        (pairs.media_prompt(QWEN, question), {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True})
        for question in ("describe the video", "what happens in this clip ?", "tell me about color")
    ]
    with harness.engine(QWEN, "target", NO_CACHE, pruner="none") as engine, pytest.MonkeyPatch.context() as patch:
        for module in (sampler, rejection_sampler):  # a number that each row has another of
            patch.setattr(module, "get_num_nans", lambda logits: logits.argmax(dim=-1).int())
        patch.setattr(engine.runner.sampler, "compute_nans", True)
        told = []

        @harness.in_place_of(patch, engine.scheduler, "update_from_output")
        def update(original, *args):
            outputs = original(*args)
            told.extend(one for part in outputs.values() for one in part.outputs if not one.finished)
            return outputs

        engine.generate(asked)
    assert [one.num_nans_in_logits for one in told] == [sum(one.new_token_ids) for one in told]
    assert max(len(one.new_token_ids) for one in told) > 1
