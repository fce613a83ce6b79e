"""tree_attention: one layer, against FlashAttention with our nodes merged in, FlexAttention, xformers' tree attention
and SDPA (`peers/attention.py`).

`note` is why a peer cannot run. The floor counts K and V of context and nodes read once, q read and out
written, and the two products. Of large trees it is the products: 65 nodes of 7 heads on a KV head are 455 rows for
every key.
"""

from typing import Any

from bench_kernels import ON_GPU, Case
from peers.attention import Inputs, bind

AXES: dict[str, list[Any]] = {
    "shape": ["28x4x128"] if ON_GPU else ["4x2x32"],  # heads, KV heads, head size
    "context": [1000, 8000, 25000, 100000] if ON_GPU else [400, 1500],
    "num_reqs": [1, 4, 16, 32] if ON_GPU else [1, 8],
    "nodes": [8, 25, 64] if ON_GPU else [8, 25],
}
ROUNDS = 21


def case(shape: str, context: int, num_reqs: int, nodes: int) -> Case:
    """Return the case, with the peers that run here and why the others do not."""
    num_heads, num_kv_heads, head_size = map(int, shape.split("x"))
    inputs = Inputs(context, num_reqs, nodes, num_heads, num_kv_heads, head_size)
    bound, notes = bind(inputs)
    return Case(
        {name: call for name, (call, _) in bound.items()},
        2 * (inputs.dense_keys.nbytes + inputs.query.nbytes),
        4 * inputs.query.numel() * inputs.seen.shape[1],
        inputs.dtype,
        {name: tokens for name, (_, tokens) in bound.items()},
        notes,
    )
