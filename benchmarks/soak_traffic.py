"""The soak's traffic: requests of every kind drawn from a seed, a client that sends them to either server, and what
both replies are held to.
"""

import base64
import contextlib
import io
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from benchmarks import captioned
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs

SAME, COMPLETE, REFUSED = "same", "complete", "refused"  # what an answer is held to
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_IMAGES = 12  # of one prompt
LAMBDA_MAX = 0.9
_NUM_SCENES = 5  # different videos: many requests share one, and the caches of pixels are full after a minute or two
_LENGTHS = (4, 7, 16, 32)  # frames
_MOST_TOKENS = 96
_TIMEOUT_S = 300.0
# vLLM 0.32 answers 500 where a client has left before its request reached the engine: the next one with the same video
# finds the API server believing that the engine has it. Its log asks the client to send it again.
_MOST_RESENT = 2
# What a request is about, and how often.
_ABOUT = {
    "video": 6,
    "video of JPEGs": 2,
    "two videos": 1,
    "image": 2,
    "images": 2,
    "frames as images": 2,
    "text": 3,
    "completion": 3,
    "chat of two turns": 2,
    "too long": 1,
}
_VIDEOS = {
    "video": ("mp4",), "chat of two turns": ("mp4",), "video of JPEGs": ("jpeg",), "two videos": ("mp4", "jpeg"),
}  # fmt: skip
# What it asks of verification; vanilla is not asked. "strict" in the second place: held to vanilla's tokens, because
# these accept no mismatch.
_SCORERS: tuple[tuple[dict[str, Any], str, int], ...] = (
    ({}, SAME, 10),
    ({"vidspec_scorer": "strict"}, SAME, 2),
    ({"vidspec_scorer": "loose", "vidspec_lambda": 0.0}, SAME, 2),
    ({"vidspec_scorer": "random", "vidspec_lambda": 0.0}, SAME, 1),
    ({"vidspec_scorer": "loose", "vidspec_lambda": 0.5}, COMPLETE, 2),
    ({"vidspec_scorer": "random", "vidspec_lambda": 0.3}, COMPLETE, 1),
    ({"vidspec_scorer": "fly"}, COMPLETE, 1),
    ({"vidspec_scorer": "fly-entropy"}, COMPLETE, 1),
)


@dataclass
class Choice:
    """One of a reply's answers; a chosen token's log-probability where they were asked for."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Reply:
    status: int = 0  # Of HTTP; 0 where the connection failed, 500 where a stream carried an error
    error: str = ""  # The server's or the client library's message
    choices: dict[int, Choice] = field(default_factory=dict)  # By index
    is_cut: bool = False  # The client closed the connection in mid-answer
    resent: int = 0  # How often it sent the request again, after a 500


@dataclass(frozen=True)
class Ask:
    """One client's doing: a request, or two where a conversation goes on."""

    about: str  # One of `_ABOUT`
    path: str  # Of the API
    body: dict[str, Any]  # Of the first request, without `own`
    rule: str = SAME  # What the answer is held to; see `verdict`
    own: dict[str, Any] = field(default_factory=dict)  # Fields for our server alone
    close_after: int | None = None  # The client closes the stream after so many chunks; None: it reads to the end
    next_turn: str | None = None  # The user's message after the first answer
    traits: tuple[str, ...] = ()  # What else is special, for the counts


