"""Records that requests ask for of themselves: who gets one, of what, and by which way it reaches a response."""

import asyncio
import json
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.outputs import RequestOutput
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from vllm_vidspec.config import REQUEST_RECORD, ScoreKnobs
from vllm_vidspec.engine.compat import api, scheduler
from vllm_vidspec.engine.report.request_metrics import RequestMetrics
from vllm_vidspec.engine.report.request_records import MAX_VISUAL_TOKENS, AnswerRecord, RequestRecorder
from vllm_vidspec.engine.requests import NewRequest, RequestRows
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import KINDS
from vllm_vidspec.pruning import TokenGrid
from vllm_vidspec.pruning.frames import PruneUnit
from vllm_vidspec.scoring import Scored
from vllm_vidspec.scoring.choices import choose

CPU = torch.device("cpu")


def make(*asking, drafted=(), salt="", for_all=False):
    """Return a recorder of four rows, those of `asking` with requests that ask, the others with such that do not."""
    rows = RequestRows(4, CPU)
    rows.has_draft_np[list(drafted)] = True
    recorder = RequestRecorder(rows, CPU, "qwen3-vl", for_all)
    for row in range(4):
        sampling = SimpleNamespace(extra_args={REQUEST_RECORD: True} if row in asking else None)
        recorder.add(NewRequest(f"r{row}", row, [], [], sampling, cache_salt=salt))
    return recorder


def job(row, units, scores, is_borrowed=False):
    plan = SimpleNamespace(units=units)
    return SimpleNamespace(req_state_idx=row, plan=plan, scores=scores, is_borrowed=is_borrowed)


def see(recorder, rows, num_logits, num_sampled, kinds=None):
    part = SimpleNamespace(idx_mapping_np=np.array(rows), num_logits_np=np.array(num_logits))
    recorder.verified(part, Scored(None, torch.tensor(num_sampled), None, kinds))


def test_a_step_is_told_to_those_that_ask_and_to_each_its_own():
    """Catches: a place in the batch for a row, placeholders that count as drafts, a step told twice."""
    recorder = make(1, 3, drafted=(0, 1, 3))
    kinds = torch.tensor([[1, 1, 0, 0], [2, 3, 1, 0], [0, 0, 0, 0]], dtype=torch.int8)
    see(recorder, [0, 3, 2], [4, 4, 4], [3, 4, 1], kinds)
    see(recorder, [1], [4], [2])
    told = recorder.publisher()
    assert told() == {"r3": {"kinds": [2, 3, 1, 0], "drafted": 3}, "r1": {"kinds": [1, 0], "drafted": 3}}
    recorder.remove(3)
    see(recorder, [3, 1], [4, 1], [4, 1])
    assert recorder.publisher()() == {"r1": {"kinds": [0], "drafted": 0}}
    recorder.remove(1)
    assert recorder.publisher() is None and not list(recorder.active_rows())
    undrafted = make(2)
    see(undrafted, [2], [4], [2])
    assert undrafted.publisher()() == {"r2": {"kinds": [0, 0], "drafted": 0}}
    nobody = make()
    nobody.verified(None, None)  # what it would look at is not there
    nobody.pruned(SimpleNamespace(req_state_idx=0), [])
    assert nobody.publisher() is None


def test_kinds_are_told_of_all_where_their_metrics_speak_of_them():
    """Catches: a record for one who has not asked, a row's last request for its present one."""
    recorder = make(1, drafted=(0, 1), for_all=True)
    see(recorder, [0, 1, 2], [4, 4, 1], [3, 2, 1])
    asked, plain = {"kinds": [1, 0], "drafted": 3}, {"kinds": [1, 1, 0]}
    assert recorder.publisher()() == {"r0": plain, "r1": asked, "r2": {"kinds": [0]}}
    for row in (0, 1):  # one is preempted and resumes on another row
        recorder.remove(row)
    recorder.add(NewRequest("r0", 1, [], [], None))
    see(recorder, [1, 0], [4, 1], [3, 1])
    assert recorder.publisher()() == {"r0": plain} and recorder.publisher() is None


def test_what_the_draft_saw_is_told_once_and_bounded():
    recorder, long = make(1), TokenGrid(MAX_VISUAL_TOKENS, 1, 2)
    units = [PruneUnit(range(1), TokenGrid(2, 1, 2), 2), PruneUnit(range(1, 2), long, 1)]
    kept, scores = [torch.tensor([0, 3]), torch.tensor([5])], [torch.tensor([0.1, 0.4, 0.0, torch.nan]), None]
    for row in (0, 1):
        recorder.pruned(job(row, units, scores), kept)
    (found,) = recorder.publisher()().values()
    assert found["pruned"] == [
        {"family": "qwen3-vl", "grid": [2, 1, 2, 0], "num_kept": 2, "kept": [0, 3], "scores": [64, 255, 0, 0]},
        {"family": "qwen3-vl", "grid": [MAX_VISUAL_TOKENS, 1, 2, 0], "num_kept": 1, "kept": None, "scores": None},
    ]
    assert "pruned" not in recorder.publisher()()["r1"]


