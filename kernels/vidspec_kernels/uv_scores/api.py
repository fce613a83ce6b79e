"""uv_scores: ParallelVLM's unbiased visual scores from two layers' hidden states, in plain torch, a chunk at a time.

The double sum of eq. 2-4, score_i = sum_j sum_{l=1..L} (cos(V_i^l, X_j^l) - cos(V_i^{l-1}, X_j^{l-1})), telescopes
over layers and factors over text tokens: score_i = V̂_i^L . T^L - V̂_i^0 . T^0, V̂ unit rows, T^l the sum of layer l's
unit text rows. So a caller needs T of two layers (add up `uv_text_sum` over the chunks of a prompt) and, once the text
has passed, `uv_video_scores` of both. Where layer 0 is the input embeddings, T^0 is known from the prompt's token ids
before any forward, and layer 0's term needs no storage. The highest layer's video rows come before most of the text:
keep them in the model's dtype (they need not be unit rows); no float32 copy of more than _CHUNK_ROWS is made here.
"""

import torch
from torch import Tensor

_CHUNK_ROWS = 1024


def uv_text_sum(hidden: Tensor) -> Tensor:
    """Return the sum of the unit vectors of a chunk's text; sums of several chunks add up.

    Args:
        hidden: float [t, d], hidden states of the text tokens at one layer.

    Returns:
        float32 [d]; zeros where there is no text. A row of zeros counts as zeros.
    """
    total = torch.zeros(hidden.shape[1], dtype=torch.float32, device=hidden.device)
    for rows in hidden.split(_CHUNK_ROWS):
        wide = rows.to(torch.float32)
        total += _inverse_norm(wide) @ wide
    return total


def uv_video_scores(hidden: Tensor, text_sum: Tensor) -> Tensor:
    """Return one layer's term of the score, the sum over text tokens of their cosine with each video token.

    Args:
        hidden: float [m, d], hidden states of the video tokens at one layer.
        text_sum: float32 [d], `uv_text_sum` of the same layer.

    Returns:
        float32 [m]; 0 for a row of zeros. The score is this of the highest layer minus this of layer 0.
    """
    scores = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    for rows, part in zip(hidden.split(_CHUNK_ROWS), scores.split(_CHUNK_ROWS), strict=True):
        wide = rows.to(torch.float32)
        part.copy_(_inverse_norm(wide) * (wide @ text_sum))
    return scores


def _inverse_norm(rows: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(rows, dim=1)
    return torch.where(norm > 0, 1 / norm, 0.0)
