"""loosen: what may stand and its scores, against a plain loop over rows; planted mistakes; refusals."""

import math

import numpy as np
import pytest
import torch

from tests.kernels.impls import IMPLS_AND_LOOP, by
from vidspec_kernels import CHANCE, RELEVANCE, LooseTables, loosen, random_scores

IMPLS = IMPLS_AND_LOOP

VOCAB, MAX_REQS, NUM_COLS = 70, 6, 6
NAN, INF = math.nan, math.inf


def make_inputs(device, in_trees, is_measured, seed=0, num_reqs=5):
    """Ragged requests in shuffled rows; some logits are forbidden, some states were not measured."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, NUM_COLS + 1, num_reqs)
    nodes = np.concatenate([np.arange(count) for count in counts] or [[]])
    rows = np.repeat(rng.permutation(MAX_REQS)[:num_reqs], counts)
    n = len(rows)
    logits = rng.normal(size=(n, VOCAB + 3)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.2] = -INF
    logits[rng.random(logits.shape) < 0.05] = NAN
    parents = np.stack([[-1, *(rng.integers(0, i) for i in range(1, NUM_COLS + 2))] for _ in range(MAX_REQS)])
    words = np.bitwise_and.reduce(rng.integers(-(2**31), 2**31, (4, 2, MAX_REQS, 3)))

    def put(values, dtype):
        return torch.tensor(np.asarray(values), dtype=dtype, device=device)

    return dict(
        target_tokens=put(rng.integers(0, VOCAB, n), torch.int64),
        draft_tokens=put(rng.integers(-1, VOCAB, n), torch.int32),
        logits=put(logits, torch.float32)[:, :VOCAB],
        req_rows=put(rows, torch.int64),
        nodes=put(nodes, torch.int32),
        pos=put(rng.integers(0, 2**40, n), torch.int64),
        tables=LooseTables(
            *(put(table, torch.int32) for table in words),
            put(rng.integers(0, 3, MAX_REQS), torch.int32),
            put(rng.integers(-(2**62), 2**62, MAX_REQS), torch.int64),
        ),
        parents=put(parents, torch.int32) if in_trees else None,
        relevance=put(rng.choice([0.25, 0.5, NAN, -INF], n), torch.float32) if is_measured else None,
    )


def expected(inputs, is_predicting):
    """Scores and permissions of each row, by a loop over plain numbers."""
    tables, parents, relevance = inputs["tables"], inputs["parents"], inputs["relevance"]
    drafts = [max(token, 0) for token in inputs["draft_tokens"].tolist()]
    scores, may = [], []

    def has(table, row, token):
        return (int(table[row, token // 32]) >> (token % 32)) & 1 == 1

    for n, (row, node) in enumerate(zip(inputs["req_rows"].tolist(), inputs["nodes"].tolist(), strict=True)):
        parent = node - (node > 0) if parents is None else max(int(parents[row, node]), 0)
        above, source = n - node + parent, int(tables.sources[row])
        score = 0.0 if relevance is None else float(relevance[above if is_predicting else n])
        allowed = math.isfinite(float(inputs["logits"][above, drafts[n]]))
        allowed &= not has(tables.protected, row, drafts[n])
        allowed &= not has(tables.protected, row, int(inputs["target_tokens"][above]))
        allowed &= not has(tables.ends, row, drafts[above])
        allowed &= not (math.isnan(score) and source == RELEVANCE)
        if source == CHANCE:
            word = int(tables.seeds[row]) + int(inputs["pos"][n]) * 0x1E3779B97F4A7C15
            for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
                word = ((word % 2**64) ^ ((word % 2**64) >> shift)) * factor
            score = ((word % 2**64) >> 40) / 2**24
        scores.append(score)
        may.append(allowed)
    return scores, may


def check(run, inputs, is_predicting):
    scores, may = run(**inputs, is_predicting=is_predicting)
    assert scores.dtype == torch.float32 and may.dtype == torch.bool
    want_scores, want_may = expected(inputs, is_predicting)
    assert may.tolist() == want_may
    assert np.array_equal(scores.cpu().numpy(), np.array(want_scores, dtype=np.float32), equal_nan=True)


@pytest.mark.parametrize("is_predicting", [False, True])
@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize("in_trees", [False, True])
def test_equals_the_loop(device, impl, in_trees, is_measured, is_predicting):
    """Catches: a bit of a neighbouring token or row, the row before taken for a tree's parent, a hash that differs."""
    for seed in range(4):
        inputs = make_inputs(device, in_trees, is_measured, seed)
        check(by(impl, loosen), inputs, is_predicting)
    assert [len(part) for part in by(impl, loosen)(**make_inputs(device, in_trees, is_measured, num_reqs=0))] == [0, 0]


