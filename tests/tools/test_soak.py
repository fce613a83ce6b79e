"""What the soak makes of answers and readings: planted faults are found, and sound runs pass."""

import json
import random

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("psutil")

from benchmarks import soak, soak_traffic  # noqa: E402
from benchmarks.soak_traffic import COMPLETE, REFUSED, SAME, Choice, Reply, verdict  # noqa: E402
from vllm_vidspec import metrics  # noqa: E402


def reply(*answers: list[int], **fields) -> Reply:
    choices = {i: Choice(list(tokens), str(tokens), "stop", [-0.5] * len(tokens)) for i, tokens in enumerate(answers)}
    return Reply(**{"status": 200, "choices": choices, **fields})


def changed(**fields) -> Reply:
    """Return the reply [1, 2, 3] with fields of its answer replaced."""
    one = reply([1, 2, 3])
    for name, value in fields.items():
        setattr(one.choices[0], name, value)
    return one


SOUND = [
    (SAME, reply([1, 2, 3])),
    (SAME, changed(logprobs=[-0.5001, -0.5, -0.5])),
    (SAME, reply([1, 2, 3, 4], is_cut=True)),
    (COMPLETE, reply([7])),
    (COMPLETE, reply([7], is_cut=True)),
]
PLANTED = {
    "another token": (SAME, reply([1, 2, 4]), "wrong", "from token 2 on"),
    "a token too many": (SAME, reply([1, 2, 3, 4]), "wrong", "from token 3 on"),
    "a token too few": (SAME, reply([1, 2]), "wrong", "from token 2 on"),
    "another text": (SAME, changed(text="other"), "wrong", "another text"),
    "another end": (SAME, changed(finish_reason="length"), "wrong", "another text or end"),
    "another log-probability": (SAME, changed(logprobs=[-0.5, -0.6, -0.5]), "wrong", "log-prob"),
    "a log-probability too few": (SAME, changed(logprobs=[-0.5]), "wrong", "log-prob"),
    "another beginning of a cut answer": (SAME, reply([1, 9], is_cut=True), "wrong", "before it was cut"),
    "an answer that is not there": (COMPLETE, reply(), "error", "0 answers of 1"),
    "an empty answer": (COMPLETE, changed(token_ids=[]), "error", "0 tokens"),
    "an answer without an end": (COMPLETE, changed(finish_reason=None), "error", "ended by None"),
    "an answer that stops early and calls it its length": (
        COMPLETE, changed(finish_reason="length"), "error", "ours: 3 tokens of at most 99, ended by length"),
    "a failure": (SAME, Reply(500, "oh"), "error", "ours: 500 oh"),
    "a connection that broke": (COMPLETE, Reply(0, "ReadError: "), "error", "ReadError"),
    "an answer that should be refused": (REFUSED, reply([1]), "error", "not refused"),
    "a server's failure in place of a refusal": (REFUSED, Reply(500), "error", "not refused"),
    "another refusal": (REFUSED, Reply(413), "error", "400 and 413"),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "ours"), SOUND)
def test_sound_answers_pass(rule, ours):
    assert verdict(rule, 1, 99, reply([1, 2, 3]), ours) == ("", "")
    assert verdict(REFUSED, 1, 9, Reply(400), Reply(400)) == ("", "")


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name):
    rule, ours, kind, why = PLANTED[name]
    limit = 3 if name == "another end" else 99
    vanilla = Reply(400) if rule == REFUSED else reply([1, 2, 3])
    found = verdict(rule, 1, limit, vanilla, ours)
    assert found[0] == kind and why in found[1]


IDLE = dict.fromkeys(metrics.NAMES, 0) | {"relevance_bytes_per_token": 256}


