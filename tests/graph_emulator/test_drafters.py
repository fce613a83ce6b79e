"""Drafters whose steps are captured graphs: every situation of an engine in one run, and bugs that only a graph shows.

The target drafts for itself, so every draft must stand as deep as it is: a replay that reads a stale table, length or
slot drafts something else. The text must be vanilla's.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from tests.engine import harness
from tests.engine.conftest import SCENARIOS
from tests.engine.harness import FAMILIES, LLAVA, NO_CACHE, QWEN, TREES, Engine, assert_all_stands, assert_begins
from tests.engine.seams import ChainDrafter, Drafter, DraftModel, tree_attention
from tests.graph_emulator.graphs import SIZES, emulated_graphs
from vllm_vidspec import metrics

pytestmark = pytest.mark.engine

# Prompts of 265 and 266 tokens: about one a step, so that batches grow by one; answers that outgrow a block of 32 and
# then the context; and memory for fewer blocks than such requests take.
OVERRIDES = {
    "max_num_batched_tokens": 300, "max_model_len": 320, "block_size": 32, "num_gpu_blocks_override": 56, **NO_CACHE,
}  # fmt: skip
# Requests of the mixed batch whose logits vLLM processes, in ways that do not look at the text: all drafts must stand.
PROCESSED = (2, 3, 6, 11)
WHOLE = {"chain": "chain", "tree-static": "tree", "tree-adaptive": "level"}  # the part that every step runs


# Every family with every shape; two are slow, whose family and shape others have.
ENGINES = [
    pytest.param(pair, marks=[pytest.mark.slow] * (pair in ((QWEN, "chain"), (LLAVA, "tree-static"))))
    for pair in itertools.product(FAMILIES, ("chain", *TREES))
]


@pytest.fixture(scope="module", params=ENGINES, ids=" ".join)
def captured(request, reference) -> Iterator[tuple[Engine, str, dict]]:
    """An engine whose draft steps are captured, and vanilla's answers; one of them schedules a step ahead."""
    family, shape = request.param
    answers = {name: reference(family, name) for name in ("endless", "endless sampled", "mixed")}
    is_ahead = (family, shape) == (LLAVA, "tree-adaptive")
    spec = {"num_speculative_tokens": 24} if is_ahead else {}  # all of them are scheduled for every request
    with (
        emulated_graphs(),
        harness.async_scheduling() if is_ahead else contextlib.nullcontext(),
        harness.engine(family, "target", overrides=OVERRIDES, pruner="none", drafting=shape, **spec) as engine,
    ):
        engine.speculator.capture()
        yield engine, shape, answers


@contextlib.contextmanager
def sizes_seen() -> Iterator[Counter]:
    """Count the steps by the number of requests that were drafted for."""
    seen, draft = Counter(), Drafter.draft

    def counting(self, message):
        seen[len(message.idx_mapping_np)] += 1
        return draft(self, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafter, "draft", counting)
        yield seen


def run(engine: Engine, requests: list, abort_after: int) -> list[list[int]]:
    """Answer requests step by step, of which the first is aborted after so many steps; return the others' tokens."""
    engine.begin(requests)
    victim, answers, step = next(iter(engine.core.output_processor.request_states)), {}, 0
    while engine.core.has_unfinished_requests():
        if step == abort_after:
            engine.core.abort_request([victim], internal=True)
        for output in engine.core.step():
            if output.finished:
                answers[int(output.request_id)] = list(output.outputs[0].token_ids)
        step += 1
    return [answers[key] for key in sorted(answers)][1 - len(requests) :]


def test_every_situation_at_once(captured):
    """Six requests, greedy and sampled, enter one by one, outgrow blocks and are preempted; some run into the end of
    the context, where trees are cut. A seventh is aborted while it is drafted for. Batches run padded.

    Catches: each of the bugs below, a graph that is missing, padding of one bucket that reaches what another one reads,
    state of a capture that reaches a request.
    """
    engine, shape, answers = captured
    family = engine.family
    endless, sampled = (SCENARIOS[name](family) for name in ("endless", "endless sampled"))
    requests = endless[:2] + [(prompt, {**arguments, "max_tokens": 30}) for prompt, arguments in sampled[:4]]
    expected = answers["endless"][:2] + answers["endless sampled"][:4]
    victim = harness.videos(family, 1, max_tokens=50, ignore_eos=True)
    start = engine.counters()
    with sizes_seen() as seen, engine.preemptions() as preempted:
        got = run(engine, victim + requests, abort_after=5)
        counted = metrics.difference(start, engine.counters())
    num_prompt_tokens = {QWEN: 266, LLAVA: 265}[family]
    assert [len(ids) for ids in got] == [OVERRIDES["max_model_len"] - num_prompt_tokens] * 2 + [30] * 4
    assert got == [ids[: len(one)] for (ids,), one in zip(harness.token_ids(expected), got, strict=True)]
    assert_all_stands(counted)
    assert preempted and not harness.skipped(counted) and counted["draft_eager_steps"] == 0
    assert {3, 5, 6, 7} & seen.keys(), "nothing was padded"
    assert shape != "tree-static" or counted["draft_tokens"] < 25 * counted["drafts"], "no tree was cut"
    graphs = engine.speculator.graphs.graphs
    used = {key.num_tokens for key, graph in graphs.items() if key.name == WHOLE[shape] and graph.recording.num_replays}
    assert used == set(SIZES)
    assert engine.used_blocks() == 0


