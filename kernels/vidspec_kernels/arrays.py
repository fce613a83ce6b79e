"""What wrappers and references share of tensors: checks, and one text for numpy and torch."""

from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, strides and dtype on the meta device, aligned to 16 bytes iff this one is."""
    offset = tensor.data_ptr() % 16 // tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.empty(offset + max(last, 0) + 1, dtype=tensor.dtype, device="meta")
    return memory.as_strided(tensor.shape, tensor.stride(), offset)


def array_module(device: torch.device) -> ModuleType:
    """Return numpy for the CPU, else torch: what references work on small arrays of that device with.

    A numpy call costs a third of a torch call on arrays this small, and tests run the references often. Both
    modules have the names and the rules that are used, so there is one text for both.
    """
    return np if device.type == "cpu" else torch


def as_array(tensor: Tensor) -> Any:
    """Return a tensor as an array of its `array_module`, on the same memory."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def at_most(array: Any, bound: int) -> Any:
    """Return the array with larger entries replaced by the bound (numpy's own clip costs five times as much)."""
    return np.minimum(array, bound) if isinstance(array, np.ndarray) else array.clamp(max=bound)


def at_least(array: Any, bound: int) -> Any:
    """Return the array with smaller entries replaced by the bound."""
    return np.maximum(array, bound) if isinstance(array, np.ndarray) else array.clamp(min=bound)


def check_vector(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device, min_len: int = 0) -> None:
    """Assert that a tensor is a vector of unit stride, dtype and device as given, with at least `min_len` entries."""
    assert tensor.dtype == dtype, f"{name}: expected {dtype}, got {tensor.dtype}"
    assert tensor.device == device, f"{name}: expected device {device}, got {tensor.device}"
    assert tensor.ndim == 1, f"{name}: expected one dimension, got shape {list(tensor.shape)}"
    # The cheaper question first: this runs for every vector of every launch.
    assert not min_len or tensor.shape[0] >= min_len, f"{name}: expected at least {min_len} entries"
    assert tensor.stride(0) == 1 or tensor.shape[0] <= 1, f"{name}: expected stride 1, got {tensor.stride(0)}"


def check_matrix(
    name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device, min_rows: int = 0, min_cols: int = 0
) -> None:
    """Assert that a tensor has two dimensions of at least these sizes, unit stride in its rows, dtype and device."""
    assert tensor.dtype == dtype and tensor.device == device, f"{name}: expected {dtype} on {device}"
    assert tensor.ndim == 2, f"{name}: expected two dimensions, got shape {list(tensor.shape)}"
    assert tensor.shape[0] >= min_rows and tensor.shape[1] >= min_cols, f"{name}: shape {list(tensor.shape)}"
    is_dense = tensor.stride(1) == 1 or tensor.shape[1] <= 1 or tensor.shape[0] == 0
    assert is_dense, f"{name}: expected unit stride in a row"


def check_lengths(device: torch.device, *vectors: tuple[str, Tensor, torch.dtype, int]) -> None:
    """Assert that each of these, given with name, dtype and length, is such a vector of unit stride."""
    for name, vector, dtype, length in vectors:
        check_vector(name, vector, dtype, device)
        assert vector.shape[0] == length, f"{name}: expected {length} entries, got {vector.shape[0]}"
