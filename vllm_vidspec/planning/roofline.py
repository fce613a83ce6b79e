"""Rooflines: what a forward takes on given cards, from the bytes and products that it needs; plain Python.

A forward is its weights' matrices and its attention, one after the other; each takes the longer of its bytes and its
products, and what a layer takes beside them and all-reduces come on top. Attention is that of a kernel that splits
keys, as tree attention does where vLLM's own does not. A prefill is the products and all-reduces of a decoder, and the
products of a vision tower.
"""

import re
from dataclasses import dataclass

from vllm_vidspec.config.static_tree import TILE_ROWS
from vllm_vidspec.errors import VidSpecError, quoted
from vllm_vidspec.planning.draft_cost import FP8
from vllm_vidspec.planning.shapes import INT4, KV_BYTES, QUANTISATIONS, WEIGHT_BYTES, ModelShape

# ---- cards, as their makers specify them -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    """What a kernel is compiled for, and its usual card."""

    num_sms: int  # multiprocessors of that card
    shared_kb: int  # shared memory of a multiprocessor
    program_kb: int  # shared memory of one program
    threads: int  # of a multiprocessor


ARCHITECTURES = {
    80: Architecture(108, 164, 163, 2048),  # A100
    89: Architecture(142, 100, 99, 1536),  # L40S
    90: Architecture(132, 228, 227, 2048),  # H100, H200
    100: Architecture(148, 228, 227, 2048),  # B200
    120: Architecture(188, 100, 99, 1536),  # RTX PRO 6000; of the RTX 50 fewer multiprocessors
}


@dataclass(frozen=True)
class Gpu:
    """A card, from its data sheet."""

    name: str  # as users write it, in words
    arch: int  # compute capability
    memory_bytes: float  # of its memory
    bandwidth: float  # bytes per second from memory, peak
    flops: float  # dense bf16 operations per second, peak
    link_bandwidth: float  # bytes per second to other cards, one direction, peak
    link_latency_s: float  # of one all-reduce of nothing; assumed, not specified


_NVLINK_S, _PCIE_S = 10e-6, 30e-6
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 80, 80e9, 2.04e12, 312e12, 300e9, _NVLINK_S),
        Gpu("a100-40gb", 80, 40e9, 1.555e12, 312e12, 300e9, _NVLINK_S),
        Gpu("a10", 86, 24e9, 0.6e12, 125e12, 32e9, _PCIE_S),
        Gpu("a10g", 86, 24e9, 0.6e12, 70e12, 32e9, _PCIE_S),
        Gpu("h100", 90, 80e9, 3.35e12, 989e12, 450e9, _NVLINK_S),
        Gpu("h200", 90, 141e9, 4.8e12, 989e12, 450e9, _NVLINK_S),
        Gpu("h20", 90, 96e9, 4.0e12, 148e12, 450e9, _NVLINK_S),
        Gpu("b200", 100, 180e9, 8.0e12, 2250e12, 900e9, _NVLINK_S),
        Gpu("l4", 89, 24e9, 0.3e12, 121e12, 32e9, _PCIE_S),
        Gpu("l40s", 89, 48e9, 0.864e12, 362e12, 32e9, _PCIE_S),
        Gpu("rtx-4090", 89, 24e9, 1.008e12, 165e12, 32e9, _PCIE_S),
        Gpu("rtx-6000-ada", 89, 48e9, 0.96e12, 364e12, 32e9, _PCIE_S),
        Gpu("rtx-pro-6000", 120, 96e9, 1.792e12, 504e12, 64e9, _PCIE_S),
    )
}
_OTHER_CARDS = re.compile(r"\bmi\d{2,3}x?\b|radeon|instinct|gaudi|tpu|trainium")


def gpu_named(name: str) -> Gpu:
    """Return a card by its name, or as its driver calls it ("NVIDIA A100-SXM4-80GB"); refuse others in one line."""
    words = _words(name)
    known = [gpu for gpu in GPUS.values() if _words(gpu.name) <= words]
    if known:
        return max(known, key=lambda gpu: len(_words(gpu.name)))
    if _OTHER_CARDS.search(name.lower()):
        raise VidSpecError(f"--gpu: {quoted(name)} is not supported: vidspec runs on NVIDIA's GPUs, by CUDA")
    raise VidSpecError(f"--gpu: unknown GPU {quoted(name)}; expected one of {', '.join(GPUS)}")