class Traffic:
    """Draws requests; equal seeds give equal traffic. A prompt that is too long exceeds the servers' max_model_len."""

    def __init__(self, rng: random.Random, max_model_len: int = pairs.MAX_MODEL_LEN):
        self._rng = rng
        self._max_model_len = max_model_len
        self._words = captioned.vocabulary()
        self._scenes = [world.held_out(i).frames for i in range(_NUM_SCENES)]
        self._urls: dict[tuple[str, int, int], str] = {}

    def slice(self, count: int) -> list[Ask]:
        asks: list[Ask] = []
        for _ in range(count):
            if asks and self._rng.random() < 0.08:
                again = self._rng.choice(asks)
                asks.append(replace(again, traits=tuple(dict.fromkeys((*again.traits, "duplicate")))))
            else:
                asks.append(self._draw())
        return asks

    def _draw(self) -> Ask:
        about = self._rng.choices(list(_ABOUT), list(_ABOUT.values()))[0]
        if about == "too long":
            return self._too_long()
        body = {"model": "target", "return_token_ids": True, **self._sampling()}
        own, rule, traits = self._verification()
        if about == "completion":
            ask = Ask(about, COMPLETIONS, {**body, "prompt": self._sentence(3, 60)})
        else:
            ask = Ask(about, CHAT, {**body, "messages": [self._user(self._media(about))]})
            if about == "chat of two turns":
                # The second turn repeats the first answer's text: both servers must have given the same.
                own, rule, traits = {}, SAME, ()
                return self._with_extras(replace(ask, next_turn=self._sentence(2, 8)), may_close=False)
        return self._with_extras(replace(ask, own=own, rule=rule, traits=traits))

    def _sampling(self) -> dict[str, Any]:
        rng = self._rng
        chosen: dict[str, Any] = {"max_tokens": rng.randint(1, _MOST_TOKENS), "temperature": 0.0}
        if rng.random() < 0.5:
            chosen |= {"temperature": 1.0, "seed": rng.randrange(2**31)}
            chosen |= rng.choice(({}, {}, {"top_p": 0.9}, {"top_k": 20}))
        if rng.random() < 0.3:
            chosen["ignore_eos"] = True
        return chosen

    def _verification(self) -> tuple[dict[str, Any], str, tuple[str, ...]]:
        own, rule, _ = self._rng.choices(_SCORERS, [weight for _, _, weight in _SCORERS])[0]
        return dict(own), rule, tuple(f"{key[8:]} {value}" for key, value in own.items())

    def _with_extras(self, ask: Ask, may_close: bool = True) -> Ask:
        """Let a request stream, want several answers, log-probabilities or a stop string, or break off."""
        rng, body, traits, rule = self._rng, dict(ask.body), list(ask.traits), ask.rule
        close_after = None
        if rng.random() < 0.5:
            body["stream"] = True
            traits.append("streamed")
            if may_close and rng.random() < 0.3:
                close_after = rng.randint(1, 12)
                body |= {"max_tokens": 400, "ignore_eos": True}
                traits.append("closed")
        may_differ = body["temperature"] > 0  # vLLM refuses several greedy answers
        if rng.random() < 0.2 and may_differ and close_after is None and ask.next_turn is None:
            body["n"] = rng.randint(2, 3)
            traits.append("n > 1")
        if rng.random() < 0.12:
            body |= {"logprobs": 1} if ask.path == COMPLETIONS else {"logprobs": True, "top_logprobs": 1}
            traits.append("logprobs")
            rule = SAME if rule == COMPLETE else rule  # requests for log-probabilities are verified strictly
        if rng.random() < 0.12:
            body["stop"] = rng.choice((["then"], ["background", "the end"], [" a "]))
            traits.append("stop string")
            rule = SAME if rule == COMPLETE else rule
        return replace(ask, body=body, traits=tuple(traits), rule=rule, close_after=close_after)

    def _too_long(self) -> Ask:
        words = " ".join(self._rng.choices(self._words, k=self._max_model_len + self._rng.randint(1, 500)))
        body = {"model": "target", "max_tokens": 8, "temperature": 0.0}
        if self._rng.random() < 0.5:
            return Ask("too long", COMPLETIONS, {**body, "prompt": words}, REFUSED)
        return Ask("too long", CHAT, {**body, "messages": [self._user([], words)]}, REFUSED)

    def _sentence(self, fewest: int, most: int) -> str:
        return " ".join(self._rng.choices(self._words, k=self._rng.randint(fewest, most)))

    def _user(self, media: list[dict[str, Any]], text: str | None = None) -> dict[str, Any]:
        if text is None:
            text = pairs.DEFAULT_QUESTION if media and self._rng.random() < 0.6 else self._sentence(2, 20)
        return {"role": "user", "content": [*media, {"type": "text", "text": text}]}

    def _media(self, about: str) -> list[dict[str, Any]]:
        rng = self._rng
        if about == "images":
            return [self._item("image", "png", 1) for _ in range(rng.randint(2, 3))]
        if about == "frames as images":
            scene, count = rng.randrange(_NUM_SCENES), rng.randint(4, MAX_IMAGES)
            return [self._item("image", "png", i + 1, scene) for i in range(count)]
        if about == "image":
            return [self._item("image", "png", 1)]
        return [self._item("video", form) for form in _VIDEOS.get(about, ())]

    def _item(self, modality: str, form: str, length: int | None = None, scene: int | None = None) -> dict[str, Any]:
        """Return one part of a message; an image is the scene's frame of number `length`."""
        scene = self._rng.randrange(_NUM_SCENES) if scene is None else scene
        length = self._rng.choice(_LENGTHS) if length is None else length
        key = (form, scene, length)
        if key not in self._urls:
            frames = self._scenes[scene]
            self._urls[key] = data_url(frames[length - 1 : length] if form == "png" else frames[:length], form)
        return {"type": f"{modality}_url", f"{modality}_url": {"url": self._urls[key]}}


