"""Host time of the controller's decisions for 64 requests, without an engine.

    python benchmarks/bench_decisions.py

It is CPU time of this thread, so that other work counts little.
"""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import numpy.ma  # an engine has it; np.median would import it within a decision

from vllm_vidspec.config import parse_config
from vllm_vidspec.engine.compat import scheduler as compat
from vllm_vidspec.engine.control import SchedulerControl


def decision_us(steps_per_arrival: int, num_reqs: int = 64, num_steps: int = 2000) -> tuple[float, float]:
    """Return mean microseconds a step of the scheduler's hooks: while it learns (200 steps), then. One request ends and
    one comes in every `steps_per_arrival` steps; what that takes is part of the step.
    """
    config = parse_config({"model": "draft", "num_speculative_tokens": 5})[0]
    scheduler = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=num_reqs))
    control, random = SchedulerControl(config, scheduler, SimpleNamespace(), None), np.random.default_rng(0)
    video = SimpleNamespace(modality="video", mm_position=SimpleNamespace(length=256))
    sampling = SimpleNamespace(temperature=0.0)
    req_ids, spent, last = list[str](), np.zeros(num_steps), 0
    for number in range(num_steps):
        new = (
            [f"request-{number}-{i}" for i in range(1 if number else num_reqs)]
            if number % steps_per_arrival == 0
            else []
        )
        ended = set(req_ids[: len(new)]) if number else set()
        req_ids = [*req_ids[len(ended) :], *new]
        requests = [
            SimpleNamespace(
                request_id=req_id,
                mm_features=[video],
                sampling_params=sampling,
                num_tokens=300,
                num_computed_tokens=0,
                max_tokens=128,
                num_output_tokens=128,
            )
            for req_id in new
        ]
        step = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(req_ids, 1), finished_req_ids=ended)
        step.scheduled_new_reqs, step.total_num_scheduled_tokens = new, len(req_ids) * (1 + last)
        step.scheduled_spec_decode_tokens = {req_id: [0] * last for req_id in req_ids} if last else {}
        accepted = np.minimum(random.geometric(0.3, len(req_ids)) - 1, last).tolist()
        output = SimpleNamespace(req_ids=req_ids, sampled_token_ids=[[0] * (1 + each) for each in accepted])
        compat.attach(output, compat.StepReport(frozenset(req_ids if last else ()), frozenset(), 0.0, ()), None)
        scheduler.running = [SimpleNamespace(request_id=req_id) for req_id in req_ids]
        begin = time.thread_time()
        for request in requests:
            control.is_shown(request, 0)
        decision = control.plan(step, None)
        setattr(step, compat._DECISION, decision)
        control.observe(step, output)
        spent[number] = time.thread_time() - begin
        last = decision.option.num_tokens
    return 1e6 * float(spent[:200].mean()), 1e6 * float(spent[200:].mean())


def main() -> None:
    """Measure."""
    for name, steps_per_arrival in (("the same requests", 10**9), ("one comes in every third step", 3)):
        learning, later = decision_us(steps_per_arrival)
        print(f"{name}: {learning:.0f} us a step while it learns, {later:.0f} us later")


if __name__ == "__main__":
    main()
