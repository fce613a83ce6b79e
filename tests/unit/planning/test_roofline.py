"""Rooflines: every term by hand on a card of round numbers."""

import dataclasses
import re

import pytest

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.planning.draft_cost import FP8
from vllm_vidspec.planning.roofline import (
    GPUS,
    Assumptions,
    Gpu,
    Placement,
    forward_seconds,
    gpu_named,
    kv_bytes,
    memory_split,
    prefill_seconds,
    weight_bytes,
)
from vllm_vidspec.planning.shapes import INT4, ModelShape

# 1 TB/s, 100 TFLOP/s, 10 GB, links of 100 GB/s and 1 us; nothing is lost and nothing comes on top.
CARD = Gpu("by hand", 90, 10e9, 1e12, 1e14, 1e11, 1e-6)
EXACT = Assumptions(
    memory_frac=1.0, flops_frac=1.0, link_frac=1.0, layer_s=0.0, fp8_layer_s=0.0, int4_layer_s=0.0, tree_layer_s=0.0,
    tile_passes=1.0, wide_tile_passes=1.0, flash_tree_layer_s=0.0, level_layer_s=0.0, step_s=0.0, speculation_s=0.0,
    usable_frac=1.0,
)  # fmt: skip
# Attention 2 x 100 x 10 x (8 + 4), MLP 3 x 100 x 200, head 50 x 100: 84,000 a layer, 5,000.
TINY = ModelShape("tiny", "qwen2.5-vl", 2, 100, 8, 4, 10, 200, 50)
TINY_PARAMS = 2 * (24_000 + 60_000) + 5000


def place(ranks=1, **given):
    return Placement(CARD, ranks, dataclasses.replace(EXACT, **given))


def test_bytes_bind_few_tokens():
    """2 bytes a weight, and 1,000 entries of 2 x 2 x 4 x 10 numbers. Catches: a byte a number, weights read a token."""
    weights, cache = 2 * TINY_PARAMS / 1e12, 1000 * 160 * 2 / 1e12
    assert forward_seconds(TINY, place(), 1, 1, 1000) == pytest.approx(weights + cache)
    assert forward_seconds(TINY, place(), 3, 1, 1000) == pytest.approx(weights + 3 * cache)
    assert forward_seconds(TINY, place(), 1, 6, 1000) == pytest.approx(weights + cache), "rows share both"


def test_products_bind_many_tokens():
    """Two operations a weight and token; QK and PV, each 2 x 8 x 10 a layer, token and entry. Catches: half of it."""
    matrices, attention = 2 * TINY_PARAMS * 800 / 1e14, 4 * 2 * 80 * 800 * 1000 / 1e14
    assert forward_seconds(TINY, place(), 1, 800, 1000) == pytest.approx(matrices + attention)
    tokens = 2000
    assert prefill_seconds(TINY, place(), tokens) == pytest.approx(
        (2 * TINY_PARAMS * tokens + 4 * 2 * 80 * tokens**2 / 2) / 1e14
    )


def test_what_comes_on_top():
    """What a layer takes beside its bytes, in fp8 more; shares of peaks. Catches: a share that multiplies where it
    divides, a time a forward that is a layer's, a draft in fp8 whose layers are only half as many bytes.
    """
    base = forward_seconds(TINY, place(), 1, 1, 0)
    layers = place(layer_s=12e-6, fp8_layer_s=17e-6)
    assert forward_seconds(TINY, layers, 1, 1, 0) == pytest.approx(base + 24e-6)
    fp8 = TINY.quantised(FP8)
    assert forward_seconds(fp8, layers, 1, 1, 0) == pytest.approx(forward_seconds(fp8, place(), 1, 1, 0) + 34e-6)
    assert forward_seconds(TINY, place(memory_frac=0.5), 1, 1, 0) == pytest.approx(2 * base)
    assert forward_seconds(TINY, place(flops_frac=0.5), 1, 1, 0) == pytest.approx(base), "bytes bind"


@pytest.mark.parametrize(
    ("arch", "num_rows", "passes", "layer_us"),
    [
        (80, 65, 2 * 0.8, 7), (80, 128, 2 * 0.8, 7), (80, 129, 3 * 0.8, 7),
        (90, 128, 1.0, 3), (90, 130, 3 * 0.8, 7), (90, 193, 2 * 0.9, 7), (100, 128, 1.0, 7), (100, 60, 1.0, 7),
    ],
)  # fmt: skip
def test_a_trees_rows_read_the_cache_by_tiles(arch, num_rows, passes, layer_us):
    """Catches: a tree verified at a chain's price, a tile too many or too few; passes over weights, or no context."""
    given = {"tile_passes": 0.8, "wide_tile_passes": 0.9, "tree_layer_s": 7e-6, "flash_tree_layer_s": 3e-6}
    at = place(**given)
    at = dataclasses.replace(at, gpu=dataclasses.replace(at.gpu, arch=arch, flops=1e20))  # bytes bind
    one_head = dataclasses.replace(TINY, kv_heads=TINY.heads)  # as many rows as queries
    base = forward_seconds(one_head, at, 1, num_rows, 0)
    chain, tree = (forward_seconds(one_head, at, 1, num_rows, 1000, is_tree=tree) for tree in (False, True))
    assert tree == pytest.approx(base + max(1.0, passes) * (chain - base) + 2e-6 * layer_us)


