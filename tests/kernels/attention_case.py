"""Inputs of `tree_attention`, and a float64 loop over entries that says what it must write."""

import dataclasses
import functools
import operator
from dataclasses import dataclass
from unittest import mock

import torch

from tests.kernels.agreement import make_cache
from vidspec_kernels import TreeAttentionScratch, tree_attention
from vidspec_kernels.limits import DeviceLimits
from vidspec_kernels.tree_attention import api as module

NAN, INF = float("nan"), float("inf")
SENTINEL = 3.0
# Entries of one tile under the interpreter at these sizes, see test_sizes_of_the_prefix.
BLOCK = 64
LIMITS = DeviceLimits(132, 228 * 1024, 227 * 1024, 90)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass
class Request:
    """One request: its prefix, and a mask word (0 <= word < 2**64) for each of its rows."""

    prefix_len: int
    words: list[int]


def tree(num_rows, seed=0):
    """Words of a random tree: row 0 is the root (no node), row i node i - 1, which sees itself and its ancestors."""
    generator = torch.Generator().manual_seed(seed)
    words = [0][:num_rows]
    for row in range(1, num_rows):
        parent = int(torch.randint(0, row, (1,), generator=generator))
        words.append(words[parent] | 1 << (row - 1))
    return words


def requests_of(*shapes):
    """Requests of (num_queries, prefix_len)."""
    return [Request(prefix_len, tree(rows, seed=i)) for i, (rows, prefix_len) in enumerate(shapes)]


MIXED = [(5, 37), (1, 0), (0, 20), (3, 16), (9, 90)]


