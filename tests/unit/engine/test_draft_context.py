"""How far a draft's context reaches: the rows of its rope table, and its own number of tokens."""

from types import SimpleNamespace

import numpy as np
import torch

from vllm_vidspec.engine.draft.drafter import Drafter
from vllm_vidspec.engine.draft.model import rope_positions


def module_with(num_rows: int | None) -> torch.nn.Module:
    """Return a module that has a rope table of so many rows, or none."""
    module = torch.nn.Module()
    if num_rows is not None:
        module.register_buffer("cos_sin_cache", torch.zeros(num_rows, 4))
    return module


def test_positions_are_the_rows_of_the_smallest_table():
    """Catches: positions counted in tokens, a table of another layer overlooked."""
    language_model = torch.nn.Sequential(module_with(4096), torch.nn.Sequential(module_with(1024), module_with(None)))
    assert rope_positions(language_model, 256) == 1024
    assert rope_positions(torch.nn.Sequential(module_with(None)), 256) == 256


def test_a_request_is_held_while_all_that_may_be_committed_has_a_place():
    """Compared with the place of the last token that may count; what passes the target's context does not.

    Catches: a row of the rope table that does not exist, a stop before it is due, a request near the end of the
    target's context that is given up although its draft has the same.
    """
    drafter, num_drafts = object.__new__(Drafter), 3
    drafter._num_speculative_tokens = num_drafts
    for target_len, draft_len, num_positions in ((20, 20, 20), (20, 12, 20), (20, 20, 15), (20, 12, 48), (20, 20, 80)):
        drafter._max_model_len = target_len
        drafter.model = SimpleNamespace(max_model_len=draft_len, num_positions=num_positions)
        for dropped, delta in ((0, 0), (5, 0), (5, -5), (0, -4), (2, 40)):
            drafter.kv = SimpleNamespace(num_dropped_np=np.array([99, dropped]), pos_delta_np=np.array([99, delta]))
            for num_tokens in range(6, target_len + 3):
                last = min(num_tokens + num_drafts, target_len) - 1
                expected = last - dropped < draft_len and last + delta < num_positions
                assert drafter.holds(np.array([1]), np.array([num_tokens])).tolist() == [expected]
    assert drafter.holds(np.array([], dtype=np.int64), np.array([], dtype=np.int64)).tolist() == []
