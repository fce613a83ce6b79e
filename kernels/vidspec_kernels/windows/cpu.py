"""Loops of the two operations on draft windows."""

from vidspec_kernels.compiled import compiled


@compiled("int64[:], int32[:], int32[:, :], int32[:, :]")
def copy_committed_suffix(rows, num_tokens, text, out):
    num_last = out.shape[1] - 1
    for i in range(len(rows)):
        row = rows[i]
        length = num_tokens[row]
        out[i, 0] = length
        for j in range(num_last):
            out[i, 1 + j] = text[row, max(length - num_last + j, 0)]


@compiled("int32[:, :], int32[:, :], int64[:], int32[:], int32[:, :], int64[:, :], int32[:, :], int64, int64, int64")
def gather_draft_windows(streams, asked, rows, num_tokens, text, tokens, window_info, num_headers, stale, no_stream):
    size = streams.shape[1] - num_headers
    for i in range(len(rows)):
        row = rows[i]
        length, generation = num_tokens[row], streams[row, 0]
        # Stores, which no load of a stream is moved across.
        tokens[i], window_info[i, 0], window_info[i, 1] = 0, 0, no_stream
        checked, end = streams[row, 2], streams[row, 3]
        if generation & 1 or streams[row, 1] != asked[i, 0] or end <= 0:
            continue
        is_stale = length - checked > size
        for position in range(checked, min(length, checked + size)):
            if streams[row, num_headers + position % size] != text[row, position]:
                is_stale = True
        count = 0 if is_stale else min(max(end - length, 0), asked[i, 1])
        for k in range(count):
            tokens[i, k] = streams[row, num_headers + (length + k) % size]
        window_info[i, 0], window_info[i, 1] = count, stale if is_stale and end > length else 0
        if streams[row, 0] != generation:
            tokens[i], window_info[i, 0], window_info[i, 1] = 0, 0, stale
