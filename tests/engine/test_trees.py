"""Verification by tree attention: branches behind decoys, chains, planted bugs, and shapes that change meanwhile.

Chains take it on backends that do not split keys over rows; the CPU's does, so here the choice is forced.

A captured forward is made once more, with the capture's tensors and numbers, as a CUDA graph's replay would be: vLLM's
own manager dispatches, prepares and captures. Steps without drafts are not captured: the CPU plans them on the host.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.worker.gpu import cudagraph_utils

from tests.engine import harness
from tests.engine.conftest import SCENARIOS
from tests.engine.harness import LLAVA, QWEN, Engine, assert_all_stands, assert_same_answers, in_place_of, token_ids
from vllm_vidspec import metrics
from vllm_vidspec.engine import tree_attention
from vllm_vidspec.engine.compat import backends
from vllm_vidspec.engine.draft.noise import CoupledSampler
from vllm_vidspec.engine.hooks.trees import TargetTrees
from vllm_vidspec.tools import pairs

pytestmark = pytest.mark.engine

K = 5  # of chains
# A caterpillar: each level has a decoy, and the right token after it. A decoy has a child, so that the draft reads it.
DECOYS = [[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]]


class Subject(NamedTuple):
    """An engine whose draft is the target's twin, and what must hold of it."""

    engine: Engine
    check: Callable[[Engine, Any], None]


@pytest.fixture(scope="module")
def subject(request, reference) -> Iterator[Subject]:
    """Trees whose accepted paths are all out of order; or chains, neither model's through the backend's attention."""
    family = LLAVA if request.param == "trees" else QWEN
    for scenario in ("videos", "sampled"):  # one engine at a time
        reference(family, scenario)
    if request.param == "trees":
        shape = {"drafting": "tree-static", "tree_paths": DECOYS, "num_speculative_tokens": len(DECOYS)}
        with harness.engine(LLAVA, pairs.checkpoint(LLAVA, "target"), pruner="none", **shape) as engine:
            yield Subject(engine, check_decoys)
    else:
        with (
            mock.patch.object(backends, "splits_keys", lambda layer, num_rows: False),
            harness.engine(QWEN, pairs.checkpoint(QWEN, "target"), pruner="none", num_speculative_tokens=K) as engine,
        ):
            yield Subject(engine, check_chains)


class Replay:
    def __init__(self, forward: Callable, attention: Any):
        self._forward, self._attention = forward, attention
        self._step = attention.step

    def replay(self) -> None:
        """Run what was captured, whatever is planned by now."""
        planned, self._attention.step = self._attention.step, self._step
        self._forward(CUDAGraphMode.NONE)
        self._attention.step = planned


@contextlib.contextmanager
def captured(runner: Any, num_reqs: Sequence[int]) -> Iterator[Counter]:
    """Let steps of up to so many requests be replayed; yield a counter of (rows, padded requests, requests)."""
    sizes = [count * (runner.num_speculative_steps + 1) for count in num_reqs]
    config, replayed = runner.compilation_config, Counter()
    prepare = type(runner).prepare_inputs

    def capture(manager, create_forward_fn, _progress_bar_desc):
        for desc in manager._capture_descs[CUDAGraphMode.FULL]:
            create_forward_fn(desc, warmup=True)(CUDAGraphMode.NONE)
            forward = create_forward_fn(desc, warmup=False)
            forward(CUDAGraphMode.NONE)
            manager.graphs[desc] = Replay(forward, runner.parts.target_trees.attention)
        manager._graphs_captured = True

    def counting(self, scheduler_output, batch_req_state, batch_desc, *args):
        if batch_desc.cg_mode == CUDAGraphMode.FULL:
            per_request = batch_desc.num_tokens // batch_desc.num_reqs
            replayed[per_request, batch_desc.num_reqs, len(batch_req_state.req_ids)] += 1
        return prepare(self, scheduler_output, batch_req_state, batch_desc, *args)

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (config, "cudagraph_capture_sizes", sizes),
            (config, "max_cudagraph_capture_size", max(sizes)),
            (type(current_platform), "get_global_graph_pool", lambda self: None),
            (cudagraph_utils.CudaGraphManager, "capture", capture),
            (type(runner), "prepare_inputs", counting),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        manager = cudagraph_utils.ModelCudaGraphManager(
            runner.vllm_config, runner.device, CUDAGraphMode.FULL_DECODE_ONLY, runner.decode_query_len
        )
        for descs in (*manager._capture_descs.values(), *manager._candidates.values()):
            descs[:] = [desc for desc in descs if desc.uniform_token_count != 1]
        parts = (runner.model, runner.model_state, runner.input_buffers, None, runner.block_tables)
        with torch.inference_mode():
            manager.capture(*parts, runner.attn_groups, runner.kv_cache_config)
        runner.hooks.after_forward(mock.Mock())
        stack.enter_context(mock.patch.object(runner, "cudagraph_manager", manager))
        yield replayed


