"""loosen: which drafts may stand and their scores, kernel against loop, and row by row by hand."""

import math

import numpy as np
import pytest
import torch

from tests.kernels.agreement import agree
from vidspec_kernels import CHANCE, RELEVANCE, LooseTables, loosen

VOCAB, MAX_REQS, NUM_COLS = 70, 6, 6
NAN, INF = math.nan, math.inf


def case(device, in_trees=True, is_measured=True, is_predicting=False, seed=0, num_reqs=5, times=1):
    """Ragged requests in shuffled rows; some logits are forbidden, some states were not measured."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, NUM_COLS + 1, num_reqs)
    nodes = np.concatenate([np.arange(count) for count in counts] * times or [[]])
    rows = np.tile(np.repeat(rng.permutation(MAX_REQS)[:num_reqs], counts), times)
    n = len(rows)
    logits = rng.normal(size=(n, VOCAB + 3)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.2] = -INF
    logits[rng.random(logits.shape) < 0.05] = NAN
    parents = np.stack([[-1, *(rng.integers(0, i) for i in range(1, NUM_COLS + 2))] for _ in range(MAX_REQS)])
    words = np.bitwise_and.reduce(rng.integers(-(2**31), 2**31, (4, 2, MAX_REQS, 3)))

    def put(values, dtype):
        return torch.tensor(np.asarray(values), dtype=dtype, device=device)

    sources, seeds = rng.integers(0, 3, MAX_REQS), rng.integers(-(2**62), 2**62, MAX_REQS)
    tables = (*(put(table, torch.int32) for table in words), put(sources, torch.int32), put(seeds, torch.int64))
    return loosen, dict(
        target_tokens=put(rng.integers(0, VOCAB, n), torch.int64),
        draft_tokens=put(rng.integers(-1, VOCAB, n), torch.int32), logits=put(logits, torch.float32)[:, :VOCAB],
        req_rows=put(rows, torch.int64), nodes=put(nodes, torch.int32), pos=put(rng.integers(0, 2**40, n), torch.int64),
        tables=LooseTables(*tables), parents=put(parents, torch.int32) if in_trees else None,
        relevance=put(rng.choice([0.25, 0.5, NAN, -INF], n), torch.float32) if is_measured else None,
        is_predicting=is_predicting,
    )  # fmt: skip


@pytest.mark.parametrize("is_predicting", [False, True])
@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize("in_trees", [False, True])
def test_equals_the_loop(device, in_trees, is_measured, is_predicting):
    """Catches: a bit of a neighbouring token or row, the row before taken for a tree's parent, a hash that differs."""
    for sizes in (dict(seed=0), dict(seed=1), dict(num_reqs=0), dict(times=40)):  # the last: several programs
        left = agree(case, device, in_trees, is_measured, is_predicting, **sizes)
        assert len(left[".result.0"]) == len(left[".nodes"]) and (len(left[".nodes"]) > 128) == ("times" in sizes)


def chance(seed, position):
    """splitmix64 of seed and position, in whole numbers modulo 2 ** 64; 24 bits of it."""
    word = (seed + position * 0x1E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * -0x40A7B892E31B1A47 % 2**64
    word = (word ^ word >> 27) * -0x6B2FB644ECCEEE15 % 2**64
    return ((word ^ word >> 31) >> 40) / 2**24


def test_by_hand(device, impl):
    """A root and four drafts of a tree: what forbids each, where its score comes from, NaN that may not stand."""
    put = {"device": device}

    def ask(source, parents=None, relevance=None, **more):
        vectors = dict(target_tokens=[7, 8, 9, 3, 2], draft_tokens=[5, 1, 2, 3, -1], nodes=range(5))
        given = {name: torch.tensor([*vectors[name]], **put) for name in vectors} | {
            "req_rows": torch.ones(5, dtype=torch.int64, **put), "pos": torch.arange(5, **put),
            "logits": torch.zeros(5, 33, **put), "tables": LooseTables(
                torch.zeros(2, 2, dtype=torch.int32, **put), torch.zeros(2, 2, dtype=torch.int32, **put),
                torch.tensor([0, source], dtype=torch.int32, **put), torch.tensor([1, 77], **put)),
            "parents": None if parents is None else torch.tensor([[0] * 5, parents], dtype=torch.int32, **put),
            "relevance": None if relevance is None else torch.tensor(relevance, **put),
        }  # fmt: skip
        given["draft_tokens"], given["nodes"] = given["draft_tokens"].int(), given["nodes"].int()
        for name, entries in more.items():
            (given.get(name) if name == "logits" else getattr(given["tables"], name))[entries[0]] = entries[1]
        scores, may = loosen(**given, impl=impl)
        return scores.tolist(), may.tolist()

    tree, every = [-1, 0, 0, 1, 3], [True] * 5
    assert ask(0) == ([0.0] * 5, every)
    assert ask(0, logits=((1, 2), -INF))[1] == [True, True, False, True, True]  # node 2's draft, at its parent, row 1
    assert ask(0, tree, logits=((0, 2), NAN))[1] == [True, True, False, True, True]
    assert ask(0, protected=((1, 0), 1 << 3))[1] == [True, True, True, False, False]  # drafted by 3, expected by 4
    assert ask(0, tree, ends=((1, 0), 1 << 1))[1] == [True, True, True, False, True]  # token 1 is above node 3 alone
    relevance = [0.5, NAN, 1.0, 2.0, 3.0]
    assert ask(RELEVANCE, tree, relevance)[1] == [True, False, True, True, True]
    assert ask(0, tree, relevance)[1] == every and ask(0, tree, relevance)[0][2:] == [1.0, 2.0, 3.0]
    assert ask(CHANCE, tree, relevance) == ([chance(77, position) for position in range(5)], every)