def test_logits_that_are_processed_between_graphs(captured):
    """Top-k, top-p, min-p and a bias at T > 0: vLLM's processors run between the graphs of the levels.

    Catches: a level whose Python number is frozen, hidden states or tokens that a replay does not take from the step.
    """
    engine, _, answers = captured
    requests, expected = (
        [whole[i] for i in PROCESSED] for whole in (SCENARIOS["mixed"](engine.family), answers["mixed"])
    )
    outputs, counted = engine.measured(requests)
    assert harness.token_ids(outputs) == harness.token_ids(expected)
    assert_all_stands(counted)
    assert counted["draft_eager_steps"] == 0


def test_few_sizes_of_what_is_not_asked_for_by_default(captured, monkeypatch):
    """The same where logits are processed by default: all sizes then, and few of the others.

    Catches: a step padded to a size of the other kind, which runs eagerly; a level whose nodes nobody has placed when
    it is captured; both kinds captured at every size.
    """
    engine, shape, answers = captured
    manager, drafter = engine.speculator.graphs, engine.speculator.backend.drafter
    names = {is_processed: {key.name for key in kind} for is_processed, kind in kinds(engine).items()}
    assert not (names[False] & names[True]) - {"finish"}
    assert {key.num_tokens for key in kinds(engine)[True]} == {1, 4, 8}
    monkeypatch.setattr(manager, "_mostly_processed", True)
    if drafter.trees is not None:
        monkeypatch.setattr(drafter.trees, "_frontiers", {})
    with captured_again(engine, list(SIZES)):
        assert {key.num_tokens for key in manager.graphs if key.name == WHOLE[shape]} == {1, 4, 8}
        assert {key.num_tokens for key in kinds(engine)[True]} == set(SIZES)
        start = engine.counters()
        assert drafts_stand(engine, answers)
        requests = [(p, {**a, "max_tokens": 8}) for p, a in SCENARIOS["endless"](engine.family)]
        assert_begins(engine.generate(requests[:3]), answers["endless"])
        assert metrics.difference(start, engine.counters())["draft_eager_steps"] == 0


def kinds(engine: Engine) -> dict[bool, set]:
    """Return the keys of the parts of steps whose logits are processed, and of the others."""
    drafter = engine.speculator.backend.drafter
    return {
        is_processed: {
            key
            for num_reqs, plan in drafter._plans(is_processed)
            for key in (drafter.chains or drafter.trees).parts(num_reqs, plan.num_tokens, is_processed)
        }
        for is_processed in (False, True)
    }


def test_a_chain_that_goes_on(captured, monkeypatch):
    """Drawn as the parallel drafter does, a token a call, the device knowing where each goes: a chain like any other.

    Catches: a token that is fed at another place or drawn under another's noise, blocks that the step did not bring, a
    replay that is of one level.
    """
    engine, shape, answers = captured
    if shape != "chain":
        pytest.skip("only chains go on")
    drafter, draft = engine.speculator.backend.drafter, Drafter.draft
    monkeypatch.setattr(drafter, "_max_run", 4)
    monkeypatch.setattr(drafter.chains, "_goes_on", True)

    def token_by_token(self, message):
        drafts, lengths = draft(self, message._replace(max_drafts=1)), np.zeros_like(message.idx_mapping_np)
        columns = [drafts.tokens[:, :1].clone()]
        while self.can_go_on(message.idx_mapping_np, lengths):
            columns.append(self.go_on().tokens[:, :1].clone())
        assert len(columns) == message.max_drafts == 5
        self.buffers.drafts[: len(drafts.rows)] = torch.cat(columns, dim=1)
        return drafts

    monkeypatch.setattr(Drafter, "draft", token_by_token)
    requests = [(prompt, {**arguments, "max_tokens": 12}) for prompt, arguments in SCENARIOS["endless"](engine.family)]
    with captured_again(engine, [4]):
        outputs, counted = engine.measured(requests[:3])
        assert drafts_stand(engine, answers)  # these are processed
        replays = {key.name: graph.recording.num_replays for key, graph in engine.speculator.graphs.graphs.items()}
    assert_begins(outputs, answers["endless"])
    assert counted["accepted_tokens"] == counted["draft_depth"] > 0 and not harness.skipped(counted)
    assert replays["more"] > 0


# ---- bugs that only a graph shows ------------------------------------------------------------------------------------


def allocated_anew(patch) -> None:
    """Each step has a block table of its own."""
    begin = Drafter._begin

    def begin_anew(self, *args):
        step = self.buffers.step
        self.buffers.step = dataclasses.replace(step, batch_table=step.batch_table.clone())
        (self.chains or self.trees)._forwards._inputs.cache_clear()
        begin(self, *args)

    patch.setattr(Drafter, "_begin", begin_anew)


