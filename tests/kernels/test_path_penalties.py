"""path_penalties: kernel against loop."""

import pytest
import torch

from tests.kernels.agreement import agree
from vidspec_kernels import PenaltyTables, path_penalties

MAX_REQS, NUM_COLS = 6, 9
ROUNDED = 1e-5 if torch.cuda.is_available() else 0.0  # a GPU fuses a product with a sum


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


@pytest.mark.parametrize("vocab_size", [3, 32, 97, 2047, 8192, 8193, 10_300])
def test_equals_the_loop(device, vocab_size):
    """Around words, blocks and shares: ancestors once each, own prompt bits, order, rows that ask for nothing.

    That the loop is vLLM's own on each node's path, bit for bit, tests/unit/engine/test_node_paths.py shows.
    """
    for seed in range(6 if vocab_size < 100 else 1):
        agree(case, device, vocab_size, seed, atol=ROUNDED)


def test_a_table_with_a_circle_ends(device):
    """Catches: a walk that never ends, which hangs a GPU for good."""
    agree(case, device, 32, circle=True, atol=ROUNDED)
