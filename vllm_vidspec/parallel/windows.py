"""Windows: what streams say, as the target's devices take it: `vidspec_kernels.take_windows` cuts the windows."""

import numpy as np

from vidspec_kernels import NUM_HEADERS
from vllm_vidspec.parallel.tables import Tables


def snapshot(tables: Tables, idx_mapping_np: np.ndarray, epochs: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return what the streams of `[n]` rows say now, in one array that ranks can hand to each other.

    Args:
        tables: Shared with the drafter.
        idx_mapping_np: `[n]` persistent rows.
        epochs: `[n]` whose streams are meant: those of others say nothing.
        wanted: `[n]` tokens that a window may have.

    Returns:
        `[n, NUM_HEADERS + R]` int32.
    """
    out = np.empty((len(idx_mapping_np), NUM_HEADERS + tables.sizes.ring), dtype=np.int32)
    is_ours = tables.stream_epoch[idx_mapping_np] == epochs
    out[:, 0] = tables.state[idx_mapping_np] * is_ours
    # The end before the tokens: what the drafter appends meanwhile is not looked at.
    out[:, 1], out[:, 2] = tables.checked[idx_mapping_np], tables.end[idx_mapping_np] * is_ours
    out[:, 3] = wanted
    out[:, NUM_HEADERS:] = tables.tokens[idx_mapping_np]
    return out
