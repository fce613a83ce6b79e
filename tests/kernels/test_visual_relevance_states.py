"""visual_relevance's surroundings: how states are stored, and how the partial results of ranks become one."""

import math

import pytest
import torch

from tests.kernels.relevance_inputs import DEVICE, FP8, NAN, unit
from vidspec_kernels import merge_relevance, storage_scale, store_states, visual_relevance
from vidspec_kernels.visual_relevance import store as store_module

IMPLS = ["triton", "torch"]


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_shards_merge_to_the_whole(impl, num_shards):
    """Bit for bit, rows without a token on some rank or any among them. Catches: a mean of the ranks' own means."""
    generator, top_n, counts = torch.Generator().manual_seed(0), 10, (37, 0, 1, 60, 11)
    cosines = torch.full((len(counts), 60), -math.inf)
    for row, count in zip(cosines, counts, strict=True):
        row[:count] = torch.randint(-9, 9, (count,), generator=generator) / 9  # many are equal
    whole, *dealt = (cosines, *(cosines[:, rank::num_shards] for rank in range(num_shards)))
    partials = torch.stack([part.topk(top_n, dim=1).values for part in dealt]).to(DEVICE)
    got = merge_relevance(partials, impl=impl)
    assert torch.equal(got, merge_relevance(whole.topk(top_n, dim=1).values[None].to(DEVICE), impl=impl))
    for mean, row, count in zip(got.tolist(), cosines.double(), counts, strict=True):
        size = min(count, top_n)
        assert mean == pytest.approx(row.topk(size).values.mean().item() if size else 0.0, abs=2e-6)
    means = torch.stack([merge_relevance(part[None], impl=impl) for part in partials]).mean(0)
    assert num_shards == 1 or not torch.allclose(means, got, rtol=0, atol=1e-3)


@pytest.mark.parametrize("top_n", [1, 10, 33])
def test_merges_are_the_same(top_n, branches):
    """The kernel against torch: rows of any number of values, one with NaN, strides of a gathered batch."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 6, top_n, generator=generator).sort(dim=2, descending=True).values
    rows[0, 1], rows[:, 2], rows[1, 3, -1] = -math.inf, -math.inf, NAN
    wide = torch.full((6, 3, top_n + 5), 9.0)
    wide[:, :, :top_n] = rows.transpose(0, 1)
    partials = wide.to(DEVICE).transpose(0, 1)[:, :, :top_n]
    ran = branches("merge_relevance", reference="_merge_relevance_torch")
    got, expected = (merge_relevance(partials, impl=impl) for impl in ("triton", "torch"))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6, equal_nan=True)
    assert merge_relevance(partials[:, :0], impl="triton").shape == (0,)
    assert ran == ["triton", "torch"] and got.isnan().tolist() == [index == 3 for index in range(6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, FP8])
@pytest.mark.parametrize("states_dtype", [torch.float32, torch.bfloat16])
def test_store_states(dtype, states_dtype, monkeypatch):
    """Unit rows in the named slots and nothing anywhere else, in several chunks; zeros stay zeros."""
    monkeypatch.setattr(store_module, "_CHUNK_ROWS", 3)
    generator = torch.Generator().manual_seed(0)
    states = (torch.randn(20, 200, generator=generator) * torch.logspace(-3, 3, 20)[:, None]).to(states_dtype)
    states[4] = 0
    source, slots = torch.tensor([3, 19, 0, 4, 7, 3, 12]), torch.tensor([30, 2, 17, 8, 9, 31, 0])
    store = torch.full((4, 8, 200), 3.0).to(dtype).to(DEVICE)
    store_states(states.to(DEVICE), source.to(DEVICE), slots.to(DEVICE), store)
    got = store.cpu().double().view(32, 200) / storage_scale(dtype, 200)
    for index, slot in zip(source.tolist(), slots.tolist(), strict=True):
        expected = unit(states[index : index + 1].double())[0]
        bound = {torch.float32: 1e-6, FP8: 2**-4}.get(dtype, 2**-8)
        assert ((got[slot] - expected).abs() <= expected.abs() * bound + 1e-4 * (dtype == FP8)).all()
        assert float(got[slot].norm()) == pytest.approx(0.0 if index == 4 else 1.0, abs=bound / 4)
    others = [slot for slot in range(32) if slot not in slots.tolist()]
    assert (store.cpu().double().view(32, 200)[others] == 3).all()


def test_float8_cosines():
    """Rows of a real size keep each cosine within 4 %; without the scale they are mostly subnormal."""
    hidden = 3584
    assert storage_scale(FP8, hidden) == pytest.approx(math.sqrt(hidden))
    assert all(storage_scale(dtype, hidden) == 1.0 for dtype in (torch.float32, torch.bfloat16, torch.float16))
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(1, hidden, generator=generator)
    states = base + torch.randn(64, hidden, generator=generator) * torch.linspace(0, 4, 64)[:, None]
    store = torch.zeros(1, 64, hidden).to(FP8).to(DEVICE)
    order = torch.arange(64, device=DEVICE)
    store_states(states.to(DEVICE), order, order, store)
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    got = visual_relevance(
        base.to(DEVICE), starts, order[:1], store, 64 * one, 0 * one[None], one, 64, 1, 1, impl="torch"
    )[0].cpu().double()  # fmt: skip
    expected = (unit(states.double()) @ unit(base.double())[0]).sort(descending=True).values
    assert expected[0] > 0.99 and expected[-1] < 0.3
    assert ((got - expected).abs() <= 0.04 * expected.abs()).all()
    # One element that holds all of a row's length is the largest that can be stored.
    peak = torch.zeros(1, hidden, device=DEVICE)
    peak[0, 5] = -1e3
    store_states(peak, order[:1], order[:1], store)
    assert float(store[0, 0, 5].float()) == pytest.approx(-math.sqrt(hidden), rel=2**-4)
