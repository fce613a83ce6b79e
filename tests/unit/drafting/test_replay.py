"""The policies' parts as CUDA graphs hold them: kernels, the capture's tensors and numbers, padding, in turns."""

import contextlib
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.drafting.fake_draft import BUFFERS, FakeDraft, candidates_of, check_tree, grow, plans_of, quick
from vllm_vidspec.config import TreeKnobs
from vllm_vidspec.drafting import AdaptiveTree, StaticTree
from vllm_vidspec.drafting import adaptive as adaptive_module
from vllm_vidspec.drafting import static as static_module

NUM_REQS, BUCKETS = 4, (2, 4)
KERNELS = {
    adaptive_module: ("tree_begin", "tree_plan", "tree_grow", "tree_finish"),
    static_module: ("tree_begin", "tree_place"),
}


def static(num_reqs=NUM_REQS):
    return StaticTree(num_reqs, "cpu", max_nodes=30)


def adaptive(num_reqs=NUM_REQS, **knobs):
    return AdaptiveTree(num_reqs, 30, "cpu", TreeKnobs(**knobs))


def without_lookahead(num_reqs=NUM_REQS):
    return adaptive(num_reqs, lookahead=False)


def record(part):
    """Return what `part` would launch and what it returned; nothing is launched, as under capture."""
    calls = []

    def stand_in(kernel):
        def note(*args, **kwargs):
            calls.append((kernel, args, kwargs))
            return kwargs.get("num_next")

        return note

    with contextlib.ExitStack() as stack:
        for module, names in KERNELS.items():
            for name in names:
                stack.enter_context(mock.patch.object(module, name, stand_in(getattr(module, name))))
        return calls, part()


class Captured:
    """A policy whose parts were all captured before the first step, for two buckets and some budgets."""

    def __init__(self, policy, budgets, fill):
        self.policy, self.fill = policy, fill
        policy.trims = False
        self.rows = torch.zeros(NUM_REQS, dtype=torch.int64)
        self.num_accepted = torch.zeros(NUM_REQS, dtype=torch.int32)
        places = NUM_REQS * policy.max_frontier
        self.log_probs = torch.zeros(places, policy.num_candidates)
        self.token_ids = torch.zeros(places, policy.num_candidates, dtype=torch.int64)
        self.parts = {(bucket, budget): self.capture(bucket, budget) for bucket in BUCKETS for budget in budgets}

    def capture(self, bucket, budget):
        policy, rows = self.policy, self.rows[:bucket]
        policy.prepare(budget)
        parts = {"begin": record(lambda: policy.begin(rows, self.num_accepted[:bucket], budget))}
        for level in range(policy.depth(budget)):
            places = bucket * policy.width(level, budget)
            found = self.log_probs[:places], self.token_ids[:places]
            parts[level] = record(
                lambda level=level, found=found: policy.extend(level, *found, rows=rows, max_nodes=budget)
            )
        parts["finish"] = record(lambda: policy.finish(self.fill, rows=rows, max_nodes=budget))
        return parts

    def replay(self, part):
        for kernel, args, kwargs in part[0]:
            kernel(*args, **kwargs)
        return part[1]

    def step(self, rows, drafts, budget, num_accepted):
        """Do what `grow` does, by replaying; return the levels."""
        bucket = min(bucket for bucket in BUCKETS if bucket >= len(rows))
        parts, rows_np = self.parts[bucket, budget], np.array(rows)
        self.rows.fill_(10**6)
        self.num_accepted.fill_(7)
        self.rows[:bucket], self.num_accepted[:bucket] = self.policy.tree.max_num_reqs, -1
        self.rows[: len(rows)], self.num_accepted[: len(rows)] = torch.from_numpy(rows_np), num_accepted
        num_levels = self.policy.num_levels(rows_np, budget)
        self.replay(parts["begin"])
        frontier = torch.zeros(bucket, 1, dtype=torch.int64)
        candidates = candidates_of(self.policy, drafts, [])
        for level in range(num_levels):
            log_probs, token_ids = candidates(level, frontier)
            self.log_probs[: len(log_probs)], self.token_ids[: len(log_probs)] = log_probs, token_ids
            frontier, _ = self.replay(parts[level]) or (None, None)
            if level == 0:
                self.policy.send(rows_np)
        self.replay(parts["finish"])
        return num_levels


