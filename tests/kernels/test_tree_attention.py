"""tree_attention: kernel and reference against a loop over entries, what may not be read or written, mutations."""

import importlib
import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from vidspec_kernels.tree_attention import tree_attention

# The package exports a function of the module's name.
module = importlib.import_module("vidspec_kernels.tree_attention")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
IMPLS = ["triton", "torch"]
NAN, INF = float("nan"), float("inf")
SENTINEL = 3.0
# Entries of one tile under the interpreter at these sizes, see test_sizes_of_the_prefix.
BLOCK = 64
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


def make_cache(num_blocks, block_size, num_kv_heads, head_size, dtype, layout, device, poison):
    """Keys and values full of poison: "flash" as a GPU backend stores them, "cpu" as the CPU engine ("vec") does."""
    if layout == "flash":
        cache = torch.full((num_blocks, 2, block_size, num_kv_heads, head_size), poison, dtype=dtype, device=device)
        return cache[:, 0], cache[:, 1]
    cache = torch.full((num_blocks, num_kv_heads, 2 * block_size, head_size), poison, dtype=dtype, device=device)
    keys, values = cache.chunk(2, dim=2)
    block_stride, head_stride, _, _ = keys.stride()
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    return keys.as_strided(shape, (block_stride, 1, head_stride, block_size)), values.permute(0, 2, 1, 3)


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
            union = 0
            for word in request.words:
                union |= word
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
        self.query = torch.randn(num_tokens, num_heads, head_size, generator=generator).to(dtype)
        self.starts, self.counts = starts, counts
        self.keys, self.values, self.words = keys, values, words.to(device)
        self.table = table.to(device)
        self.scale = head_size**-0.5

    def arguments(self):
        def vector(values):
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        prefix_lens = [request.prefix_len for request in self.requests]
        return {
            "query": self.query.to(self.device),
            "key_cache": self.keys,
            "value_cache": self.values,
            "block_table": self.table,
            "rows": self.rows.to(self.device),
            "query_start": vector(self.starts),
            "num_queries": vector(self.counts),
            "prefix_lens": vector(prefix_lens),
            "masks": self.words,
            "scale": self.scale,
            "max_queries": self.max_queries,
            "max_prefix_len": max([0, *prefix_lens]),
        }

    def expect(self, nodes=True, prefix=True):
        """Output and LSE of every token in float64, one row and head at a time; the sentinel where nothing is written.

        Without `nodes` of the prefix alone, without `prefix` of the nodes alone.
        """
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


def run(case, impl, attention=tree_attention, **changes):
    """Return output and LSE of a call on tensors full of sentinels."""
    arguments = case.arguments() | changes
    out = torch.full_like(arguments["query"], SENTINEL)
    lse = torch.full(out.shape[1::-1], SENTINEL, device=case.device)
    attention(**({"out": out, "lse": lse} | arguments), impl=impl)
    return out, lse


def check(case, impl, attention=tree_attention, **changes):
    """Compare a call with the float64 loop, the rows and LSEs that must be left alone included."""
    out, lse = run(case, impl, attention, **changes)
    expected, expected_lse = case.expect()
    assert (expected != SENTINEL).any() or not any(case.counts)
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.fixture
def small_splits(monkeypatch):
    """Splits of at least one tile, so that prefixes of a few hundred entries have several."""
    monkeypatch.setattr(module, "_KEYS_PER_SPLIT", BLOCK)


# ---- literal facts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
def test_equal_keys_by_hand(device, impl):
    """Equal keys: a row's output is the plain mean of the values it attends to, its LSE log(count) + logit.

    Values are the entry's number. Prefix 0, 1, 2; nodes at entries 3 to 5: row 0 sees none, row 1 node 0, row 2 nodes
    0 and 2, row 3 all.
    """
    case = Case(device, [Request(3, [0, 0b1, 0b101, 0b111])], num_heads=2, num_kv_heads=2)
    block = case.table[case.rows[0], 0].long()
    case.keys[block, :6] = 1.0
    case.values[block, :6] = torch.arange(6.0, device=device)[:, None, None]
    case.query.fill_(0.5)
    out, lse = run(case, impl)
    start, logit = case.starts[0], 32 * 0.5 * 32**-0.5
    means = [(0 + 1 + 2) / 3, (0 + 1 + 2 + 3) / 4, (0 + 1 + 2 + 3 + 5) / 5, (0 + 1 + 2 + 3 + 4 + 5) / 6]
    for i, (mean, count) in enumerate(zip(means, [3, 4, 5, 6], strict=True)):
        assert out[start + i].flatten().tolist() == pytest.approx([mean] * 64, rel=1e-5)
        assert lse[:, start + i].tolist() == pytest.approx([math.log(count) + logit] * 2, rel=1e-5)
    assert (out[start - 1] == SENTINEL).all() and (out[start + 4] == SENTINEL).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("splits", [False, True])
