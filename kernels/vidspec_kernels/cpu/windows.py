"""Loops of `text_tails` and `take_windows`."""

from torch import Tensor

from vidspec_kernels.cpu.compiled import compiled
from vidspec_kernels.windows import NUM_HEADERS


@compiled("int64[:], int32[:], int32[:, :], int32[:, :]")
def _text_tails(rows, num_tokens, text, out):
    num_last = out.shape[1] - 1
    for i in range(len(rows)):
        row = rows[i]
        length = num_tokens[row]
        out[i, 0] = length
        for j in range(num_last):
            out[i, 1 + j] = text[row, max(length - num_last + j, 0)]


def text_tails(rows: Tensor, num_tokens: Tensor, text: Tensor, out: Tensor) -> None:
    """Do what `text_tails` does."""
    _text_tails(rows.numpy(), num_tokens.numpy(), text.numpy(), out.numpy())


@compiled("int32[:, :], int64[:], int32[:], int32[:, :], int64[:, :], int32[:, :], int64")
def _take_windows(streams, rows, num_tokens, text, tokens, told, num_headers):
    size = streams.shape[1] - num_headers
    for i in range(len(rows)):
        row, checked, end, wanted = rows[i], streams[i, 1], streams[i, 2], streams[i, 3]
        length = num_tokens[row]
        is_stale = length - checked > size
        for position in range(checked, min(length, checked + size)):
            if streams[i, num_headers + position % size] != text[row, position]:
                is_stale = True
        count = 0 if is_stale else min(max(end - length, 0), wanted)
        for k in range(tokens.shape[1]):
            tokens[i, k] = streams[i, num_headers + (length + k) % size] if k < count else 0
        told[i, 0], told[i, 1] = count, is_stale and end > length


def take_windows(streams: Tensor, rows: Tensor, num_tokens: Tensor, text: Tensor, tokens: Tensor, told: Tensor) -> None:
    """Do what `take_windows` does."""
    arrays = (part.numpy() for part in (streams, rows, num_tokens, text, tokens, told))
    _take_windows(*arrays, NUM_HEADERS)
