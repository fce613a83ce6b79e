"""What a request may choose, within the server's bounds; FLy's measure and window."""

import inspect
import math
import re
from types import SimpleNamespace

import pytest
import torch
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from vllm_vidspec import scoring
from vllm_vidspec.config import ScoreKnobs, VidSpecConfig
from vllm_vidspec.engine import auto_pruner
from vllm_vidspec.engine.compat import api
from vllm_vidspec.engine.report import request_records
from vllm_vidspec.engine.verify import loose_tables
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.scoring import RULES, choices
from vllm_vidspec.scoring.choices import (
    CALLS_TOOLS,
    INTERNAL_KEYS,
    PREFIX,
    REQUEST_KEYS,
    choose,
    strict_reason,
)  # fmt: skip


@pytest.mark.parametrize(
    "knobs,asked,expected",
    [
        ({}, None, ("strict", 0.7)),
        ({"scorer": "loose"}, {}, ("loose", 0.7)),
        ({"scorer": "loose"}, {"vidspec_scorer": "strict", "vidspec_lambda": 0.1}, ("strict", 0.1)),
        ({"scorer": "loose"}, {"vidspec_lambda": 0}, ("loose", 0.0)),
        ({"scorer": "loose", "lambda_loose": 1.0}, {"vidspec_lambda": 1}, ("loose", 1.0)),
        ({"request_scorers": ["loose", "fly"]}, {"vidspec_scorer": "fly"}, ("fly", 0.7)),
        ({"request_scorers": ["loose"]}, {"vidspec_scorer": "strict"}, ("strict", 0.7)),
        ({"scorer": "loose"}, dict.fromkeys(INTERNAL_KEYS, True), ("loose", 0.7)),
    ],
)
def test_choices(knobs, asked, expected):
    assert choose(asked, ScoreKnobs(**knobs)) == expected


@pytest.mark.parametrize(
    "knobs,asked,message",
    [
        ({}, {"vidspec_scorer": "loose"}, r"vidspec_scorer: this server allows strict, got 'loose'"),
        ({"scorer": "loose"}, {"vidspec_scorer": "fly"}, r"allows loose, strict, got 'fly'"),
        ({"scorer": "loose"}, {"vidspec_scorer": 3}, r"got 3"),
        ({"scorer": "loose"}, {"vidspec_lambda": 0.71}, r"vidspec_lambda: this server allows 0 to 0.7, got 0.71"),
        ({"scorer": "loose"}, {"vidspec_lambda": -0.1}, r"got -0.1"),
        ({"scorer": "loose"}, {"vidspec_lambda": True}, r"got True"),
        ({"scorer": "loose"}, {"vidspec_lambda": float("nan")}, r"got nan"),
        ({"scorer": "loose"}, {"vidspec_lamda": 0.5}, r"'vidspec_lamda' \(did you mean 'vidspec_lambda'\?\)"),
        ({"scorer": "fly"}, {"vidspec_lambda": 0.1}, r"the scorer fly takes none"),
        ({"scorer": "loose"}, {"vidspec_scorer": ["loose"]}, r"allows loose, strict, got \['loose'\]"),
        ({"scorer": "loose"}, {"vidspec_lambda": 10**5000}, r"got int of too many digits"),
        ({"scorer": "loose"}, {"vidspec_scorer": "x\n" * 10**6}, r"got 'x\\nx"),
        ({"scorer": "loose"}, {"vidspec_" + "x" * 10**6: 1}, r"unknown request parameter 'vidspec_xxx"),
    ],
    ids=lambda value: str(value)[:40] if not isinstance(value, dict) else None,
)
def test_out_of_bounds(knobs, asked, message):
    """Catches: a type that cannot be looked up, a value that is quoted whole."""
    with pytest.raises(VidSpecError, match=message) as error:
        choose(asked, ScoreKnobs(**knobs))
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


@pytest.mark.parametrize(
    "change,reason",
    [
        ({}, None),
        ({"structured_outputs": object()}, "structured"),
        ({"extra_args": {CALLS_TOOLS: True}}, "tools"),
        ({"logprobs": 0}, "logprobs"),
        ({"logprob_token_ids": [3]}, "logprobs"),
        ({"stop": ["."]}, "stop_strings"),
    ],
)
def test_what_keeps_a_request_strict(change, reason):
    plain = {"structured_outputs": None, "extra_args": None, "logprobs": None, "logprob_token_ids": None, "stop": []}
    assert strict_reason(SimpleNamespace(**plain | change)) == reason


