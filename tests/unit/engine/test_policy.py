"""The policy: what it chooses, for whom, and what that costs; on an engine without models, so time is exact."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.unit.engine.simulated import (
    CHAINS,
    OPTIONS,
    SimulatedEngine,
    like_a_small_pair,
    measured,
    memory_bound,
    noisy,
)
from vllm_vidspec.engine.policy import NONE, Decision, Observed, Option, Policy, StepCosts, class_label
from vllm_vidspec.names import CLASS_LABELS

FIXED = (0, 1, 2, 3, 5)
COSTS = (memory_bound, like_a_small_pair)


def rate(fixed: int | None, cost: Callable, *kinds: tuple, batch: int, requests: int, seed: int = 0) -> float:
    """Return tokens a second from the third round of answers on."""
    engine = SimulatedEngine(fixed, cost=cost, seed=seed)
    engine.serve(*kinds, batch=batch, requests=2 * batch)
    return engine.serve(*kinds, batch=batch, requests=requests)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("num_visual", [256, 4096])
@pytest.mark.parametrize("chance", [0.95, 0.6, 0.05])
def test_a_class_is_as_fast_as_with_the_best_fixed_option(batch, num_visual, chance, cost):
    """Catches: an option that is never found, or left for another's noise; a hopeless class that pays for probes."""
    requests, kind = max(48, 4 * batch), (num_visual, chance)
    by_option = {k: rate(k, cost, kind, batch=batch, requests=requests, seed=1) for k in FIXED}
    found, best = rate(None, cost, kind, batch=batch, requests=requests), max(by_option.values())
    assert found > 0.96 * best and found > (0.985 if chance < 0.1 else 0.96) * by_option[0], (found, by_option)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_a_class_that_begins_to_pay_is_found(batch, cost):
    """Catches: a paused class that is never probed, or not believed."""
    found = []
    for seed in range(3):
        engine, num_reqs = SimulatedEngine(cost=noisy(cost, seed), seed=seed), 0
        engine.serve((256, 0.0), batch=batch, requests=60)
        assert engine.policy.classes[0].is_paused
        while engine.policy.classes[0].is_paused and num_reqs < 400:
            engine.serve((256, 0.95), batch=batch, requests=batch)
            num_reqs += batch
        found.append(num_reqs)
    assert np.median(found) <= 200, found


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("chance", [0.95, 0.75])
def test_good_requests_keep_their_gain_beside_hopeless_ones(chance, cost):
    """Half of the requests are hopeless and long: these are admitted no more, and all answers are ready no later than
    without drafts. Catches: many tokens of short contexts that make up for fewer of long ones."""
    kinds = (256, chance), (4096, 0.0)
    engine, without = (SimulatedEngine(fixed, cost=cost) for fixed in (None, 0))
    for each in (engine, without):
        each.serve(*kinds, batch=16, requests=100)
    num_admitted = engine.num_admitted
    found = engine.serve(*kinds, batch=16, requests=400)
    assert found > 0.97 * without.serve(*kinds, batch=16, requests=400)
    assert [known.is_paused for known in engine.policy.classes] == [False, True]
    assert 200 <= engine.num_admitted - num_admitted <= 215, "all good ones, and probes"
    if chance > 0.9:
        alone = [rate(fixed, cost, kinds[0], batch=16, requests=64) for fixed in (None, 0)]
        beside = [_answer_s(fixed, cost, kinds) for fixed in (None, 0)]
        assert beside[1] / beside[0] > 0.9 * alone[0] / alone[1]


def _answer_s(fixed: int | None, cost: Callable, kinds: tuple) -> float:
    """Return the mean seconds of an answer of the first kind."""
    engine, begun, seconds = SimulatedEngine(fixed, cost=cost), dict[str, float](), []
    while engine.num_added < 400:
        while len(engine.running) < 16:
            if engine.num_added % 2 == 0:
                begun[f"r{engine.num_added}"] = engine.seconds
            engine.add(*kinds[engine.num_added % 2], 128)
        before = set(engine.running)
        engine.step()
        ended = before - set(engine.running)
        seconds += [engine.seconds - begun[req_id] for req_id in ended & begun.keys() if engine.num_added > 100]
    return float(np.mean(seconds))