def data_url(frames: np.ndarray, form: str) -> str:
    """Return `[num_frames, height, width, 3]` uint8 frames as a data URL: an mp4 file, JPEGs of a video, or one PNG."""
    if form == "mp4":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "video.mp4"
            world.write_mp4(frames, path)
            return "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode()
    if form == "jpeg":
        return "data:video/jpeg;base64," + ",".join(_encoded(frame, "JPEG") for frame in frames)
    return "data:image/png;base64," + _encoded(frames[0], "PNG")


def _encoded(frame: np.ndarray, form: str) -> str:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, form)
    return base64.b64encode(buffer.getvalue()).decode()


def send(client: httpx.Client, base_url: str, ask: Ask, is_ours: bool) -> list[Reply]:
    """Send a client's requests; return a reply for each turn that took place."""
    body = ask.body | (ask.own if is_ours else {})
    replies = [_send(client, base_url + ask.path, body, ask.close_after)]
    first = replies[0]
    if ask.next_turn is not None and first.status == 200 and 0 in first.choices:
        answer = {"role": "assistant", "content": first.choices[0].text}
        body = body | {"messages": [*body["messages"], answer, {"role": "user", "content": ask.next_turn}]}
        replies.append(_send(client, base_url + ask.path, body, None))
    return replies


def _send(client: httpx.Client, url: str, body: dict[str, Any], close_after: int | None) -> Reply:
    for resent in range(_MOST_RESENT + 1):  # noqa: B007
        reply = _send_once(client, url, body, close_after)
        if reply.status != 500:
            break
    reply.resent = resent
    return reply


def _send_once(client: httpx.Client, url: str, body: dict[str, Any], close_after: int | None) -> Reply:
    """Read an answer to its end, or so many chunks of its stream."""
    reply, count = Reply(), 0
    try:
        with client.stream("POST", url, json=body, timeout=_TIMEOUT_S) as answer:
            reply.status = answer.status_code
            if answer.status_code != 200:
                reply.error = answer.read().decode(errors="replace")[:300]
                return reply
            for event in _events(answer, body.get("stream", False)):
                if "error" in event:
                    reply.status, reply.error = 500, str(event["error"])[:300]
                    break
                for choice in event["choices"]:
                    _take(reply, choice, choice.get("message") or choice.get("delta") or choice)
                    count += bool(choice.get("token_ids"))
                if close_after is not None and count >= close_after:
                    reply.is_cut = True
                    break
    except (httpx.HTTPError, ValueError) as error:
        reply.status, reply.error = 0, f"{type(error).__name__}: {error}"
    return reply


def _events(answer: httpx.Response, is_stream: bool) -> Iterator[dict[str, Any]]:
    if not is_stream:
        yield json.loads(answer.read())
        return
    for line in answer.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _take(reply: Reply, choice: dict[str, Any], message: dict[str, Any]) -> None:
    """Add a choice, whole or a chunk of it, to the reply."""
    received = reply.choices.setdefault(choice["index"], Choice())
    received.token_ids += choice.get("token_ids") or []
    received.text += message.get("content") or message.get("text") or ""
    received.finish_reason = choice.get("finish_reason") or received.finish_reason
    if logprobs := choice.get("logprobs"):
        chosen = [entry["logprob"] for entry in logprobs.get("content") or ()]
        received.logprobs += chosen or logprobs.get("token_logprobs") or []