def run_steps(make, seed, budgets, fill, num_steps=4, captured_with=None):
    """Run random batches replayed and eagerly; assert that nothing differs.

    `captured_with` is a module, a name of it and what replaces it while the parts are captured.
    """
    rng = np.random.default_rng(seed)
    with mock.patch.object(*captured_with) if captured_with else contextlib.nullcontext():
        captured, eager = Captured(make(), budgets, fill), make()
    for _ in range(num_steps):
        rows = rng.permutation(NUM_REQS)[: rng.integers(1, NUM_REQS + 1)].tolist()
        budget = int(rng.choice(budgets))
        accepted = torch.from_numpy(rng.integers(-1, 7, len(rows)).astype(np.int32))
        drafts = [FakeDraft(int(rng.integers(10**6)), eager.num_candidates, rng.choice([0.2, 1.0, 4.0])) for _ in rows]
        fed = grow(eager, drafts, rows, budget, fill, accepted)
        assert captured.step(rows, drafts, budget, accepted) == len(fed)
        for name in BUFFERS:
            expected, got = (getattr(policy.tree, name)[: len(rows)] for policy in (eager, captured.policy))
            assert torch.equal(expected, got), name
        for row in range(len(rows)):
            check_tree(captured.policy.tree, row)
        if isinstance(eager, AdaptiveTree):
            everyone = list(range(NUM_REQS))
            assert plans_of(eager, everyone) == plans_of(captured.policy, everyone)
            for table in ("confidence", "max_depths"):
                expected, got = (getattr(policy, table)[:NUM_REQS] for policy in (eager, captured.policy))
                assert torch.equal(expected, got), table


@pytest.mark.parametrize("make", [static, adaptive, without_lookahead])
@settings(quick, max_examples=20)
@given(seed=st.integers(0, 10**6), fill=st.booleans(), budgets=st.sets(st.integers(0, 30), min_size=1, max_size=2))
def test_replays_are_the_steps(make, seed, fill, budgets):
    """Batches of any size in buckets of 2 and 4, of budgets that take turns, against the same steps uncaptured.

    Catches: a number of Python's that a step changes, a tensor that is handed over instead of kept, tables or leftovers
    of another bucket's or budget's step, padding that touches a request, a table without a row for it.
    """
    run_steps(make, seed, sorted(budgets), fill)


@pytest.mark.parametrize(
    ("make", "launches"),
    [(static, [1, 1, 1, 1, 1, 1, 0]), (adaptive, [1, 2, *[1] * 7, 1]), (without_lookahead, [1, 2, *[1] * 7, 1])],
)
def test_launches_of_a_step(make, launches):
    """Begin, each level, the end: a launch each, one more for the plan that the roots make."""
    for fill in (False, True):
        parts = Captured(make(), [30], fill).parts[4, 30]
        assert [len(calls) for calls, _ in parts.values()] == launches


@pytest.mark.parametrize("make", [static, adaptive])
def test_results_lie_at_fixed_addresses(make):
    """What a part returns is what another capture of it returns: views of the same memory, wide as `width` says."""
    policy = make()
    first, second = (Captured(policy, [12, 30], False).parts for _ in range(2))
    for key, parts in first.items():
        for level in range(policy.depth(key[1]) - 1):
            for one, other in zip(parts[level][1], second[key][level][1], strict=True):
                assert one.data_ptr() == other.data_ptr() and one.shape == (key[0], policy.width(level + 1, key[1]))
        assert parts[policy.depth(key[1]) - 1][1] is None


def keeps_leftovers(right):
    """Let candidates of the step before stay where this one runs no level."""

    def begin(tree, template, num_reqs, growth, *accepted):
        before = growth.leftover_log_probs.clone()
        right(tree, template, num_reqs, growth, *accepted)
        growth.leftover_log_probs.copy_(before)

    return begin


def keeps_tables(right):
    """Write a budget's tables when it is first asked for only."""
    seen = set()

    def begin(tree, template, num_reqs):
        tables = [table.clone() for table in tree.tensors[1:]]
        right(tree, template, num_reqs)
        if (id(template), num_reqs) in seen:
            for table, before in zip(tree.tensors[1:], tables, strict=True):
                table.copy_(before)
        seen.add((id(template), num_reqs))

    return begin


def pads_with_a_request(right):
    """Let padding adopt plans for the last request: tables without a row of its own."""

    def finish(*args, rows, **kwargs):
        right(*args, rows=rows.clamp(max=NUM_REQS - 1), **kwargs)

    return finish


@pytest.mark.parametrize(
    ("make", "module", "name", "mutation"),
    [
        (adaptive, adaptive_module, "tree_begin", keeps_leftovers),
        (static, static_module, "tree_begin", keeps_tables),
        (adaptive, adaptive_module, "tree_finish", pads_with_a_request),
    ],
)
def test_mutations(make, module, name, mutation):
    """Each, in what is captured, is seen to fail `run_steps`."""
    run_steps(make, 1, [9, 30], True, num_steps=8)
    with pytest.raises(AssertionError):
        run_steps(make, 1, [9, 30], True, num_steps=8, captured_with=(module, name, mutation(getattr(module, name))))
