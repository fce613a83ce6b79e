"""Guidance and the states of videos without a target, for the tests of what listens."""

from types import SimpleNamespace

import torch

from tests.unit.engine import fakes
from tests.unit.engine.fakes import CPU, HIDDEN, NUM_ROWS, VIDEO
from vllm_vidspec.engine.hooks import attention, hidden_states, state_store, visual_states
from vllm_vidspec.engine.hooks.attention import AttentionGuidance
from vllm_vidspec.engine.hooks.hidden_states import HiddenStateGuidance
from vllm_vidspec.engine.hooks.prompts import Guidance
from vllm_vidspec.engine.hooks.protocol import Forward, TargetHooks
from vllm_vidspec.engine.hooks.visual_states import VisualStates


def make_guidance(kind: type[Guidance], monkeypatch, **more) -> Guidance:
    """Return guidance without a target: one layer of attention, or hidden states that are embeddings of the ids."""
    counters = fakes.Counts()
    if kind is AttentionGuidance:
        layer = SimpleNamespace(impl=SimpleNamespace(num_heads=1, head_size=HIDDEN, scale=1.0))
        monkeypatch.setattr(attention.kv_views, "attention_layers", lambda config: {"layers.0": layer})
        monkeypatch.setattr(attention, "get_tensor_model_parallel_world_size", lambda: 1)
        monkeypatch.setattr(attention.kv_views, "check_readable", lambda *_: None)
        monkeypatch.setattr(attention.compat, "observe_attention", lambda *_: lambda is_on: None)
        model = SimpleNamespace(get_total_num_hidden_layers=lambda: 1)
        vllm_config = SimpleNamespace(model_config=model, device_config=SimpleNamespace(device=CPU))
        return AttentionGuidance(fakes.make_knobs(**more), vllm_config, counters, fakes.ALONE)
    monkeypatch.setattr(hidden_states.compat, "expose_hidden_states", lambda target, layers: None)
    model = SimpleNamespace(dtype=torch.float32, get_hidden_size=lambda: HIDDEN, get_total_num_hidden_layers=lambda: 2)
    target = SimpleNamespace(embed_input_ids=lambda ids: ids[:, None].float().expand(-1, HIDDEN))
    vllm_config = SimpleNamespace(model_config=model, device_config=SimpleNamespace(device=CPU))
    return HiddenStateGuidance(fakes.make_knobs(pruner="uv", **more), target, vllm_config, counters, fakes.ALONE)


def make_states(monkeypatch, num_blocks: int = 4) -> VisualStates:
    """Return the states of requests that all need relevance, in a store of so many blocks."""
    monkeypatch.setattr(visual_states, "get_tp_group", lambda: fakes.GROUP)
    monkeypatch.setattr(visual_states, "visual_indices", lambda feature: VIDEO)
    block_bytes = state_store.BLOCK_ROWS * HIDDEN * 4
    knobs = fakes.make_knobs(
        request_scorers=("strict", "loose"), lambda_loose=1.0, state_bytes=-(-num_blocks * block_bytes * 7 // 5)
    )
    model = SimpleNamespace(dtype=torch.float32, max_model_len=256, get_hidden_size=lambda: HIDDEN)
    vllm_config = SimpleNamespace(model_config=model, device_config=SimpleNamespace(device=CPU))
    ready: list[int] = []
    rules = SimpleNamespace(needs_relevance=lambda req_state_idx: True, ready=ready.append, of=ready)
    states = VisualStates(knobs, vllm_config, NUM_ROWS, fakes.Counts(), rules, fakes.ALONE)
    states.reserve(1 << 20)
    states.init_kv(SimpleNamespace(kv_allocation=lambda: torch.no_grad()))
    return states


def hear(hooks: TargetHooks, guidance: Guidance, batch: SimpleNamespace) -> None:
    """Let the list hear a forward in which every layer attends to the visual tokens, to each later one more."""
    hooks.before_forward(batch)
    step = getattr(guidance, "_step", None)
    if step is not None:
        step.sums += 1 + torch.arange(step.sums.shape[1])
        step.num_observed += 1
    states = torch.rand(int(batch.query_start_loc_np[-1]), HIDDEN)
    hooks.after_forward(Forward(states, [states, states]))