def test_more_rows_than_a_program_takes(device, impl):
    inputs = make_inputs(device, True, True)
    times = 40
    offset = len(inputs["nodes"])
    many = {name: torch.cat([inputs[name]] * times) for name in inputs if name not in ("tables", "parents")}
    scores, may = by(impl, loosen)(**inputs | many)
    assert len(may) > 128
    alone = by(impl, loosen)(**inputs)
    assert torch.equal(scores.nan_to_num(7).view(times, offset), alone[0].nan_to_num(7).expand(times, offset))
    assert torch.equal(may.view(times, offset), alone[1].expand(times, offset))


def chain_for_a_tree(run, **inputs):
    return run(**inputs | {"parents": None})


def tables_by_logits_row(run, **inputs):
    return run(**inputs | {"req_rows": inputs["req_rows"].roll(1)})


def own_logits(run, **inputs):
    return run(**inputs | {"logits": inputs["logits"].roll(1, 0)})


def unmeasured_may_stand(run, **inputs):
    tables = inputs["tables"]
    return run(**inputs | {"tables": tables._replace(sources=tables.sources * (tables.sources != RELEVANCE))})


@pytest.mark.parametrize("mutant", [chain_for_a_tree, tables_by_logits_row, own_logits, unmeasured_may_stand])
def test_mutations(device, mutant):
    cases = [make_inputs(device, True, True, seed) for seed in range(4)]
    for inputs in cases:
        check(loosen, inputs, False)
    with pytest.raises(AssertionError):
        for inputs in cases:
            check(lambda **arguments: mutant(loosen, **arguments), inputs, False)


def test_scores_by_chance_are_uniform():
    scores = random_scores(torch.arange(4096), torch.arange(4096) // 7)
    assert scores.min() >= 0 and scores.max() < 1
    assert np.abs(np.histogram(scores, bins=8, range=(0, 1))[0] - 512).max() < 100


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, lambda t: t[:-1]) for name in ("draft_tokens", "req_rows", "nodes", "pos", "relevance", "logits")),
        *((name, lambda t: t.double()) for name in ("target_tokens", "draft_tokens", "nodes", "relevance", "parents")),
        ("logits", lambda t: t.int()),
        ("logits", lambda t: t.T.contiguous().T),
        ("parents", lambda t: t[:-1]),
        ("tables.protected", lambda t: t[:, :-1]),
        ("tables.ends", lambda t: torch.cat((t, t), 1)[:, : t.shape[1]]),
        ("tables.sources", lambda t: t.long()),
        ("tables.seeds", lambda t: t[:-1]),
    ],
)
def test_wrapper_refuses(device, name, change):
    """Catches: a dropped dtype, stride or shape check (the kernel would read through a wrong pointer)."""
    inputs = make_inputs(device, True, True)
    group, _, field = name.rpartition(".")
    if group:
        inputs[group] = inputs[group]._replace(**{field: change(getattr(inputs[group], field))})
    else:
        inputs[name] = change(inputs[name])
    with pytest.raises(AssertionError, match=field):
        loosen(**inputs)