def test_the_api_server_passes_choices_and_tools_on(monkeypatch):
    """Fields beside `vllm_xargs`, and tools whose calls a parser will read; nothing for other requests."""
    for request in (ChatCompletionRequest, CompletionRequest):
        monkeypatch.setattr(request, "to_sampling_params", request.to_sampling_params)  # put back afterwards
    api.hear_request_choices(PREFIX, CALLS_TOOLS, lambda asked: None)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

    def extra_args(**fields) -> dict | None:
        request = ChatCompletionRequest(messages=[{"role": "user", "content": "hello"}], model="m", **fields)
        return request.to_sampling_params(8, {}).extra_args

    completion = CompletionRequest(prompt="hello", model="m", vidspec_scorer="strict")
    assert completion.to_sampling_params(8, {}).extra_args == {"vidspec_scorer": "strict"}
    for fields, expected in (
        ({}, None),
        ({"vidspec_lambda": 0.2}, {"vidspec_lambda": 0.2}),
        ({"vidspec_lambda": 0.2, "vllm_xargs": {"vidspec_lambda": 0.1}}, {"vidspec_lambda": 0.1}),
        ({"tools": [tool], "tool_choice": "auto"}, {CALLS_TOOLS: True}),
        ({"tools": [tool], "tool_choice": "none"}, None),
        # A mistake stays one, so that the check can refuse it: vLLM would drop the first and make the second 0 and 1.
        ({"vidspec_lamda": 0.2}, {"vidspec_lamda": 0.2}),
        ({"vllm_xargs": {"vidspec_lambda": False, "other": 1}}, {"vidspec_lambda": False, "other": 1}),
        # Catches: five lines of vLLM's about types where our one says what the parameter takes.
        ({"vllm_xargs": {"vidspec_scorer": [[1]]}}, {"vidspec_scorer": [[1]]}),
    ):
        assert extra_args(**fields) == expected, fields
    for value in ({"other": None}, 3):
        with pytest.raises(ValueError, match="vllm_xargs"):
            extra_args(vllm_xargs=value)


REQUESTS = (
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": "hello"}]}),
    (CompletionRequest, {"prompt": "hello"}),
    (ResponsesRequest, {"input": "hello"}),
)


@pytest.mark.parametrize(("request_type", "fields"), REQUESTS, ids=lambda one: getattr(one, "__name__", ""))
@pytest.mark.parametrize("key", [*INTERNAL_KEYS, f"_{PREFIX}another"])
def test_what_is_ours_to_say_is_not_a_clients(monkeypatch, key, request_type, fields):
    """Catches: an internal key that travels to the engine from a body."""
    monkeypatch.setattr(request_type, "to_sampling_params", request_type.to_sampling_params)  # put back afterwards
    api.hear_request_choices(PREFIX, CALLS_TOOLS, lambda asked: None)
    for more, expected in (
        ({key: 7}, {}),
        ({"vllm_xargs": {key: 7}}, {}),
        ({"vllm_xargs": {key: 7, "a": 1}}, {"a": 1}),
    ):
        request = request_type(model="m", **fields, **more)
        assert (request.to_sampling_params(8, {}).extra_args or {}) == expected


def test_every_key_of_ours_is_listed():
    """Catches: a key that the code reads of a request, and that neither a client's check nor the list of ours has."""
    read = set()
    for module in (choices, auto_pruner, request_records, loose_tables):
        assert "extra_args" in inspect.getsource(module)
        read |= {value for value in vars(module).values() if isinstance(value, str) and re.match("_?vidspec_", value)}
    assert read == {*REQUEST_KEYS, *INTERNAL_KEYS, PREFIX}
    assert all(key.startswith(f"_{PREFIX}") for key in INTERNAL_KEYS)


def test_every_configured_scorer_exists():
    """Catches: a `scorer` that the configuration accepts and no code implements."""
    assert set(ScoreKnobs.model_fields["scorer"].annotation.__args__) == set(RULES)


def test_the_entropy_of_the_most_likely_tokens():
    """Catches: tokens that are renormalised among themselves, a share of the greatest possible instead of nats."""
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]])
    terms = [0.5 * math.log(2), 0.25 * math.log(4), 0.125 * math.log(8), 0.125 * math.log(8)]
    for top_k, wanted in ((1, terms[:1]), (3, terms[:3]), (0, terms), (9, terms)):
        found = scoring.top_entropy(probs.log(), top_k)
        torch.testing.assert_close(found, torch.tensor([sum(wanted), 0.0]))


@pytest.mark.parametrize(
    ("knobs", "window"),
    [
        ({"num_speculative_tokens": 5}, 4),
        ({"num_speculative_tokens": 10}, 6),
        ({"num_speculative_tokens": 1}, 1),
        ({"draft_shape": "tree-static", "num_speculative_tokens": 25}, 4),  # five deep
        ({"draft_shape": "tree-adaptive", "num_speculative_tokens": 25}, 6),
    ],
)
def test_the_window_of_fly_is_shorter_than_a_path(knobs, window):
    """vLLM's default, `min(6, K - 1)` of a chain. Catches: a window of a tree's nodes, which no path ever fills."""
    assert VidSpecConfig(model="self", scorer="fly", **knobs).fly_window == window
