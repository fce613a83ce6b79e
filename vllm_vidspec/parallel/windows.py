"""Windows: the tokens of each stream that the target verifies next, if the stream agrees with what it has committed."""

from typing import NamedTuple

import numpy as np
import torch

from vllm_vidspec.parallel.tables import Tables

NUM_HEADERS = 4  # state, checked, end, wanted; the stream's ring behind them


class Windows(NamedTuple):
    """What the target may verify.

    Attributes:
        tokens: `[n, K]` int64, zeros behind the window.
        counts: `[n]` int32 tokens of the window.
        is_stale: `[n]` bool: the stream had said something else than was committed since.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    is_stale: torch.Tensor


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


def take_windows(
    streams: torch.Tensor, lengths: torch.Tensor, text: torch.Tensor, rows: torch.Tensor, most: int
) -> Windows:
    """Cut the next window out of each stream; no number of the host depends on what is in them.

    A stream agrees with the committed text up to `checked`, which the drafter has seen to; the tokens from there to the
    committed length are compared here. The window is what follows.

    Args:
        streams: `[n, NUM_HEADERS + R]` int32 as `snapshot` takes them.
        lengths: `[n]` int committed lengths.
        text: `[max_num_reqs, max_model_len]` int32 committed text.
        rows: `[n]` int64 persistent rows.
        most: K, the most that a window may have.
    """
    _, checked, end, wanted = (column[:, None].long() for column in streams[:, :NUM_HEADERS].unbind(1))
    ring = streams[:, NUM_HEADERS:]
    size, lengths = ring.shape[1], lengths.long()[:, None]
    steps = torch.arange(size, device=streams.device)
    since = checked + steps  # [n, R]
    said = ring.gather(1, since % size)
    committed = text[rows[:, None], since.clamp(max=text.shape[1] - 1)]
    # What lies further back than the ring reaches is unknown.
    is_stale = ((said != committed) & (since < torch.minimum(lengths, end))).any(dim=1, keepdim=True)
    is_stale |= lengths - checked > size
    counts = torch.minimum((end - lengths).clamp(min=0), wanted) * ~is_stale
    ahead = lengths + steps[:most]
    tokens = ring.gather(1, ahead % size).long() * (steps[:most] < counts)
    return Windows(tokens, counts[:, 0].int(), is_stale[:, 0] & (end > lengths)[:, 0])
