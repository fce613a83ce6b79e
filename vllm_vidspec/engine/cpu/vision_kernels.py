"""Numpy twin of a kernel of vLLM's vision towers: see `batch_kernels`. CPU engine only."""

import numpy as np

_F32 = np.float32


def bilinear_pos_embed(
    grid,
    embed,  # [NUM_GRID ** 2, HIDDEN_DIM] float32
    output,  # [t * H * W, HIDDEN_DIM], out
    H,
    W,
    h_scale,
    w_scale,
    NUM_GRID,
    M_SIZE,
    HIDDEN_DIM,
    BLOCK_D,
) -> None:
    """Twin of `vllm.model_executor.models.qwen3_vl._bilinear_pos_embed_kernel`, in the order of merged patches."""
    place = np.arange(H * W)
    block, local = place // M_SIZE**2, place % M_SIZE**2
    row, col = block // (W // M_SIZE) * M_SIZE + local // M_SIZE, block % (W // M_SIZE) * M_SIZE + local % M_SIZE
    h, w = row.astype(_F32) * _F32(h_scale), col.astype(_F32) * _F32(w_scale)
    low, left = np.floor(h).astype(np.int32), np.floor(w).astype(np.int32)
    high, right = np.minimum(low + 1, NUM_GRID - 1), np.minimum(left + 1, NUM_GRID - 1)
    dh, dw = h - low.astype(_F32), w - left.astype(_F32)
    both = dh * dw
    corners = (
        (_F32(1) - dh - (dw - both), low, left),
        (dw - both, low, right),
        (dh - both, high, left),
        (both, high, right),
    )
    frame = np.zeros((len(place), HIDDEN_DIM), dtype=_F32)
    for share, y, x in corners:
        frame += share[:, None] * embed[y * NUM_GRID + x]
    output.reshape(-1, len(place), HIDDEN_DIM)[:] = frame
