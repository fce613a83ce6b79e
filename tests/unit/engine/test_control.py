"""SchedulerControl without an engine; tests/engine/test_control.py has what comes of its decisions."""

from types import SimpleNamespace

from vllm_vidspec.config import parse_config
from vllm_vidspec.engine import control as module
from vllm_vidspec.engine.compat.scheduler import _DECISION, StepReport, attach_report


def test_placeholders_cost_rows_and_are_not_rejected_drafts(monkeypatch):
    """Rows that are scheduled for drafts which have not come: their time is learned, and no acceptance. Catches:
    acceptance of placeholders, costs of steps with placeholders taken for those of steps without."""
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    config, _ = parse_config({"model": "draft", "num_speculative_tokens": 5})
    scheduler = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=64))
    control = module.SchedulerControl(config, scheduler, SimpleNamespace(), None)
    video = SimpleNamespace(modality="video", mm_position=SimpleNamespace(length=250))
    sampling = SimpleNamespace(temperature=0.0)
    control.is_shown(SimpleNamespace(request_id="a", mm_features=[video], sampling_params=sampling, num_tokens=300), 0)
    for number in range(12):
        new = [] if number else ["a"]
        step = SimpleNamespace(num_scheduled_tokens={"a": 1}, finished_req_ids=set(), scheduled_new_reqs=new)
        decision = control.plan(step, None)
        setattr(step, _DECISION, decision)
        rows = step.num_spec_tokens_to_schedule = decision.option.num_tokens
        step.scheduled_spec_decode_tokens = {"a": [0] * rows} if rows else {}
        step.total_num_scheduled_tokens = 1 + rows
        output = SimpleNamespace(req_ids=["a"], sampled_token_ids=[[0]])
        attach_report(output, StepReport(frozenset(), frozenset(), 0.0, ()))
        now += 0.01 + 0.001 * rows
        control.observe(step, output)
    assert control._controller.acceptance.tries(0) == 0
    assert any(record.x[4] > 0 for record in control._controller.costs._records.values())
