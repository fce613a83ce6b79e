"""Forwards that are captured for whatever batch comes: what their graphs hold, and what a batch of before leaves there.

That they verify trees and chains, tests/engine/test_trees.py shows.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.engine import fakes
from tests.unit.engine.fakes import CPU, NOTHING
from vllm_vidspec.engine.hooks.trees import TargetTrees
from vllm_vidspec.engine.requests import RequestRows
from vllm_vidspec.engine.tree_attention import TreeAttention

K, MAX_REQS, MAX_TOKENS = 3, 4, 40


class Target:
    def __init__(self) -> None:
        self.state, attention = fakes.model_state(), TreeAttention([fakes.attention_layer()], CPU)
        self.trees = TargetTrees(attention, self.state, RequestRows(MAX_REQS, CPU), K, MAX_TOKENS, CPU)

    def prepare(self, counts: list[int], is_dummy: bool = False, for_capture: bool = False, **more: Any) -> Any:
        """Do what a runner does before a forward of so many query rows each; return what the layers are to do."""
        rows, padded = np.arange(len(counts)), more.get("num_reqs_after_padding", len(counts))
        bounds = np.cumsum([0, *counts, *[0] * (padded - len(counts))], dtype=np.int32)
        given = dict(
            num_reqs=len(counts), num_reqs_after_padding=padded, num_tokens=sum(counts), max_query_len=None,
            idx_mapping=torch.from_numpy(rows), idx_mapping_np=rows, positions=torch.zeros(sum(counts)).long(),
            query_start_loc=torch.from_numpy(bounds), seq_lens=torch.tensor(counts, dtype=torch.int32) + 9,
            num_scheduled_tokens=np.array(counts), is_prefilling_np=np.zeros(len(counts), dtype=bool),
            num_draft_tokens_per_req=None if is_dummy else np.array(counts) - 1,
        )  # fmt: skip
        batch = SimpleNamespace(**given | more)
        if not for_capture:
            self.trees.before_forward(batch)
        self.state.prepare_attn(batch, None, (None,), None, None, None, for_capture=for_capture)
        self.state.prepare_inputs(batch, None)
        return self.trees.attention.step


@pytest.mark.parametrize(
    ("num_reqs", "num_tokens", "max_query_len", "expected"),
    [
        (2, 8, 4, (4, True)),  # a grid of whole trees
        (3, 6, 2, (2, True)),  # of a smaller budget
        (2, 12, 6, (4, False)),  # of longer prompts than a tree
        (4, 8, 8, (4, False)),  # any batch of 8 tokens: vLLM's `cudagraph_mode: FULL`
        (1, 4, 4, (4, True)),
    ],
)
def test_what_is_captured(num_reqs, num_tokens, max_query_len, expected):
    """Catches: vLLM's attention left out of a graph whose batches may hold prompts; a bound that replays can pass."""
    it = Target()
    counts = [num_tokens // num_reqs] * num_reqs
    step = it.prepare(counts, is_dummy=True, for_capture=True, max_query_len=max_query_len)
    assert (step.max_queries, step.is_whole_batch) == expected and len(step.rows) == num_reqs
    assert all(getattr(step, name) is value for name, value in vars(it.trees.places).items() if hasattr(step, name))


def test_a_forward_finds_nothing_of_the_last_batch():
    """Catches: rows of padding verified as what was there before; a dummy run that attends as the last batch did; a
    capture that writes where a larger batch lay, or takes what has no drafts from vLLM's own attention."""
    it = Target()
    places = it.trees.places
    assert it.prepare([K + 1] * 4) and places.num_queries.tolist() == [K + 1] * 4
    assert it.prepare([K + 1] * 3, num_reqs_after_padding=4) and places.num_queries.tolist() == [K + 1] * 3 + [0]
    it.trees.after_forward(NOTHING)
    assert it.trees.attention.step is None
    assert it.prepare([2, 2], is_dummy=True) is None
    places.num_queries.fill_(K + 1)
    places.query_start.fill_(999)
    assert it.prepare([2] * 4, is_dummy=True, for_capture=True)
    assert places.query_start.tolist() == [0, 2, 4, 6] and places.num_queries.tolist() == [2] * 4
    assert it.prepare([1] * 4, is_dummy=True, for_capture=True) is None