@pytest.mark.parametrize(
    ("held", "leaked"),
    [
        ({}, (0, 0)),
        ({"draft_pool_blocks_used": 3}, (3, 0)),
        ({"held_requests": 2}, (0, 2)),
        ({"relevance_held_bytes": 64 * 256}, (0, 64)),
        ({"relevance_held_bytes": 1, "held_requests": 1}, (0, 2)),
        ({"relevance_held_bytes": 5, "relevance_bytes_per_token": 0}, (0, 5)),
    ],
)
def test_what_is_held_at_rest_has_leaked(held, leaked):
    found = soak.leaks(IDLE | held)
    assert (found["leaked_blocks"], found["leaked_states"]) == leaked


def test_slope_is_of_the_second_half():
    """2 MB a minute after caches have filled; catches: the first half, bytes per second, a mean of steps; a judgement
    of the minutes in which caches fill, as of a soak of two.
    """
    filling = [(float(at), int(1e6 * at)) for at in range(0, 300, 2)]
    growing = [(300.0 + at, int(3e8 + 2e6 * at / 60)) for at in range(0, 302, 2)]
    assert soak.slope_mb_per_min(filling + growing) == pytest.approx(2.0, abs=0.01)
    assert soak.slope_mb_per_min([(250.0 * at, 5) for at in range(5)]) == 0.0
    assert soak.slope_mb_per_min([]) is soak.slope_mb_per_min(growing) is None


def test_vanilla_is_as_old_as_what_it_is_compared_with():
    """Catches: a vanilla whose caches filled an hour ago beside a server that has just started."""
    vanilla = [(float(at), 0) for at in range(0, 1000, 2)]
    ours = [(float(at), 0) for at in range(700, 901, 2)]
    assert soak.first_minutes(vanilla, ours) == vanilla[:101]
    assert soak.first_minutes([], ours) == soak.first_minutes(vanilla, []) == []


CONFIG = {"config": "chain", "rss_slope_mb_per_min": 2.0, "vanilla_rss_slope_mb_per_min": -1.0}
PASS = {"wrong_answers": 0, "errors_unexpected": 0, "leaked_blocks": 0, "leaked_states": 0}


@pytest.mark.parametrize(
    ("ours", "vanillas", "fails"),
    # A leak of 5.5 MB a minute is seen, which vanilla's own growth explains or does not; what was not judged passes.
    [
        (2.0, -1.0, False),
        (5.5, 0.4, True),
        (5.5, 3.0, False),
        (5.5, None, True),
        (None, None, False),
        (3.1, -2.0, True),
    ],
)
def test_each_figure_fails_a_soak(ours, vanillas, fails):
    row = CONFIG | {"rss_slope_mb_per_min": ours, "vanilla_rss_slope_mb_per_min": vanillas}
    memory = ["memory of chain"] if fails else []
    assert soak.is_bad(PASS | {"configs": [CONFIG, row]}, 3.0) == memory
    for name in PASS:
        assert soak.is_bad(PASS | {"configs": [row], name: 6}, 3.0) == [name, *memory]


# ---- traffic --------------------------------------------------------------------------------------------------------


def test_traffic_is_of_every_kind():
    """Catches: a kind or a trait that is never drawn, a loose answer that is compared, a seed that is not."""
    asks, again = (soak_traffic.Traffic(random.Random(0)).slice(400) for _ in range(2))
    assert {ask.about for ask in asks} == set(soak_traffic._ABOUT)
    traits = {trait for ask in asks for trait in ask.traits}
    assert {"streamed", "closed", "n > 1", "logprobs", "stop string", "duplicate", "scorer strict"} <= traits
    assert {ask.path for ask in asks} == {soak_traffic.CHAT, soak_traffic.COMPLETIONS}
    for ask in asks:
        is_lossy = ask.own.get("vidspec_scorer", "strict").startswith("fly") or ask.own.get("vidspec_lambda")
        if ask.rule == COMPLETE:
            assert is_lossy and not {"logprobs", "stop string"} & set(ask.traits)
        if is_lossy and ask.rule == SAME:
            assert {"logprobs", "stop string"} & set(ask.traits)
        assert not ask.own.keys() & ask.body.keys()
        assert ask.rule == REFUSED or ask.body["temperature"] == 0 or "seed" in ask.body
        assert ("closed" in ask.traits) == (ask.close_after is not None)
    assert json.dumps([ask.body for ask in again]) == json.dumps([ask.body for ask in asks])


