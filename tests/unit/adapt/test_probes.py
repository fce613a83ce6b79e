"""Probes: how a class at rest is found to pay, what that costs, and who waits for it; on an engine without models."""

import pytest

from tests.unit.adapt.simulated import SimulatedEngine, like_a_small_pair, memory_bound
from vllm_vidspec.adapt import control as module
from vllm_vidspec.adapt.learning import PROBE_FIRST, PROBE_STEPS


def test_a_class_that_does_not_pay_is_not_shown_and_probes_are_bounded():
    """Catches: a class that is never given up, a probe that never ends or that goes on although nothing is accepted,
    probes for every request."""
    engine = SimulatedEngine()
    engine.serve((4096, 0.0), requests=20)
    shown = engine.num_shown
    requests = [engine.add(4096, 0.0, 128)]
    for _ in range(400):
        while engine.running:
            engine.step()
        requests.append(engine.add(4096, 0.0, 128))
    probes = engine.num_shown - shown
    assert 1 <= probes <= 401 // module._PROBE_EVERY + 1
    assert max(request.verified for request in requests) <= PROBE_FIRST + 1


def test_who_was_probed_is_at_rest_afterwards():
    """Catches: a batch that is looked at step by step until a request ends whose probe is over."""
    engine = SimulatedEngine()
    engine.serve((4096, 0.0), requests=20)
    shown = engine.num_shown
    while engine.num_shown == shown:
        request = engine.add(4096, 0.0, 400)
        for _ in range(100):
            engine.step()
        assert engine.controller.num_quiet > 0
        while engine.running:
            engine.step()
    assert request.verified >= PROBE_FIRST


def test_a_probe_that_shows_something_goes_on():
    """Catches: one that ends half-way whatever was accepted."""
    engine = SimulatedEngine(cost=like_a_small_pair)
    engine.serve((4096, 0.1), batch=16, requests=48)
    probed = []
    for _ in range(4):
        probed += [engine.add(4096, 0.1, 128) for _ in range(48)]
        while engine.running:
            engine.step()
    most = max(request.verified for request in probed)
    assert PROBE_STEPS <= most <= PROBE_STEPS + 1


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_probes_cost_a_hundredth_of_the_time_at_most(batch):
    """With all that follows from them, as steps whose drafts are on their way."""
    without = SimulatedEngine(0).serve((4096, 0.0), batch=batch, requests=400)
    engine = SimulatedEngine()
    engine.serve((4096, 0.0), batch=batch, requests=60)
    assert engine.serve((4096, 0.0), batch=batch, requests=400) > 0.99 * without


@pytest.mark.parametrize("batch", [4, 16])
def test_probes_save_nothing_up(batch):
    """After a long time without probes a hopeless class costs about 1 % of its own time. Catches: an allowance of all
    the time that ever passed, with which every eighth of its requests is probed."""
    without = SimulatedEngine(0, cost=like_a_small_pair).serve((1024, 0.0), batch=batch, requests=200)
    engine = SimulatedEngine(cost=like_a_small_pair, start_s=3e-2)
    engine.serve((256, 0.95), batch=batch, requests=400 * batch)
    engine.serve((1024, 0.0), batch=batch, requests=40)
    assert engine.serve((1024, 0.0), batch=batch, requests=200) > 0.985 * without


@pytest.mark.parametrize("start_s", [5e-3, 3e-2])
@pytest.mark.parametrize("batch", [4, 16])
def test_probes_come_one_by_one(batch, start_s):
    """Some short answers of a hopeless class, after a long time without any, are 0.95 as fast as without drafts.
    Catches: several probes at once, which are paid for later."""
    without = SimulatedEngine(0, cost=like_a_small_pair).serve(
        (1024, 0.0), batch=batch, requests=10 * batch, lengths=(32,)
    )
    engine = SimulatedEngine(cost=like_a_small_pair, start_s=start_s)
    engine.serve((1024, 0.0), batch=batch, requests=40)
    engine.serve((256, 0.95), batch=batch, requests=100 * batch)
    assert engine.serve((1024, 0.0), batch=batch, requests=10 * batch, lengths=(32,)) > 0.95 * without


@pytest.mark.parametrize("num_visual", [1024, 4096, 14848])
def test_most_first_tokens_wait_for_no_probe(num_visual):
    """All of sixteen that come at once wait for what the draft reads of one. Catches: a probe in four of five bursts,
    as time allows one."""
    engine = SimulatedEngine()
    engine.serve((num_visual, 0.0), batch=16, requests=20)
    shown = []
    for _ in range(24):
        before = engine.num_shown
        for _ in range(16):
            engine.add(num_visual, 0.0, 128)
        shown.append(engine.num_shown > before)
        while engine.running:
            engine.step()
    assert 1 <= sum(shown) < 12, shown


@pytest.mark.parametrize("cost", [memory_bound, like_a_small_pair])
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("num_visual", [256, 4096])
def test_a_class_that_begins_to_pay_is_found_again(num_visual, batch, cost):
    """A better draft behind the same name: within 200 requests all are shown, and drafted for. Catches: probes that
    are paid for as if all of a batch were drafted for, so that none of sixteen is ever probed; a class that remembers
    all probes that failed."""
    engine = SimulatedEngine(cost=cost)
    engine.serve((num_visual, 0.0), batch=batch, requests=100)
    assert engine.controller.classes[0].rests
    engine.serve((num_visual, 0.95), batch=batch, requests=200)
    shown = engine.num_shown
    engine.serve((num_visual, 0.95), batch=batch, requests=20)
    assert engine.num_shown - shown == 20
