"""float8_e4m3fn as kernels read it: as it is where the device converts it, as bytes where it does not."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.limits import device_limits

FP8 = torch.float8_e4m3fn
FP8_CAPABILITY = 89  # the first that converts it
# Of queries, keys and values: float32 [num_kv_heads] of any stride, None for 1.
Scales = tuple[Tensor | None, Tensor | None, Tensor | None]
NO_SCALES: Scales = (None, None, None)


def check_scales(device: torch.device, scales: Scales, num_kv_heads: int) -> None:
    """Assert that scales fit so many KV heads."""
    for name, scale in zip(("query", "key", "value"), scales, strict=True):
        is_right = scale is None or (scale.dtype == torch.float32 and scale.shape == (num_kv_heads,))
        assert is_right and (scale is None or scale.device == device), f"{name} scale: {scale}"


def widens(query: Tensor, keys: Tensor) -> bool:
    """Return whether products of queries and keys keep float32's precision: those of float32, or of two dtypes, where
    keys in float8 are no second one: it becomes any other exactly.

    bfloat16 is widened where a CPU tensor shows that this is the interpreter, whose dot multiplies bfloat16's bit
    patterns as integers.
    """
    is_mixed = keys.dtype not in (query.dtype, FP8)
    interpreted_bf16 = query.dtype == torch.bfloat16 and query.device.type == "cpu"
    return query.dtype == torch.float32 or is_mixed or interpreted_bf16


def readable(tensor: Tensor) -> Tensor:
    """Return a tensor as its device's kernels can load it, for `as_float`."""
    is_plain = tensor.dtype != FP8 or device_limits(tensor.device).capability >= FP8_CAPABILITY
    return tensor if is_plain else tensor.view(torch.uint8)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return float8 as bytes, which every index operation of every device takes; any other tensor as it is."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


@triton.jit
def as_float(loaded, dtype: tl.constexpr):
    """Return loaded values in a dtype. Bytes are float8's, exactly but for NaN, which reads as 480."""
    if loaded.dtype == tl.uint8:
        bits = loaded.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        # float16 with these bits has the same exponent, counted from 8 less; numbers below the normal range follow.
        loaded = bits.to(tl.float16, bitcast=True) * 256.0
    return loaded.to(dtype)


@triton.jit
def scaled(factor, scale_ptr, scale_stride, kv_head):
    """Return a factor times a KV head's scale, where there is one."""
    if scale_ptr is not None:
        factor *= tl.load(scale_ptr + kv_head * scale_stride)
    return factor
