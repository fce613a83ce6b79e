"""What guidance takes from FlashAttention's own softmax: the call's log-sum-exp, asked for only where it is free."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from vllm_vidspec.engine.compat import model as compat

NUM_HEADS, HEAD_SIZE, NUM_TOKENS = 4, 8, 6


@pytest.fixture
def backend(monkeypatch):
    """A module as vLLM's FlashAttention is one: `forward` calls the function by its name there; `calls` says how."""
    module = ModuleType("a_flash_attention")
    module.calls = []

    def flash_attn_varlen_func(q, k, v, max_seqlen_q, return_softmax_lse=False, out=None, fa_version=3):
        module.calls.append(return_softmax_lse)
        out.copy_(q)
        return (out, q.sum(dim=2).T.float()) if return_softmax_lse else out

    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def make_layer(backend, name="FLASH_ATTN", fa_version=3, max_seqlen_q=NUM_TOKENS, num_calls=1, asks=False):
    class Impl:
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, output):
            for _ in range(num_calls):
                more = {"return_softmax_lse": True} if asks else {}
                backend.flash_attn_varlen_func(
                    q=query, k=key, v=value, max_seqlen_q=max_seqlen_q, out=output, fa_version=fa_version, **more
                )
            return output

    Impl.__module__ = backend.__name__
    return SimpleNamespace(impl=Impl(), get_attn_backend=lambda: SimpleNamespace(get_name=lambda: name))


def run(layer):
    """Return the output of one forward and the LSE that its observer hears."""
    heard = []
    compat.observe_attention(layer, lambda layer, query, kv_cache, metadata, lse: heard.append(lse))
    query = torch.arange(NUM_TOKENS * NUM_HEADS * HEAD_SIZE).view(NUM_TOKENS, NUM_HEADS, HEAD_SIZE).float()
    out = layer.impl.forward(layer, query, None, None, None, object(), torch.empty_like(query))
    assert torch.equal(out, query)
    (lse,) = heard
    return query, lse


@pytest.mark.parametrize("fa_version", [2, 3])
def test_the_calls_own_sums_reach_the_observer(backend, fa_version):
    """Catches: CUDA paying for a pass over all keys that its own attention has made."""
    query, lse = run(make_layer(backend, fa_version=fa_version))
    assert backend.calls == [True]
    assert torch.equal(lse, query.sum(dim=2).T) and lse.shape == (NUM_HEADS, NUM_TOKENS)


@pytest.mark.parametrize(
    ("layer", "calls"),
    [
        ({"fa_version": 4}, [False]),
        ({"max_seqlen_q": 1}, [False]),
        ({"num_calls": 2}, [True, True]),
        ({"num_calls": 2, "asks": True}, [True, True]),
        ({"name": "TRITON_ATTN"}, [False]),
    ],
)
def test_where_there_is_none_the_kernel_finds_it(backend, layer, calls):
    """Another variant to compile, rows in an order of their own, attention in parts, another backend: no LSE."""
    assert run(make_layer(backend, **layer))[1] is None
    assert backend.calls == calls