@pytest.fixture
def server():
    """Answers like the API, by the request's fields; keeps the bodies in `server.bodies`."""

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        answer.bodies.append(body)
        choice = {"index": 0, "finish_reason": "stop", "token_ids": [5, 6]}
        if body.get("refuse"):
            return httpx.Response(400, json={"error": {"message": "no"}})
        if body.get("stream"):
            pieces = [choice | {"delta": {"content": "a"}, "finish_reason": None, "token_ids": [i]} for i in range(4)]
            events = [{"choices": [piece]} for piece in pieces] + [{"choices": [choice | {"delta": {}}]}]
            if body.get("break"):
                events[2:] = [{"error": {"message": "it broke"}}]
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))
        logprobs = {"content": [{"logprob": -1.0}, {"logprob": -2.0}]}
        message = {"content": f"turn {len(body['messages'])}"}
        return httpx.Response(200, json={"choices": [choice | {"message": message, "logprobs": logprobs}]})

    answer.bodies = []
    return answer


def sent(server, is_ours: bool = False, **fields) -> list[Reply]:
    body = {"messages": [{"role": "user", "content": "q"}], **fields.pop("body", {})}
    ask = soak_traffic.Ask("text", soak_traffic.CHAT, body, **fields)
    with httpx.Client(transport=httpx.MockTransport(server)) as client:
        return soak_traffic.send(client, "http://server", ask, is_ours)


def test_the_client_reads_answers_and_refusals(server):
    (whole,) = sent(server)
    assert (whole.status, whole.choices[0]) == (200, Choice([5, 6], "turn 1", "stop", [-1.0, -2.0]))
    (streamed,) = sent(server, body={"stream": True})
    assert streamed.choices[0] == Choice([0, 1, 2, 3, 5, 6], "aaaa", "stop") and not streamed.is_cut
    (cut,) = sent(server, body={"stream": True}, close_after=2)
    assert cut.choices[0].token_ids == [0, 1] and cut.is_cut
    count = len(server.bodies)
    (refused,) = sent(server, body={"refuse": True})
    assert len(server.bodies) == count + 1
    assert refused.status == 400 and "no" in refused.error
    (broken,) = sent(server, body={"stream": True, "break": True})
    assert broken.status == 500 and "it broke" in broken.error and broken.resent == 2


def test_a_second_turn_repeats_the_first(server):
    first, second = sent(server, next_turn="and then", is_ours=True, own={"vidspec_scorer": "strict"})
    assert (first.choices[0].text, second.choices[0].text) == ("turn 1", "turn 3")
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["q", "turn 1", "and then"]
    assert all(body["vidspec_scorer"] == "strict" for body in server.bodies)
    sent(server, own={"vidspec_scorer": "strict"})
    assert "vidspec_scorer" not in server.bodies[-1]


def test_nobody_there_is_an_error():
    with soak_traffic.client_for(1) as client:
        (gone,) = soak_traffic.send(client, "http://127.0.0.1:9", soak_traffic.Ask("text", "/", {}), False)
    assert gone.status == 0 and "Error" in gone.error


def test_a_record_tells_what_was_wrong():
    lines: list[str] = []
    record = soak.Record(lines.append)
    ask = soak_traffic.Ask("video", soak_traffic.CHAT, {"max_tokens": 9, "messages": ["m"], "seed": 3}, traits=("x",))
    for answer in ([1, 2, 3], [1, 2, 9]):
        record.add("chain", ask, [reply([1, 2, 3])], [reply(answer)])
    (wrong,) = record.bad["wrong"]
    assert wrong["seed"] == 3 and "messages" not in wrong and "token 2" in wrong["why"]
    assert record.requests == 2 and record.kinds == {"video": 2} and record.traits == {"x": 2}
    record.add("chain", ask, [reply([1])], [])
    assert record.bad["error"][0]["why"] == "1 turns and 0"
    assert len(lines) == 2 and "token 2" in lines[0]