def test_products_in_fp8_are_twice_as_fast_where_a_card_has_them():
    """Catches: an fp8 target's verification of many rows at bf16's rate; a card before them, or four bits, taken so."""
    at = place()
    for shape, arch, times in (
        (TINY.quantised(FP8), 89, 2),
        (TINY.quantised(FP8), 80, 1),
        (TINY.quantised(INT4), 90, 1),
    ):
        card = dataclasses.replace(at, gpu=dataclasses.replace(at.gpu, arch=arch))
        bf16, found = (prefill_seconds(each, card, 10_000) for each in (TINY, shape))
        attention = 2 * 2 * 80 * 10_000**2 / 1e14  # of values and keys in 16 bits, at any target's rate
        assert bf16 - attention == pytest.approx(times * (found - attention))


def test_a_prefill_has_a_tower_and_all_reduces():
    """Four patches a visual token through the tower, one token through a map. Catches: a tower that is left out."""
    seeing = dataclasses.replace(TINY, vision_params=1000)
    base = prefill_seconds(TINY, place(), 2000)
    assert prefill_seconds(seeing, place(), 2000, 3000) == pytest.approx(base + 2 * 1000 * 4 * 3000 / 1e14)
    mapped = seeing.with_eyes_of(dataclasses.replace(TINY, hidden=300))
    assert mapped.vision_params == 100 * 300
    assert prefill_seconds(mapped, place(), 2000, 3000) == pytest.approx(base + 2 * 30_000 * 3000 / 1e14)
    assert prefill_seconds(TINY, place(2), 2000) == pytest.approx(base / 2 + 4 * (1e-6 + 2000 * 200 / 1e11))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        *((name, name) for name in GPUS),
        ("NVIDIA A100-SXM4-80GB", "a100"), ("A100-80GB", "a100"), ("A100-40GB", "a100-40gb"), ("NVIDIA A10G", "a10g"),
        ("4090", "rtx-4090"), ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("RTX4090", "rtx-4090"), ("NVIDIA L4", "l4"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"), ("NVIDIA H100 80GB HBM3", "h100"), (" H200 ", "h200"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"), ("NVIDIA B200", "b200"),
    ],
)  # fmt: skip
def test_cards_go_by_the_names_that_users_and_drivers_have_for_them(name, found):
    assert gpu_named(name).name == found


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v100", "unknown GPU 'v100'; expected one of a100, "),
        ("MI300X", "'MI300X' is not supported: vidspec runs on NVIDIA's GPUs"),
        ("AMD Instinct MI325", "is not supported"),
    ],
)
def test_another_card_is_one_line(name, words):
    with pytest.raises(VidSpecError, match=re.escape(words)) as error:
        gpu_named(name)
    assert "\n" not in str(error.value)


def test_ranks_halve_the_work_and_reduce():
    """Two ranks: half of everything, four all-reduces of 2 x 1/2 x 200 bytes. Catches: one a layer, half a head."""
    alone, shared = (forward_seconds(TINY, place(ranks), 1, 1, 1000) for ranks in (1, 2))
    assert shared == pytest.approx(alone / 2 + 4 * (1e-6 + 200 / 1e11))
    assert forward_seconds(TINY, place(2, link_frac=0.5), 1, 1, 1000) == pytest.approx(
        alone / 2 + 4 * (1e-6 + 400 / 1e11)
    )
    # 8 ranks, 4 KV heads: each rank has one.
    assert kv_bytes(TINY, 8, 1, 1000) == kv_bytes(TINY, 4, 1, 1000) == 1000 * 2 * 2 * 10 * 2
    assert weight_bytes(TINY, 2) == weight_bytes(TINY, 1) / 2


def test_a_card_is_what_its_split_adds_up_to():
    """Catches: KV of the draft left out, and a card that fits what it has no room for."""
    split = memory_split(place(usable_frac=0.9), (4e9, 3e9), (1e9, 0.3e9, 0.2e9))
    parts = dataclasses.astuple(split)
    assert parts == pytest.approx((4e9, 1e9, 3e9, 0.3e9, 0.2e9, 1e9, 0.5e9)) and split.fits
    assert sum(parts) == pytest.approx(CARD.memory_bytes)
    assert not memory_split(place(), (4e9, 6.1e9)).fits
