"""Loop of `path_penalties`."""

import numpy as np

from vidspec_kernels.compiled import compiled


@compiled(
    "float32[:, :], int64[:], int32[:], int32[:], int32[:, :], float32[:], float32[:], float32[:], int32[:, :], "
    "int32[:, :]"
)
def path_penalties(
    logits, req_rows, nodes, tokens, parents, repetition, frequency, presence, prompt_bits, output_counts
):  # fmt: skip
    vocab_size, one = logits.shape[1], np.float32(1.0)
    counts = np.zeros(vocab_size, dtype=np.int32)
    for i in range(len(req_rows)):
        row, node = req_rows[i], nodes[i]
        rep, freq, pres = repetition[row], frequency[row], presence[row]
        if rep == one and freq == 0.0 and pres == 0.0:
            continue
        first = i - node
        counts[:] = output_counts[row, :vocab_size]
        while node > 0:
            token = tokens[first + node]
            if 0 <= token < vocab_size:
                counts[token] += 1
            node = min(parents[row, node], node - 1)
        for v in range(vocab_size):
            value, is_seen = logits[i, v], counts[v] > 0
            if rep != one and (is_seen or (prompt_bits[row, v // 32] >> (v % 32)) & 1):
                value *= one / rep if value > 0 else rep
            value -= freq * np.float32(counts[v])
            logits[i, v] = value - pres * (one if is_seen else np.float32(0.0))
