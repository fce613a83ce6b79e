"""Calls that wrappers keep ready: bound once, other calls with any other argument, refused ones not at all."""

import pytest
import torch

from tests.kernels.sampling_case import SamplingCase, candidates_case, draw_case, toy
from tests.kernels.step_case import level_case
from tests.kernels.test_draft_tree_grow import level_case as grow_case
from vidspec_kernels import candidates, draw
from vidspec_kernels.dispatch import remember


def of_candidates(device):
    """Return the wrapper, its arguments, others of them, and what it has ready."""
    wrapper, arguments = candidates_case(device, 4, 9, num_candidates=3)
    others = {"logits": arguments["logits"][:3], "noise": toy(), "width": 3, "first": 1}
    others |= {"with_log_probs": False, "apply_temperature": False}
    return wrapper, arguments, others, arguments["scratch"].ready


def of_draw(device):
    wrapper, arguments = draw_case(device, 4, 9)
    others = {"logits": arguments["logits"][:3], "noise": toy(), "level": 2, "apply_temperature": False}
    return wrapper, arguments, others, arguments["scratch"].ready


def of_next_level(device):
    wrapper, arguments = level_case(device, 3, 4)
    others = {"step": level_case(device, 3, 4)[1]["step"], "size": 2, "level": 2, "block_size": 32, "max_position": 7}
    return wrapper, arguments, others, arguments["out"].ready


def of_tree_grow(device):
    wrapper, arguments = grow_case(device)
    others = {"level": 1, "budget": 8, "first_parent": 1, "num_next": 3, "trims": True}
    return wrapper, arguments, others, arguments["buffers"].ready


WRAPPERS = {"candidates": of_candidates, "draw": of_draw, "next_level": of_next_level, "tree_grow": of_tree_grow}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_call_is_bound_once(device, name):
    """Catches: a call looked at anew every time; one that passes for another, a freed tensor's among them."""
    wrapper, arguments, others, ready = WRAPPERS[name](device)
    for _ in range(3):
        wrapper(**arguments)
    assert len(ready) == 1
    held = [key for key, value in arguments.items() if isinstance(value, torch.Tensor) and key != "logits"]
    assert len(held) > 2
    for key in held:
        for _ in range(3):
            wrapper(**arguments | {key: arguments[key].clone()})
    assert len(ready) == 1 + 3 * len(held)
    for key, other in others.items():
        before = len(ready)
        for _ in range(2):
            wrapper(**arguments | {key: other})
        assert len(ready) == before + 1, key
    before = len(ready)
    wrapper(**arguments, impl="triton" if device.type == "cuda" else "numba")
    assert len(ready) == before + 1


def test_candidates_are_of_what_the_tensors_hold(device):
    """Catches: contents that were copied when the call was bound; greedy and noised steps follow each other."""
    case = SamplingCase(2, 9, device)
    outs = {"log_probs": torch.zeros(2, 3, device=device), "ids": torch.zeros(2, 3, dtype=torch.int64, device=device)}
    held = {"temperature": case.temperature, "seeds": case.seeds, "pos": case.pos, "noise": toy()}
    scratch = case.scratch(3)
    for seed, heat in enumerate((0.0, 1.0, 0.0, 0.5)):
        new = SamplingCase(2, 9, device, seed=seed)
        held["temperature"].fill_(heat)
        for name in ("seeds", "pos"):
            held[name].copy_(getattr(new, name))
        fresh = {name: torch.zeros_like(out) for name, out in outs.items()}
        candidates(new.logits, **held, **outs, scratch=scratch)
        candidates(new.logits, **held, **fresh, scratch=case.scratch(3))
        assert outs["ids"].equal(fresh["ids"]) and outs["log_probs"].equal(fresh["log_probs"])
    assert len(scratch.ready) == 1


def test_draws_are_of_what_the_tensors_hold(device):
    """Catches: a temperature or a level that is the first step's."""
    _, arguments, _, ready = of_draw(device)
    for seed, heat, level in ((0, 0.0, 0), (1, 1.0, 2), (2, 0.0, 1), (3, 0.5, 2)):
        arguments["logits"].copy_(SamplingCase(4, 9, device, seed=seed).logits)
        arguments["temperature"].fill_(heat)
        arguments["level"].fill_(level)
        arguments["out_tokens"].zero_()
        draw(**arguments)
        fresh = {name: torch.zeros_like(arguments[name]) for name in ("out_tokens", "out_ids")}
        draw(**arguments | fresh | {"level": level, "scratch": SamplingCase(4, 9, device).scratch()})
        assert all(arguments[name][:4].equal(out[:4]) for name, out in fresh.items())
    assert len(ready) == 1


def test_a_level_on_the_device_is_the_steps_own(device):
    """Catches: the level of the step in which the call was bound."""
    wrapper, arguments = level_case(device, 3, 0, on_device=True)
    out, level = arguments["out"], arguments["level"]
    for now in (1, 2, 5):
        level.fill_(now)
        wrapper(**arguments)
        _, other = level_case(device, 3, 0, level=now)
        wrapper(**other)
        assert out.seq_lens.equal(other["out"].seq_lens) and out.slot_mapping.equal(other["out"].slot_mapping)
    assert len(out.ready) == 1


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_refused_call_is_not_ready(device, name):
    """Catches: a call that passes once it has been refused."""
    wrapper, arguments, _, ready = WRAPPERS[name](device)
    wrong = {"candidates": "ids", "draw": "out_ids", "next_level": "tokens", "tree_grow": "rows"}[name]
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
