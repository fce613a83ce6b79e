"""tree_attention: kernel and reference against a loop over entries, what may not be read or written."""

import pytest
import torch

from tests.kernels import attention_case
from tests.kernels.attention_case import BLOCK, INF, MIXED, NAN, SENTINEL, Case, Request, check, requests_of, run
from vidspec_kernels.tree_attention import reference, tiles

IMPLS = ["triton", "torch"]


@pytest.fixture
def small_shares(monkeypatch):
    """Shares of at least one tile, so that prefixes of a few hundred entries have parts in several programs."""
    monkeypatch.setattr(attention_case.module, "MIN_UNITS", 1)


ALL_BITS = [1 << j for j in range(64)] + [2**64 - 1]
LEVEL = [0b1, 0b10011, 0b1000000100010001, 1 << 63 | 0b101]
SIZES = {
    # A missing tail mask, a lost or doubled entry at a block's or a tile's end, an empty prefix's NaN.
    **{f"prefix {n}, poison {poison}": dict(requests=requests_of((3, n), (2, 5)), poison=poison)
       for n in (0, 1, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1) for poison in (7.0, NAN)},
    # A missing row mask, a wrong number of row tiles (16 rows of 2 heads), bit 63 taken for a sign.
    **{f"{n} rows": dict(requests=requests_of((n, 20), (1, 3))) for n in (0, 1, 2, 7, 8, 9, 65)},
    # One row for each bit alone, and one for all: bit 63 is the sign, and its shift brings in ones.
    **{f"every bit behind {n}": dict(requests=[Request(n, ALL_BITS)], num_heads=2, num_kv_heads=1) for n in (0, 30)},
    # One row a request, which attends to its ancestors of earlier levels.
    "a draft level": dict(requests=[Request(10 + 16 * i, [word]) for i, word in enumerate(LEVEL)]),
    # Whole tiles of keys under many rows, which nothing masks, and the last one, which is masked.
    **{f"whole tiles of {n}": dict(requests=requests_of((35, n), (2, 5)), dtype=torch.float16, poison=NAN)
       for n in (0, 63, 64, 65, 200)},
    # Ragged rows and prefixes in one call, a request without rows among them, a bound larger than needed.
    "ragged": dict(requests=requests_of(*MIXED, (17, 130))),
    "ragged, a loose bound": dict(requests=requests_of(*MIXED), spare_queries=2, poison=NAN),
    # GQA groups of 1, 2, 3 and 7 on both engines' strides.
    **{f"groups_{heads}_{kv}_{layout}": dict(
        requests=requests_of((5, 37), (2, 9)), num_heads=heads, num_kv_heads=kv, layout=layout)
       for heads, kv in ((2, 2), (4, 2), (6, 2), (14, 2), (7, 1)) for layout in ("flash", "cpu")},
    # A padded head read past its end; a block size taken for a power of two or for a tile's divisor.
    **{f"d{dim} blocks of {size} {layout}": dict(
        requests=requests_of((4, 40), (3, 130)), head_size=dim, block_size=size, layout=layout)
       for dim, size in ((32, 128), (64, 16), (64, 24), (80, 16), (128, 128), (256, 1)) for layout in ("flash", "cpu")},
    # Softmax, sums or partial results in the inputs' dtype. Seen to fail: partial results rounded to bfloat16.
    **{f"dtypes_{dtype}": dict(requests=requests_of((5, 300), (17, 33)), head_size=64, dtype=dtype, layout=layout)
       for dtype, layout in ((torch.float16, "cpu"), (torch.bfloat16, "flash"))},
    # Entries past the table count as masked: nodes, and even the prefix's end.
    **{f"table of {n}": dict(requests=requests_of((9, 40), (5, 14), (4, 16)), max_blocks=n, poison=NAN)
       for n in (1, 2, 3, 4)},
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_sizes(device, impl, name, small_shares):
    """What each of these catches is said beside it."""
    shape = tiles.tile_shape(6, 32, True, True, attention_case.LIMITS)
    assert shape.block_keys == BLOCK and tiles._MAX_BLOCK_ROWS_WIDE == 16
    check(Case(device, **SIZES[name]), impl)


def test_mixed_dtypes(device, impl):
    """A float16 cache under float32 queries: nothing is rounded to float16 on the way."""
    case = Case(device, requests_of((5, 37), (2, 9)), dtype=torch.float16)
    case.query, case.dtype = case.query.float(), torch.float32
    check(case, impl)


@pytest.mark.parametrize("num_sms", [1, 2, 5, 12])
def test_shares(device, impl, num_sms, monkeypatch):
    """Items in one program or up to 20. Seen to fail: parts weighted equally; a late share; the nodes in every part."""
    monkeypatch.setattr(attention_case.module, "MIN_UNITS", 1)
    case = Case(device, requests_of((3, 19 * BLOCK), (2, 65), (0, 70), (1, 0)), num_heads=2, num_kv_heads=1)
    check(case, impl, scratch=attention_case.make_scratch(32, device, num_sms))


def test_strips_of_the_reference(device, impl, monkeypatch):
    """Requests in strips of one and two. Seen to fail: every strip with the first one's blocks or masks."""
    for entries in (1, 2 * 4 * 9 * 160):
        monkeypatch.setattr(reference, "_STRIP_ENTRIES", entries)
        check(Case(device, requests_of(*MIXED)), impl)


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


@pytest.mark.parametrize(
    ("poison", "layout"), [(NAN, "flash"), (NAN, "cpu"), (INF, "flash"), (-INF, "flash"), (3e38, "flash"), (7.0, "cpu")]
)
def test_garbage_does_not_leak(device, impl, poison, layout):
    """What lies in entries that no row attends to changes nothing. Seen to fail: values loaded without their mask;
    NaN scores hidden by addition alone; no second product with the values hidden."""
    requests = [Request(33, [0b1001, 0b1]), Request(0, [0b100]), Request(16, []), Request(5, [0, 1 << 63])]
    case = Case(device, requests, poison=poison, layout=layout)
    check(case, impl)
    if layout == "flash":
        clean = Case(device, requests, poison=0.0, layout=layout)
        torch.testing.assert_close(run(case, impl), run(clean, impl), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("unused_block", [-1, 10**8])
def test_garbage_in_the_table(device, impl, unused_block):
    """Columns that hold no entry attended to may hold anything: kernel and reference look nothing up there."""
    requests = [*requests_of(*MIXED), Request(20, [1 << 40])]
    check(Case(device, requests, unused_block=unused_block), impl)
    case = Case(device, requests, unused_block=unused_block)
    check(case, impl, prefix=attention_case.external_prefix(case))


def test_large_logits(device, impl, small_shares):
    """Catches: exp without the row's maximum, in a tile or in the merge (logits of 1e4)."""
    case = Case(device, requests_of((3, 200), (2, 5)))
    case.query *= 3e3
    out, lse = run(case, impl)
    expected, expected_lse = case.expect()
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-5, atol=1e-3)
    # float32 logits of 1e4 are good to 1e-3: so are the weights.
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2e-2, atol=2e-2)


def test_nothing_to_do(device, impl):
    """No requests, no rows, no tokens, a bound of 0: nothing changes, nothing fails; `lse` may be left out."""
    case = Case(device, [Request(20, []), Request(3, [])])
    check(case, impl)
    check(case, impl, max_queries=0)
    case = Case(device, requests_of((3, 5)))
    out, _ = run(case, impl, rows=case.rows[:0].to(device))
    assert (out == SENTINEL).all()
    assert torch.equal(run(case, impl, lse=None)[0], run(case, impl)[0])
