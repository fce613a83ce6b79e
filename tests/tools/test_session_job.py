"""The engine's side of a session, vLLM replaced: what a batch is, and what is watched of it."""

import io
import json
import os
import sys
from types import SimpleNamespace

import pytest

from benchmarks import session, watching
from benchmarks.session import BenchEngine
from vllm_vidspec import metrics
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import NAMES
from vllm_vidspec.tools import session_job
from vllm_vidspec.tools.engine_session import answer_command


class FakeLLM:
    """Answers three requests; every batch drafts more steps, and a knob says which token the first answer ends in."""

    def __init__(self, speculates=True):
        config = SimpleNamespace(speculative_config=speculates or None, instance_id="x")
        self.llm_engine = SimpleNamespace(vllm_config=config)
        self.counters, self.calls, self.last = dict.fromkeys(NAMES, 0), [], 1

    def collective_rpc(self, method, args):
        name = getattr(method, "__name__", method)
        self.calls.append((name, *args))
        if name == "vidspec_retune":
            self.last = args[0]["lambda_loose"]
        if name == "scores" and not args[0]:
            return [
                [
                    # Watched past the end of the answer; vLLM's suffix on the id; not in the requests' order.
                    {"req_id": "8-b1b2", "tokens": [7, 8], "relevance": [None, 0.5], "kinds": [0, 2]},
                    {"req_id": "7-a1b2", "tokens": [5, self.last, 9], "relevance": [0.1, None, 1], "kinds": [0, 1, 3]},
                ]
            ]
        return [None]

    def generate(self, requests, params, use_tqdm):
        self.calls.append(("generate", requests, [(one.seed, one.temperature, one.max_tokens) for one in params]))
        self.counters["drafts"] += len(self.calls)
        answers = ([5, self.last], [7, 8], [6])
        return [
            SimpleNamespace(request_id=str(7 + i), outputs=[SimpleNamespace(text=f"text {i}", token_ids=ids)])
            for i, ids in enumerate(answers)
        ]

    def get_tokenizer(self):
        return SimpleNamespace(decode=lambda ids: " ".join(f"w{token}" for token in ids))


@pytest.fixture
def sampling_params(monkeypatch):
    params = lambda **given: SimpleNamespace(**{"max_tokens": None} | given)  # noqa: E731
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=params))


def command(lambda_loose, watch=True):
    knobs = None if lambda_loose is None else {"lambda_loose": lambda_loose}
    fields = answer_command(knobs, seed=3, temperature=0.5, max_tokens=9) | {"watch": watch}
    return {name: value for name, value in fields.items() if name != "command"}


def test_a_batch_is_retuned_watched_and_counted_by_itself(monkeypatch, sampling_params):
    llm = FakeLLM()
    monkeypatch.setattr(metrics, "read_metrics", lambda path: dict(llm.counters))
    engine = BenchEngine(llm, ["a", "b", "c"])
    answers = [engine.answer(**command(lambda_loose)) for lambda_loose in (1, 2)]
    generate = ("generate", ["a", "b", "c"], [(3, 0.5, 9), (4, 0.5, 9), (5, 0.5, 9)])
    watch = [("scores", on) for on in (True, False)]
    assert llm.calls == [
        *(watch[0], ("vidspec_retune", {"lambda_loose": 1}), generate, watch[1]),
        *(watch[0], ("vidspec_retune", {"lambda_loose": 2}), generate, watch[1]),
    ]
    assert [answer["metrics"]["drafts"] for answer in answers] == [3, 7], "each batch's own gain"
    first, second = answers
    assert first["texts"] == ["text 0", "text 1", "text 2"]
    assert first["captions"] == [
        {"words": ["w5", "w1"], "relevance": [0.1, None], "kinds": [0, 1]},
        {"words": ["w7", "w8"], "relevance": [None, 0.5], "kinds": [0, 2]},
        {"words": ["w6"], "relevance": [None], "kinds": [0]},
    ]
    assert second["token_ids"][0] == [5, 2]
    json.dumps(answers)


