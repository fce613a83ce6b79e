"""Targets that need vLLM's classes: a request's own knobs, bodies of API requests, bytes on the drafter's channel."""

import asyncio
import contextlib
import functools
import os
import pickle
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from hypothesis import strategies as st
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.exceptions import VLLMValidationError
from vllm.v1.serial_utils import CUSTOM_TYPE_CLOUDPICKLE, CUSTOM_TYPE_PICKLE, MsgpackEncoder

from tests.fuzz.running import Target, may_refuse
from tests.fuzz.values import JSON, NUMBERS, damaged
from vllm_vidspec.config import ScoreKnobs
from vllm_vidspec.engine.compat import api
from vllm_vidspec.engine.parallel import channel
from vllm_vidspec.engine.parallel.messages import Failed, Prefill, Ready, Refused, ToTarget
from vllm_vidspec.scoring.choices import CALLS_TOOLS, PREFIX, choose

_SERVERS = (
    {},
    {"scorer": "loose"},
    {"scorer": "fly", "request_scorers": ["strict", "loose", "fly"], "lambda_loose": 0.9},
    {"request_scorers": ["random", "fly-entropy"], "lambda_loose": 0.0},
)
_NAMES = st.one_of(
    st.sampled_from(["vidspec_scorer", "vidspec_lambda", CALLS_TOOLS, "vidspec_lamda", "vidspec_", "other"]),
    st.text(max_size=10).map(PREFIX.__add__),
    st.just(100_000).map(lambda size: PREFIX + "x" * size),
)
_VALUES = st.one_of(
    st.sampled_from(["strict", "loose", "fly", "fly-entropy", "random", "Loose", "0.5"]),
    st.floats(-0.5, 1.5),
    NUMBERS,
    JSON,
)
_ASKED = st.one_of(
    st.fixed_dictionaries({}, optional={"vidspec_scorer": st.sampled_from(["strict", "loose"]), "other": JSON}),
    st.fixed_dictionaries({"vidspec_lambda": st.floats(-0.1, 1.1)}, optional={"vidspec_scorer": st.just("loose")}),
    st.dictionaries(_NAMES, _VALUES, max_size=3),
)


def check_choice(given: tuple[dict, dict]) -> Iterator[None]:
    """An allowed scorer with a share within its bound."""
    server, asked = given
    knobs = ScoreKnobs(**server)
    choice = choose(asked, knobs)
    yield
    assert choice.scorer in knobs.scorers and 0 <= choice.share <= knobs.lambda_loose


@functools.cache
def _installed() -> ScoreKnobs:
    """Install our part of vLLM's front end once; return what it allows."""
    knobs = ScoreKnobs(**_SERVERS[2])
    api.hear_request_choices(PREFIX, CALLS_TOOLS, lambda asked: choose(asked, knobs) and None)
    return knobs


_FEW = st.one_of(st.sampled_from(["strict", "loose", 0.5, 0, True]), _VALUES)
_BODIES = st.fixed_dictionaries(
    {},
    optional={
        "vidspec_scorer": _FEW,
        "vidspec_lambda": _FEW,
        CALLS_TOOLS: _FEW,
        "vllm_xargs": st.one_of(_ASKED, JSON),
        "temperature": st.one_of(st.floats(0, 1), NUMBERS),
        "cache_salt": st.one_of(st.text(max_size=5), JSON),
    },
)


class _Reached(Exception):
    """The rest of vLLM's serving begins."""


class _Serving(OpenAIServingChat):
    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise _Reached


def check_body(body: dict[str, Any]) -> str:
    """A body is refused by errors that vLLM's server answers with 400, or its choices are allowed ones."""
    knobs = _installed()
    try:
        request = ChatCompletionRequest(messages=[{"role": "user", "content": "hello"}], model="m", **body)
        params = request.to_sampling_params(8, {})
        with contextlib.suppress(_Reached):
            asyncio.run(_Serving().create_chat_completion(request, None))
    except (ValidationError, VLLMValidationError):
        return "refused"
    choice = choose(params.extra_args, knobs)
    assert choice.scorer in knobs.scorers and 0 <= choice.share <= 0.9
    return "accepted"


class _Bomb:
    """Leaves a file behind where it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("/tmp/vidspec-fuzz-unpickled",)


@functools.cache
def _messages() -> list[bytes]:
    """Return the drafter's messages, and some that would run code if they were unpickled."""
    encoder, bomb = MsgpackEncoder(), pickle.dumps(_Bomb())
    sent = [Ready(), Failed("why"), Refused(1, 2, "too_long", "why"), Prefill(1, 2, None, ["guided_prompts"])]
    evil = [msgspec.msgpack.Ext(code, bomb) for code in (CUSTOM_TYPE_PICKLE, CUSTOM_TYPE_CLOUDPICKLE, 3, 99)]
    refused = {"type": "Refused", "req_state_idx": 1, "epoch": 2, "reason": "too_long"}
    packed = [msgspec.msgpack.encode(value) for value in (*evil, *({**refused, "detail": one} for one in evil))]
    return [bytes(encoder.encode(message)[0]) for message in sent] + packed


_PACKETS = st.tuples(
    st.sampled_from(["packet", "memory", "short memory"]),
    st.deferred(
        lambda: st.one_of(
            st.binary(min_size=1, max_size=200),
            st.sampled_from(_messages()),
            st.sampled_from(_messages()).flatmap(lambda whole: damaged(whole, most_changed=3)).filter(bool),
        )
    ),
)
_HEADS = (struct.pack("<qq", 1, 1 << 40), struct.pack("<q", 1 << 60), struct.pack("<q", -3), struct.pack("<qq", 1, -1))


def check_channel(given: tuple[str, bytes]) -> str:
    """A packet is one of our messages, or the channel is closed: nothing is executed, waited for or trusted."""
    place, content = given
    here, there = channel.Channel.pair(ToTarget)
    begin = time.monotonic()
    try:
        if place == "packet":
            there.send(content)
        else:
            head = struct.pack("<qq", 1, len(content)).ljust(64, b"\0") if place == "memory" else b""
            memory = os.memfd_create("fuzz")
            # Without a head, what the head says is garbage itself: sizes that no memory has.
            os.write(memory, head + (content if head else _HEADS[len(content) % len(_HEADS)] + content))
            socket.send_fds(there, [b"m"], [memory])
            os.close(memory)
        messages = here.receive()
    finally:
        is_closed = here.is_closed
        here.close()
        there.close()
    assert time.monotonic() - begin < 5
    assert not os.path.exists("/tmp/vidspec-fuzz-unpickled"), "a message was run"
    assert all(isinstance(message, msgspec.Struct) for message in messages)
    assert bool(messages) != is_closed, "what is no message ends the conversation"
    return "accepted" if messages else "refused"


TARGETS = {
    "a request's knobs": Target(st.tuples(st.sampled_from(_SERVERS), _ASKED), may_refuse(check_choice, 250), 400),
    "API bodies": Target(_BODIES, check_body, 100),
    "the drafter's channel": Target(_PACKETS, check_channel, 300),
}
