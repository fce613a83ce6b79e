"""path_penalties: kernel against loop, and both against a walk by hand; a node is what a chain of its path would be."""

import numpy as np
import pytest
import torch

from tests.kernels.agreement import agree
from vidspec_kernels import PenaltyTables, path_penalties

MAX_REQS, NUM_COLS = 6, 9


def case(device, vocab_size=97, seed=0, circle=False):
    """Three requests with random trees (one a chain, one that asks for nothing), of cut sizes, and a lone root."""
    draws = torch.Generator().manual_seed(seed)

    def ints(low, high, *shape, dtype=torch.int32):
        return torch.randint(low, high, shape, generator=draws, dtype=dtype)

    parents = torch.zeros(MAX_REQS + 1, NUM_COLS, dtype=torch.int32)
    for node in range(1, NUM_COLS):
        parents[:, node] = NUM_COLS - 1 if circle else ints(0, node, MAX_REQS + 1)
    parents[3] = torch.arange(-1, NUM_COLS - 1)
    sizes = {4: NUM_COLS, 3: 6, 0: int(ints(2, NUM_COLS, 1)), 5: 1}
    req_rows = torch.tensor([row for row, size in sizes.items() for _ in range(size)])
    nodes = torch.tensor([node for size in sizes.values() for node in range(size)], dtype=torch.int32)
    # Few tokens, so that paths repeat themselves and what was committed; some are none, or past the vocabulary.
    tokens = ints(-1, min(vocab_size, 6) + 1, len(nodes))
    tokens[tokens == 5] = vocab_size - 1
    choices = torch.tensor([1.0, 1.05, 0.9, 1.3]), torch.tensor([0.0, 0.4, -0.3]), torch.tensor([0.0, 0.6, -0.2])
    asked = [values[ints(0, len(values), MAX_REQS, dtype=torch.int64)] for values in choices]
    asked[0][4], asked[1][3], asked[2][3] = 1.05, 0.4, 0.6
    asked[0][0], asked[1][0], asked[2][0] = 1.0, 0.0, 0.0
    bits = ints(-(2**31), 2**31 - 1, MAX_REQS, -(-vocab_size // 32) + 1)
    counts = ints(0, 3, MAX_REQS, vocab_size) * ints(0, 2, MAX_REQS, vocab_size)
    logits = 3 * torch.randn(len(nodes), vocab_size, generator=draws)
    logits[torch.rand(logits.shape, generator=draws) < 0.1] = -torch.inf
    vectors = dict(logits=logits, req_rows=req_rows, nodes=nodes, tokens=tokens, parents=parents)
    tables = PenaltyTables(*(part.to(device) for part in (*asked, bits, counts)))
    return path_penalties, {name: part.to(device) for name, part in vectors.items()} | {"tables": tables}


def by_hand(logits, req_rows, nodes, tokens, parents, tables):
    """Each row by itself: who is above it, how often each token was there, then float32 operations in vLLM's order."""
    out, one = logits.clone().numpy(), np.float32(1)
    for i, (row, node) in enumerate(zip(req_rows.tolist(), nodes.tolist(), strict=True)):
        rep, freq, pres = (table[row].numpy() for table in tables[:3])
        first, path = i - node, []
        while node:
            path.append(int(tokens[first + node]))
            node = int(parents[row, node])
        for token in range(out.shape[1]) if (rep, freq, pres) != (1, 0, 0) else ():
            count = np.float32(int(tables.output_counts[row, token]) + path.count(token))
            in_prompt = int(tables.prompt_bits[row, token // 32]) >> (token % 32) & 1
            if rep != 1 and (in_prompt or count > 0):
                out[i, token] *= one / rep if out[i, token] > 0 else rep
            out[i, token] -= freq * count
            out[i, token] -= pres * np.float32(count > 0)
    return torch.from_numpy(out)


@pytest.mark.parametrize("vocab_size", [3, 32, 97, 2047, 8192, 8193, 10_300])
def test_equals_a_walk_by_hand(device, vocab_size):
    """Around words, blocks and shares: ancestors once each, own prompt bits, order, rows that ask for nothing."""
    for seed in range(6 if vocab_size < 100 else 1):
        # A GPU fuses a product with a sum.
        atol = 0 if device.type == "cpu" else 1e-5
        left = agree(case, device, vocab_size, seed, atol=atol)
        if vocab_size < 100:
            assert torch.equal(left[".logits"], by_hand(**case(torch.device("cpu"), vocab_size, seed)[1]))


def test_a_table_with_a_circle_ends(device):
    """Catches: a walk that never ends, which hangs a GPU for good."""
    agree(case, device, 32, circle=True, atol=0 if device.type == "cpu" else 1e-5)
