"""Whose attention it is: which layers' chains take tree attention; the sums that guidance takes from a layer's own."""

import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.attention.ops import triton_unified_attention

from tests.unit.engine import fakes
from vidspec_kernels.tree_attention.reference import tree_attention_reference
from vllm_vidspec.engine import kv_views, tree_attention
from vllm_vidspec.engine.compat import backends
from vllm_vidspec.engine.compat import model as compat
from vllm_vidspec.errors import VidSpecError


@pytest.fixture(autouse=True)
def lines(monkeypatch):
    """What the logger is told, by level."""
    lines = []
    for level in ("info", "warning"):
        log = lambda text, *args, level=level: lines.append((level, text % args))  # noqa: E731
        monkeypatch.setattr(tree_attention.logger, f"{level}_once", log)
    return lines


def flash_layer(version: int | None, **changes):
    layer = fakes.attention_layer()
    layer.impl.vllm_flash_attn_version = version
    for name, value in changes.items():
        setattr(layer if hasattr(layer, name) else layer.impl, name, value)
    return layer


def triton_layer():
    layer = fakes.attention_layer(name="TRITON_ATTN")
    impl = object.__new__(TritonAttentionImpl)
    vars(impl).update(vars(layer.impl))
    layer.impl = impl
    return layer


def make(*layers, num_rows: int = 6, in_trees: bool = False, **asked: bool):
    flags = SimpleNamespace(**{"use_ubatching": False, "fuse_attn_quant": False} | asked)
    config = SimpleNamespace(parallel_config=flags, compilation_config=SimpleNamespace(pass_config=flags))
    return tree_attention.make_attention(
        layers, config, fakes.CPU, num_rows=num_rows, in_trees=in_trees, whose="target"
    )


@pytest.mark.parametrize("version", [2, 3, 4, None])
def test_flash_attention_by_its_version(version):
    """Catches: Hopper's and Blackwell's backends replaced, version 2 left to walk all keys; the choice inverted."""
    layer = flash_layer(version)
    assert backends.splits_keys(layer, 1)
    assert backends.splits_keys(layer, 2) == backends.splits_keys(layer, 1 << 20) == (version != 2)
    made = make(layer)
    assert (made is None) == (version != 2)
    if made is not None:
        assert made.layers == [layer] and made.outruns(2) and not made.outruns(1)


@pytest.mark.parametrize("bound", [None, 8])
def test_tritons_kernel_by_its_bound(monkeypatch, bound):
    """0.32 has no constant and splits for single rows alone; 0.33 names 8."""
    layer, most = triton_layer(), bound or 1
    monkeypatch.setattr(triton_unified_attention, "MAX_3D_QUERY_LEN", bound, raising=False)
    if bound is None:
        monkeypatch.delattr(triton_unified_attention, "MAX_3D_QUERY_LEN")
    assert backends.splits_keys(layer, most) and not backends.splits_keys(layer, most + 1)
    assert make(layer, num_rows=most) is None and make(layer, num_rows=most + 1) is not None


@pytest.mark.parametrize(
    ("changes", "config", "wanted"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, {}, "does not read fp8_e5m2 KV caches"),
        ({"sliding_window": (1023, 0)}, {}, "knows no sliding windows"),
        ({"logits_soft_cap": 30.0}, {}, "soft caps"),
        ({}, {"use_ubatching": True}, "--enable-dbo"),
        ({}, {"fuse_attn_quant": True}, "fuse_attn_quant"),
        ({}, {}, "VLLM_BATCH_INVARIANT"),
    ],
)
def test_what_tree_attention_cannot_do_stays_with_the_backend(monkeypatch, lines, changes, config, wanted):
    """A chain loses time alone, and one line says so; its layer's forward is not touched."""
    if wanted == "VLLM_BATCH_INVARIANT":
        monkeypatch.setenv(wanted, "1")
    layer = flash_layer(2, **changes)
    forward = layer.impl.forward
    assert make(layer, **config) is None and layer.impl.forward is forward
    ((level, line),) = lines
    assert level == "warning" and wanted in line
    assert line.endswith(("chains are slow at long contexts", "fuse_attn_quant"))