@pytest.mark.parametrize("factor", [0.4, 3.0])
@pytest.mark.parametrize("kind", [(256, 0.95), (256, 0.05), (4096, 0.8)])
@pytest.mark.parametrize("batch", [1, 16])
def test_a_machine_whose_speed_changes(batch, kind, factor):
    """Catches: options that are left for good since one was measured on another machine."""
    ratios = []
    for seed in range(2):
        engine = SimulatedEngine(cost=noisy(like_a_small_pair, seed), seed=seed)
        engine.serve(kind, batch=batch, requests=4 * batch)
        engine.slow_down(factor)
        engine.serve(kind, batch=batch, requests=4 * batch)
        num_reqs, cost = max(48, 4 * batch), noisy(like_a_small_pair, seed)
        found = factor * engine.serve(kind, batch=batch, requests=num_reqs)
        fixed = (rate(k, cost, kind, batch=batch, requests=num_reqs, seed=seed) for k in FIXED)
        ratios.append(found / max(fixed))
    assert np.median(ratios) > 0.93, ratios


def test_costs_are_those_of_the_batch_size():
    """Rows that are free alone and dear together: drafts for one, none for sixteen."""

    def dear_together(num_reqs, context, drafted, levels):
        return memory_bound(num_reqs, context, drafted, levels) + (2e-3 * float(drafted.sum()) if num_reqs > 8 else 0)

    engine = SimulatedEngine(cost=dear_together)
    engine.serve((256, 0.8), requests=20)
    engine.add(256, 0.8, 400)
    for _ in range(40):
        engine.step()
    alone = engine.decisions[-1].option.num_tokens
    for _ in range(15):
        engine.add(256, 0.8, 4000)
    together = [engine.step().option.num_tokens for _ in range(300)]
    assert alone >= 2 and np.mean(np.array(together[150:]) > 0) < 0.1


@pytest.mark.parametrize(("level", "drafts"), [(0.47, False), (0.36, True)])
def test_a_gain_that_the_prefill_takes_back_is_none(level, drafts):
    """A draft token makes steps 2 % faster and answers slower, as the draft reads prompts: paused; 10 %: not."""

    def cost(num_reqs, context, drafted, levels):
        return 4e-3 * (1 + level * levels)

    shares = []
    for seed in range(3):
        engine = SimulatedEngine(cost=cost, seed=seed, start_s=2e-2)
        engine.serve((256, 0.5), batch=4, requests=40)
        learning = len(engine.decisions)
        engine.serve((256, 0.5), batch=4, requests=40)
        shares.append(np.mean([decision.option.num_tokens > 0 for decision in engine.decisions[learning:]]))
    assert np.median(shares) > 0.9 if drafts else np.median(shares) < 0.3, shares


def test_short_answers_are_not_admitted():
    """Catches: the first and the last step of an answer of a few tokens, which gain nothing, taken for others."""
    policy = Policy(OPTIONS, measured(memory_bound), 8, False)
    assert [policy.add(f"r{most}", 1, (), 300, 60, most) for most in (1, 15, 16, 64)] == [False, False, True, True]
    assert policy.decide(["r1", "r15"], 5).option == NONE
    assert policy.decide(["r1", "r64"], 5).paused == {"r1"}


def test_an_answer_is_as_long_as_its_class_or_its_bound():
    """Catches: a request with a prefill that its few tokens never earn, admitted as longer ones earn theirs."""
    engine = SimulatedEngine(cost=memory_bound, start_s=0.3)
    engine.serve((256, 0.9), requests=12, length=256)
    kind = class_label(256, 0), (), 306, 75
    assert engine.policy.add("long", *kind, 512) and not engine.policy.add("bounded", *kind, 20)


def test_a_request_of_its_own_acceptance():
    """Beside fifteen good ones of its class, one that accepts nothing has no drafts after some steps."""
    engine = SimulatedEngine(
        cost=lambda n, context, drafted, levels: 2e-3 + 1.2e-4 * float((drafted > 0).sum()) * levels
    )
    engine.serve((256, 0.95), batch=8, requests=32)
    for number in range(8):
        engine.add(256, 0.0 if number == 3 else 0.97, 2000)
    bad = f"r{engine.num_added - 5}"
    for _ in range(160):
        engine.step()
    assert all(decision.paused == {bad} for decision in engine.decisions[-16:])


def test_placeholders_are_no_rejected_drafts():
    """Rows scheduled for drafts which have not come teach no acceptance."""
    policy = Policy(OPTIONS, measured(memory_bound), 8, False)
    policy.add("a", 0, (), 50, 50, 128)
    decision = policy.decide(["a"], 5)
    policy.observe(Observed(decision, decision, ["a"], np.array([1]), np.array([False]), 0.01))
    assert policy.remove("a", 1).verify_steps == policy.acceptance.verify_steps[0] == 0