def _words(name: str) -> set[str]:
    """Return the words that tell a card from others: 4090 is enough of rtx-4090, RTX4090 is the same."""
    text = name.lower().replace("rtx", " ").replace("pro", " pro ")
    return set(re.findall(r"\d+gb|[a-z]+\d+[a-z]?|\d+|[a-z]+", text))


# ---- forwards --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assumptions:
    """What is between a data sheet and a forward. `FITTED` are fitted to the steps of one H100, which they meet within
    5 % (docs/results/gpu-h100.json), and taken to hold for other cards; the rest is assumed.
    """

    memory_frac: float = 0.88  # of the memory's peak that a whole forward reaches
    flops_frac: float = 0.6  # of the products' peak
    link_frac: float = 0.7  # of the link's peak
    layer_s: float = 40e-6  # of a layer beside its bytes: its kernels' starts and ends, compiled, in a CUDA graph
    fp8_layer_s: float = 60e-6  # the same of a layer in fp8, whose inputs are quantised by kernels of their own
    int4_layer_s: float = 52e-6  # the same in four bits, for 15 kernels where fp8 has 18
    # A tree's verification: a layer beside the above, and what share of its KV cache's time a tile of 64 rows takes,
    # or of 128, which reads it from the second-level cache; and a layer where FlashAttention 3 reads the prefix, once
    tree_layer_s: float = 40e-6
    tile_passes: float = 0.547
    wide_tile_passes: float = 0.95
    flash_tree_layer_s: float = 28e-6
    level_layer_s: float = 13e-6  # of a layer in a draft forward of a tree's level, beside the above
    step_s: float = 0.5e-3  # host time of a target's step that no kernel hides, with drafts or without
    speculation_s: float = 0.3e-3  # the same of a step with drafts, on top
    # Of a card's memory that weights and KV may take; the rest is activations, graphs and room
    usable_frac: float = 0.9


ASSUMED = Assumptions()
FITTED = ("memory_frac", "layer_s", "fp8_layer_s", "tree_layer_s", "tile_passes", "level_layer_s")
_FP8_FROM = 89  # compute capability of the first cards with products in fp8


@dataclass(frozen=True)
class Placement:
    gpu: Gpu  # the card
    ranks: int = 1  # tensor-parallel ranks, one card each
    assumed: Assumptions = ASSUMED  # what a forward reaches of the card's peaks


