"""What the target's layers do with trees: eagerly, and as a forward that was captured with another batch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from tests.unit.engine import fakes
from tests.unit.engine.fakes import CPU, NOTHING
from vllm_vidspec.drafting import DraftTree, topology_tables
from vllm_vidspec.engine.hooks.trees import TargetTrees
from vllm_vidspec.engine.requests import RequestRows
from vllm_vidspec.engine.tree_attention import TreeAttention

K, MAX_REQS, BLOCK_SIZE, MAX_BLOCKS = 3, 4, 4, 6
HEADS, HEAD_SIZE = 2, 4
MAX_TOKENS = 40
FORK = [0, 0, 1]  # parents: two children of the root, and one of the first


class Target:
    """A layer, its cache, a model state, and the batches of four persistent rows, of which some hold trees."""

    def __init__(self, in_trees: bool = True):
        torch.manual_seed(0)
        self.layer = fakes.attention_layer(HEADS, 1, HEAD_SIZE)
        # Rope positions differ from slots by 100 times the axis.
        self.rope = torch.zeros(3, MAX_TOKENS, dtype=torch.int64)
        self.state = fakes.model_state()
        self.state.prepare_inputs = lambda input_batch, req_states: {
            "positions": self.rope[:, : len(input_batch.positions)]
        }
        self.state.prepare_dummy_inputs = lambda num_reqs, num_tokens: {"positions": self.rope[:, :num_tokens]}
        self.requests = RequestRows(MAX_REQS, CPU)
        attention = TreeAttention([self.layer], CPU)
        self.trees = TargetTrees(attention, self.state, self.requests, K, MAX_TOKENS, CPU, in_trees=in_trees)
        self.cache = torch.randn(MAX_REQS * MAX_BLOCKS + 1, 1, BLOCK_SIZE, 2 * HEAD_SIZE)
        table = 1 + torch.randperm(MAX_REQS * MAX_BLOCKS).view(MAX_REQS, MAX_BLOCKS).int()
        self.table, self.block_table = table, torch.zeros_like(table)  # by persistent row, by batch row
        self.seq_lens = torch.zeros(MAX_REQS, dtype=torch.int32)
        self.query_start_loc = torch.zeros(MAX_REQS + 1, dtype=torch.int32)

    def plant(self, row: int, parents: list[int] = FORK) -> None:
        """Let a row's draft in flight be a tree."""
        tree = DraftTree(1, K, CPU)
        tree.parents[:], tree.depths[:], tree.ancestors[:] = topology_tables(parents, CPU)
        self.trees.expect(np.array([row]))
        self.trees.take(torch.tensor([row]), tree)

    def batch(self, rows: list[int], counts: list[int], padded: int | None = None, num_drafts: int | None = K):
        """Return a batch of so many query rows each, behind 9 + row committed tokens, as vLLM would prepare it."""
        padded = padded or len(rows)
        bounds = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        computed = 9 + np.array(rows)
        self.query_start_loc[:] = int(bounds[-1])
        self.query_start_loc[: len(bounds)] = torch.from_numpy(bounds)
        self.seq_lens[:] = 0
        self.seq_lens[: len(rows)] = torch.from_numpy((computed + counts).astype(np.int32))
        self.block_table.zero_()
        self.block_table[: len(rows)] = self.table[rows]
        positions = torch.cat([torch.arange(c, c + n) for c, n in zip(computed, counts, strict=True)])
        num_tokens = max(len(positions), padded * max(counts)) if padded > len(rows) else len(positions)
        positions = torch.cat((positions, torch.zeros(num_tokens - len(positions), dtype=torch.int64)))
        self.rope[:, :num_tokens] = positions + 100 * torch.arange(len(self.rope))[:, None]
        drafts = None if num_drafts is None else np.minimum(np.array(counts) - 1, num_drafts)
        return SimpleNamespace(
            num_reqs=len(rows), num_reqs_after_padding=padded, num_tokens=int(bounds[-1]), max_query_len=None,
            idx_mapping=torch.tensor(rows), idx_mapping_np=np.array(rows), positions=positions,
            query_start_loc=self.query_start_loc[: padded + 1], seq_lens=self.seq_lens[:padded],
            num_scheduled_tokens=np.array(counts, dtype=np.int32), num_draft_tokens_per_req=drafts,
            is_prefilling_np=np.zeros(len(rows), dtype=bool),
        )  # fmt: skip

    def prepare(self, batch, for_capture: bool = False) -> torch.Tensor:
        """Do what a runner does before a forward; return the positions that the model sees."""
        if not for_capture:
            self.trees.before_forward(batch)
        table = self.block_table[: batch.num_reqs_after_padding]
        self.state.prepare_attn(batch, None, (table,), None, None, None, for_capture=for_capture)
        return self.state.prepare_inputs(batch, None)["positions"]

    def attend(self, query: torch.Tensor, num_reqs: int) -> torch.Tensor:
        """Return what the layer puts out; -2 where nobody writes."""
        out = torch.full_like(query, -2.0)
        metadata = SimpleNamespace(block_table=self.block_table[:num_reqs])
        self.layer.impl.forward(self.layer, query, None, None, self.cache, metadata, out)
        return out

    def expected(self, query: torch.Tensor, row: int, node: int, parents: list[int] | None) -> torch.Tensor:
        """Return a query row's output by definition: the committed tokens, the root, the node and its ancestors."""
        seen = [*range(9 + row + 1)]
        while node > 0:
            seen.append(9 + row + node)
            node = node - 1 if parents is None else parents[node - 1]
        entries = torch.tensor(sorted(seen))
        kv = self.cache[self.table[row].long()[entries // BLOCK_SIZE], 0, entries % BLOCK_SIZE]
        weights = torch.softmax(query.view(HEADS, HEAD_SIZE) @ kv[:, :HEAD_SIZE].T * self.layer.impl.scale, dim=-1)
        return (weights @ kv[:, HEAD_SIZE:]).flatten()


@pytest.fixture
def captured():
    """A target whose graph of four requests was captured, and whose last batch of four was verified eagerly."""
    here = Target()
    dummy = here.batch([0, 1, 2, 3], [K + 1] * 4, num_drafts=None)
    dummy.max_query_len = K + 1
    here.prepare(dummy, for_capture=True)
    here.graph = here.trees.attention.step
    here.trees.after_forward(NOTHING)
    for row in range(4):
        here.plant(row)
    here.prepare(here.batch([3, 2, 1, 0], [K + 1] * 4))
    here.trees.after_forward(NOTHING)
    return here


def check_replay(here: Target) -> None:
    """Three requests in the graph of four: a tree, a chain, another tree; the fourth row is nobody's."""
    here.trees.remove(1)
    here.plant(0, [0, 1, 0])
    rows = {0: [0, 1, 0], 1: None, 3: FORK}
    batch = here.batch(list(rows), [K + 1] * 3, padded=4)
    here.prepare(batch)
    eager = here.trees.attention.step
    query = torch.randn(16, HEADS * HEAD_SIZE)
    here.trees.attention.step = here.graph
    replayed = here.attend(query, num_reqs=4)
    here.trees.attention.step = eager
    assert torch.allclose(replayed[:12], here.attend(query[:12], num_reqs=3), atol=1e-6)
    for i, (row, parents) in enumerate(rows.items()):
        for node in range(K + 1):
            at = i * (K + 1) + node
            assert torch.allclose(replayed[at], here.expected(query[at], row, node, parents), atol=1e-5), (row, node)
    assert (replayed[12:] == -2).all()


def test_a_replay_serves_whatever_batch_comes(captured):
    """A captured forward of trees verifies trees, chains and padding alike, as the eager one does."""
    check_replay(captured)


def stale_padding(patch) -> None:
    """Rows past the batch keep what the last one left there."""
    original = TargetTrees._place

    def unpadded(self, batch, *arguments):
        original(self, SimpleNamespace(**vars(batch) | {"num_reqs_after_padding": batch.num_reqs}), *arguments)

    patch.setattr(TargetTrees, "_place", unpadded)


def masks_of_the_next_row(patch) -> None:
    """Each row attends under another's mask."""
    original = TargetTrees._place

    def shifted(self, *arguments):
        original(self, *arguments)
        self.places.masks.copy_(self.places.masks.roll(1, dims=0))

    patch.setattr(TargetTrees, "_place", shifted)


def a_tree_forever(patch) -> None:
    """A row keeps its tree once it drafts no more."""
    patch.setattr(TargetTrees, "remove", lambda self, row: None)


@pytest.mark.parametrize("mutation", [stale_padding, masks_of_the_next_row, a_tree_forever])
def test_planted_bug_is_caught(captured, monkeypatch, mutation):
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        check_replay(captured)


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
    here = Target()
    per_request = num_tokens // num_reqs
    dummy = here.batch(list(range(num_reqs)), [per_request] * num_reqs, num_drafts=None)
    dummy.max_query_len = max_query_len
    here.prepare(dummy, for_capture=True)
    step = here.trees.attention.step
    assert (step.max_queries, step.is_whole_batch) == expected and len(step.rows) == num_reqs
    assert all(getattr(step, name) is value for name, value in vars(here.trees.places).items() if hasattr(step, name))


def test_a_dummy_run_is_nobodys(captured):
    """Catches: a dummy run that attends as the last capture did; a capture that writes where a larger batch lay."""
    assert captured.trees.attention.step is None
    captured.prepare(captured.batch([0, 1], [2, 2], num_drafts=None))
    assert captured.trees.attention.step is None
    captured.trees.places.num_queries.fill_(K + 1)
    captured.trees.places.query_start.fill_(999)
    captured.prepare(captured.batch([0, 1, 2, 3], [2] * 4, num_drafts=None), for_capture=True)
    assert captured.trees.places.query_start.tolist() == [0, 2, 4, 6]
    assert captured.trees.places.num_queries.tolist() == [2] * 4
    captured.prepare(captured.batch([0, 1, 2, 3], [1] * 4, num_drafts=None), for_capture=True)
    assert captured.trees.attention.step is None  # no drafts: vLLM's own attention
