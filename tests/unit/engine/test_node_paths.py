"""PathSampler on vLLM's own sampler: each node of a tree is what the last row of its path as a chain would be."""

import numpy as np
import pytest
import torch

from tests.unit.engine.fakes import CPU, vllm_sampler
from vllm_vidspec.devices import has_gpu
from vllm_vidspec.drafting import topology_tables
from vllm_vidspec.engine.verify import node_paths
from vllm_vidspec.engine.verify.node_paths import PathSampler
from vllm_vidspec.engine.verify.step import VerifySlice
from vllm_vidspec.scoring import TreeShapes

pytestmark = pytest.mark.skipif(has_gpu(), reason="samples on the CPU engine's kernels")

VOCAB_SIZE, MAX_REQS, K, ROOT_POS = 61, 8, 7, 40
# A tree of two branches, one of which branches again; a chain; another tree, cut after its fifth node.
PARENTS = {6: [0, 0, 1, 1, 2, 3, 5], 1: list(range(K)), 3: [0, 1, 1, 0, 4, 4, 5]}
SIZES = {6: K + 1, 1: K + 1, 3: 6}
PENALISED = {
    6: {"temperature": 0.0, "repetition_penalty": 1.05},
    1: {"temperature": 1.0, "presence_penalty": 0.6, "frequency_penalty": 0.4, "seed": 5},
    3: {
        "temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": -0.2, "min_p": 0.02, "seed": 6,
        "logit_bias": {3: 2.5, 9: -1.0},
    },
}  # fmt: skip


def make_step(draws: torch.Generator):
    """Return a slice of three requests, its logits and its input tokens, of which few are different."""
    rows = torch.tensor(list(SIZES))
    counts = np.array(list(SIZES.values()))
    tables = [torch.zeros(MAX_REQS + 1, K + 1, dtype=dtype) for dtype in (torch.int32, torch.int32, torch.int64)]
    for row, parents in PARENTS.items():
        for table, values in zip(tables, topology_tables(parents, CPU), strict=True):
            table[row] = values
    nodes = torch.cat([torch.arange(count, dtype=torch.int32) for count in counts.tolist()])
    expanded = rows.repeat_interleave(torch.from_numpy(counts))
    shapes = TreeShapes(rows, *tables)
    bounds = torch.tensor([0, *counts.cumsum()], dtype=torch.int32)
    pos = ROOT_POS + shapes.depths[expanded, nodes.long()].long()
    input_ids = torch.randint(7, 12, (len(nodes),), generator=draws, dtype=torch.int32)
    part = VerifySlice(rows, rows.numpy(), bounds, counts, expanded, nodes, pos, input_ids, None, shapes)
    return part, 3 * torch.randn(len(nodes), VOCAB_SIZE, generator=draws), input_ids


def along_paths(asked: dict, part: VerifySlice, logits: torch.Tensor, input_ids: torch.Tensor):
    """Sample every node by itself as vanilla would: a lone request whose drafts are the node's path."""
    sampler, tokens, processed = vllm_sampler(asked, VOCAB_SIZE), [], []
    for i, (row, node) in enumerate(zip(part.expanded_idx_mapping.tolist(), part.nodes.tolist(), strict=True)):
        path, first = [node], i - node
        while path[0]:
            path.insert(0, int(part.shapes.parents[row, path[0]]))
        places = torch.tensor(path) + first
        rows = torch.full((len(path),), row)
        found = sampler.sample(
            logits[places], rows, rows[:1], rows[:1].numpy(), ROOT_POS + torch.arange(len(path)), input_ids[places],
            torch.arange(len(path), dtype=torch.int32), np.array([64]),
        )  # fmt: skip
        tokens.append(found[0][-1])
        processed.append(found[1][-1])
    return torch.stack(tokens), torch.stack(processed)


def sample(asked: dict, step) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return tokens, processed logits, and the numbers of rows that vLLM's sampler was shown."""
    (part, logits, input_ids), sampler, shown = step, vllm_sampler(asked, VOCAB_SIZE), []
    paths, whole = PathSampler(sampler, K), sampler.sample
    sampler.sample = lambda rows, *args, **kwargs: shown.append(len(rows)) or whole(rows, *args, **kwargs)
    before = logits.clone()
    found = paths.sample(part, logits, input_ids, np.full(len(SIZES), 64))
    assert torch.equal(logits, before), "the raw logits have changed"
    return *found, shown


@pytest.mark.parametrize("seed", range(4))
def test_penalties_of_nodes_are_vllms_on_their_paths(seed):
    """Bit for bit, with a bias before, a temperature and min-p behind, in one pass over the batch's own rows."""
    step = make_step(torch.Generator().manual_seed(seed))
    tokens, processed, shown = sample(PENALISED, step)
    expected = along_paths(PENALISED, *step)
    assert torch.equal(processed, expected[1]) and torch.equal(tokens, expected[0])
    assert shown == [sum(SIZES.values())]


@pytest.mark.parametrize("limit", [node_paths.MAX_PATH_BYTES, 4 * VOCAB_SIZE * (K + 1) * 3, 1])
def test_who_looks_back_otherwise_is_laid_out_in_pieces(monkeypatch, limit):
    """A banned phrase depends on its path, and is penalised too: its nodes are laid out within the bound, no others."""
    monkeypatch.setattr(node_paths, "MAX_PATH_BYTES", limit)
    asked = PENALISED | {6: {"temperature": 0.0, "repetition_penalty": 1.2, "bad_words": [[7, 8], [9], [10, 11, 7]]}}
    step = make_step(torch.Generator().manual_seed(9))
    tokens, processed, shown = sample(asked, step)
    expected = along_paths(asked, *step)
    assert torch.equal(processed, expected[1]) and torch.equal(tokens, expected[0])
    at_once = max(limit // (4 * VOCAB_SIZE), K + 1)
    assert shown[0] == sum(SIZES.values()) and max(shown[1:]) <= at_once
    assert sum(shown[1:]) == SIZES[6] * (K + 1) and len(shown) > 1
