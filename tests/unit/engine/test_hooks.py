"""What hears the target: each guarded in the one list, each forgetting a row's request with the request."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.unit.engine import fakes
from tests.unit.engine.fakes import CPU, HIDDEN, NOTHING, NUM_ROWS, NUM_TOKENS, batch_of, in_list, new_request
from tests.unit.engine.listening import make_states
from vllm_vidspec.drafting import DraftTree
from vllm_vidspec.engine.hooks import state_store
from vllm_vidspec.engine.hooks.protocol import Forward, TargetHooks
from vllm_vidspec.engine.hooks.state_store import StateStore
from vllm_vidspec.engine.hooks.trees import TargetTrees
from vllm_vidspec.engine.hooks.visual_states import VisualStates
from vllm_vidspec.engine.requests import RequestRows
from vllm_vidspec.engine.tree_attention import TreeAttention
from vllm_vidspec.errors import VidSpecError

# ---- the list -------------------------------------------------------------------------------------------------------


def live(hooks: TargetHooks) -> None:
    """Let a request come, be seen in a forward, and go, as the table of requests tells it."""
    requests = RequestRows(NUM_ROWS, CPU)
    requests.register(hooks)
    requests.add(new_request())
    hooks.before_forward(batch_of(2))
    hooks.after_forward(NOTHING)
    requests.remove(2)
    hooks.forget_kv()


@pytest.mark.parametrize("step", fakes.LIFE)
def test_an_exception_in_one_is_paid_by_that_one(step, monkeypatch):
    """Catches: a guard that is missing, that stops at the first failure, or that lets the others pay; an end of a
    request that some hook is not told of.
    """
    logged: list[str] = []
    logger = SimpleNamespace(error=lambda *args, **_: logged.append(args[0] % args[1:]))
    monkeypatch.setattr("vllm_vidspec.engine.hooks.protocol.logger", logger)
    before, failing, after = fakes.Recorder(), fakes.Recorder(step), fakes.Recorder()
    hooks = in_list(before, failing, after)
    live(hooks)
    live(hooks)
    assert before.observed == after.observed == 2 * fakes.LIFE
    assert failing.observed == 2 * [name for name in fakes.LIFE if name != step]
    assert [hook.cost for hook in (before, failing, after)] == [0, 2, 0]
    assert logged == ["vidspec: nothing"]


def test_an_exception_is_let_through_where_that_is_asked_for():
    """Alone it is raised; with other ranks, which would wait for this one, the engine ends with its line."""
    with pytest.raises(RuntimeError, match="planted in add"):
        live(in_list(fakes.Recorder("add"), on_draft_error="raise"))
    ended: list[str] = []
    ranks = SimpleNamespace(is_alone=False, abort=ended.append)
    live(TargetHooks([fakes.Recorder("add")], fakes.make_knobs(on_draft_error="raise"), ranks))
    assert ended == ["planted in add"]


def test_memory_is_asked_for_by_turns_and_refusals_are_not_survived():
    """Catches: a reserve that only the first hears, or that promises the same bytes twice."""
    first, second = fakes.Recorder(), fakes.Recorder()
    hooks = in_list(first, second)
    assert hooks.reserve(1600) == 400 + 300
    hooks.init_kv(None)
    assert first.observed == second.observed == ["reserve", "init_kv"]
    for step in ("reserve", "init_kv"):
        with pytest.raises(RuntimeError, match=f"planted in {step}"):
            failing = in_list(fakes.Recorder(step))
            failing.reserve(1600)
            failing.init_kv(None)


# ---- the video's states ---------------------------------------------------------------------------------------------


def measured(states: VisualStates, *rows: int) -> list[float]:
    """Return the relevance of one state of each row."""
    batch = SimpleNamespace(
        logits_indices=torch.arange(len(rows)),
        cu_num_logits=torch.arange(len(rows) + 1, dtype=torch.int32),
        idx_mapping=torch.tensor(rows),
        idx_mapping_np=np.array(rows),
    )
    return states.relevance(torch.ones(len(rows), HIDDEN), batch, 1).tolist()


def prefill(hooks: TargetHooks, *rows: int, count: int = NUM_TOKENS) -> None:
    """Let each row hear a step of its prompt, each of a video of its own."""
    for row in rows:
        hooks.add(new_request(row, f"video-{row}"))
        hooks.before_forward(batch_of(row, count=count))
        hooks.after_forward(Forward(torch.ones(count, HIDDEN), None))


def test_states_are_of_the_request_in_the_row(monkeypatch):
    """Catches: a row whose next request is measured against the video before; room that never comes back."""
    states = make_states(monkeypatch)
    hooks = in_list(states, on_draft_error="raise")
    hooks.add(new_request(2))
    hooks.add(new_request(0, "other"))
    hooks.before_forward(batch_of(2, 0))
    hooks.after_forward(Forward(torch.ones(2 * NUM_TOKENS, HIDDEN), None))
    assert states._rules.of == [2, 0] and states.counters["relevance_prompts"] == 2
    assert measured(states, 2, 0, 1) == pytest.approx([1.0, 1.0, 0.0])
    hooks.remove(2)
    hooks.add(new_request(2, ""))
    assert measured(states, 2, 0) == pytest.approx([0.0, 1.0]) and list(states._holders) == [0]
    assert not states.store._is_stale
    hooks.remove(2)
    hooks.add(new_request(2, adapter="another"))  # other weights, other states
    assert states._holders[2].num_reused == 0
    hooks.remove(2)
    hooks.add(new_request(2))
    assert states._holders[2].num_reused == 1
    hooks.remove(2)
    hooks.remove(0)
    hooks.forget_kv()
    assert len(states.store._free) == 4


@pytest.mark.parametrize("step", ["_claim", "_observe", "_finish"])
def test_a_failure_costs_the_requests_in_prefill_their_looseness(step, monkeypatch):
    """Catches: a request that is loose without its states, one that was before and pays, blocks that are lost, a rank
    that the others wait for because it has failed.
    """
    states, settled = make_states(monkeypatch), []
    hooks = in_list(states)
    monkeypatch.setattr(states._agreement, "all_ranks_and", lambda phase, flags: settled.append(flags) or flags)
    prefill(hooks, 0)
    with monkeypatch.context() as patch:
        patch.setattr(states, step, lambda *_: 1 / 0)
        prefill(hooks, 1)
    prefill(hooks, 3)
    assert states._rules.of == [0, 3] and settled == [[True], [False], [True]]
    assert states.counters["strict_error"] == 1 and states.counters["relevance_prompts"] == 2
    assert measured(states, 0, 1, 3) == pytest.approx([1.0, 0.0, 1.0])
    assert len(states.store._free) == 4 - 2


def test_what_cannot_be_measured_is_nan_and_counted_once(monkeypatch):
    states = make_states(monkeypatch)
    hooks = in_list(states)
    hooks.add(new_request(1))
    monkeypatch.setattr(state_store, "visual_relevance", lambda *_: 1 / 0)
    assert np.isnan(measured(states, 0, 1)).all() and np.isnan(measured(states, 1)).all()
    assert states.counters["strict_error"] == 1
    states.knobs.change(states.knobs.current.changed({"on_draft_error": "raise"}))
    with pytest.raises(ZeroDivisionError):
        measured(states, 1)


def test_states_are_given_up_before_the_pool_is_lost(monkeypatch):
    """Catches: a pool kept while the engine sleeps; items found by later requests whose states are gone; blocks that
    never come back, or come back twice, as those of a request whose relevance could not be measured.
    """
    states, entered = make_states(monkeypatch), []
    store, hooks = states.store, in_list(states)

    @contextlib.contextmanager
    def allocation():
        entered.append("pool")
        yield
        entered.append(store.pool.shape[0])

    hooks.init_kv(SimpleNamespace(kv_allocation=allocation))
    assert entered == ["pool", len(store._free)] == ["pool", 4]
    prefill(hooks, 0)
    prefill(hooks, 1, count=1)  # it waits for its prefill to go on
    prefill(hooks, 2)
    with monkeypatch.context() as patch:
        patch.setattr(state_store, "visual_relevance", lambda *_: 1 / 0)
        measured(states, 2)
    assert len(store._items) == 2 and len(store._free) == 1
    hooks.forget_kv()
    for row in range(3):
        hooks.remove(row)
    assert not store._items and sorted(store._free) == list(range(4))


def test_the_store_drops_what_nobody_uses_the_oldest_first():
    """Catches: an item in use that is dropped, one that a strict request drops, the wrong one of two."""
    store = StateStore(HIDDEN, torch.float32, 256, NUM_ROWS, CPU, fakes.GROUP)
    with pytest.raises(VidSpecError, match="hold nothing"):
        store.reserve(store.bytes_per_block - 1, 1 << 20)
    with pytest.raises(VidSpecError, match="leaves nothing"):
        store.reserve(1 << 20, store.bytes_per_block)
    assert store.reserve(3 * store.bytes_per_block, 1 << 20) == 3 * store.bytes_per_block
    store.allocate(torch.no_grad())
    items = [store.make(key, 4, may_drop=True) for key in (b"a", b"b", b"c")]
    for item in items:
        item.observed[:] = True
        assert store.publish(item) is item
    assert store.make(b"d", 4, may_drop=True) is None
    assert store.held_bytes == 3 * store.bytes_per_block
    store.drop(items[0])
    store.drop(items[1])
    assert store.find(b"a") is items[0]
    store.drop(items[0])  # used after b
    assert store.held_bytes == store.bytes_per_block  # c alone: what nobody uses is kept and held for nobody
    assert store.make(b"d", 4, may_drop=False) is None
    d = store.make(b"d", 4, may_drop=True)
    assert (d.blocks, items[0] in store, items[1] in store) == (items[1].blocks, True, False)
    twin = store.make(b"c", 4, may_drop=True)  # two prompts of one video side by side: the first to end is kept
    twin.observed[:] = True
    assert store.publish(twin) is items[2] and items[2].users == 2 and store._free == twin.blocks


# ---- trees ----------------------------------------------------------------------------------------------------------


def make_trees(requests: RequestRows) -> TargetTrees:
    attention = TreeAttention([fakes.attention_layer()], CPU)
    return TargetTrees(attention, fakes.model_state(), requests, max_nodes=3, max_num_tokens=16, device=CPU)


def test_a_row_is_a_chain_again_after_its_request():
    """Catches: a row whose next request's placeholders are verified as the tree of the one before."""
    requests = RequestRows(NUM_ROWS, CPU)
    trees = make_trees(requests)
    chains = [table.clone() for table in (trees.parents, trees.depths, trees.ancestors)]
    rows = np.array([1, 3])
    tree = DraftTree(2, 3, CPU)  # three leaves under the root
    hooks = in_list(trees, on_draft_error="raise")
    trees.expect(rows)
    trees.take(torch.from_numpy(rows), tree)
    assert requests.is_tree.tolist() == [False, True, False, True] and trees.parents[3].tolist() == [-1, 0, 0, 0]
    hooks.remove(3)
    assert requests.is_tree.tolist() == [False, True, False, False] and trees.parents[3].equal(chains[0][3])
    trees.take_chains(torch.tensor([1]), np.array([1]))
    assert not requests.is_tree.any()
    assert all(map(torch.equal, (trees.parents, trees.depths, trees.ancestors), chains))


def test_a_failure_of_trees_is_not_survived():
    """Catches: a forward whose tree nodes stand where a chain's would."""
    trees = make_trees(RequestRows(NUM_ROWS, CPU))
    with pytest.raises(AttributeError):
        in_list(trees).before_forward(batch_of(1))
    groups = SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=[None, None]))
    with pytest.raises(VidSpecError, match="use chain"):
        in_list(trees).init_kv(groups)