@contextlib.contextmanager
def client_for(concurrency: int) -> Iterator[httpx.Client]:
    # A connection for each request: a server closes what was idle for five seconds, and a request that is sent on it
    # just then is lost (RemoteProtocolError), vanilla's as ours.
    limits = httpx.Limits(max_connections=2 * concurrency, max_keepalive_connections=0)
    with httpx.Client(limits=limits, trust_env=False) as client:
        yield client


# ---- what replies are held to ----------------------------------------------------------------------------------------

# A chosen token's log-probability in two batches of other shapes, fp32.
_LOGPROB_TOLERANCE = 1e-3


def verdict(rule: str, num_choices: int, max_tokens: int, vanilla: Reply, ours: Reply) -> tuple[str, str]:
    """Judge both servers' replies to one request for `num_choices` answers.

    SAME: vanilla's tokens. COMPLETE: an answer that ended as it should, of any tokens. REFUSED: a 4xx, the same from
    both. Returns "" and "", or "wrong" or "error" and why; "error" is anything but an answer where there should be one.
    """
    if rule == REFUSED:
        if all(400 <= reply.status < 500 for reply in (vanilla, ours)) and vanilla.status == ours.status:
            return "", ""
        return "error", f"not refused by both: {vanilla.status} and {ours.status} {ours.error}".strip()
    for name, reply in (("vanilla", vanilla), ("ours", ours)):
        if reply.status != 200:
            return "error", f"{name}: {reply.status} {reply.error}".strip()
    if vanilla.is_cut or ours.is_cut:  # the other may have met a stop string before its client left
        return _compare(vanilla, ours) if rule == SAME else ("", "")
    for name, reply in (("vanilla", vanilla), ("ours", ours)):
        if why := _unfinished(reply, num_choices, max_tokens):
            return "error", f"{name}: {why}"
    return _compare(vanilla, ours) if rule == SAME else ("", "")


def _unfinished(reply: Reply, num_choices: int, max_tokens: int) -> str:
    """Return what is missing from a reply that claims to be whole, or ""."""
    if sorted(reply.choices) != list(range(num_choices)):
        return f"{len(reply.choices)} answers of {num_choices}"
    for choice in reply.choices.values():
        count, reason = len(choice.token_ids), choice.finish_reason
        if reason not in ("stop", "length") or not count or (reason == "length" and count != max_tokens):
            return f"{count} tokens of at most {max_tokens}, ended by {reason}"
    return ""


def _compare(vanilla: Reply, ours: Reply) -> tuple[str, str]:
    """Compare two answers, where a client has cut one as far as both have received them: chunks have other sizes."""
    is_cut = vanilla.is_cut or ours.is_cut
    for index in vanilla.choices.keys() & ours.choices.keys():
        expected, got = vanilla.choices[index], ours.choices[index]
        both = list(zip(expected.token_ids, got.token_ids, strict=False))
        place = next((i for i, (a, b) in enumerate(both) if a != b), len(both))
        if place < (len(both) if is_cut else max(len(expected.token_ids), len(got.token_ids))):
            when = "before it was cut, " if is_cut else ""
            differing = [choice.token_ids[place : place + 3] for choice in (expected, got)]
            return "wrong", f"answer {index} differs {when}from token {place} on: {differing[0]} and {differing[1]}"
        if is_cut:
            continue
        if (got.text, got.finish_reason) != (expected.text, expected.finish_reason):
            return "wrong", f"answer {index}: same tokens, another text or end: {got.text!r}, {got.finish_reason}"
        if len(got.logprobs) != len(expected.logprobs) or any(
            abs(a - b) > _LOGPROB_TOLERANCE for a, b in zip(expected.logprobs, got.logprobs, strict=True)
        ):
            return "wrong", f"answer {index}: other log-probabilities"
    return "", ""
