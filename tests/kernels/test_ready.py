"""Calls that wrappers keep ready: bound once, other calls with any other argument, refused ones not at all."""

import functools

import pytest
import torch

from tests.kernels.agreement import tensors_in
from tests.kernels.sampling_case import candidates_case, draw_case, toy
from tests.kernels.step_case import level_case
from tests.kernels.test_draft_tree_grow import level_case as grow_case
from vidspec_kernels.dispatch import remember

# By wrapper its case, the argument that has calls ready, other arguments, and a tensor that may have no other dtype.
WRAPPERS = {
    "candidates": (
        functools.partial(candidates_case, num_rows=4, vocab_size=9, num_candidates=3), "scratch",
        {"noise": toy(), "width": 3, "first": 1, "with_log_probs": False, "apply_temperature": False}, "ids",
    ),
    "draw": (
        functools.partial(draw_case, num_rows=4, vocab_size=9), "scratch",
        {"noise": toy(), "level": 0, "apply_temperature": False}, "out_ids",
    ),
    "next_level": (
        functools.partial(level_case, size=3, frontier=4, on_device=True), "out",
        {"size": 2, "level": 2, "block_size": 32, "max_position": 7}, "tokens",
    ),
    "tree_grow": (
        grow_case, "buffers", {"level": 1, "budget": 8, "first_parent": 1, "num_next": 3, "trims": True}, "rows",
    ),
}  # fmt: skip


def made(name, device):
    """Return a wrapper, its arguments, and what it has ready."""
    case, holder, _, _ = WRAPPERS[name]
    wrapper, arguments = case(device)
    return wrapper, arguments, arguments[holder].ready


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_call_is_bound_once(device, name):
    """Catches: a call looked at anew every time; one that passes for another, a freed tensor's among them."""
    wrapper, arguments, ready = made(name, device)
    for _ in range(3):
        wrapper(**arguments)
    assert len(ready) == 1
    held = [key for key, value in arguments.items() if isinstance(value, torch.Tensor) and key != "logits"]
    assert len(held) > 2
    for key in held:
        for _ in range(3):
            wrapper(**arguments | {key: arguments[key].clone()})
    assert len(ready) == 1 + 3 * len(held)
    others = dict(WRAPPERS[name][2])
    others |= {"logits": arguments["logits"][:3]} if "logits" in arguments else {}
    others |= {"step": made(name, device)[1]["step"]} if "step" in arguments else {}
    for key, other in others.items():
        before = len(ready)
        for _ in range(2):
            wrapper(**arguments | {key: other})
        assert len(ready) == before + 1, key
    before = len(ready)
    wrapper(**arguments, impl="triton" if device.type == "cuda" else "numba")
    assert len(ready) == before + 1


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_call_is_of_what_its_tensors_hold(device, name):
    """Catches: contents that were copied when the call was bound: the first step's temperature, noise or level."""
    wrapper, arguments, ready = made(name, device)
    wrapper(**arguments)
    held = tensors_in(arguments)
    for _ in range(3):
        for path, tensor in held.items():
            tensor.copy_(1 + tensor % 2 if path == ".level" else tensor.roll(1, 0))
        _, fresh, _ = made(name, device)
        fresh_tensors = tensors_in(fresh)
        for path, tensor in fresh_tensors.items():
            tensor.copy_(held[path])
        wrapper(**arguments)
        wrapper(**fresh)
        for path, tensor in fresh_tensors.items():
            assert torch.equal(held[path].nan_to_num(), tensor.nan_to_num()), path
    assert len(ready) == 1


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_refused_call_is_not_ready(device, name):
    """Catches: a call that passes once it has been refused."""
    wrapper, arguments, ready = made(name, device)
    wrong = WRAPPERS[name][3]
    arguments[wrong] = arguments[wrong].short()
    for _ in range(2):
        with pytest.raises(AssertionError):
            wrapper(**arguments)
    assert not ready


def test_ready_calls_are_bounded():
    """Catches: a caller whose tensors are new in every step, for whom everything is kept."""
    ready = {}
    for i in range(3000):
        remember(ready, i, list, ())
    assert 0 < len(ready) <= 1024 and 2999 in ready
