"""SchedulerControl on an engine without models, whose steps reach it as vLLM's scheduler passes them on."""

from types import SimpleNamespace

import pytest

from tests.unit.adapt.simulated_engine import SimulatedEngine
from vllm_vidspec.adapt import Controller
from vllm_vidspec.config import parse_config
from vllm_vidspec.engine import control as module
from vllm_vidspec.engine.compat.scheduler import _DECISION, StepReport, attach_report


class ThroughScheduler:
    """What SimulatedEngine asks of a controller, passed through SchedulerControl.

    Args:
        clock: What SchedulerControl reads; it moves on by the seconds of each step.
    """

    def __init__(self, clock: SimpleNamespace):
        config, _ = parse_config({"model": "draft", "num_speculative_tokens": 5})
        scheduler = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=64))
        self.control = module.SchedulerControl(config, scheduler, SimpleNamespace(), None)
        self.controller: Controller = self.control._controller
        self._clock, self._finished, self._new = clock, set(), []

    def add(self, req_id, label, kind, num_tokens, num_draft_tokens):
        video = SimpleNamespace(modality="video", mm_position=SimpleNamespace(length=num_tokens - 50))
        greedy = SimpleNamespace(temperature=0.0)
        request = SimpleNamespace(request_id=req_id, mm_features=[video], sampling_params=greedy, num_tokens=num_tokens)
        self._new.append(req_id)
        return self.control.is_shown(request, 0)

    def decide(self, req_ids):
        self._step = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(req_ids, 1),
            finished_req_ids=self._finished,
            scheduled_new_reqs=self._new,
        )
        self._finished, self._new = set(), []
        decision = self.control.plan(self._step, None)
        setattr(self._step, _DECISION, decision)
        self._step.num_spec_tokens_to_schedule = decision.option.num_tokens
        return decision

    def observe(self, decision, req_ids, drafted, num_tokens, is_chain, seconds, is_steady, reading, reading_s):
        self._clock.now += seconds or 0.01
        drafts = {req_id: [0] * k for req_id, k in zip(req_ids, drafted.tolist(), strict=True) if k}
        self._step.scheduled_spec_decode_tokens = drafts
        self._step.total_num_scheduled_tokens = len(req_ids) + int(drafted.sum())
        output = SimpleNamespace(req_ids=req_ids, sampled_token_ids=[[0] * n for n in num_tokens.tolist()])
        attach_report(output, StepReport(frozenset(drafts), reading, reading_s, ()))
        self.control.observe(self._step, output)

    def remove(self, req_id):
        self._finished.add(req_id)


@pytest.fixture
def engine(monkeypatch) -> SimulatedEngine:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)
    return SimulatedEngine(ThroughScheduler(clock))


def test_a_class_rests_and_resumes_through_the_scheduler(engine):
    """A better draft behind the same name: within 200 requests all are drafted for; probes cost 1 % of the time.

    Catches: steps that the scheduler's side never passes on, or whose time it gets wrong; probes without a bound.
    """
    without = SimulatedEngine(0)
    without.serve((1024, 0.0), requests=200)
    engine.serve((1024, 0.0), requests=100)
    (known,) = engine.controller.controller.classes
    assert known.rests
    begin = engine.seconds
    engine.serve((1024, 0.0), requests=200)
    assert known.rests and engine.seconds - begin < 1.015 * without.seconds
    engine.serve((1024, 0.95), requests=200)
    shown = engine.num_shown
    engine.serve((1024, 0.95), requests=20)
    assert not known.rests and engine.num_shown - shown == 20
    assert engine.decisions[-2].option.num_tokens > 1


def test_placeholders_cost_rows_and_are_not_rejected_drafts(engine):
    """Rows that are scheduled for drafts which have not come: their time is learned, and no acceptance.

    Catches: acceptance of placeholders, costs of steps with placeholders taken for those of steps without.
    """
    through, report = engine.controller, StepReport(frozenset(), frozenset(), 0.0, ())
    through.add("a", 0, (), 300, 80)
    for _ in range(12):
        decision = through.decide(["a"])
        step = through._step
        rows = decision.option.num_tokens
        step.scheduled_spec_decode_tokens = {"a": [0] * rows} if rows else {}
        step.total_num_scheduled_tokens = 1 + rows
        output = SimpleNamespace(req_ids=["a"], sampled_token_ids=[[0]])
        attach_report(output, report)
        through._clock.now += 0.01 + 0.001 * rows
        through.control.observe(step, output)
    controller = through.controller
    assert controller.acceptance.tries(0) == 0
    assert any(record.x[4] > 0 for record in controller.costs._records.values())
