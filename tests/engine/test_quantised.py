"""What a cache in float8 holds, and its scales, as guidance reads them in a running engine: against float64."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.engine import harness, quantise
from tests.engine.harness import NO_CACHE, QWEN
from vllm_vidspec.engine import kv_views
from vllm_vidspec.engine.hooks import attention
from vllm_vidspec.tools import pairs

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's CPU cache in float8 needs AVX-512"),
]


def rounded(numbers: torch.Tensor, scale: float) -> torch.Tensor:
    """Return what vLLM's CPU cache of e4m3 makes of `[n, num_kv_heads, head_size]`, in float64: towards zero."""
    nearest = (numbers / scale).to(kv_views.FP8)
    is_above = nearest.float().abs() > (numbers / scale).abs()
    return (nearest.view(torch.uint8) - is_above.to(torch.uint8)).view(kv_views.FP8).double() * scale


@pytest.mark.parametrize("cache", ["tensor", pytest.param("attn_head", marks=pytest.mark.slow)])
def test_guidance_reads_what_the_layers_wrote(tmp_path, cache):
    """The sums of each layer against the keys that it was handed, rounded as its scale says.

    On a CPU vLLM takes the heads' largest scale for all of them. Catches: a scale that is ignored, or another layer's;
    strides of bytes taken for those of numbers; a block of keys that is laid out otherwise in bytes.
    """
    source = Path(pairs.checkpoint(QWEN, "target"))
    overrides = NO_CACHE | {"model": str(quantise.quantise(source, tmp_path / "target", "w8a8", cache))}
    written, errors, scores = {}, [], attention.guidance_scores

    def compare(query, keys, table, starts, positions, out, *args, **kwargs):
        before = out.clone()
        scores(query, keys, table, starts, positions, out, *args, **kwargs)
        meant = rounded(*written[list(written)[len(errors)]]).repeat_interleave(query.shape[1] // keys.shape[2], dim=1)
        logits = torch.einsum("qhd,khd->hqk", query.double(), meant) * query.shape[2] ** -0.5
        hidden = torch.arange(len(meant)) > positions[:, None]
        expected = logits.masked_fill(hidden, -torch.inf).softmax(dim=2).sum(dim=(0, 1))[: out.shape[1]]
        # `out` sums over layers, in float32: what one of them adds is known no better.
        errors.append((out[0] / (before[0] + expected) - 1).abs().max().item())

    with harness.engine(QWEN, "draft", overrides, pruner="specvlm") as engine:
        for name, layer in engine.guides[0].attention.items():

            def update(layer, key, *args, name=name, write=layer.impl.do_kv_cache_update):
                if len(key) > 100:
                    written[name] = (key, layer._k_scale_float)
                write(layer, key, *args)

            layer.impl.do_kv_cache_update = update
        with mock.patch.object(attention, "guidance_scores", compare):
            _, counted = engine.measured(harness.videos(QWEN, 1, max_tokens=2))
        assert counted["guided_prompts"] == 1 and len(errors) == len(engine.guides[0].attention) == 4
        assert len({scale for _, scale in written.values()}) == 4
    assert max(errors) < 1e-4, errors
