"""Chains through tree attention, as on backends that do not split keys over several rows: the output is vanilla's.

The CPU's backend is left to its chains; here the choice is forced the other way, for the target and for the draft.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from tests.engine import harness
from tests.engine.conftest import SCENARIOS
from tests.engine.full_graphs import captured
from tests.engine.harness import QWEN, assert_all_stands, assert_same_answers, skipped, token_ids
from tests.engine.seams import TargetTrees, tree_attention
from vllm_vidspec.engine.compat import backends

pytestmark = pytest.mark.engine

K = 5


@pytest.fixture(scope="module")
def chains(reference):
    """The target drafts chains for itself, neither through the backend's own attention."""
    for scenario in ("videos", "sampled", "mixed", "grammar"):  # one engine at a time
        reference(QWEN, scenario)
    with (
        mock.patch.object(backends, "splits_keys", lambda layer, num_rows: False),
        harness.engine(QWEN, "target", pruner="none", num_speculative_tokens=K) as engine,
    ):
        yield engine


@contextlib.contextmanager
def counting() -> Iterator[Counter]:
    """Yield how often tree attention takes so many rows a request, and how often ("ragged") not all have as many."""
    rows: Counter = Counter()
    original = tree_attention.tree_attention

    def attend(*args, max_queries, **kwargs):
        rows[max_queries] += 1
        of_batch, num_queries = args[4], args[6]
        rows["ragged"] += len(num_queries[: len(of_batch)].unique()) > 1
        original(*args, max_queries=max_queries, **kwargs)

    with mock.patch.object(tree_attention, "tree_attention", attend):
        yield rows


def check(engine, reference) -> None:
    """Every draft stands and the output is vanilla's, greedy and at T = 1."""
    for scenario in ("videos", "sampled"):
        outputs, counted = engine.measured(SCENARIOS[scenario](engine.family))
        assert_same_answers(reference(engine.family, scenario), outputs)
        assert_all_stands(counted)
        assert counted["draft_tokens"] == counted["draft_depth"] and not skipped(counted)


def check_all(engine, reference) -> None:
    """The same, through tree attention: verify steps, and the draft's first forwards."""
    with counting() as rows:
        check(engine, reference)
    assert rows[K + 1] > 0 and rows[2] > 0
    assert engine.runner.parts.trees is None and engine.kv.caches is None, "nothing of a chain moves"


def test_every_draft_stands(chains, reference):
    """Catches: every mutation below."""
    check_all(chains, reference)


def test_whole_forwards_are_captured(chains, reference):
    """Verify steps replay what was captured at other batches, padding and all.

    Catches: a prefix that is the capture's, a row of padding that attends or writes.
    """
    with captured(chains.runner, [1, 3, 8]) as replayed:
        check(chains, reference)
    assert {padded > real for _, padded, real in replayed} == {True, False}, replayed
    assert {rows for rows, _, _ in replayed} == {K + 1}


def test_grammars_and_every_sampling_parameter(chains, reference):
    """Structured outputs are drafted for; requests with and without drafts, and cut chains, share batches.

    Catches: what trees refuse or leave out refused for chains too; logprobs, penalties or stops of another row.
    """
    expected = reference(QWEN, "grammar")
    outputs, counted = chains.measured(SCENARIOS["grammar"](QWEN))
    assert token_ids(outputs) == token_ids(expected)
    assert counted["accepted_tokens"] > 0 and not skipped(counted)
    outputs, counted = chains.measured(SCENARIOS["mixed"](QWEN))
    assert_same_answers(reference(QWEN, "mixed"), outputs)
    assert counted["accepted_tokens"] > 0


def test_chains_of_unequal_lengths_share_a_forward(chains, reference, monkeypatch):
    """As where windows have any length, or some requests no drafts: every row of such a batch is ours.

    Catches: a batch that goes to the backend because its rows are unequal; rows of one request taken for another's.
    """
    take = type(chains.runner).take_draft_token_ids

    def cut(self):
        drafts = take(self)
        if drafts is not None:
            offered = enumerate(drafts.draft_token_ids)
            drafts.draft_token_ids = [tokens[: (3 * i) % (K + 1)] for i, tokens in offered]
        return drafts

    monkeypatch.setattr(type(chains.runner), "take_draft_token_ids", cut)
    with counting() as rows:
        outputs, counted = chains.measured(SCENARIOS["videos"](QWEN))
    assert_same_answers(reference(QWEN, "videos"), outputs)
    assert_all_stands(counted)
    assert rows["ragged"] > 0


def shorter_prefix(patch, engine) -> None:
    """The target's prefix ends one entry early."""
    original = TargetTrees._place

    def shorter(self, *arguments):
        original(self, *arguments)
        self.places.prefix_lens.sub_(1)

    patch.setattr(TargetTrees, "_place", shorter)


def blind_root(patch, engine) -> None:
    """The draft's root does not attend to its own entry."""
    forwards = engine.speculator.backend.drafter.chains._forwards
    original = forwards._tree

    def blind(*arguments):
        step = original(*arguments)
        return dataclasses.replace(step, masks=torch.zeros_like(step.masks))

    patch.setattr(forwards, "_tree", blind)


def rows_of_the_neighbour(patch, engine) -> None:
    """Each request attends to the next one's keys."""
    original = TargetTrees._step

    def shifted(self, *arguments):
        step = original(self, *arguments)
        return dataclasses.replace(step, rows=step.rows.roll(1))

    patch.setattr(TargetTrees, "_step", shifted)


def never_taken(patch, engine) -> None:
    """Layers keep their own attention."""
    patch.setattr(tree_attention.TreeAttention, "step", property(lambda self: None, lambda self, step: None), False)


@pytest.mark.parametrize("mutation", [shorter_prefix, blind_root, rows_of_the_neighbour, never_taken])
def test_planted_bug_is_caught(chains, reference, mutation):
    """Each changes the output of the run above, its acceptance, or who attends."""
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch, chains)
        with pytest.raises(AssertionError):
            check_all(chains, reference)
