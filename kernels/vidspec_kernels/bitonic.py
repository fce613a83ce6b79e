"""The largest entries of groups, in order: bitonic top-k inside a Triton kernel, of int64 or float32."""

import triton
import triton.language as tl


@triton.jit
def merge_groups(x, DIMS: tl.constexpr, STAGE: tl.constexpr, DESCENDING: tl.constexpr):
    """Order groups of 2 ** STAGE bitonic entries of x, [2] * DIMS: the last axis is bit 0 of an entry's index.

    DESCENDING is 0, 1, or None where the order alternates from group to group. The network is tl.sort's own, whose xor
    reductions take the interpreter half a second a tile.
    """
    flip = DESCENDING
    if DESCENDING is None:
        flip = tl.reshape(tl.arange(0, 2), [1] * (DIMS - 1 - STAGE) + [2] + [1] * STAGE)
    for i in tl.static_range(STAGE):
        # A pair's sum less one of it is the other, modulo 2 to the number of bits: this moves bits, it does not round.
        if x.dtype == tl.float32:
            bits = x.to(tl.int32, bitcast=True)
            other = (tl.sum(bits, axis=DIMS - STAGE + i, keep_dims=True) - bits).to(tl.float32, bitcast=True)
        else:
            other = tl.sum(x, axis=DIMS - STAGE + i, keep_dims=True) - x
        is_right = tl.reshape(tl.arange(0, 2), [1] * (DIMS - STAGE + i) + [2] + [1] * (STAGE - 1 - i))
        x = tl.where((x > other) != (is_right ^ flip).to(tl.int1), other, x)
    return x


@triton.jit
def largest(
    x,
    DIMS: tl.constexpr, LOG_WIDTH: tl.constexpr, LOG_TOP: tl.constexpr, DESCENDING: tl.constexpr,
    ALTERNATE: tl.constexpr,
):  # fmt: skip
    """Return the 2 ** LOG_TOP largest of each 2 ** LOG_WIDTH entries of x, [2] * DIMS, in order; LOG_TOP >= 1.

    Bitonic top-k: of two groups, one ordered the other way round, the larger of each pair are the largest of both.
    ALTERNATE says that groups of 2 ** LOG_TOP entries are ordered so already. Returns
    [2] * (DIMS - LOG_WIDTH + LOG_TOP).
    """
    if not ALTERNATE:
        for i in tl.static_range(1, LOG_TOP + 1):
            x = merge_groups(x, DIMS, i, None if i < LOG_WIDTH else DESCENDING)
    for i in tl.static_range(LOG_TOP + 1, LOG_WIDTH + 1):
        x = tl.max(x, axis=DIMS - i)
        x = merge_groups(x, DIMS - i + LOG_TOP, LOG_TOP, None if i < LOG_WIDTH else DESCENDING)
    return x
