"""Sets of token ids as bit tables, one row per set: the tokens that no accepted mismatch may add or drop."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

_WORD_BITS = 32


def num_words(vocab_size: int) -> int:
    """Return the size in int32 words of a set of a vocabulary's tokens."""
    return -(-vocab_size // _WORD_BITS)


def pack_ids(ids: Iterable[int], num_words: int) -> np.ndarray:
    """Return `[num_words]` int32 with one bit per token id. Ids beyond are left out."""
    bits = np.zeros(num_words * _WORD_BITS, dtype=bool)
    bits[[i for i in ids if i < len(bits)]] = True
    return np.packbits(bits, bitorder="little").view(np.int32).copy()


def ids_of_words(
    words: Iterable[str], with_digits: bool, vocab: Mapping[str, int], text_of: Callable[[str], str]
) -> set[int]:
    """Return the ids of the tokens that are one of some words, in any case, spaces aside, or that have a digit."""
    wanted, ids = {word.strip().lower() for word in words}, set()
    for token, i in vocab.items():
        text = text_of(token).strip().lower()
        if text in wanted or (with_digits and any(letter.isdigit() for letter in text)):
            ids.add(i)
    return ids