@pytest.mark.parametrize(("salt", "is_told"), [("", False), ("mine", True)])
def test_nobody_is_told_what_anothers_question_has_scored(salt, is_told):
    """Where the prefix cache hides a prompt's own scores. Catches: what one key has asked in another's record."""
    recorder = make(1, salt=salt)
    units = [PruneUnit(range(1), TokenGrid(1, 1, 2), 1)]
    recorder.pruned(job(1, units, [torch.rand(2)], is_borrowed=True), [torch.tensor([1])])
    ((seen,),) = (record["pruned"] for record in recorder.publisher()().values())
    assert seen["num_kept"] == 1 and (seen["kept"] is not None) == (seen["scores"] is not None) == is_told
    recorder.remove(1)
    assert not recorder._unsalted


def test_a_record_leaves_with_its_own_requests_tokens():
    """Catches: a record of another request, one without tokens, the loss of what a KV connector says."""

    def output(req_id, tokens, kv=None):
        return SimpleNamespace(request_id=req_id, new_token_ids=tokens, kv_transfer_params=kv)

    first, second, third, stranger = output("a", [1, 2], {"x": 1}), output("b", [3]), output("c", []), output("d", [4])
    outputs = {0: SimpleNamespace(outputs=[first, stranger]), 1: SimpleNamespace(outputs=[second, third])}
    records = {req_id: {"kinds": [], "drafted": ord(req_id)} for req_id in "abc"}
    scheduler._hand_over(records, outputs)
    assert first.kv_transfer_params == {"x": 1, REQUEST_RECORD: {"kinds": [], "drafted": 97, "tokens": [1, 2]}}
    assert second.kv_transfer_params == {REQUEST_RECORD: {"kinds": [], "drafted": 98, "tokens": [3]}}
    assert third.kv_transfer_params is None and stranger.kv_transfer_params is None


def detokenizer_of(length: int) -> mock.Mock:
    """Return one that has taken in so many tokens, and spells each alone."""
    tokenizer = SimpleNamespace(decode=lambda ids, **_: f"<{ids[0]}>")
    return mock.Mock(tokenizer=tokenizer, **{"num_output_tokens.return_value": length})


def test_an_answers_record_ends_where_the_answer_does():
    """Catches: kinds of tokens that vLLM has cut, at the end of a step or by a stop string; a step told twice."""
    detokenizer = detokenizer_of(1)
    record = AnswerRecord(SimpleNamespace(detokenizer=detokenizer, prompt_token_ids=[1]))
    record.add({"tokens": [5], "kinds": [], "drafted": 0})
    detokenizer.num_output_tokens.return_value = 3
    record.add({"tokens": [6, 7, 8], "kinds": [1, 1, 2, 0], "drafted": 5, "pruned": []})
    assert record.take() == [
        {"tokens": [5], "text": ["<5>"], "kinds": [0], "drafted": 0},
        {"tokens": [6, 7], "text": ["<6>", "<7>"], "kinds": [1, 1], "drafted": 5, "pruned": []},
    ]
    assert record.take() == []