def test_what_the_draft_reads_is_shared_by_length():
    """Catches: a short prompt that is dear as a step reads it beside long ones; what is read after a pause."""
    policy = Policy(OPTIONS, measured(memory_bound), 8, False)
    for req_id, label, length in (("short", 1, 100), ("long", 2, 900)):
        policy.add(req_id, label, (), length, length, 128)
    reqs = ["short", "long"]
    decision = policy.decide(reqs, 5)
    none = np.zeros(2, dtype=bool)
    policy.observe(Observed(decision, None, reqs, np.array([0, 0]), none, None, reqs, 0.1))
    policy.observe(Observed(decision, decision, reqs, np.array([2, 2]), ~none, None))
    policy.decide(reqs[:1], 5)
    policy.observe(Observed(decision, decision, reqs, np.array([1, 1]), none, None, reqs, 7.0))
    assert [policy.remove(req_id, 5).verify_tokens for req_id in reqs] == [2, 2]
    assert [known.start_s for known in policy.classes] == pytest.approx([0.01, 0.09])


def test_a_tree_is_chosen_where_it_gains_more():
    """Catches: a tree's acceptance that is never tried, or taken for a chain's."""
    tree = Option("tree-static", 25, 5, False)
    options, tokens = (tree, *CHAINS, NONE), {tree: 5, NONE: 1} | dict.fromkeys(CHAINS, 2)

    def cost(index: int, size: int) -> float:
        return 0.010 + 0.001 * options[index].num_levels

    costs = StepCosts(len(options), {(index, 1, 0.05): cost(index, 1) for index in range(len(options))})
    policy = Policy(options, costs, 8, False)
    policy.add("a", class_label(256, 0), (), 300, 80, 128)
    last: Decision | None = None
    for _ in range(300):
        decision = policy.decide(["a"], 25)
        verified = NONE if last is None else last.option
        step_s = cost(options.index(decision.option), 1)
        drafted = np.array([verified.num_tokens > 0])
        policy.observe(Observed(decision, last, ["a"], np.array([tokens[verified]]), drafted, step_s))
        last = decision
    assert last is not None and last.option == tree
    assert policy.decide(["a"], 8).option in CHAINS, "a bound that the tree exceeds"
    assert policy.decide(["a"], 25, frozenset({"chain"})).option in CHAINS


def test_who_cannot_be_drafted_for_is_paused():
    """Catches: a request that was skipped for good and still holds rows of the target's forward."""
    policy = Policy(OPTIONS, measured(memory_bound), 8, False)
    for req_id in ("a", "b"):
        policy.add(req_id, 0, (), 50, 50, 128)
    assert not policy.decide(["a", "b"], 5).paused
    policy.cannot_draft(["b", "unknown"])
    decision = policy.decide(["a", "b"], 5)
    assert decision.paused == {"b"} and decision.option.num_tokens


def test_rows_that_graphs_pad_cost_as_those_of_all():
    """Catches: drafts for one of sixteen taken for cheap where every request has as many rows."""

    def rows_cost(num_reqs, context, drafted, levels):
        return 4e-3 + 1e-4 * float(drafted.sum())

    def drafted_for(pads: bool) -> int:
        policy = Policy(OPTIONS, measured(rows_cost), 16, pads)
        for number in range(16):
            policy.add(f"r{number}", 0, (), 50, 50, 128 if number == 0 else 8)
        return policy.decide([f"r{number}" for number in range(16)], 5).option.num_tokens

    assert drafted_for(False) > 0 == drafted_for(True)


def test_more_requests_than_slots_share_one():
    """Catches: an index beyond the table, a slot that is given back twice."""
    policy = Policy(OPTIONS, measured(memory_bound), 2, False)
    reqs = [f"r{number}" for number in range(5)]
    assert all(policy.add(req_id, 0, (), 50, 50, 128) for req_id in reqs)
    policy.decide(reqs, 5)
    ended = [policy.remove(req_id, 5) for req_id in [*reqs, *reqs]]
    assert len(ended) - ended.count(None) == 2 and sorted(policy._free) == [1, 2]


def test_a_decision_can_be_explained():
    engine = SimulatedEngine(cost=lambda *batch: 0.0174 if batch[-1] == 0 else 0.0395)
    engine.serve((256, 1.0), requests=4)
    best = engine.policy.classes[0].best
    assert str(best) == "K = 5: 6.0 tokens / 39.5 ms = 152/s; K = 0: 1 / 17.4 ms = 57/s"
    assert "K = 5 (chain) 39.5 ms of 1, 39.5 ms of 4" in engine.policy.costs.summary(OPTIONS)


def test_classes():
    sizes = [(0, 0), (256, 0), (0, 64), (4097, 0), (14848, 5), (10**6, 0)]
    names = ["text", "video_256", "image_256", "video_4k", "video_16k", "video_32k"]
    assert [CLASS_LABELS[class_label(*each)] for each in sizes] == names