both = pytest.mark.parametrize("subject", ["trees", "chains"], indirect=True)


def check_decoys(engine: Engine, reference: Any) -> None:
    """The draft's best candidate is listed second: every step accepts the three tokens behind the decoys."""
    original = CoupledSampler.candidates_into

    def decoy_first(self, *args, log_probs, ids, **kwargs):
        original(self, *args, log_probs=log_probs, ids=ids, **kwargs)
        for ranked in (log_probs, ids):
            ranked.copy_(ranked.flip(1))

    with mock.patch.object(CoupledSampler, "candidates_into", decoy_first):
        for scenario in ("videos", "sampled"):
            outputs, counted = engine.measured(SCENARIOS[scenario](engine.family))
            assert token_ids(outputs) == token_ids(reference(engine.family, scenario))
            assert counted["accepted_tokens"] == counted["draft_depth"] == 3 * counted["drafts"] > 0


def check_chains(engine: Engine, reference: Any) -> None:
    """Every draft stands, through tree attention: verify steps, and the draft's first forwards."""
    with counting() as rows:
        for scenario in ("videos", "sampled"):
            outputs, counted = engine.measured(SCENARIOS[scenario](engine.family))
            assert_same_answers(reference(engine.family, scenario), outputs)
            assert_all_stands(counted)
            assert counted["draft_tokens"] == counted["draft_depth"]
    assert rows[K + 1] > 0 and rows[2] > 0
    assert engine.runner.parts.trees is None and engine.kv.caches is None, "nothing of a chain moves"


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


@both
def test_whole_forwards_are_captured(subject, reference):
    """Verify steps replay what was captured at other batches: no mask, position, prefix or number is the capture's."""
    engine, check = subject
    with captured(engine.runner, [1, 3, 8]) as replayed:
        check(engine, reference)
    assert {padded > real for _, padded, real in replayed} == {True, False}, replayed
    assert {rows for rows, _, _ in replayed} == {engine.runner.num_speculative_steps + 1}


@pytest.mark.parametrize("subject", ["chains"], indirect=True)
def test_chains_of_unequal_lengths_share_a_forward(subject, reference, monkeypatch):
    """As where windows have any length, or some requests no drafts: every row of such a batch is ours."""
    engine = subject.engine

    @in_place_of(monkeypatch, type(engine.runner), "take_draft_token_ids")
    def cut(take, self):
        drafts = take(self)
        if drafts is not None:
            offered = enumerate(drafts.draft_token_ids)
            drafts.draft_token_ids = [tokens[: (3 * i) % (K + 1)] for i, tokens in offered]
        return drafts

    with counting() as rows:
        outputs, counted = engine.measured(SCENARIOS["videos"](QWEN))
    assert_same_answers(reference(QWEN, "videos"), outputs)
    assert_all_stands(counted)
    assert rows["ragged"] > 0


def no_depth_positions(patch) -> None:
    """Nodes keep the position of their slot."""

    @in_place_of(patch, TargetTrees, "_place")
    def by_slot(original, self, batch, positions, out=None):
        before = positions.clone()
        original(self, batch, positions, out)
        (positions if out is None else out).copy_(before)


def no_compaction(patch) -> None:
    patch.setattr(TargetTrees, "compact", lambda self: None)


def leaking_sibling(patch) -> None:
    """Every node also attends to the node before it."""

    @in_place_of(patch, TargetTrees, "_place")
    def leaking(original, self, *arguments):
        original(self, *arguments)
        self.places.masks.bitwise_or_(self.places.masks.roll(1, dims=1))


def shorter_prefix(patch) -> None:
    """The target's prefix ends one entry early."""

    @in_place_of(patch, TargetTrees, "_place")
    def shorter(original, self, *arguments):
        original(self, *arguments)
        self.places.prefix_lens.sub_(1)


@both
def test_every_draft_stands(subject, reference):
    subject.check(subject.engine, reference)


@pytest.mark.parametrize(
    ("subject", "mutation"),
    [
        *(("trees", mutation) for mutation in (no_depth_positions, no_compaction, leaking_sibling)),
        ("chains", shorter_prefix),
    ],
    indirect=["subject"],
)
def test_planted_bug_is_caught(subject, reference, monkeypatch, mutation):
    """Each changes the output or its acceptance: positions, compaction, masks and prefixes are each vital."""
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        subject.check(subject.engine, reference)


def test_auto_follows_its_table(reference):
    """Trees while few run, chains, nothing while all do, there and back: no seam in masks, KV, paths or graphs."""
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