def forward_seconds(
    shape: ModelShape, place: Placement, batch: int, rows: int, context: float, is_tree: bool = False
) -> float:
    """Return what one decode forward takes, in seconds (T_t, T_t^K or T_d).

    A request has `rows` query tokens, 1 to decode, K + 1 to verify K drafts (`is_tree`: those of a tree), and `context`
    tokens in its KV cache. Nothing is overlapped but bytes with products.
    """
    gpu, ranks, assumed = place.gpu, place.ranks, place.assumed
    bandwidth, flops = gpu.bandwidth * assumed.memory_frac, gpu.flops * assumed.flops_frac
    tokens = batch * rows
    matrices = max(
        shape.read_bytes(tokens) / ranks / bandwidth,
        2 * shape.active_params * tokens / ranks / (flops * _rate(shape, gpu)),
    )
    entry_bytes = 2 * shape.layers * _kv_heads(shape, ranks) * shape.head_dim * KV_BYTES
    products = 4 * shape.layers * shape.heads / ranks * shape.head_dim
    passes, tree_layer_s = _tree_reads(rows * shape.heads // shape.kv_heads, place) if is_tree else (1.0, 0.0)
    attention = max(passes * batch * context * entry_bytes / bandwidth, tokens * context * products / flops)
    by_bytes = {QUANTISATIONS[FP8]: assumed.fp8_layer_s, QUANTISATIONS[INT4]: assumed.int4_layer_s}
    layers = shape.layers * (by_bytes.get(shape.linear_bytes, assumed.layer_s) + tree_layer_s)
    return matrices + attention + layers + _all_reduces(shape, place, tokens)


def _tree_reads(num_rows: int, place: Placement) -> tuple[float, float]:
    """Return how often a tree's verification reads a KV cache, for so many rows of a KV head, and what a layer takes
    beside that: as tree attention cuts tiles, and with FlashAttention 3 where one tile holds all (Hopper).
    """
    is_hopper, assumed = place.gpu.arch == 90, place.assumed
    if is_hopper and num_rows <= TILE_ROWS:
        return 1.0, assumed.flash_tree_layer_s
    is_wide = place.gpu.arch in (90, 100) and -num_rows % TILE_ROWS < TILE_ROWS // 2
    tiles = -(-num_rows // (TILE_ROWS if is_wide else TILE_ROWS // 2))
    return max(1.0, tiles * (assumed.wide_tile_passes if is_wide else assumed.tile_passes)), assumed.tree_layer_s


def prefill_seconds(shape: ModelShape, place: Placement, tokens: float, video_tokens: float = 0.0) -> float:
    """Return what a model takes to read a prompt, in seconds: its tower or map sees `video_tokens`, whole videos, its
    decoder `tokens`, with attention over half the square. Weights alone have fp8's rate.
    """
    flops = place.gpu.flops * place.assumed.flops_frac * place.ranks
    attention = 2 * shape.layers * shape.heads * shape.head_dim * tokens**2
    products = 2 * shape.active_params * tokens / _rate(shape, place.gpu) + attention
    return (products + shape.vision_flops * video_tokens) / flops + _all_reduces(shape, place, tokens)


def _rate(shape: ModelShape, gpu: Gpu) -> int:
    """Return the rate of a model's products, of bf16's: in fp8 twice that, where a card has such."""
    return 2 if shape.linear_bytes == QUANTISATIONS[FP8] and gpu.arch >= _FP8_FROM else 1


def _kv_heads(shape: ModelShape, ranks: int) -> int:
    """Return the KV heads of a rank; where there are fewer than ranks, several have a copy of one."""
    return max(1, -(-shape.kv_heads // ranks))


def _all_reduces(shape: ModelShape, place: Placement, tokens: float) -> float:
    """Return the seconds of two ring all-reduces a layer, of one row of the residual stream a token."""
    ranks, gpu = place.ranks, place.gpu
    if ranks == 1:
        return 0.0
    moved = 2 * (ranks - 1) / ranks * tokens * shape.hidden * WEIGHT_BYTES
    return 2 * shape.layers * (gpu.link_latency_s + moved / (gpu.link_bandwidth * place.assumed.link_frac))


def weight_bytes(shape: ModelShape, ranks: int) -> float:
    return shape.weight_bytes / ranks


def kv_bytes(shape: ModelShape, ranks: int, batch: int, context: float) -> float:
    return batch * context * 2 * shape.layers * _kv_heads(shape, ranks) * shape.head_dim * KV_BYTES


@dataclass(frozen=True)
class MemorySplit:
    """What a card's memory holds, in bytes; of a parallel drafter's card the target's part is 0."""

    target_weights: float  # of this rank
    draft_weights: float  # of this rank; 0 where the target drafts for itself
    target_kv: float  # of all requests
    # The draft's KV pool; of a target that drafts for itself what is copied of the requests' KV, of a parallel drafter
    # what they take over the tokens that it sees
    draft_kv: float
    draft_media: float  # what the draft keeps of pictures: vision embeddings and pixels
    reserved: float  # what weights and KV may not take
    left: float  # of the card; negative: it does not fit

    @property
    def fits(self) -> bool:
        return self.left >= 0


def memory_split(
    place: Placement, target: tuple[float, float] = (0.0, 0.0), draft: tuple[float, float, float] = (0.0, 0.0, 0.0)
) -> MemorySplit:
    """Return what a card holds; `target` is weights and KV, `draft` weights, KV and media, all in bytes."""
    memory = place.gpu.memory_bytes
    reserved = (1 - place.assumed.usable_frac) * memory
    left = memory - reserved - sum(target) - sum(draft)
    return MemorySplit(target[0], draft[0], target[1], draft[1], draft[2], reserved, left)
