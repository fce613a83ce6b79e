"""Trees: branches behind decoys, planted bugs, and shapes that change while requests run."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from tests.engine import harness
from tests.engine.conftest import SCENARIOS
from tests.engine.full_graphs import captured
from tests.engine.harness import LLAVA, QWEN, assert_all_stands, assert_begins, token_ids
from tests.engine.seams import CoupledSampler, TargetTrees
from vllm_vidspec import metrics
from vllm_vidspec.scoring import rules as scorers

pytestmark = pytest.mark.engine

# A caterpillar: each level has a decoy, and the right token after it.
DECOYS = [[0], [1], [1, 0], [1, 1], [1, 1, 0], [1, 1, 1]]


@pytest.fixture(scope="module")
def decoys(reference):
    """The target drafts for itself, its best candidate always listed second: every accepted path is out of order."""
    for scenario in ("videos", "sampled", "penalised"):  # one engine at a time
        reference(LLAVA, scenario)
    with harness.engine(
        LLAVA, "target", pruner="none", drafting="tree-static", tree_paths=DECOYS, num_speculative_tokens=6
    ) as engine:
        yield engine


@contextlib.contextmanager
def decoys_first() -> Iterator[None]:
    """List the draft's best candidate second."""
    original = CoupledSampler.candidates_into

    def decoy_first(self, *args, log_probs, ids, **kwargs):
        original(self, *args, log_probs=log_probs, ids=ids, **kwargs)
        for ranked in (log_probs, ids):
            ranked.copy_(ranked.flip(1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CoupledSampler, "candidates_into", decoy_first)
        yield


def check_decoys(engine, reference) -> None:
    """Every step accepts the three tokens behind the decoys; the output is vanilla's, greedy and sampled."""
    with decoys_first():
        for scenario in ("videos", "sampled"):
            outputs, counted = engine.measured(SCENARIOS[scenario](engine.family))
            assert token_ids(outputs) == token_ids(reference(engine.family, scenario))
            assert counted["accepted_tokens"] == counted["draft_depth"] == 3 * counted["drafts"] > 0


def test_branches_behind_decoys_are_accepted(decoys, reference):
    """Catches: every mutation below."""
    check_decoys(decoys, reference)


def test_penalties_follow_a_nodes_own_path(decoys, reference):
    """Repetition, presence and frequency penalties, greedy and sampled, on trees whose accepted paths are never the
    first nodes: vanilla's own tokens, and drafts among them; nobody's path is laid out.

    Catches: paths laid out for penalties, drafts that penalties cost. This model's choices are too sure for a wrong
    count to show: that the logits are right to the bit is for `tests/unit/engine/test_node_paths.py`.
    """
    with decoys_first(), rows_sampled(decoys) as shown:
        outputs, counted = decoys.measured(SCENARIOS["penalised"](decoys.family))
    assert token_ids(outputs) == token_ids(reference(decoys.family, "penalised"))
    assert counted["accepted_tokens"] > counted["drafts"] > 0
    assert max(shown) <= 7 * len(outputs)


@contextlib.contextmanager
def rows_sampled(engine) -> Iterator[list[int]]:
    """Yield the list that the numbers of rows go to which vLLM's sampler is shown."""
    sampler, shown = engine.runner.sampler, []
    sample = type(sampler).sample

    def noting(self, logits, *args, **kwargs):
        shown.append(len(logits))
        return sample(self, logits, *args, **kwargs)

    with mock.patch.object(type(sampler), "sample", noting):
        yield shown


def test_whole_forwards_are_captured(decoys, reference):
    """Grids of trees replay what was captured at other batches, padding and all, and the output is vanilla's.

    Catches: a mask, a position or a prefix that is not where the capture found it; a host number of the capture.
    """
    with captured(decoys.runner, [1, 3, 8]) as replayed:
        check_decoys(decoys, reference)
    assert {padded > real for _, padded, real in replayed} == {True, False}
    assert replayed.total() > 10


def no_depth_positions(patch) -> None:
    """Nodes keep the position of their slot."""
    original = TargetTrees._place

    def by_slot(self, batch, positions, out=None):
        before = positions.clone()
        original(self, batch, positions, out)
        (positions if out is None else out).copy_(before)

    patch.setattr(TargetTrees, "_place", by_slot)


def no_compaction(patch) -> None:
    """The accepted path's KV stays where the nodes were."""
    patch.setattr(TargetTrees, "compact", lambda self: None)


def leaking_sibling(patch) -> None:
    """Every node also attends to the node before it."""
    original = TargetTrees._place

    def leaking(self, *arguments):
        original(self, *arguments)
        self.places.masks.bitwise_or_(self.places.masks.roll(1, dims=1))

    patch.setattr(TargetTrees, "_place", leaking)


def wrong_branch(patch) -> None:
    """The right tokens stand, but the KV of the first branch is kept."""
    original = scorers.accept

    def first_branch(*args):
        results, tally = original(*args), args[-1]
        tally.path[tally.rows] = torch.arange(tally.path.shape[1], dtype=torch.int32)
        return results

    patch.setattr(scorers, "accept", first_branch)


def noise_by_slot(patch) -> None:
    """A node's noise is that of its slot, not of its depth."""
    original = TargetTrees.shapes

    def flat(self, rows):
        shapes = original(self, rows)
        in_order = torch.arange(shapes.depths.shape[1], dtype=torch.int32)
        return type(shapes)(rows, shapes.parents, in_order.expand_as(shapes.depths), shapes.ancestors)

    patch.setattr(TargetTrees, "shapes", flat)


@pytest.mark.parametrize("mutation", [no_depth_positions, no_compaction, leaking_sibling, wrong_branch, noise_by_slot])
def test_planted_bug_is_caught(decoys, reference, mutation):
    """Each changes the output of the run above, or its acceptance."""
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        with pytest.raises(AssertionError):
            check_decoys(decoys, reference)


def untruncated(patch) -> None:
    """The verifier takes every tree for whole: its last nodes' rows belong to the next request."""
    original = scorers.accept

    def whole(target_tokens, draft_tokens, cu_num_logits, max_drafts, trees, _looseness, tally):
        pad = torch.zeros(max_drafts + 1, dtype=torch.int64)
        starts = cu_num_logits[:-1]
        targets, drafts = torch.cat((target_tokens, pad)), torch.cat((draft_tokens, pad.int()))
        rows = (starts[:, None] + torch.arange(max_drafts + 1)).flatten()
        bounds = torch.arange(len(starts) + 1, dtype=torch.int32) * (max_drafts + 1)
        return original(targets[rows], drafts[rows], bounds, max_drafts, trees, None, tally)

    patch.setattr(scorers, "accept", whole)


def test_a_cut_tree_taken_for_a_whole_one_is_caught(reference):
    """Answers that run into max_model_len, where the scheduler cuts trees; without the bug see test_situations.py."""
    expected = reference(QWEN, "endless")
    overrides = {"max_model_len": 320}
    with (
        harness.engine(QWEN, "target", overrides=overrides, pruner="none", drafting="tree-static") as engine,
        pytest.MonkeyPatch.context() as patch,
        pytest.raises((AssertionError, RuntimeError)),
    ):
        untruncated(patch)
        outputs, counted = engine.measured(harness.videos(QWEN, 4, max_tokens=100, ignore_eos=True))
        assert_begins(outputs, expected)
        assert_all_stands(counted)


def test_auto_follows_its_table(reference):
    """`auto`: trees while few requests run, chains while many do, nothing while all do, there and back, in one engine,
    without a seam; whole forwards of trees are captured.

    Two requests begin, six join them, and all end at different times. Catches: a chain verified under a tree's mask, KV
    that a change of shape leaves behind, a path of an earlier tree that a chain's acceptance is looked up in; nodes of
    a last tree before a rest that nobody has moved together; a forward of the draft at rest.
    """
    expected = [ids[0] for ids in token_ids(reference(QWEN, "videos"))]
    lengths = [28, 28, 4, 4, 2, 2, 4, 4]
    requests = [(p, {**a, "max_tokens": n}) for (p, a), n in zip(SCENARIOS["videos"](QWEN), lengths, strict=True)]
    table = [[1, 4, "tree-static", 25], [5, 6, "chain", 5], [7, 64, "none", 0]]
    with (
        harness.engine(
            QWEN, "target", drafting="auto", draft_table=table, num_speculative_tokens=25, pruner="none"
        ) as engine,
        captured(engine.runner, [1, 3, 8]) as replayed,
    ):
        answers, shapes = {}, []

        def step() -> None:
            before = engine.counters()
            with mock.patch.object(engine.draft, "forward", wraps=engine.draft.forward) as forward:
                done = [output for output in engine.core.step() if output.finished]
            answers.update({int(output.request_id): list(output.outputs[0].token_ids) for output in done})
            gained = metrics.difference(before, engine.counters())
            assert not (gained["undrafted_steps"] and forward.called)
            if gained["drafts"]:
                shapes.append("chain" if gained["draft_tokens"] == gained["draft_depth"] else "tree")
            elif gained["undrafted_steps"]:
                shapes.append("none")

        start = engine.counters()
        engine.begin(requests[:2])
        for _ in range(2):
            step()
        engine.begin(requests[2:])
        while engine.core.has_unfinished_requests():
            step()
        counted = metrics.difference(start, engine.counters())
    assert [ids for _, ids in sorted(answers.items())] == [
        ids[:length] for ids, length in zip(expected, lengths, strict=True)
    ]
    assert counted["accepted_tokens"] == counted["draft_depth"] == 5 * counted["drafts"]
    changes = [shape for i, shape in enumerate(shapes) if i == 0 or shapes[i - 1] != shape]
    assert changes == ["tree", "none", "chain", "tree"]
    assert replayed[26, 3, 2], "two trees in the graph of three"
