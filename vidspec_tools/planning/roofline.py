"""Rooflines: what a forward takes on given cards, from the bytes and products that it needs; plain Python.

A forward is its weights' matrices and its attention, one after the other; each takes the longer of its bytes and its
products, and launches and all-reduces come on top. Attention is that of a kernel that splits keys, as tree attention
does where vLLM's own does not. A prefill is its products alone. The vision tower is not modelled.
"""

from dataclasses import dataclass

from vidspec_tools.gpus import Gpu
from vidspec_tools.planning.shapes import KV_BYTES, WEIGHT_BYTES, ModelShape


@dataclass(frozen=True)
class Assumptions:
    """What is between a data sheet and a forward; none of it has been measured on a GPU by this project."""

    memory_frac: float = 0.8  # of the memory's peak that a whole forward reaches
    flops_frac: float = 0.6  # of the products' peak
    link_frac: float = 0.7  # of the link's peak
    launch_s: float = 1.5e-6  # from one kernel to the next, in a CUDA graph
    layer_launches: int = 12  # kernels of a decoder layer
    forward_launches: int = 10  # kernels of a forward beside its layers: inputs, head, the draw of a token
    step_s: float = 0.5e-3  # host time of a target's step that no kernel hides, with drafts or without
    speculation_s: float = 0.3e-3  # the same of a step with drafts, on top
    # Of a card's memory that weights and KV may take; the rest is activations, graphs and room
    usable_frac: float = 0.9


ASSUMED = Assumptions()


@dataclass(frozen=True)
class Placement:
    gpu: Gpu  # the card
    ranks: int = 1  # tensor-parallel ranks, one card each
    assumed: Assumptions = ASSUMED  # what a forward reaches of the card's peaks


def forward_seconds(shape: ModelShape, place: Placement, batch: int, rows: int, context: float) -> float:
    """Return what one decode forward takes, in seconds (T_t, T_t^K or T_d of METHODS' speed model).

    A request has `rows` query tokens, 1 to decode, K + 1 to verify K drafts, and `context` tokens in its KV cache.
    Nothing is overlapped but bytes with products.
    """
    gpu, ranks, assumed = place.gpu, place.ranks, place.assumed
    bandwidth, flops = gpu.bandwidth * assumed.memory_frac, gpu.flops * assumed.flops_frac
    tokens = batch * rows
    matrices = max(shape.read_bytes(tokens) / ranks / bandwidth, 2 * shape.active_params * tokens / ranks / flops)
    entry_bytes = 2 * shape.layers * _kv_heads(shape, ranks) * shape.head_dim * KV_BYTES
    products = 4 * shape.layers * shape.heads / ranks * shape.head_dim
    attention = max(batch * context * entry_bytes / bandwidth, tokens * context * products / flops)
    launches = (shape.layers * assumed.layer_launches + assumed.forward_launches) * assumed.launch_s
    return matrices + attention + launches + _all_reduces(shape, place, tokens)


def prefill_seconds(shape: ModelShape, place: Placement, tokens: float) -> float:
    """Return what the decoder takes to read a prompt, in seconds: its products, attention over half the square."""
    products = 2 * shape.active_params * tokens + 2 * shape.layers * shape.heads * shape.head_dim * tokens**2
    return products / place.ranks / (place.gpu.flops * place.assumed.flops_frac)


def _kv_heads(shape: ModelShape, ranks: int) -> int:
    """Return the KV heads of a rank; where there are fewer than ranks, several have a copy of one."""
    return max(1, -(-shape.kv_heads // ranks))


def _all_reduces(shape: ModelShape, place: Placement, tokens: int) -> float:
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
    draft_kv: float  # of all requests, over the tokens that the draft sees
    reserved: float  # what weights and KV may not take
    left: float  # of the card; negative: it does not fit

    @property
    def fits(self) -> bool:
        return self.left >= 0


def memory_split(
    place: Placement, target: tuple[float, float] = (0.0, 0.0), draft: tuple[float, float] = (0.0, 0.0)
) -> MemorySplit:
    memory = place.gpu.memory_bytes
    reserved = (1 - place.assumed.usable_frac) * memory
    return MemorySplit(target[0], draft[0], target[1], draft[1], reserved, memory - reserved - sum(target + draft))
