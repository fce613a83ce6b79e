"""What an engine prepares before it serves: every kernel of its parts, from its own tensors."""

import sys
from collections import Counter

import pytest

from tests.engine import harness
from vidspec_kernels import dispatch
from vidspec_kernels.limits import DeviceLimits
from vllm_vidspec.drafting.adaptive import SAGE
from vllm_vidspec.engine import worker

pytestmark = pytest.mark.engine


def test_every_part_is_prepared(monkeypatch):
    """Attention guidance, adaptive trees and the loose scorer: no kernel of ours is left for the first request."""
    prepared: Counter[str] = Counter()
    limits = DeviceLimits(132, 228 * 1024, 227 * 1024, 90)
    monkeypatch.setattr(dispatch, "_prepare", lambda kernel, grid, *_, **__: prepared.update([kernel.__name__]))
    for name, loaded in list(sys.modules.items()):
        if name.startswith("vidspec_kernels.") and hasattr(loaded, "device_limits"):
            monkeypatch.setattr(loaded, "device_limits", lambda device: limits)
    spec = {"drafting": "tree-adaptive", "pruner": "specvlm", "scorer": "loose", "num_speculative_tokens": 8}
    with harness.engine("qwen2.5-vl", "draft", **spec) as engine:
        worker.warm_up_kernels(engine.runner)
        assert not prepared  # interpreted kernels need none
        worker.prepare(engine.runner)
    # Target and draft have the same attention kernel, and the same one that moves accepted nodes.
    assert set(prepared) == {
        *("_accept_kernel", "_loosen_kernel", "_kv_compact_kernel"),
        *("_place_trees_kernel", "_begin_step_kernel", "_next_level_kernel", "_path_penalties_kernel"),
        *("_tree_begin_kernel", "_tree_plan_kernel", "_tree_grow_kernel", "_tree_finish_kernel"),
        *("_candidates_kernel", "_merge_candidates_kernel"),
        *("_tree_attention_kernel", "_merge_parts_kernel"),
        *("_visual_relevance_kernel", "_merge_splits_kernel", "_merge_relevance_kernel"),
        *("_row_stats_kernel", "_guidance_scores_kernel"),
    }
    assert prepared["_kv_compact_kernel"] >= 2
    # Chains and trees, strict and loose; a level of a tree, its frontier of any width.
    assert prepared["_accept_kernel"] == 4 and prepared["_next_level_kernel"] >= 1
    # 9 rows of the target, and levels of up to 10 nodes of the draft.
    assert prepared["_tree_attention_kernel"] == 9 + SAGE.width_max
