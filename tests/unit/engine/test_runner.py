"""What the scheduler's side, the runner and the worker do beside the loop."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_vidspec.adapt import REST, Controller
from vllm_vidspec.adapt import control as control_module
from vllm_vidspec.adapt.costs import StepCosts
from vllm_vidspec.adapt.trials import Trials
from vllm_vidspec.config import VidSpecConfig, parse_config
from vllm_vidspec.engine import control as module
from vllm_vidspec.engine.compat.scheduler import _DECISION, StepReport, attach, report_of
from vllm_vidspec.engine.parallel.messages import Failed
from vllm_vidspec.engine.parallel.supervisor import DrafterSupervisor
from vllm_vidspec.engine.requests import Phase
from vllm_vidspec.engine.runner import VidSpecModelRunner
from vllm_vidspec.engine.worker import VidSpecWorker
from vllm_vidspec.errors import VidSpecError


def request_of(req_id, num_cached=0, max_tokens=64):
    """Return a request of 300 tokens, 250 of them a video's, of which the prefix cache has so many."""
    video = SimpleNamespace(modality="video", mm_position=SimpleNamespace(length=250))
    sizes = {"num_tokens": 300, "num_computed_tokens": num_cached, "max_tokens": max_tokens, "num_output_tokens": 25}
    return SimpleNamespace(
        request_id=req_id, mm_features=[video], sampling_params=SimpleNamespace(temperature=0.0), **sizes
    )


def decisions(monkeypatch, num_steps, sampled, num_requests=1, pause_s=0.0, look_s=0.0):
    """Let a scheduler's control decide steps of which `sampled(step, rows)` tells each request's tokens; a request ends
    after 25 steps, its neighbour after 17, then nothing runs for so long. To look at a step takes `look_s`. Return the
    control, and each step's number of drafts."""
    now = 0.0

    def look(*_):
        nonlocal now
        now += look_s

    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    monkeypatch.setattr(Controller, "observe", heard(Controller.observe, look))
    config, _ = parse_config({"model": "draft", "num_speculative_tokens": 5})
    scheduler = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=64), running=[])
    control, found = module.SchedulerControl(config, scheduler, SimpleNamespace(), None), []
    for number in range(num_steps):
        generation, age = divmod(number, 25)
        req_ids = [f"{generation}-{i}" for i in range(num_requests if age < 17 else 1)]
        step = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(req_ids, 1), finished_req_ids=set())
        step.scheduled_new_reqs = [] if age else req_ids
        if age == 17:
            step.finished_req_ids = {f"{generation}-1"}
        if not age:
            now += pause_s
            step.finished_req_ids = {f"{generation - 1}-0"}
            for req_id in req_ids:
                control.is_shown(request_of(req_id), 0)
        decision = control.plan(step, None)
        setattr(step, _DECISION, decision)
        rows = step.num_spec_tokens_to_schedule = decision.option.num_tokens
        step.scheduled_spec_decode_tokens = {req_id: [0] * rows for req_id in req_ids} if rows else {}
        step.total_num_scheduled_tokens = len(req_ids) * (1 + rows)
        tokens, is_real = sampled(number, rows)
        output = SimpleNamespace(req_ids=req_ids, sampled_token_ids=[[0] * tokens] * len(req_ids))
        attach(output, StepReport(frozenset(req_ids if is_real else ()), frozenset(), 0.0, ()), None)
        now += 0.01 + 0.001 * rows
        control.observe(step, output)
        found.append(rows)
    return control, found


def test_what_a_cold_prompt_costs_is_not_what_a_cached_one_costs(monkeypatch):
    """Catches: a class that rests for its cold prompts' sake, although cached ones would pay."""
    control, _ = decisions(monkeypatch, 1, lambda number, rows: (1, False))
    for number, num_cached in enumerate((0, 64, 256, 288)):
        control.is_shown(request_of(f"more-{number}", num_cached), 0)
    slots = control._controller.requests.slots([f"more-{number}" for number in range(4)])
    assert control._controller.forecast.acceptance.classes[slots].tolist() == [0, 0, 1, 1]