def test_nothing_to_attend_to(device, impl, splits, monkeypatch):
    """Prefix 0 and mask 0: zeros and -inf, beside a request that has a prefix (and so splits)."""
    monkeypatch.setattr(module, "_KEYS_PER_SPLIT", BLOCK if splits else 10**6)
    case = Case(device, [Request(0, [0, 0b10, 0]), Request(200, [0, 1])])
    check(case, impl)
    out, lse = run(case, impl)
    start = case.starts[0]
    assert (out[[start, start + 2]] == 0).all() and (lse[:, [start, start + 2]] == -INF).all()
    assert (out[start + 1] != 0).all()


# ---- sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("prefix_len", [0, 1, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("poison", [7.0, NAN])
def test_sizes_of_the_prefix(device, impl, prefix_len, poison):
    """Catches: a missing tail mask, a lost or doubled entry at a block's or a tile's end, an empty prefix's NaN."""
    assert module._tile(16, 32 * 4, 227 * 1024) == BLOCK
    check(Case(device, requests_of((3, prefix_len), (2, 5)), poison=poison), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 8, 9, 65])
def test_numbers_of_rows(device, impl, num_rows):
    """Catches: a missing row mask, a wrong number of row tiles (16 rows of 2 heads), bit 63 taken for a sign."""
    assert module._MAX_BLOCK_ROWS_WIDE == 16
    check(Case(device, requests_of((num_rows, 20), (1, 3))), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("prefix_len", [0, 30])
def test_every_bit(device, impl, prefix_len):
    """64 nodes, one row for each bit alone, and one for all: bit 63 is the sign, and its shift brings in ones."""
    words = [1 << j for j in range(64)] + [2**64 - 1]
    case = Case(device, [Request(prefix_len, words)], num_heads=2, num_kv_heads=1)
    check(case, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_one_query_that_sees_several_nodes(device, impl):
    """A draft level: one row a request, which attends to its ancestors of earlier levels; one with bit 63."""
    words = [0b1, 0b10011, 0b1000000100010001, 1 << 63 | 0b101]
    check(Case(device, [Request(10 + 16 * i, [word]) for i, word in enumerate(words)]), impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_requests_of_different_shapes(device, impl, small_splits):
    """Ragged rows and prefixes in one call, a request without rows among them, bounds larger than needed."""
    check(Case(device, requests_of(*MIXED, (17, 130))), impl)
    check(Case(device, requests_of(*MIXED), spare_queries=2, poison=NAN), impl, max_prefix_len=300)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 2), (6, 2), (14, 2), (7, 1)])
@pytest.mark.parametrize("layout", ["flash", "cpu"])
def test_groups_and_layouts(device, impl, num_heads, num_kv_heads, layout):
    """GQA groups of 1, 2, 3 and 7 on both engines' strides."""
    check(Case(device, requests_of((5, 37), (2, 9)), num_heads, num_kv_heads, layout=layout), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("head_size", "block_size"), [(32, 128), (64, 16), (64, 24), (80, 16), (128, 128), (256, 1)])
@pytest.mark.parametrize("layout", ["flash", "cpu"])
def test_head_and_block_sizes(device, impl, head_size, block_size, layout):
    """Catches: a padded head read past its end; a block size taken for a power of two or for a tile's divisor."""
    case = Case(device, requests_of((4, 40), (3, 130)), head_size=head_size, block_size=block_size, layout=layout)
    check(case, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["flash", "cpu"])
