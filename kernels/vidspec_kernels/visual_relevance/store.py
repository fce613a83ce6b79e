"""The store of unit rows that `visual_relevance` reads: its scale, and how rows are written."""

import math

import torch
from torch import Tensor

from vidspec_kernels.arrays import check, check_contiguous
from vidspec_kernels.float8 import as_bytes

# float32 copies of store_states.
_CHUNK_ROWS = 1024
_QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STORE_DTYPES = (*_QUERY_DTYPES, torch.float8_e4m3fn)
_FP8_MAX = 448.0


def storage_scale(dtype: torch.dtype, hidden_size: int) -> float:
    """Return the factor by which a store of this dtype holds unit rows.

    Args:
        dtype: float32, bfloat16, float16 or float8_e4m3fn.
        hidden_size: Elements of a row.

    Returns:
        1, but sqrt(hidden_size) for float8_e4m3fn: the elements of a unit row are about 1 / sqrt(hidden_size), below
        that format's normal range, and times it about 1; none can exceed it.

    Raises:
        AssertionError: The dtype is another one, or a row's largest possible element exceeds float8_e4m3fn's range.
    """
    assert dtype in _STORE_DTYPES, f"store dtype {dtype}"
    if dtype != torch.float8_e4m3fn:
        return 1.0
    scale = math.sqrt(hidden_size)
    assert scale <= _FP8_MAX, f"hidden_size {hidden_size}: sqrt exceeds {_FP8_MAX}"
    return scale


def store_states(states: Tensor, source: Tensor, slots: Tensor, store: Tensor) -> None:
    """Write chosen rows, normalised in float32 and times `storage_scale`, to slots of the store.

    Args:
        states: float [T, d], hidden states of one forward; not changed.
        source: int64 [n], the rows to store.
        slots: int64 [n], row of `store.view(-1, d)` that each goes to; no two may be equal.
        store: Out, float32, bfloat16, float16 or float8_e4m3fn [num_store_blocks, block_rows, d], contiguous. A row of
            zeros stays zeros. Other rows are left alone.
    """
    hidden_size, device = states.shape[1], states.device
    scale = storage_scale(store.dtype, hidden_size)
    check_contiguous(device, store=(store, store.dtype, 0, 0, [hidden_size]))
    check(device, source=(source, torch.int64, 0), slots=(slots, torch.int64, [len(source)]))
    lines = as_bytes(store).view(-1, hidden_size)
    for chosen, goal in zip(source.split(_CHUNK_ROWS), slots.split(_CHUNK_ROWS), strict=True):
        lines.index_copy_(0, goal, as_bytes((_unit(states[chosen]) * scale).to(store.dtype)))


def _unit(rows: Tensor) -> Tensor:
    """Return rows over their norms in float32, zeros for zeros."""
    wide = rows.to(torch.float32)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return wide * torch.where(norm > 0, 1 / norm, 0.0)