class Case:
    """Inputs of one call; what no row attends to is poison, and the table points to poison where it is not used."""

    def __init__(
        self, device, requests, num_heads=4, num_kv_heads=2, head_size=32, block_size=16, dtype=torch.float32,
        layout="flash", seed=0, poison=7.0, max_blocks=None, spare_queries=0, unused_block=None,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.requests, self.dtype, self.device = requests, dtype, device
        num_reqs = len(requests)
        counts = [len(request.words) for request in requests]
        needed = [-(-(request.prefix_len + 64) // block_size) for request in requests]
        self.max_blocks = max_blocks or max(needed) + 2
        num_blocks = sum(needed) + 3
        keys, values = make_cache(num_blocks, block_size, num_kv_heads, head_size, dtype, layout, device, poison)
        # Rows of other requests between, before and behind ours; ours in no order.
        order = torch.randperm(num_reqs, generator=generator).tolist()
        starts, num_tokens = [0] * num_reqs, 2
        for i in order:
            starts[i] = num_tokens
            num_tokens += counts[i] + 1
        self.rows = torch.randperm(num_reqs + 4, generator=generator)[:num_reqs]
        spare, *physical = torch.randperm(num_blocks, generator=generator).tolist()
        unused_block = spare if unused_block is None else unused_block
        table = torch.full((num_reqs + 4, self.max_blocks), unused_block, dtype=torch.int32)
        # Of each request: {entry that some row attends to: its place}, float64 [n, 2, num_kv_heads, D] as stored.
        self.entries = []
        for i, request in enumerate(requests):
            union = functools.reduce(operator.or_, request.words, 0)
            attended = list(range(request.prefix_len)) if request.words else []
            attended += [request.prefix_len + j for j in range(64) if union >> j & 1]
            attended = [entry for entry in attended if entry // block_size < self.max_blocks]
            for block in sorted({entry // block_size for entry in attended}):
                table[self.rows[i], block] = physical.pop()
            pairs = torch.randn(len(attended), 2, num_kv_heads, head_size, generator=generator).to(dtype)
            index = torch.tensor(attended, dtype=torch.int64)
            block, slot = table[self.rows[i], index // block_size].long().to(device), (index % block_size).to(device)
            keys[block, slot], values[block, slot] = pairs[:, 0].to(device), pairs[:, 1].to(device)
            self.entries.append(({entry: place for place, entry in enumerate(attended)}, pairs.double()))
        self.max_queries = max([1, *counts]) + spare_queries
        words = torch.randint(-(2**63), 2**63 - 1, (num_reqs, self.max_queries + 1), generator=generator)
        for i, request in enumerate(requests):
            signed = [word - 2**64 if word >> 63 else word for word in request.words]
            words[i, : counts[i]] = torch.tensor(signed, dtype=torch.int64)
        mine = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
        self.query = torch.full((num_tokens, num_heads, head_size), NAN, dtype=dtype)
        self.query[mine] = torch.randn(len(mine), num_heads, head_size, generator=generator).to(dtype)
        self.starts, self.counts = starts, counts
        self.keys, self.values, self.words = keys, values, words.to(device)
        self.table = table.to(device)
        self.scale = head_size**-0.5

    def arguments(self):
        def vector(values):
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        prefix_lens = [request.prefix_len for request in self.requests]
        return {
            "query": self.query.to(self.device), "key_cache": self.keys, "value_cache": self.values,
            "block_table": self.table, "rows": self.rows.to(self.device), "query_start": vector(self.starts),
            "num_queries": vector(self.counts), "prefix_lens": vector(prefix_lens), "masks": self.words,
            "scale": self.scale, "max_queries": self.max_queries,
        }  # fmt: skip

    def expect(self, nodes=True, prefix=True):
        """Output and LSE in float64, one row and head at a time, or of prefix or nodes alone; else the sentinel."""
        num_tokens, num_heads, head_size = self.query.shape
        group = num_heads // self.keys.shape[2]
        out = torch.full((num_tokens, num_heads, head_size), SENTINEL, dtype=torch.float64)
        lse = torch.full((num_heads, num_tokens), SENTINEL, dtype=torch.float64)
        for request, (places, pairs), start in zip(self.requests, self.entries, self.starts, strict=True):
            for i, word in enumerate(request.words):
                attended = list(range(request.prefix_len)) if prefix else []
                attended += [request.prefix_len + j for j in range(64) if nodes and word >> j & 1]
                chosen = [places[entry] for entry in attended if entry in places]
                for head in range(num_heads):
                    out[start + i, head], lse[head, start + i] = 0.0, -INF
                    if not chosen:
                        continue
                    keys, values = pairs[chosen, :, head // group].unbind(1)
                    logits = keys @ self.query[start + i, head].double() * self.scale
                    lse[head, start + i] = logits.logsumexp(0)
                    out[start + i, head] = logits.softmax(0) @ values
        return out, lse


def make_scratch(head_size, device, num_sms=3):
    """Return scratch for so many multiprocessors, of two programs each or one, in memory that holds anything."""
    limits = dataclasses.replace(LIMITS, num_sms=num_sms)
    with mock.patch.object(module, "device_limits", lambda _: limits):
        scratch = TreeAttentionScratch(head_size, device)
    for memory in (scratch.part_out, scratch.part_lse):
        memory.fill_(NAN)
    return scratch


def run(case, impl, **changes):
    """Return output and LSE of a call on tensors full of sentinels."""
    scratch = make_scratch(case.query.shape[2], case.device)
    arguments = case.arguments() | {"scratch": scratch} | changes
    out = torch.full_like(arguments["query"], SENTINEL, dtype=case.dtype)
    lse = torch.full(out.shape[1::-1], SENTINEL, device=case.device)
    tree_attention(**({"out": out, "lse": lse} | arguments), impl=impl)
    return out, lse


def check(case, impl, **changes):
    """Compare a call with the float64 loop, the rows and LSEs that must be left alone included."""
    out, lse = run(case, impl, **changes)
    expected, expected_lse = case.expect()
    assert (expected != SENTINEL).any() or not any(case.counts)
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-5, atol=1e-5)


def external_prefix(case):
    """Prefix output and LSE as FlashAttention would give them; NaN and +inf where a row has none, NaN elsewhere."""
    out, lse = case.expect(nodes=False)
    written = lse.T != SENTINEL
    out[~written | (lse.T == -INF)] = NAN
    # FlashAttention-2 writes +inf for an empty row, other backends -inf.
    lse[1::2][lse[1::2] == -INF] = INF
    return out.to(case.device, case.dtype), lse.masked_fill(~written.T, NAN).to(case.device, torch.float32)


def case(device, has_prefix=False):
    """A call of the operation as the table of operations takes it; items have parts in several programs."""
    made = Case(device, requests_of((5, 9 * BLOCK), (2, 65), (1, 0)))
    query = made.query.to(device)
    outs = {"out": torch.full_like(query, SENTINEL), "lse": torch.full(query.shape[1::-1], SENTINEL, device=device)}
    prefix = (query.clone(), torch.ones_like(outs["lse"])) if has_prefix else None
    return tree_attention, made.arguments() | outs | {"scratch": make_scratch(32, device, 5), "prefix": prefix}