def test_half_precision(device, impl, dtype, layout, small_splits):
    """Catches: softmax, sums or partial results in the inputs' dtype.

    Seen to fail: partial results rounded to bfloat16.
    """
    check(Case(device, requests_of((5, 300), (17, 33)), head_size=64, dtype=dtype, layout=layout), impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_mixed_dtypes(device, impl):
    """A float16 cache under float32 queries: nothing is rounded to float16 on the way."""
    case = Case(device, requests_of((5, 37), (2, 9)), dtype=torch.float16)
    case.query, case.dtype = case.query.float(), torch.float32
    check(case, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_splits", [2, 3, 16, 17])
def test_splits(device, impl, num_splits, monkeypatch):
    """Splits of several tiles, of one, and empty ones; more of them than the merge takes at once.

    Seen to fail: parts weighted equally; a split that starts a tile late; the nodes in every split.
    """
    monkeypatch.setattr(module, "_num_splits", lambda *_: num_splits)
    assert module._MERGE_SPLITS == 16
    check(Case(device, requests_of((3, 400), (2, 65), (1, 0)), num_heads=2, num_kv_heads=1), impl)


def test_number_of_splits():
    """Catches: splits where the batch fills the GPU already, too few for a single request, more than there are keys."""
    assert module._num_splits(12, 1, 264) == 1
    assert module._num_splits(264, 100, 264) == 1
    assert module._num_splits(2640, 100, 264) == 1
    assert 19 <= module._num_splits(12, 100, 264) <= 22
    assert module._num_splits(4, 10, 264) in (9, 10)


@pytest.mark.parametrize("impl", IMPLS)
def test_strips_of_the_reference(device, impl, monkeypatch):
    """Requests in strips of one and two.

    Seen to fail: every strip with the first one's blocks, or with the first one's masks.
    """
    for entries in (1, 2 * 4 * 9 * 160):
        monkeypatch.setattr(module, "_STRIP_ENTRIES", entries)
        check(Case(device, requests_of(*MIXED)), impl)


# ---- strides, what may not be used ---------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
def test_non_contiguous_tensors(device, impl):
    """Queries and outputs as slices of a fused projection, heads in reverse memory order; LSE transposed; masks cut."""
    case = Case(device, requests_of(*MIXED))
    expected, expected_lse = run(case, impl)
    query = case.query.to(device)
    num_tokens, num_heads, head_size = query.shape
    for view in (
        torch.full((2 * num_tokens, num_heads + 4, head_size + 3), NAN, device=device)[::2, 2:-2, 1:-2],
        torch.full((num_heads, num_tokens, head_size), NAN, device=device).transpose(0, 1),
    ):
        assert view.shape == query.shape and not view.is_contiguous()
        out = view.clone(memory_format=torch.preserve_format).fill_(SENTINEL)
        wide = torch.full((num_tokens, num_heads + 1, head_size + 8), SENTINEL, device=device)
        lse = torch.full((num_tokens, num_heads), SENTINEL, device=device).T
        changes = {"query": view.copy_(query), "lse": lse}
        for target in (out, wide[:, :-1, :-8]):
            run(case, impl, **changes, out=target)
            torch.testing.assert_close(target, expected, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)
        assert (wide[:, -1] == SENTINEL).all() and (wide[:, :, -8:] == SENTINEL).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("poison", [NAN, INF, -INF, 3e38, 7.0])
@pytest.mark.parametrize("layout", ["flash", "cpu"])
def test_garbage_does_not_leak(device, impl, poison, layout):
    """Whatever lies in entries that no row attends to (in the last block, between nodes, in the pool) changes nothing.

    Seen to fail: values loaded without the entry's mask; NaN scores hidden by addition alone; no second product with
    the values hidden.
    """
    requests = [Request(33, [0b1001, 0b1]), Request(0, [0b100]), Request(16, []), Request(5, [0, 1 << 63])]
    case = Case(device, requests, poison=poison, layout=layout)
    check(case, impl)
    if layout == "flash":
        clean = Case(device, requests, poison=0.0, layout=layout)
        torch.testing.assert_close(run(case, impl), run(clean, impl), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_garbage_in_rows_beyond_a_requests_own(device, impl):
    """Queries of foreign rows are NaN and their masks arbitrary: neither is used, and no foreign row is written."""
    case = Case(device, requests_of(*MIXED), spare_queries=3)
    mine = torch.zeros(len(case.query), dtype=torch.bool)
    for start, count in zip(case.starts, case.counts, strict=True):
        mine[start : start + count] = True
    case.query[~mine] = NAN
    check(case, impl)
    out, lse = run(case, impl)
    assert (out[~mine.to(device)] == SENTINEL).all() and (lse[:, ~mine.to(device)] == SENTINEL).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("max_blocks", [1, 2, 3, 4])
def test_table_too_short(device, impl, max_blocks):
    """Entries past the table count as masked: nodes, and even the prefix's end."""
    check(Case(device, requests_of((9, 40), (5, 14), (4, 16)), max_blocks=max_blocks, poison=NAN), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("unused_block", [-1, 10**8])
def test_garbage_in_the_table(device, impl, unused_block):
    """Columns that hold no entry attended to may hold anything: kernel and reference look nothing up there."""
    requests = [*requests_of(*MIXED), Request(20, [1 << 40])]
    check(Case(device, requests, unused_block=unused_block), impl)
    case = Case(device, requests, unused_block=unused_block)
    check(case, impl, prefix=external_prefix(case))


@pytest.mark.parametrize("impl", IMPLS)
def test_large_logits(device, impl, small_splits):
    """Catches: exp without the row's maximum, in a tile or in the merge (logits of 1e4)."""
    case = Case(device, requests_of((3, 200), (2, 5)))
    case.query *= 3e3
    out, lse = run(case, impl)
    expected, expected_lse = case.expect()
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-5, atol=1e-3)
    # float32 logits of 1e4 are good to 1e-3: so are the weights.
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2e-2, atol=2e-2)


# ---- a prefix that something else has computed ---------------------------------------------------------------------


def external_prefix(case):
    """Prefix output and LSE as FlashAttention would give them; NaN and +inf where a row has none, NaN elsewhere."""
    out, lse = case.expect(nodes=False)
    written = lse.T != SENTINEL
    out[~written | (lse.T == -INF)] = NAN
    # FlashAttention-2 writes +inf for an empty row, other backends -inf.
    lse[1::2][lse[1::2] == -INF] = INF
    return out.to(case.device, case.dtype), lse.masked_fill(~written.T, NAN).to(case.device, torch.float32)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("block_size", [16, 128])
def test_external_prefix(device, impl, dtype, block_size):
    """With the prefix's output and LSE given, the result is that of the whole; the prefix's KV entries are not read."""
    case = Case(device, requests_of(*MIXED, (3, 127), (4, 128)), dtype=dtype, block_size=block_size)
    prefix = external_prefix(case)
    check(case, impl, prefix=prefix)
    for i, request in enumerate(case.requests):
        for entry in range(request.prefix_len if request.words else 0):
            block = case.table[case.rows[i], entry // block_size].long()
            case.keys[block, entry % block_size] = NAN
            case.values[block, entry % block_size] = NAN
    check(case, impl, prefix=prefix)


@pytest.mark.parametrize("impl", IMPLS)
def test_external_prefix_in_place(device, impl):
    """The prefix's output and LSE may be the outputs themselves: each row is read and written by one program."""
    case = Case(device, requests_of((65, 37), (3, 20)), num_heads=2, num_kv_heads=1)
    prefix = external_prefix(case)
    expected, expected_lse = run(case, impl, prefix=prefix)
    out, lse = (tensor.clone() for tensor in prefix)
    run(case, impl, prefix=(out, lse), out=out, lse=lse)
    written = expected[:, 0, 0] != SENTINEL
    assert torch.equal(out[written], expected[written]) and torch.equal(lse[:, written], expected_lse[:, written])


@pytest.mark.parametrize("impl", IMPLS)
def test_external_prefix_of_any_strides(device, impl):
    """A transposed LSE and a sliced output give what dense ones give."""
    case = Case(device, requests_of(*MIXED))
    out, lse = external_prefix(case)
    fused = torch.full((out.shape[0], out.shape[1] + 2, out.shape[2] + 5), NAN, device=device)
    fused[:, 1:-1, 2:-3] = out
    check(case, impl, prefix=(fused[:, 1:-1, 2:-3], lse.T.contiguous().T))


@pytest.mark.parametrize("impl", IMPLS)
def test_parts_add_up(device, impl):
    """The prefix alone, given as external prefix to a call for the nodes alone, makes the whole."""
    case = Case(device, requests_of((5, 37), (3, 20)))
    prefix = run(case, impl, masks=torch.zeros_like(case.words))
    check(case, impl, prefix=prefix)
    torch.testing.assert_close(run(case, impl, prefix=prefix), run(case, impl), rtol=1e-5, atol=1e-5)


# ---- mutations -----------------------------------------------------------------------------------------------------


def mutant(tmp_path, impl, edits):
    """Return `tree_attention` of a copy of the module with some text replaced, every occurrence."""
    source = Path(module.__file__).read_text()
    for old, new in edits:
        assert old in source, f"the mutation no longer applies: {old}"
        source = source.replace(old, new)
    path = tmp_path / f"mutant_{impl}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    changed._KEYS_PER_SPLIT = BLOCK
    return changed.tree_attention


MUTATIONS = {
    "nothing changed": {"triton": [], "torch": []},
    "a sibling's bit leaks into the mask": {
        "triton": [("(bits[:, None] >> node[None, :]) & 1", "(bits[:, None] >> node[None, :]) & 3")],
        "torch": [("& _BITS[:num_nodes].to(rows.device)", "& (_BITS | _BITS << 1)[:num_nodes].to(rows.device)")],
    },
    "a prefix one entry short": {
        "triton": [("tl.minimum(prefix_len, max_entries)", "tl.minimum(prefix_len - 1, max_entries)")],
        "torch": [("entry < prefix_end", "entry < prefix_end - 1")],
    },
    "a prefix one entry long": {
        "triton": [("tl.minimum(prefix_len, max_entries)", "tl.minimum(prefix_len + 1, max_entries)")],
        "torch": [("prefix_lens[:num_reqs, None].to(torch.int64)", "prefix_lens[:num_reqs, None].to(torch.int64) + 1")],
    },
    "parts averaged, not weighted by their LSE": {
        "triton": [
            ("weights = tl.exp2(part_lse - shift)", "weights = tl.where(split_mask, 1.0, 0.0)"),
            ("correction = tl.exp2(top - shift)", "correction = 1.0"),
            ('row_max = tl.where(row_max == float("inf"), float("-inf"), row_max)', "row_max = tl.zeros_like(row_max)"),
        ],
        "torch": [("return out * weight + prefix_out * prefix_weight", "return out * 0.5 + prefix_out * 0.5")],
    },
    "heads of a group spread over the KV heads": {
        "triton": [
            ("first_head = kv_head * GROUP", "first_head = kv_head"),
            ("head = row % GROUP", "head = row % GROUP * (num_heads // GROUP)"),
        ],
        "torch": [(
            "view(num_reqs, max_queries, num_kv_heads, -1, head_size).permute(0, 2, 3, 1, 4)",
            "view(num_reqs, max_queries, -1, num_kv_heads, head_size).permute(0, 3, 2, 1, 4)",
        )],
    },
}  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(device, impl, mutation, tmp_path):
    """`check`, which every test above rests on, fails for each of these changes of kernel and reference, and only then.

    The module's source is changed and run: a sibling's bit leaking into the mask (shift & 3), a prefix off by one
    (either way), an LSE merge without weights (a plain average of splits, and of external prefix and nodes), heads of a
    GQA group taken with a stride (head h on KV head h % num_kv_heads).
    """
    attention = mutant(tmp_path, impl, MUTATIONS[mutation][impl])
    case = Case(device, requests_of((5, 150), (6, 20)), num_heads=6, num_kv_heads=2, poison=1.0)
    # A bound with room: a longer prefix must give a wrong result, no index out of range.
    whole, external = {"max_prefix_len": 160}, {"prefix": external_prefix(case)}
    if mutation == "nothing changed":
        check(case, impl, attention, **whole)
        check(case, impl, attention, **external)
        return
    # Only the kernel merges splits; both merge an external prefix.
    merges = [external] if impl == "torch" else [whole, external]
    for changes in merges if "LSE" in mutation else [whole]:
        with pytest.raises(AssertionError, match="Tensor-likes are not close"):
            check(case, impl, attention, **changes)


# ---- determinism, dispatch, checks, compilation, benchmark ---------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
def test_equal_bits_twice(device, impl, small_splits):
    """Catches: atomic adds, or an order of summation that depends on anything but the inputs."""
    case = Case(device, requests_of((9, 300), (3, 70)))
    assert all(torch.equal(a, b) for a, b in zip(run(case, impl), run(case, impl), strict=True))


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_to_do(device, impl):
    """No requests, no rows, no tokens, a bound of 0: nothing changes, nothing fails; `lse` may be left out."""
    case = Case(device, [Request(20, []), Request(3, [])])
    check(case, impl)
    check(case, impl, max_queries=0)
    case = Case(device, requests_of((3, 5)))
    out, _ = run(case, impl, rows=case.rows[:0].to(device))
    assert (out == SENTINEL).all()
    assert torch.equal(run(case, impl, lse=None)[0], run(case, impl)[0])


@pytest.mark.parametrize("impl", ["auto", "triton", "torch"])
def test_dispatch(device, branches, impl):
    """Catches: a forced branch that silently runs the other, and a wrong automatic choice."""
    ran = branches("tree_attention")
    run(Case(device, requests_of((3, 5))), impl)
    automatic = "triton" if device.type == "cuda" else "torch"
    assert ran == [automatic if impl == "auto" else impl]


def test_merge_runs_for_splits_only(device, monkeypatch):
    """Catches: partial results and a second launch where one program sees everything; tests of splits that had none."""
    merges = []
    kernel = module._merge_splits_kernel

    class Watched:
        def __getitem__(self, grid):
            merges.append(grid)
            return kernel[grid]

    monkeypatch.setattr(module, "_merge_splits_kernel", Watched())
    case = Case(device, requests_of((3, 300)))
    run(case, "triton", prefix=external_prefix(case))
    run(case, "triton", max_prefix_len=module._KEYS_PER_SPLIT)
    assert merges == []
    run(case, "triton")
    assert merges == [(3, 4)]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("query", lambda t: t.double()),
        ("query", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)),
        ("key_cache", lambda t: t.double()),
        ("key_cache", lambda t: t[..., :8]),
        ("key_cache", lambda t: t[:, :, [0, 1, 1]]),
        ("value_cache", lambda t: t.half()),
        ("value_cache", lambda t: t[:, :8]),
        ("block_table", lambda t: t.long()),
        ("block_table", lambda t: t.T.contiguous().T),
        ("rows", lambda t: t.int()),
        ("query_start", lambda t: t.long()),
        ("query_start", lambda t: t[:-1]),
        ("num_queries", lambda t: t[:-1]),
        ("prefix_lens", lambda t: t.long()),
        ("masks", lambda t: t.int()),
        ("masks", lambda t: t[:-1]),
        ("masks", lambda t: t[:, :2]),
        ("masks", lambda t: t.T.contiguous().T),
        ("max_queries", lambda _: -1),
        ("max_prefix_len", lambda _: -1),
        ("out", lambda t: t.half()),
        ("out", lambda t: t[:-1]),
        ("lse", lambda t: t.double()),
        ("lse", lambda t: t.T),
        ("prefix", lambda t: (t[0].half(), t[1])),
        ("prefix", lambda t: (t[0], t[1].T)),
    ],
)
def test_wrapper_refuses(device, name, change):
    """Catches: a dropped dtype, stride or shape check (the kernel would read through a wrong pointer)."""
    case = Case(device, requests_of((3, 5), (4, 3)))
    query = case.query.to(device)
    lse = torch.zeros(query.shape[1::-1], device=device)
    arguments = case.arguments() | {"out": query.clone(), "lse": lse, "prefix": (query, lse)}
    arguments[name] = change(arguments[name])
    with pytest.raises(AssertionError, match=name):
        tree_attention(**arguments)
