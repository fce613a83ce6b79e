"""What is measured while an engine starts, without one: which batch sizes and contexts, in what order."""

from types import SimpleNamespace

import pytest

from tests.unit.engine.simulated import OPTIONS
from vllm_vidspec.engine import step_times
from vllm_vidspec.engine.policy import StepCosts


@pytest.mark.parametrize(
    ("slow", "fails", "sizes", "long_size"),
    [
        (None, [(64, 48)], [1, 4, 16], 4),
        (2048, [], [1, 4], 4),
        (None, [(4, 2048)], [1, 4, 16, 64], 1),
        (None, [(4, 48)], [1, 16, 64], 1),
        (None, [(1, 2048), (4, 2048)], [1, 4, 16, 64], None),
    ],
)
def test_costs_follow_from_whatever_was_measured(monkeypatch, slow, fails, sizes, long_size):
    """A prompt that takes minutes, sizes without room. Catches: a context of a size that was never measured without
    it, by which the engine would not start; what has room and is left out."""
    now = 0.0

    def of_size(core, trial, options, is_parallel, size, num_tokens):
        nonlocal now
        now += 61.0 if num_tokens == slow else 1.0
        return None if (size, num_tokens) in fails else [1e-3 * size + 1e-6 * num_tokens] * len(options)

    monkeypatch.setattr(step_times, "_of_size", of_size)
    monkeypatch.setattr(step_times.time, "monotonic", lambda: now)
    core = SimpleNamespace(
        scheduler=SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=64)),
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=8192),
            cache_config=SimpleNamespace(num_gpu_blocks=10**6, block_size=16),
        ),
    )
    measured = step_times.measure(core, step_times.Trial(OPTIONS[0]), OPTIONS, False)
    assert StepCosts(len(OPTIONS), measured).sizes == sizes
    assert [size for index, size, context in measured if index == 0 and context > 1] == [long_size] * bool(long_size)