def test_a_response_has_the_record_only_of_a_request_that_asks(monkeypatch):
    """Through vLLM's own outputs, merged as for a slow client. Catches: the field without being asked for."""

    def output(self, new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params=None, error=None):
        return SimpleNamespace(kv=kv_transfer_params, error=error) if finish_reason else None

    monkeypatch.setattr(RequestState, "make_request_output", output)
    monkeypatch.setattr(api, "_hearers", {})
    monkeypatch.setattr(RequestOutput, "add", RequestOutput.add)

    async def lines(self, request, result_generator):
        async for result in result_generator:
            yield f'data: {{"text": "é{result.finished}"}}\n\n'
        yield "data: [DONE]\n\n"

    for name in ("chat_completion_stream_generator", "chat_completion_full_generator"):  # put back afterwards
        monkeypatch.setattr(OpenAIServingChat, name, lines)
    api.show_request_records(AnswerRecord)

    # As vLLM does for a step, for the last one, and for an abort: there by name.
    state = RequestState.__new__(RequestState)
    state.detokenizer, state.prompt_token_ids = detokenizer_of(2), []
    for tokens, reason, kv in (([5], None, {}), ([6], "stop", {"x": 1})):
        step = {REQUEST_RECORD: {"tokens": tokens, "kinds": [], "drafted": 0}}
        last = state.make_request_output(tokens, None, reason, None, kv | step, error="e")
    assert (last.kv, last.error) == ({"x": 1}, "e") and [one["tokens"] for one in last._vidspec_record] == [[5], [6]]
    names = {"new_token_ids": [], "pooling_output": None, "finish_reason": "abort", "stop_reason": None}
    aborted = RequestState.__new__(RequestState).make_request_output(**names, kv_transfer_params=None)
    assert aborted.kv is None and not hasattr(aborted, "_vidspec_record")

    merged, later = (RequestOutput("r", None, [], None, [], is_last) for is_last in (False, True))
    merged._vidspec_record, later._vidspec_record = [{"drafted": 1}], [{"drafted": 2}]
    merged.add(later, aggregate=True)

    async def results():
        yield merged

    async def told(extra, n=1):
        request = SimpleNamespace(model_extra=extra, n=n)
        return [line async for line in OpenAIServingChat.chat_completion_stream_generator(None, request, results())]

    asked = asyncio.run(told({REQUEST_RECORD: True}))
    assert json.loads(asked[0][6:]) == {"text": "éTrue", REQUEST_RECORD: [{"drafted": 1}, {"drafted": 2}]}
    assert asked[1] == "data: [DONE]\n\n"
    for extra, n in ((None, 1), ({}, 1), ({REQUEST_RECORD: False}, 1), ({REQUEST_RECORD: True}, 2)):
        assert asyncio.run(told(extra, n)) == ['data: {"text": "éTrue"}\n\n', asked[1]]


def test_a_finished_request_has_its_own_counts_and_nobody_elses(monkeypatch):
    """Catches: a step that is lost or told twice, counts left among what a KV connector says, ours without any."""
    names = ("make_request_output", "_new_completion_output")
    reported = RequestSpecDecodeMetrics(num_spec_tokens=3)

    def output(self, new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params=None):
        completion = self._new_completion_output(new_token_ids, finish_reason, stop_reason)
        return kv_transfer_params, completion.spec_decode_metrics

    def completion(self, token_ids, finish_reason, stop_reason):
        return SimpleNamespace(spec_decode_metrics=reported if finish_reason else None)

    def raises(state, what):
        raise ValueError(what)

    for name, function in zip(names, (output, completion), strict=True):
        monkeypatch.setattr(RequestState, name, function)
    monkeypatch.setattr(api, "_hearers", {"broken": raises})
    api.extend_request_metrics(RequestMetrics.of)
    state, other = RequestState.__new__(RequestState), RequestState.__new__(RequestState)
    step = {REQUEST_RECORD: {"kinds": [1, 2, 0]}, "x": 1}
    assert state.make_request_output([1], None, None, None, step) == ({"x": 1}, None)
    kv, told = state.make_request_output([1], None, "stop", None, {REQUEST_RECORD: {"kinds": [1, 3, 3, 0]}})
    of_other = other.make_request_output([1], None, "stop", None)[1].to_dict()
    assert kv is None and told.num_spec_tokens == 3
    for kind, count in zip(KINDS, (2, 1, 2), strict=True):
        assert told.to_dict()[f"num_{kind}_draft_tokens"] == count and of_other[f"num_{kind}_draft_tokens"] == 0


def test_counts_that_fail_cost_no_answer(monkeypatch):
    """Catches: an error of ours in the loop that serves every request, or one that nobody is told of."""
    reported, lines = RequestSpecDecodeMetrics(num_spec_tokens=3), []

    def completion(self, token_ids, finish_reason, stop_reason):
        return SimpleNamespace(spec_decode_metrics=reported)

    monkeypatch.setattr(RequestState, "_new_completion_output", completion)
    monkeypatch.setattr(RequestState, "make_request_output", RequestState.make_request_output)  # put back afterwards
    monkeypatch.setattr(api, "_hearers", {})
    monkeypatch.setattr(api.logger, "warning_once", lambda line, *values: lines.append(line % values))
    api.extend_request_metrics(lambda reported, kinds: 1 / 0)
    output = RequestState.__new__(RequestState)._new_completion_output([1], "stop", None)
    assert output.spec_decode_metrics is reported
    assert lines == ["vidspec: responses go without our counts and records: <class 'ZeroDivisionError'>"]


@pytest.mark.parametrize(("value", "said"), [(True, "start it with request_records"), ("yes", "true or false")])
def test_a_server_without_the_opt_in_refuses(value, said):
    with pytest.raises(VidSpecError, match=said):
        choose({REQUEST_RECORD: value}, ScoreKnobs(), has_records=False)
    choose({REQUEST_RECORD: False}, ScoreKnobs(), has_records=False)
    choose({REQUEST_RECORD: True}, ScoreKnobs())
