"""Samples of the Python stack: whose time each is, and that they are taken where time is spent."""

import time

import pytest

from null_gpu import host_time

RUNNER, VERIFIER, NETWORK = (
    f"/w/vllm_vidspec/engine/{name}.py" for name in ("runner", "verify/verifier", "draft/model")
)
KERNEL, DISPATCH = (f"/w/kernels/vidspec_kernels/{name}.py" for name in ("accept/api", "dispatch"))
VLLM, TORCH = "/s/site-packages/vllm/v1/worker/gpu/model_runner.py", "/s/site-packages/torch/_ops.py"
ENTERED = [(VLLM, "sample"), (RUNNER, "sample"), (VLLM, "sample_tokens")]


@pytest.mark.parametrize(
    ("stack", "owner"),
    [
        (ENTERED, host_time.VANILLA),
        ([(VLLM, "step")], host_time.VANILLA),
        ([(RUNNER, "sample"), (VLLM, "sample_tokens")], "runner.py sample"),
        ([(TORCH, "add"), (VERIFIER, "_verify"), *ENTERED], "verifier.py _verify"),
        ([(VLLM, "upload"), (VERIFIER, "_judge"), (VERIFIER, "_verify"), *ENTERED], "verifier.py _judge"),
        ([(DISPATCH, "launcher"), (KERNEL, "accept"), (VERIFIER, "_verify"), *ENTERED], "accept.py accept"),
        ([(TORCH, "mm"), (VLLM, "layer"), (NETWORK, "_run"), (NETWORK, "forward"), *ENTERED], host_time.FORWARD),
    ],
)
def test_a_sample_has_one_owner(stack, owner):
    """Catches: vLLM's own work inside our wrappers counted as ours, ours counted as vLLM's where it calls vLLM back."""
    empty = compile("", "?", "exec")
    codes = tuple(empty.replace(co_filename=path, co_name=name) for path, name in stack)
    assert host_time.owner(codes) == owner


def test_time_is_sampled_where_it_is_spent():
    """By the number of samples, so that a busy machine makes no difference. Catches: a sample of another's."""
    source = "def spend(num_samples, total):\n    end = total() + num_samples\n    while total() < end:\n        pass\n"
    names: dict = {}
    exec(compile(source, "/w/vllm_vidspec/engine/report/counters.py", "exec"), names)
    seen, begun = host_time.Samples(), time.perf_counter()
    with host_time.sampling(seen):
        names["spend"](90, seen.stacks.total)
        while seen.stacks.total() < 120:
            pass
    shares = seen.shares()
    assert time.perf_counter() - begun > 0.9 * 120 * host_time.INTERVAL_S
    assert seen.stacks.total() >= 120 and set(shares) <= {"counters.py spend", host_time.VANILLA}
    assert 0.6 < shares["counters.py spend"] < 0.9
    assert host_time.own_ms(shares, 8.0) == pytest.approx(8 * shares["counters.py spend"])
