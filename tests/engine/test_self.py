"""A target that drafts for itself over its own KV cache: what a draft step reads and writes there, entry by entry.

The oracle is the target's cache before and after a draft step. Read is what the target has computed of each token that
the draft sees, and nothing else; written are the slots that vLLM holds behind each root, and the null block.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.engine import harness
from tests.engine.conftest import SCENARIOS
from tests.engine.harness import (
    LLAVA,
    QWEN,
    QWEN3,
    Engine,
    assert_all_stands,
    assert_begins,
    assert_same_answers,
    in_place_of,
)
from vllm_vidspec.engine.draft import drafter, forwards
from vllm_vidspec.engine.draft.drafter import Drafter
from vllm_vidspec.engine.draft.target_kv import TargetKV
from vllm_vidspec.engine.kv_views import attention_layers, cache_views
from vllm_vidspec.pruning.prompt import kept_tokens

pytestmark = pytest.mark.engine

SIZE, K = 32, 5
# Answers end where the context does, and where a row's next request has fewer blocks than its last had.
MAX_LEN = 288
SMALL = {"block_size": SIZE, "kv_cache_memory_bytes": 12 * 2**20}


class Watch:
    """What every draft step has read and written since it was put on an engine."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch):
        self.engine, self.num_steps, self.wrong = engine, 0, []
        self.seen: dict[int, torch.Tensor] = {}  # by row which tokens of its prompt the draft sees
        self.layers = attention_layers(engine.runner.vllm_config).values()
        self.views = [view for layer in self.layers for view in cache_views(layer.kv_cache, layer)]
        engine.runner.observers.append(SimpleNamespace(pruned=self.pruned, verified=lambda *_: None))

        @in_place_of(patch, Drafter, "draft")
        def looking(draft, drafting, message):
            before, rows = [layer.kv_cache.clone() for layer in self.layers], message.idx_mapping_np.tolist()
            self.wrong += [row for row in rows if not self.reads_what_it_sees(row)]
            drafts = draft(drafting, message)
            allowed = set().union(*map(self.behind_the_root, rows))
            self.wrong += [slot for slot in self.changed(before) - allowed if slot[0] != 0]  # the null block
            self.num_steps += 1
            return drafts

    def pruned(self, job, kept) -> None:
        self.seen[job.req_state_idx] = kept_tokens(job.plan, kept)

    def target(self, row: int) -> tuple[np.ndarray, int]:
        """Return the ids of the target's blocks of a row, and its committed length."""
        tables = self.engine.runner.block_tables
        length = int(self.engine.runner.req_states.total_len.gpu[row])
        return tables.block_tables[0].gpu[row, : tables.num_blocks.np[0, row]].numpy(), length

    def reads_what_it_sees(self, row: int) -> bool:
        (blocks, length), kv, prompt = self.target(row), self.engine.kv, self.seen[row]
        tokens = np.concatenate((prompt.nonzero()[:, 0], np.arange(len(prompt), length - 1)))
        entries = np.arange(length - 1 - kv.num_dropped_np[row])
        table = kv.block_tables[row].numpy()
        for view in self.views:
            theirs = view[blocks[tokens // SIZE], tokens % SIZE].flatten(1).numpy()
            ours = view[table[entries // SIZE], entries % SIZE].flatten(1).numpy()
            if len(ours) != len(theirs) or (ours[np.lexsort(ours.T)] != theirs[np.lexsort(theirs.T)]).any():
                return False
        return True

    def changed(self, before: list[torch.Tensor]) -> set[tuple[int, int]]:
        """Return the blocks and places in them where some layer's cache is no longer what it was."""
        found = set()
        for layer, then in zip(self.layers, before, strict=True):
            blocks = (layer.kv_cache != then).flatten(1).any(1).nonzero()[:, 0]
            for new, old in zip(cache_views(layer.kv_cache, layer), cache_views(then, layer), strict=True):
                where = (new[blocks] != old[blocks]).flatten(2).any(-1).nonzero().tolist()
                found |= {(int(blocks[i]), place) for i, place in where}
        return found

    def behind_the_root(self, row: int) -> set[tuple[int, int]]:
        """Return the slots that vLLM holds for a row's drafts: the root's and K - 1 more, as far as it has blocks."""
        blocks, length = self.target(row)
        places = range(length - 1, min(length - 1 + K, len(blocks) * SIZE))
        return {(int(blocks[place // SIZE]), place % SIZE) for place in places}


@contextlib.contextmanager
def watched(engine: Engine) -> Iterator[Watch]:
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(engine, patch)
        yield watch
        engine.runner.observers.pop()
    assert watch.num_steps > 5
    assert not watch.wrong, watch.wrong


AHEAD = pytest.param(True, id="ahead")
SLOWLY_AHEAD = pytest.param(True, id="ahead", marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def small(request, reference) -> Iterator[Engine]:
    for scenario in ("endless", "endless sampled"):
        reference(QWEN, scenario)
    overrides = SMALL | {"max_model_len": MAX_LEN, "max_num_seqs": 3}
    with harness.engine(QWEN, "target", overrides, request.param, pruner="specvlm") as engine:
        yield engine


def check(engine: Engine, reference) -> None:
    """Prompts seen whole and to the end of the context; then a tenth of others, in the same rows, as far: some are
    aborted, and one waits for blocks; then greedy and sampled ones, preempted.
    """
    endless = [(prompt, {**more, "max_tokens": MAX_LEN}) for prompt, more in SCENARIOS["endless"](QWEN)]
    with watched(engine):
        with engine.retuned(prune_ratio=0.0):
            assert_begins(engine.generate(endless[:3]), reference(QWEN, "endless"))
        engine.begin(endless[3:], steps=3)
        engine.abort()
        assert_begins(engine.generate(endless), reference(QWEN, "endless"))
        sampled = SCENARIOS["endless sampled"](QWEN)
        with engine.preemptions() as preempted:
            engine.begin(sampled, steps=2)
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            answers = engine.finish()
        assert len(preempted) == 3
        expected = harness.token_ids(reference(QWEN, "endless sampled"))
        assert answers == [ids[0][: len(answer)] for answer, ids in zip(answers, expected, strict=True)]
        assert engine.used_blocks() == 0


@pytest.mark.parametrize("small", [False, AHEAD], indirect=True)
def test_a_draft_step_reads_and_writes_what_it_may(small, reference):
    """Catches: every mutation below, and entries that are not the target's own."""
    check(small, reference)


def entries_of_another(monkeypatch) -> None:
    """What is copied for a row is the prompt of another, if there is one."""

    @in_place_of(monkeypatch, TargetKV, "take")
    def take(original, kv, row, keep):
        own, num_whole = kv._tables[row], len(keep) // SIZE
        others = [block for other, table in kv._tables.items() if other != row for block in table]
        kv._tables[row] = [*(others + own)[:num_whole], *own[num_whole:]]
        return original(kv, row, keep)


def stale_blocks(monkeypatch) -> None:
    """Behind its blocks a row's table keeps an earlier request's."""

    @in_place_of(monkeypatch, TargetKV, "apply")
    def apply(original, kv):
        kv.max_blocks, width = 0, kv.max_blocks
        original(kv)
        kv.max_blocks = width


def feed_again(monkeypatch) -> None:
    """The last of a chain that was accepted whole is fed again, as in a cache that nothing but the draft writes."""

    @in_place_of(monkeypatch, drafter, "begin_step")
    def begin(original, batch_rows, picked, num_sampled, is_verified, temperature, seeds, tables, out, **kwargs):
        original(batch_rows, picked, num_sampled, is_verified, temperature, seeds, tables, out, **kwargs)
        num_reqs = len(batch_rows) if picked is None else len(picked)
        for place in np.flatnonzero(out.num_accepted[:num_reqs].numpy() == K).tolist():
            entry = int(out.root_slot[place]) - 1
            out.slot_mapping[2 * place] = int(out.batch_table[place, entry // SIZE]) * SIZE + entry % SIZE


def behind_the_lookahead(monkeypatch) -> None:
    """A level's entries are one slot too far."""

    @in_place_of(monkeypatch, forwards, "next_level")
    def level(original, step, out, *args, **kwargs):
        step.root_slot.add_(1)
        original(step, out, *args, **kwargs)
        step.root_slot.sub_(1)


@pytest.mark.parametrize("small", [False, SLOWLY_AHEAD], indirect=True)
@pytest.mark.parametrize(
    "mutation",
    [
        entries_of_another,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (stale_blocks, feed_again, behind_the_lookahead)),
    ],
)
def test_planted_bug_is_caught(small, reference, monkeypatch, mutation):
    """Each leaves the answers as they are, or spoils them."""
    mutation(monkeypatch)
    with pytest.raises(AssertionError, match=r"\["):
        check(small, reference)
    monkeypatch.undo()
    small.abort()
    small.idle()


@pytest.mark.parametrize(
    ("family", "shape", "overrides"),
    [
        (QWEN, "chain", {"max_num_batched_tokens": harness.CHUNK_SIZES[QWEN]}),
        (LLAVA, "tree-static", {}),
        pytest.param(QWEN3, "chain", {}, marks=pytest.mark.slow),
    ],
)
def test_who_sees_all_is_never_wrong(reference, family, shape, overrides):
    """Every kind of prompt and parameter, unpruned, then a tenth. Catches: a token that is lost on the way; a copy
    where there is nothing to drop; positions other than the target's.
    """
    expected = {scenario: reference(family, scenario) for scenario in ("videos", "sampled", "mixed")}
    with harness.engine(family, "target", SMALL | overrides, drafting=shape, prune_ratio=0.0) as engine:
        for scenario in ("videos", "sampled", "videos"):
            outputs, counted = engine.measured(SCENARIOS[scenario](family))
            assert_same_answers(expected[scenario], outputs)
            assert_all_stands(counted)
            assert counted["visual_tokens_kept"] == counted["visual_tokens_full"] > 0
            assert counted["draft_pool_blocks_used"] == 0
        engine.retune(prune_ratio=0.9, image_prune_ratio=0.9)
        outputs, counted = engine.measured(SCENARIOS["mixed"](family))
        assert_same_answers(expected["mixed"], outputs)
        assert counted["accepted_tokens"] > 0 and not harness.skipped(counted)
        assert counted["visual_tokens_kept"] < 0.3 * counted["visual_tokens_full"]
        assert engine.used_blocks() == 0


def test_second_turns_over_drafted_answers(reference):
    """A chat goes on over blocks that hold its first answer, drafted. Catches: a draft's entry in the prefix cache."""
    turns = []
    for draft in (None, "target"):
        spec = {} if draft is None else {"pruner": "uniform"}
        with harness.engine(QWEN, draft, SMALL, **spec) as engine:
            requests = harness.greedy_and_sampled(QWEN, 2, 2, ignore_eos=True, max_tokens=70)
            first = engine.generate(requests)
            again = [
                ({**prompt, "prompt": prompt["prompt"] + output.outputs[0].text + " . what moves ?"}, more)
                for (prompt, more), output in zip(requests, first, strict=True)
            ]
            second = engine.generate(again)
            assert all(output.num_cached_tokens >= 320 for output in second)
            turns.append((first, second))
    for expected, got in zip(*turns, strict=True):
        assert_same_answers(expected, got)


def test_a_full_pool_lets_requests_wait(reference):
    """Blocks for two prompts of eight. Catches: a request that gets blocks of another, or never any."""
    expected = reference(QWEN, "videos")
    with harness.engine(QWEN, "target", SMALL, pruner="uniform") as engine:
        del engine.kv._free[4:]
        with watched(engine):
            outputs, counted = engine.measured(SCENARIOS["videos"](QWEN))
    assert_same_answers(expected, outputs)
    assert counted["prompts"] == 8 and counted["resumed_drafts"] == harness.skipped(counted)["pool_full"] > 3


def test_what_sleeps_is_given_up():
    """Catches: drafts from blocks whose memory was given back."""
    with harness.engine(QWEN, "target", SMALL, pruner="uniform", on_draft_error="skip") as engine:
        engine.begin(harness.videos(QWEN, 2, ignore_eos=True), steps=6)
        engine.runner.forget_kv()
        before = engine.counters()["drafts"]
        engine.finish()
        assert engine.counters()["drafts"] == before
        assert engine.used_blocks() == 0
