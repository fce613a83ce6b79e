"""float8 caches and queries with a scale of the tensor or of each head: against float64 on the quantised numbers."""

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels import test_guidance_scores as guidance
from tests.kernels.attention_case import LIMITS, Case, Request, requests_of
from tests.kernels.attention_case import check as check_attention
from vidspec_kernels import float8

IMPLS = ["triton", "torch"]
FP8, HALF = torch.float8_e4m3fn, torch.float16
# Of queries: the dtype, and what `tree_attention` writes.
QUERIES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": FP8}


@pytest.fixture(params=[(90, "flash"), (80, "cpu")], ids=["converted", "as bytes"])
def layout(request, monkeypatch):
    """A GPU that converts float8, and one whose kernels take its bytes; strides of both engines."""
    capability, name = request.param
    limits = dataclasses.replace(LIMITS, capability=capability)
    monkeypatch.setattr(float8, "device_limits", lambda _: limits)
    return name


@pytest.fixture(params=["tensor", "head"])
def scales(request, device):
    """Queries', keys' and values', of two KV heads: powers of two and others, one for all (stride 0) or one a head."""
    found = torch.tensor([[0.5, 1.7], [3.0, 0.3], [0.13, 2.5]], device=device)
    return tuple(row[:1].expand(2) if request.param == "tensor" else row for row in found)


def wide(tensor, scale):
    """Return numbers in float64 as they are meant: `[..., heads, head_size]`, a scale for each group of heads."""
    factor = scale.repeat_interleave(tensor.shape[-2] // len(scale)).to(tensor.device, torch.float64)
    return tensor.double() * factor[:, None]


def wrong_scales(scales, num_read):
    """Yield the scales with one ignored, or another head's."""
    for i in range(num_read):
        if scales[i] is not None:
            yield tuple(None if j == i else scale for j, scale in enumerate(scales))
            if scales[i].stride() != (0,):
                yield tuple(scale.flip(0) if j == i else scale for j, scale in enumerate(scales))


@pytest.mark.parametrize("name", QUERIES)
def test_guidance(device, impl, layout, scales, name):
    """Catches: a scale ignored, of another head or of one pass; strides of bytes; products rounded; NaN read."""
    dtype = QUERIES[name]
    scales = scales if dtype == FP8 else (None, *scales[1:])
    inputs = guidance.make_inputs(device, num_heads=6, head_dim=32, layout=layout)
    inputs |= {"query": inputs["query"].to(dtype), "key_cache": inputs["key_cache"].to(FP8)}
    meant = inputs | {"key_cache": wide(inputs["key_cache"], scales[1])}
    if dtype == FP8:
        meant["query"] = wide(inputs["query"], scales[0])
    expected, lse = guidance.float64(meant)
    guidance.assert_close(guidance.run(inputs, impl, scales=scales), expected)
    guidance.assert_close(guidance.run(inputs, impl, scales=scales, lse=lse.float().T), expected, rtol=1e-5)
    for wrong in wrong_scales(scales, 2):
        with pytest.raises(AssertionError):
            guidance.assert_close(guidance.run(inputs, impl, scales=wrong), expected)


@pytest.mark.parametrize("name", QUERIES)
def test_tree_attention(device, impl, layout, scales, name):
    """Catches: the same of nodes and values; a scale of the values inside of the softmax's sum."""
    dtype = QUERIES[name]
    scales = scales if dtype == FP8 else (None, *scales[1:])
    case = Case(device, [*requests_of((3, 70), (2, 9)), Request(0, [0, 1])], dtype=FP8, layout=layout)
    query = case.query if dtype == FP8 else torch.randn(case.query.shape).to(dtype)
    case.dtype = HALF if dtype == FP8 else dtype
    case.query = wide(query, scales[0]) if dtype == FP8 else query
    case.entries = [
        (places, torch.stack((wide(pairs[:, 0], scales[1]), wide(pairs[:, 1], scales[2])), dim=1).cpu())
        for places, pairs in case.entries
    ]
    check_attention(case, impl, query=query.to(device), scales=scales)
    for wrong in wrong_scales(scales, 3):
        with pytest.raises(AssertionError):
            check_attention(case, impl, query=query.to(device), scales=wrong)


@triton.jit
def _convert(out_ptr, bytes_ptr, dtype: tl.constexpr):
    place = tl.arange(0, 256)
    tl.store(out_ptr + place, float8.as_float(tl.load(bytes_ptr + place), dtype).to(tl.float32))


@pytest.mark.parametrize("dtype", [tl.float32, tl.float16, tl.bfloat16], ids=str)
def test_every_byte(device, dtype):
    """Catches: a number below the normal range, or a sign, that a GPU without float8 reads as another."""
    every = torch.arange(256, dtype=torch.uint8, device=device)
    out, expected = torch.empty(256, device=device), every.view(FP8).float()
    _convert[(1,)](out, every, dtype)
    is_number = ~expected.isnan()
    assert torch.equal(out[is_number], expected[is_number]) and out[~is_number].tolist() == [480.0, -480.0]
