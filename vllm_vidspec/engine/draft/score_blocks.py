"""Logits in blocks of rows, so that a large batch's scores over a large vocabulary never live at once; pure torch."""

from collections.abc import Callable
from typing import TypeVar

import torch

# Float32 scores of one block. A few such blocks live at a time: the model's logits, their processed float32 copy, the
# temporary of a softmax. Some 440 rows of a vocabulary of 152,064: enough to keep the head's product bound by
# arithmetic, so blocks cost no time; and a chain for 440 requests is one block.
SCORE_BYTES = 256 * 2**20

Scores = TypeVar("Scores", torch.Tensor, tuple[torch.Tensor, torch.Tensor])


def rows_per_block(vocab_size: int) -> int:
    """Return how many rows of so many scores a block has, at least one."""
    return max(1, SCORE_BYTES // (4 * vocab_size))


def in_blocks(score: Callable[[slice], Scores], num_rows: int, vocab_size: int) -> Scores:
    """Return what a function of a block of rows says of all of them; blocks follow from sizes that the host knows.

    Args:
        score: Rows -> a tensor, or a pair, of one entry a row.
        num_rows: Rows in all, >= 1.
        vocab_size: Scores of one row.
    """
    most = rows_per_block(vocab_size)
    parts = [score(slice(low, min(low + most, num_rows))) for low in range(0, num_rows, most)]
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)
    first, second = zip(*parts, strict=True)
    return torch.cat(first), torch.cat(second)
