"""Logits in blocks of rows, so that a large batch's scores over a large vocabulary never live at once."""

# Float32 scores of one block, of which a few live at a time. Some 440 rows of a vocabulary of 152,064: enough to keep
# the head's product bound by arithmetic, so blocks cost no time.
SCORE_BYTES = 256 * 2**20


def rows_per_block(vocab_size: int) -> int:
    """Return how many rows of so many scores a block has, at least one."""
    return max(1, SCORE_BYTES // (4 * vocab_size))


def blocks(num_rows: int, vocab_size: int) -> list[slice]:
    """Return the blocks of so many rows of scores; they follow from sizes that the host knows."""
    most = rows_per_block(vocab_size)
    return [slice(low, min(low + most, num_rows)) for low in range(0, num_rows, most)]