def test_an_answer_ends_where_vllm_ends_it(monkeypatch):
    """Catches: drafts accepted beyond the end taken for a part of it, by which short answers seem twice as long; the
    length of others' answers where this one may not have so many tokens; requests that are kept for ever."""
    control, _ = decisions(monkeypatch, 200, lambda number, rows: (1 + rows, rows > 0))
    control._controller.learn()
    assert control._controller.classes[0].answer_tokens == 25 and list(control._requests) == ["7-0"]
    for req_id, max_tokens in (("long", 64), ("bounded", 20), ("short", 8)):
        control.is_shown(request_of(req_id, max_tokens=max_tokens), 0)
    requests, slots = control._controller.requests, control._controller.requests.slots(["long", "bounded", "short"])
    assert requests.batch(slots).answer_tokens.tolist() == [25, 20, 8]
    assert control._controller.forecast.acceptance.classes[slots].tolist() == [0, 0, 1]


def test_placeholders_cost_rows_and_are_not_rejected_drafts(monkeypatch):
    """Rows scheduled for drafts which have not come: their time is learned, and no acceptance."""
    control, _ = decisions(monkeypatch, 20, lambda number, rows: (1, False))
    control._controller.learn()
    assert control._controller.forecast.acceptance.tries(0) == 0
    assert any(record.x[4] > 0 for record in control._controller.forecast.costs._records.values())


@pytest.mark.parametrize("num_unseen", [0, 4, 15])
@pytest.mark.parametrize("may_draft", [False, True])
def test_steps_that_nobody_looks_at_are_counted(may_draft, num_unseen, monkeypatch):
    """Nobody may be drafted for, or nobody is. Catches: tokens of an answer that are lost, a pause between two answers
    that pays for probes, steps that are all looked at, decisions that come late.
    """
    monkeypatch.setattr(control_module, "_QUIET", num_unseen)
    monkeypatch.setattr(Controller, "_is_shown", lambda *_: may_draft)
    if may_draft:
        monkeypatch.setattr(Controller, "_choose", lambda self, slots, _: (REST, np.zeros(len(slots), dtype=bool)))
    elapsed, looked, answers, decided = [], [], [], []
    for owner, name, told in (
        (Trials, "elapse", lambda self, seconds: elapsed.append(seconds)),
        (Controller, "observe", lambda self, kind, *_: looked.append(kind)),
        (Controller, "_choose", lambda self, *_: decided.append(self._learning.num_steps)),
        (Controller, "_end", lambda self, req_id, _: answers.append(self.requests.tokens[self.requests.slot(req_id)])),
    ):
        monkeypatch.setattr(owner, name, heard(getattr(owner, name), told))
    decisions(monkeypatch, 20 * 25, lambda number, rows: (1, False), num_requests=2, pause_s=10.0)
    assert answers == [17, 25] * 19 + [17]
    assert sum(elapsed) == pytest.approx(0.01 * 20 * 25, rel=0.2) and max(elapsed) < 1
    assert (len(looked) < (0.75 if may_draft else 0.4) * 20 * 25) == (num_unseen > 0)
    # After a request has come or gone in 4 steps, then in 8: never later, whoever looks.
    assert np.diff(decided).max() <= (8 if may_draft else 25)


@pytest.mark.parametrize("num_unseen", [0, 15])
def test_to_look_is_no_part_of_a_step_at_rest(num_unseen, monkeypatch):
    """Catches: rest that seems slower than it is, where hardly a step is looked at."""
    monkeypatch.setattr(control_module, "_QUIET", num_unseen)
    monkeypatch.setattr(Controller, "_is_shown", lambda *_: False)
    seconds = []
    monkeypatch.setattr(StepCosts, "observe", heard(StepCosts.observe, lambda _, kind, x, s, *__: seconds.append(s)))
    decisions(monkeypatch, 20 * 25, lambda number, rows: (1, False), look_s=5e-4)
    assert len(seconds) > 50 and seconds == pytest.approx([0.01] * len(seconds))