def test_layers_choose_one_by_one(lines):
    """Catches: a plain layer, or one in e4m3, beside one that cannot be read left slow; both lines twice."""
    plain, other, split = flash_layer(2), flash_layer(2, kv_cache_dtype="nvfp4"), flash_layer(3)
    quantised = flash_layer(2, kv_cache_dtype="fp8")
    made = make(plain, other, quantised, split)
    assert made is not None and made.layers == [plain, quantised]
    assert [level for level, _ in lines] == ["warning", "info"] and "6 rows" in lines[1][1]


def test_trees_take_every_layer_or_none():
    """Catches: trees that a layer would verify as chains."""
    made = make(flash_layer(3), flash_layer(3), in_trees=True)
    assert made is not None and len(made.layers) == 2 and not made.outruns(2)
    with pytest.raises(VidSpecError, match="does not read int8_per_token_head"):
        make(flash_layer(3, kv_cache_dtype="int8_per_token_head"), in_trees=True)


@pytest.mark.parametrize("shape", [(), (1,), (2,)], ids=["scalar", "tensor", "head"])
@pytest.mark.parametrize("isa", [None, "vec"])
def test_scales_are_vllms_own_tensors(shape, isa):
    """Catches: a copy, which an update of weights leaves behind; a scale of queries that are not in float8; the CPU's
    heads, which share the largest scale, taken for heads with scales of their own."""
    layer = flash_layer(3, kv_cache_dtype="fp8", num_kv_heads=2)
    parts = [torch.arange(1.0, 3.0)[: shape[0] if shape else 1].reshape(shape) * 10**i for i in range(3)]
    layer._q_scale, layer._k_scale, layer._v_scale = parts
    layer.isa = isa
    query = torch.zeros(1, 2, 4)
    plain, quantised = (kv_views.cache_scales(layer, some) for some in (query, query.to(kv_views.FP8)))
    assert plain[0] is None and all(scale.shape == (2,) for scale in (*plain[1:], *quantised))
    largest = [part.max().item() for part in parts]
    for scale, part, most in zip(quantised, parts, largest, strict=True):
        by_head = [most] * 2 if isa and part is not parts[0] else part.expand(2).tolist()
        assert scale.tolist() == by_head
        assert isa or scale.data_ptr() == part.data_ptr()
    layer.kv_cache_dtype = "auto"
    assert kv_views.cache_scales(layer, query) == (None, None, None)


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
    switch = compat.observe_attention(layer, lambda layer, query, kv_cache, metadata, lse: heard.append(lse))
    switch(True)
    query = torch.arange(NUM_TOKENS * NUM_HEADS * HEAD_SIZE).view(NUM_TOKENS, NUM_HEADS, HEAD_SIZE).float()
    out = layer.impl.forward(layer, query, None, None, None, object(), torch.empty_like(query))
    assert torch.equal(out, query)
    (lse,) = heard
    switch(False)
    assert layer.impl.forward == type(layer.impl).forward.__get__(layer.impl), "a layer that nobody observes"
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