def test_vanilla_is_not_watched_and_what_was_watched_is_what_was_said(sampling_params):
    llm = FakeLLM(speculates=False)
    answer = BenchEngine(llm, ["a", "b", "c"]).answer(**command(None, watch=False))
    assert [call[0] for call in llm.calls] == ["generate"]
    assert answer["metrics"] is answer["captions"] is None
    (watched,) = llm.collective_rpc(watching.scores, (False,))
    watched[0]["tokens"][1] = 9
    with pytest.raises(VidSpecError, match="not the tokens of the answer"):
        session._watched_captions(llm.get_tokenizer(), llm.generate([], [], False), watched)


def test_vllms_own_drafts_are_counted_by_our_names():
    """Catches: an engine without our worker whose counters are looked for in a file that nobody writes."""
    llm = FakeLLM()
    found = {"num_drafts": 4, "num_draft_tokens": 20, "num_accepted_tokens": 2}
    values = [SimpleNamespace(name=f"vllm:spec_decode_{name}", value=value) for name, value in found.items()]
    llm.get_metrics = lambda: [SimpleNamespace(name="vllm:e2e", value=1), *values]
    engine = BenchEngine(llm, [], job={"llm": {"speculative_config": {"method": "ngram"}}})
    counted = engine.counters()
    assert metrics.summarize(counted)["acceptance_length"] == 1.5
    assert set(counted) == set(metrics.NAMES)
    llm.get_metrics = list
    assert engine.counters()["drafts"] == 0, "before the first step"


def test_some_requests_at_once(monkeypatch, sampling_params):
    """Catches: all requests for some, seeds by place in the batch for those of requests, times of another clock."""
    llm = FakeLLM()
    monkeypatch.setattr(metrics, "read_metrics", lambda path: dict(llm.counters))
    monkeypatch.setattr(session.time, "monotonic", lambda: 10.0)
    generate = llm.generate

    def answered(requests, params, use_tqdm):
        outputs = generate(requests, params, use_tqdm)[: len(requests)]
        for output in outputs:
            output.metrics = SimpleNamespace(first_token_ts=10.5, last_token_ts=12.0)
        return outputs

    llm.generate = answered
    found = BenchEngine(llm, ["a", "b", "c"]).batch([1, 2], {"max_tokens": 9}, 3)
    assert llm.calls == [("generate", ["b", "c"], [(4, 0, 9), (5, 0, 9)])]
    assert found["answers"][1] == {"token_ids": [7, 8], "first_s": 0.5, "last_s": 2.0}
    assert found["metrics"]["drafts"] == 1


def test_kept_videos_are_sent_once(monkeypatch):
    """Catches: frames that are sent again, a name that two videos share, names that come after the frames have gone."""
    sent = []
    monkeypatch.setattr(
        BenchEngine, "batch", lambda self, indices, *_: sent.append(json.dumps(self.requests[indices[0]]))
    )
    engine = BenchEngine(None, [{"multi_modal_data": {"video": [f"{i} a", f"{i} b"]}} for i in range(2)])
    for index in (0, 1):
        engine.keep(index, {})
        assert json.loads(sent[index])["multi_modal_data"] == {"video": [f"{index} a", f"{index} b"]}
    assert all("multi_modal_uuids" in request for request in sent)
    assert {request["multi_modal_data"]["video"][0] for request in engine.requests} == {None}
    names = [name for request in engine.requests for name in request["multi_modal_uuids"]["video"]]
    assert len(set(names)) == 4


def test_an_error_without_a_message_says_where_it_was(tmp_path, monkeypatch):
    class Failing(BenchEngine):
        @classmethod
        def prepare(cls, job):
            raise AssertionError

    monkeypatch.setattr(sys, "stdin", io.StringIO('{"llm": {}}\n'))
    with open(tmp_path / "messages", "w") as messages:
        monkeypatch.setattr(sys, "argv", ["", str(os.dup(messages.fileno()))])
        assert session_job.main(Failing) == 1
    error = json.loads((tmp_path / "messages").read_text())["message"]
    place, code = error.removeprefix("AssertionError at ").rsplit(": ", 1)
    assert code == "raise AssertionError" and place.rsplit(":", 1)[0].endswith("test_session_job.py"), error