def test_a_class_that_comes_and_goes_is_logged_once_a_minute(monkeypatch):
    """Catches: a line for each of its changes, a change that no line ever tells, a change that is not counted."""
    now, counted, told = 0, [], []
    control, _ = decisions(monkeypatch, 1, lambda number, rows: (1, False))
    control._file = SimpleNamespace(add=counted.append)
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    monkeypatch.setattr(module.logger, "info", lambda line, *_: told.append("again" in line))
    for now in range(0, 180, 10):
        control._controller.classes[0].rests = now >= 100 or now // 10 % 2 == 0
        control._log_classes()
    assert told == [False, True, False]  # at 0, 70 and 130 seconds
    assert counted == ["rests_video_256", "resumes_video_256"] * 5 + ["rests_video_256"]


def heard(original, told):
    """Return a method that tells what it is given before it does what it did."""

    def method(self, *args):
        told(self, *args)
        return original(self, *args)

    return method


def test_steps_that_wait_change_no_decision(monkeypatch):
    """Acceptance comes and goes. Catches: a decision, a request's class or its end before what it rests on is known."""

    def sampled(number, rows):
        return 1 + (rows if number // 40 % 2 else min(rows, number % 3)), rows > 0

    known = []  # at each choice and gain: steps that it does not know of
    for name in ("_choose", "_gain"):
        original = getattr(Controller, name)

        def asked(self, *args, _original=original):
            known.append(self._learning.num_waiting + len(self._ending))
            return _original(self, *args)

        monkeypatch.setattr(Controller, name, asked)
    control, found = decisions(monkeypatch, 400, sampled, num_requests=2)
    assert len(known) > 50 and not any(known) and len(set(found)) > 2
    control._controller.learn()
    assert sum(ended.verify_steps for ended in control._controller.ended) <= 2 * 25


@pytest.mark.parametrize(("has_stages", "expected"), [(False, {"other"}), (True, {"drafted"})])
def test_the_drafts_that_a_step_verifies(has_stages, expected):
    """With pipeline stages two batches are under way. Catches: the controller told of the drafts of the other one."""
    runner = VidSpecModelRunner.__new__(VidSpecModelRunner)
    batch = SimpleNamespace(req_ids=["plain", "drafted"], idx_mapping_np=np.array([2, 0]))
    runner.use_pp, runner.execute_model_state = has_stages, SimpleNamespace(input_batch=batch)
    runner.requests = SimpleNamespace(in_flight=frozenset({"other"}), has_draft_np=np.array([True, True, False]))
    assert runner._verified() == expected


@pytest.mark.parametrize(
    ("is_settled", "recorder", "num_skips", "publishes"),
    [(True, None, 2, False), (False, None, 2, True), (True, mock.Mock(), 2, True), (True, None, 3, True)],
)
def test_a_step_at_rest_publishes_what_there_is(is_settled, recorder, num_skips, publishes, monkeypatch):
    """Catches: counts, records or requests without speculation that nobody is told of while nothing is drafted, also of
    a request that comes while others rest; drafts that the next decision asks for and nobody makes.
    """
    runner = VidSpecModelRunner.__new__(VidSpecModelRunner)
    backend = SimpleNamespace(reading=frozenset({"earlier"}), reading_s=0.0)
    runner.speculator = SimpleNamespace(is_at_rest=True, backend=backend, decision=object())
    runner.counters = mock.Mock(is_settled=is_settled, publisher=lambda: None, carried=lambda: None)
    runner.requests = SimpleNamespace(num_skips=num_skips, in_flight=frozenset(), phase=np.array([Phase.SKIPPED]))
    runner.req_states = SimpleNamespace(req_id_to_index={"skipped": 0})
    runner.use_pp, runner.recorder, runner._num_told_skips, runner.num_speculative_steps = False, recorder, 2, 5
    runner._rests_on = runner.execute_model_state = None
    output = SimpleNamespace()
    monkeypatch.setattr(GPUModelRunner, "sample_tokens", lambda self, grammar: output)
    assert runner.sample_tokens(None) is output and runner.counters.flush.called == publishes
    assert report_of(output).skipped == (("skipped",) if num_skips > 2 else ()) and runner.num_speculative_steps == 5
    assert recorder is None or recorder.publisher.called
    runner.counters.flush.reset_mock()
    assert runner.sample_tokens(None) is output and runner.num_speculative_steps == 5
    assert runner.counters.flush.called == (not is_settled or recorder is not None)
    for name in ("add_requests", "_new_request", "_publish_active"):
        monkeypatch.setattr(VidSpecModelRunner.__base__ if name == "add_requests" else runner, name, mock.Mock())
    runner.requests.add, output = lambda _: setattr(runner.requests, "num_skips", 4), SimpleNamespace()
    runner.add_requests(SimpleNamespace(scheduled_new_reqs=["skipped"]))
    assert report_of(runner.sample_tokens(None)).skipped == ("skipped",)
    runner.sample_tokens(None)
    runner.speculator.decision, runner.speculator.is_at_rest = object(), False
    runner.sample_tokens(None)
    assert not runner._was_at_rest


def test_a_step_with_draft_rows_is_not_at_rest(monkeypatch):
    """Drafts were wanted a step ago, nobody has made any, and none are wanted now. Catches: vLLM's rejection sampler
    without a speculator."""
    runner = VidSpecModelRunner.__new__(VidSpecModelRunner)
    runner.speculator = SimpleNamespace(is_at_rest=True, decision=None)
    runner.counters, runner.requests = mock.Mock(is_settled=True), SimpleNamespace(num_skips=0, in_flight=frozenset())
    runner.use_pp, runner.recorder, runner._num_told_skips, runner.num_speculative_steps = False, None, 0, 5
    runner._rests_on, output, had = None, SimpleNamespace(), []
    monkeypatch.setattr(
        GPUModelRunner, "sample_tokens", lambda self, _: had.append(self.speculator is not None) or output
    )
    for num_draft_tokens in (5, 0):
        batch = SimpleNamespace(num_draft_tokens=num_draft_tokens)
        runner.execute_model_state = SimpleNamespace(input_batch=batch)
        runner.sample_tokens(None)
    assert had == [True, False]


def test_drafts_of_a_request_that_has_left_are_nobodys():
    """A scheduler that runs ahead asks for them after the request has ended: no error, no other's drafts."""
    runner = VidSpecModelRunner.__new__(VidSpecModelRunner)
    drafts = DraftTokenIds(["here", "gone", "cut"], [[1, 2], [3, 4], [5, 6]])
    runner.draft_tokens_handler = SimpleNamespace(get_draft_tokens=lambda: drafts)
    runner.num_speculative_steps, runner._was_at_rest = 2, False
    runner.requests = SimpleNamespace(num_drafts=lambda most: np.array([1, most]))
    runner.req_states = SimpleNamespace(req_id_to_index={"here": 1, "cut": 0})
    assert runner.take_draft_token_ids().draft_token_ids == [[1, 2], [], [5]]


@pytest.mark.parametrize(
    ("choice", "is_up", "raises"), [("raise", True, True), ("skip", True, False), ("raise", False, False)]
)
def test_errors_that_are_to_raise_do_so_in_the_drafters_process_too(choice, is_up, raises):
    """Catches: a drafter that dies again and again untold; one that has not come up is refused at the start."""
    client = DrafterSupervisor.__new__(DrafterSupervisor)
    client._config = VidSpecConfig(model="x", num_speculative_tokens=5, on_draft_error=choice)
    client._channel = SimpleNamespace(flush=lambda: None, receive=lambda: [Failed("RuntimeError: no")], is_closed=False)
    client._processes, client.is_up = [], is_up
    if raises:
        with pytest.raises(VidSpecError, match="the drafter failed: RuntimeError: no"):
            list(client._receive())
    else:
        assert list(client._receive()) == []
        assert client._reason == "RuntimeError: no"


def test_what_is_lost_is_forgotten_first():
    """Catches: a draft that goes on over KV that is gone; weights that nobody reloads; pools copied to the host."""
    vllms = mock.Mock()

    class Base:
        model_runner, sleep, discard, init_device = vllms, vllms.sleep, vllms.discard, vllms.init_device
        _maybe_get_memory_pool_context = staticmethod(lambda tag: contextlib.nullcontext(tag))

    worker = type("Worker", (VidSpecWorker, Base), {})()
    worker.sleep()
    worker.discard(("kv_cache",))
    worker.sleep(2)
    forget, sleep = mock.call.forget_kv(), mock.call.sleep(1)
    assert vllms.mock_calls == [forget, sleep, forget, mock.call.discard(("kv_cache",)), forget, sleep]
    worker.init_device()
    with vllms.kv_allocation() as tag:
        assert tag == "kv_cache"