def flash_over(monkeypatch):
    """Return two layers of FlashAttention 3, as vLLM's module has it: the call is torch's attention over `seqused_k`
    keys of each request, causal or not; `calls` has the most rows of each, and what made its schedule.
    """
    module = ModuleType("a_flash_attention_3")
    module.calls = []
    module.canonicalize_singleton_dim_strides = lambda tensor: tensor

    def flash_attn_varlen_func(
        *, q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, block_table,
        return_softmax_lse, fa_version, num_splits, scheduler_metadata,
    ):  # fmt: skip
        assert return_softmax_lse and fa_version == 3 and seqused_k.max() <= max_seqlen_k
        sizes = (len(seqused_k), max_seqlen_q, max_seqlen_k, *q.shape[1:], *k.shape[1:3], causal, num_splits)
        made, scheduled, lens = scheduler_metadata
        assert scheduled == sizes and torch.equal(lens, seqused_k)
        module.calls.append((max_seqlen_q, made))
        lse, group = torch.full((q.shape[1], len(q)), torch.inf), q.shape[1] // k.shape[2]
        for request, (low, high) in enumerate(pairwise(cu_seqlens_q.tolist())):
            if not (num_keys := int(seqused_k[request])):
                continue
            keys, values = (
                cache[block_table[request].long()].flatten(0, 1)[:num_keys].repeat_interleave(group, dim=1)
                for cache in (k, v)
            )
            logits = torch.einsum("qhd,khd->hqk", q[low:high], keys) * softmax_scale
            if causal:
                logits += torch.full(logits.shape[1:], -torch.inf).triu(1 + num_keys - (high - low))
            lse[:, low:high] = logits.logsumexp(dim=2)
            out[low:high] = torch.einsum("hqk,khd->qhd", logits.softmax(dim=2), values)
        return out, lse

    def get_scheduler_metadata(
        *, batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype,
        cu_seqlens_q, page_size, causal, num_splits,
    ):  # fmt: skip
        assert qkv_dtype == torch.float32 and len(cu_seqlens_q) == batch_size + 1
        heads = (num_heads_q, headdim, page_size, num_heads_kv)
        scheduled.append((batch_size, max_seqlen_q, max_seqlen_k, *heads, causal, num_splits))
        return len(scheduled), scheduled[-1], cache_seqlens.clone()

    scheduled: list[tuple] = []
    module.flash_attn_varlen_func, module.get_scheduler_metadata = flash_attn_varlen_func, get_scheduler_metadata
    monkeypatch.setitem(sys.modules, module.__name__, module)
    layers = [flash_layer(3), flash_layer(3)]
    for layer in layers:
        impl = type("Impl", (), {"__module__": module.__name__})()
        vars(impl).update(vars(layer.impl))
        layer.impl = impl
    return layers, module.calls


@pytest.mark.parametrize(("max_queries", "is_read"), [(3, True), (64, True), (65, False)])
def test_flash_attention_reads_the_prefix_where_a_tile_holds_the_rows(monkeypatch, max_queries, is_read):
    """Catches: nodes read twice or not at all, a causal prefix, another request's keys, a prefix of nothing, the tile's
    bound off by one; a schedule by layer, or one of an earlier forward.
    """
    generator = torch.Generator().manual_seed(0)
    layers, calls = flash_over(monkeypatch)
    attention = tree_attention.TreeAttention(layers, fakes.CPU, is_targets=True)
    blocks, size, (heads, kv_heads, dim) = 12, 4, (2, 1, 4)
    cache = torch.randn(blocks, kv_heads, size, 2 * dim, generator=generator)
    table = torch.randperm(blocks, generator=generator)[:9].view(3, 3).int()
    lens, counts = torch.tensor([5, 0, 8, 99], dtype=torch.int32), torch.tensor([3, 2, 1, 9], dtype=torch.int32)
    starts = torch.tensor([0, 3, 5, 6], dtype=torch.int32)
    masks = torch.zeros(4, 65, dtype=torch.int64)
    masks[:3, :3] = torch.tensor([[0, 1, 2], [1, 3, 0], [0, 0, 0]])
    query = torch.randn(6, heads, dim, generator=generator)
    metadata = SimpleNamespace(query_start_loc=starts, block_table=table, max_seq_len=12, max_num_splits=0)
    attention.step = tree_attention.TreeStep(torch.arange(3), starts, counts, lens, masks, max_queries, True)
    keys, values = kv_views.cache_views(cache, layers[0])
    for first_lens in ([5, 0, 8], [4, 9, 0]):
        lens[:3] = torch.tensor(first_lens)
        wanted = torch.zeros_like(query)
        tree_attention_reference(
            query, keys, values, table, torch.arange(3), starts, counts, lens, masks, wanted,
            scale=layers[0].impl.scale, max_queries=max_queries,
        )  # fmt: skip
        assert wanted.abs().sum() > 0
        for layer in layers:
            found = torch.zeros_like(query)
            layer.impl.forward(layer, query, None, None, cache, metadata, found)
            torch.testing.assert_close(found, wanted)
    assert calls == [(max_queries, forward) for forward in (1, 1, 2, 2)] * is_read
