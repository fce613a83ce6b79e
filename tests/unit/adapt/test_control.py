"""The controller: what it chooses, for whom, and what that costs; on an engine without models, so time is exact."""

import numpy as np
import pytest

from tests.unit.adapt.simulated_engine import CHAINS, SimulatedEngine, like_a_small_pair, memory_bound, noisy
from vllm_vidspec.adapt import REST, Controller, Option, class_label
from vllm_vidspec.adapt import control as module
from vllm_vidspec.names import CLASS_LABELS

FIXED = (0, 1, 2, 3, 5)


def best_fixed(*kinds: tuple[int, float], batch: int) -> tuple[float, float]:
    """Return tokens a second without drafts, and with the best fixed number of them."""
    found = {k: SimulatedEngine(k, seed=1).serve(*kinds, batch=batch, requests=5 * batch) for k in FIXED}
    return found[0], max(found.values())


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("num_visual", [256, 1024, 4096, 14848])
@pytest.mark.parametrize("chance", [0.9, 0.6, 0.05])
def test_never_slower(batch, num_visual, chance):
    """After some requests: no slower than without drafts, and as fast as the best fixed number of drafts. Catches:
    drafts that go on though none is accepted, drafting that stops though it pays, trials without end."""
    kind = (num_visual, chance)
    without, best = best_fixed(kind, batch=batch)
    engine = SimulatedEngine()
    engine.serve(kind, batch=batch, requests=5 * batch)
    found = engine.serve(kind, batch=batch, requests=10 * batch)
    assert found > 0.97 * without and found > 0.95 * best, (found / without, found / best)


@pytest.mark.parametrize(
    ("num_visual", "chance", "batch"), [(256, 0.97, 1), (1024, 0.8, 1), (256, 0.97, 4), (256, 0.7, 4), (256, 0.5, 4)]
)
def test_it_learns_in_a_few_noisy_rounds(num_visual, chance, batch):
    """From the third round of a batch of answers on, whole answers are as fast as with the best fixed number. Several
    numbers of tokens are nearly equal here, drafting hardly pays or costs a sixth, and a step's time is noisy. Catches:
    trials that cost more than their allowance, a class that is weighed at the batch size of a round's last requests."""

    def rounds(fixed: int | None, seed: int) -> list[float]:
        cost = noisy(like_a_small_pair, seed)
        engine = SimulatedEngine(fixed, cost=cost, start_s=0.06, seed=seed)
        return [engine.serve((num_visual, chance), batch=batch, requests=batch) for _ in range(7)]

    ratios = []
    for seed in range(4):
        ours, *others = (np.median(rounds(fixed, seed)[2:]) for fixed in (None, *FIXED))
        ratios.append(ours / max(others))
    assert np.median(ratios) > 0.95, ratios


def test_a_class_that_does_not_pay_is_not_shown_and_probes_are_bounded():
    """Catches: a class that is never given up, a probe that never ends, probes for every request."""
    engine = SimulatedEngine()
    engine.serve((4096, 0.0), requests=20)
    shown, seconds = engine.num_shown, engine.seconds
    requests = [engine.add(4096, 0.0, 128)]
    for _ in range(400):
        while engine.running:
            engine.step()
        requests.append(engine.add(4096, 0.0, 128))
    probes = engine.num_shown - shown
    assert 1 <= probes <= 401 // module._PROBE_EVERY + 1
    assert max(request.verified for request in requests) <= module._PROBE_STEPS + 2 * module._DECIDE_FIRST
    without = SimulatedEngine(0)
    without.serve((4096, 0.0), requests=401)
    assert engine.seconds - seconds < 1.02 * without.seconds


@pytest.mark.parametrize("num_visual", [256, 4096])
def test_a_class_that_begins_to_pay_is_found_again(num_visual):
    """A better draft behind the same name: within 200 requests all are shown, and drafted for."""
    engine = SimulatedEngine()
    engine.serve((num_visual, 0.0), requests=100)
    assert not engine.add(num_visual, 0.0, 1).shown
    engine.serve((num_visual, 0.95), requests=200)
    shown = engine.num_shown
    engine.serve((num_visual, 0.95), requests=20)
    assert engine.num_shown - shown == 20


def test_costs_are_those_of_the_batch_size():
    """Rows that are free alone and dear together: drafts for one, none for sixteen. Catches: costs of another batch
    size."""

    def dear_together(num_reqs, context, drafted, levels):
        return memory_bound(num_reqs, context, drafted, levels) + (2e-3 * float(drafted.sum()) if num_reqs > 8 else 0)

    engine = SimulatedEngine(cost=dear_together)
    engine.serve((256, 0.8), requests=20)
    engine.serve((256, 0.8), batch=16, requests=160)
    engine.serve((256, 0.8), requests=2)
    engine.add(256, 0.8, 400)
    for _ in range(40):
        engine.step()
    alone = engine.decisions[-1].option.num_tokens
    for _ in range(15):
        engine.add(256, 0.8, 4000)
    together = [engine.step().option.num_tokens for _ in range(300)]
    assert alone >= 3 and np.mean(np.array(together[150:]) > 0) < 0.1


def test_a_step_without_drafts_is_measured_first():
    """Drafting at all costs twice a step: the first answer takes no longer than 1.6 times as without drafts.

    Catches: a step without drafts whose time is a guess, so that drafting goes on which costs more than it gains.
    """

    def dear_at_all(num_reqs, context, drafted, levels):
        return 2.1e-3 + (5e-3 if levels else 0.0) + 1e-3 * levels

    first = [SimulatedEngine(fixed, cost=dear_at_all).serve((1024, 0.7), requests=1) for fixed in (None, 0)]
    assert first[0] > 0.62 * first[1], first


def test_a_tree_is_chosen_where_it_gains_more():
    """`draft_shape: auto`: catches a tree's acceptance that is never tried, or taken for a chain's."""
    tree = Option("tree-static", 25, 5, False)
    controller = Controller((tree, *CHAINS, REST), 8, False)
    controller.add("a", class_label(256, 0), (), 300, 80)
    last, tokens = None, {tree: 5, REST: 1} | dict.fromkeys(CHAINS, 2)
    for _ in range(300):
        decision = controller.decide(["a"])
        verified = REST if last is None else last.option
        drafted, num_tokens = np.array([verified.num_tokens]), np.array([tokens[verified]])
        is_steady = last is not None and last.number == decision.number
        seconds = 0.010 + 0.001 * decision.option.num_levels
        controller.observe(decision, ["a"], drafted, num_tokens, verified.is_prefix, seconds, is_steady)
        last = decision
    assert last.option == tree


def test_who_cannot_be_drafted_for_rests():
    """Catches: a request that was skipped for good and still holds rows of the target's forward."""
    controller = Controller((*CHAINS, REST), 8, False)
    for req_id in ("a", "b"):
        controller.add(req_id, 0, (), 50, 50)
    assert not controller.decide(["a", "b"]).resting
    controller.cannot_draft(["b"])
    decision = controller.decide(["a", "b"])
    assert decision.resting == {"b"} and decision.option.num_tokens


def test_classes():
    shown = [(0, 0), (256, 0), (0, 64), (4097, 0), (14848, 5), (10**6, 0)]
    names = ["text", "video_256", "image_256", "video_4k", "video_16k", "video_32k"]
    assert [CLASS_LABELS[class_label(*sizes)] for sizes in shown] == names
