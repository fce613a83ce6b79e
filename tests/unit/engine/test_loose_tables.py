"""Who is loose and when, what no mismatch may touch, and what changes with the knobs; without a model."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.unit.engine.fakes import CPU, NUM_ROWS, make_knobs
from vllm_vidspec.engine.requests import NewRequest
from vllm_vidspec.engine.verify import loose_tables
from vllm_vidspec.engine.verify.loose_tables import LooseRules
from vllm_vidspec.engine.verify.step import VerifySlice, VerifyStep

VOCAB_SIZE = 70


@pytest.fixture
def made(monkeypatch):
    """Return rules that protect token 9, or 5 with words of one's own; `made.counted` says who is strict, and why."""
    monkeypatch.setattr(loose_tables, "protected_ids", lambda config, _: {5} if config.protected_tokens else {9})
    counted: list[str] = []
    vllm_config = SimpleNamespace(device_config=SimpleNamespace(device=CPU), model_config=None)
    seeds = SimpleNamespace(sampling_states=SimpleNamespace(seeds=SimpleNamespace(gpu=torch.arange(NUM_ROWS))))
    knobs = make_knobs(model="self", scorer="loose", request_scorers=("loose", "fly", "random"))
    rules = LooseRules(knobs, vllm_config, NUM_ROWS, VOCAB_SIZE, seeds, SimpleNamespace(add=counted.append))
    return SimpleNamespace(rules=rules, knobs=knobs, counted=counted)


def arrival(req_state_idx: int, stops=(), **asked) -> NewRequest:
    sampling = SimpleNamespace(
        extra_args={f"vidspec_{name}": value for name, value in asked.items()},
        all_stop_token_ids=set(stops),
        **dict.fromkeys(("structured_outputs", "logprobs", "logprob_token_ids", "stop")),
    )
    return NewRequest(f"request-{req_state_idx}", req_state_idx, [], [], sampling)


def part(drafts: list[int], relevance: list[float] | None = None) -> VerifySlice:
    """Return a chain of row 1, the first of `drafts` its root."""
    n = len(drafts)
    measured = None if relevance is None else torch.tensor(relevance)
    rows, nodes = torch.ones(n, dtype=torch.int64), torch.arange(n, dtype=torch.int32)
    ends = torch.tensor([0, n], dtype=torch.int32)
    chain, tokens = (rows[:1], np.array([1]), ends, np.array([n]), rows, nodes), torch.tensor(drafts).int()
    return VerifySlice(*chain, nodes.long() + 7, tokens, measured, None)


def test_what_no_mismatch_may_touch(made):
    """Protected drafts and targets, what a request forbids, what follows its end, relevance that nobody measured."""
    rules = made.rules
    target = torch.tensor([1, 1, 9, 1, 1, 1, 1])  # after each row; the draft of row i is compared with that of i - 1
    logits = torch.zeros(7, VOCAB_SIZE)
    logits[4, 33] = -torch.inf

    def may(relevance=None, **knobs) -> list[bool]:
        drafts = [2, 9, 41, 3, 64, 33, 8]
        return rules.looseness(part(drafts, relevance), target, logits).may_loosen[1:].tolist()

    rules.add(arrival(1, stops=[64, 10**6]))
    rules.ready(1)
    assert may() == [False, True, False, False, False, True]
    rules.add(arrival(1, stops=[41]))
    rules.ready(1)
    assert may() == [False, False, False, True, False, True]
    assert may([0.0] * 6 + [float("nan")])[-2:] == [False, False]
    made.knobs.change(made.knobs.current.changed({"protected_tokens": ("no",), "position_shift": False}))
    rules.add(arrival(1))
    rules.ready(1)
    assert may() == [True, True, True, True, False, True]


def test_whose_relevance_a_draft_is_judged_by(made):
    """Catches: a row that is off by one, in either reading; a share or a rule of another row."""
    rules, relevance, logits = made.rules, [0.1, 0.2, 0.3], torch.zeros(3, VOCAB_SIZE)
    rules.add(arrival(1, **{"lambda": 0.25}))
    rules.ready(1)
    found = rules.looseness(part([2, 3, 4], relevance), torch.zeros(3, dtype=torch.int64), logits)
    assert found.scores.tolist() == pytest.approx(relevance)
    assert found.shares.tolist() == [0, 0.25, 0, 0] and (found.rules != 0).tolist() == [False, True, False, False]
    made.knobs.change(made.knobs.current.changed({"relevance_rows": "prediction"}))
    found = rules.looseness(part([2, 3, 4], relevance), torch.zeros(3, dtype=torch.int64), logits)
    assert found.scores.tolist() == pytest.approx([0.1, 0.1, 0.2])


def test_a_step_is_seen_slice_by_slice():
    """Catches: rows or relevance of another slice, an output order that outlives its slice, states that are kept."""
    step = VerifyStep(torch.ones(9, 2))
    step.open(np.array([0, 2, 3, 7, 9]), torch.arange(9.0))
    assert step.hidden_states is None
    seen = []
    for num_reqs, num_logits in ((1, 2), (2, 5), (1, 2)):
        num_logits_np, relevance = step.advance(num_reqs, num_logits)
        assert step.output_order is None
        step.output_order = torch.arange(num_logits)
        seen.append((num_logits_np.tolist(), relevance.tolist()))
    assert seen == [([2], [0, 1]), ([1, 4], [2, 3, 4, 5, 6]), ([2], [7, 8])]