def level_of_python(patch) -> None:
    """A level of a chain is placed by a Python number."""

    def feed(self, num_reqs, level):
        self._buffers.step.level.add_(1)
        self._buffers.place(num_reqs, level)
        self._forwards.tokens(num_reqs)

    function = ChainDrafter._function
    patch.setattr(
        ChainDrafter,
        "_function",
        lambda self, num_reqs, level: (
            functools.partial(feed, self, num_reqs, level) if level else function(self, num_reqs, level)
        ),
    )


def note_of_host(patch) -> dict:
    """Return what is noted on the host whenever a step of the draft begins: its longest request."""
    begin, noted = Drafter._begin, {}

    def begin_and_look(self, *args):
        begin(self, *args)
        noted.update(longest=int(self.buffers.step.seq_lens[: args[-1]].max()), attention=self.attention)

    patch.setattr(Drafter, "_begin", begin_and_look)
    return noted


def bound_of_host(patch) -> None:
    """The attention backend is told how long the step's requests can get."""
    noted, forward = note_of_host(patch), DraftModel.forward

    def bounded(self, *args, seq_lens, seq_lens_upper_bound=None, **kwargs):
        if seq_lens_upper_bound is None:
            seq_lens_upper_bound = np.full(len(seq_lens), noted["longest"] + 8)
        return forward(self, *args, seq_lens=seq_lens, seq_lens_upper_bound=seq_lens_upper_bound, **kwargs)

    patch.setattr(DraftModel, "forward", bounded)


def splits_of_host(patch) -> None:
    """The draft reads a tree's prefix in as many splits as the step's longest needs."""
    noted, attend, split = note_of_host(patch), tree_attention.tree_attention, 64

    def attend_in_splits(*args, scratch, **kwargs):
        args = list(args)
        if noted and scratch is noted["attention"].scratch:
            args[7] = args[7].clamp(max=split * max(1, -(-noted["longest"] // split)))  # prefix_lens
        attend(*args, scratch=scratch, **kwargs)

    patch.setattr(tree_attention, "tree_attention", attend_in_splits)


def padding_writes(patch) -> None:
    """Padding has the slot of the first request's root."""
    begin = Drafter._begin

    def begin_and_write(self, batch_rows, picked, *args):
        begin(self, batch_rows, picked, *args)
        num_reqs, slots = len(batch_rows if picked is None else picked), self.buffers.step.slot_mapping
        slots[2 * num_reqs : 2 * args[-1]] = slots[1].clone()

    patch.setattr(Drafter, "_begin", begin_and_write)


PLANTED = {
    (QWEN, "chain"): (level_of_python, bound_of_host),
    (QWEN, "tree-static"): (allocated_anew,),
    (QWEN, "tree-adaptive"): (splits_of_host,),
    (LLAVA, "chain"): (allocated_anew, padding_writes),
    (LLAVA, "tree-static"): (splits_of_host,),
    (LLAVA, "tree-adaptive"): (padding_writes,),
}


def drafts_stand(engine: Engine, answers: dict) -> bool:
    """Answer three requests, which leaves one place of four to padding: as vanilla does, whatever became of the drafts.

    Return whether all drafts stood.
    """
    mixed = SCENARIOS["mixed"](engine.family)
    requests = [(prompt, {**arguments, "max_tokens": 12}) for prompt, arguments in (mixed[i] for i in PROCESSED[:3])]
    outputs, counted = engine.measured(requests)
    assert_begins(outputs, [answers["mixed"][i] for i in PROCESSED])
    return not harness.skipped(counted) and counted["accepted_tokens"] == counted["draft_depth"] > 0


@contextlib.contextmanager
def captured_again(engine: Engine, sizes: list[int]) -> Iterator[None]:
    """Let the engine have graphs of other sizes for a while; without any its steps run as they come."""
    manager = engine.speculator.graphs
    graphs, manager.graphs = manager.graphs, {}
    before, manager.sizes = manager.sizes, sizes
    engine.speculator.capture()
    try:
        yield
    finally:
        manager.graphs, manager.sizes = graphs, before


@pytest.mark.draft_errors
def test_planted_bug_is_caught(captured, monkeypatch):
    """Each leaves the drafts alone where steps run without graphs, and spoils them, or fails, where they are replayed.

    Catches: an emulator that reads what was not frozen.
    """
    engine, shape, answers = captured
    knobs = engine.runner.knobs
    monkeypatch.setattr(knobs, "current", knobs.current.changed({"on_draft_error": "skip"}))
    plants = PLANTED[engine.family, shape]
    with monkeypatch.context() as patch, captured_again(engine, []):
        for plant in plants:
            plant(patch)
        assert drafts_stand(engine, answers)
    for plant in plants:
        with monkeypatch.context() as patch:
            plant(patch)
            with captured_again(engine, [4]):
                assert not drafts_stand(engine, answers), plant.__name__
