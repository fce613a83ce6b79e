"""The scorers: strict, and LVSpec's, FLy's and a random one that accept mismatches; one walk, a rule per request."""

from typing import NamedTuple

import torch
from torch import Tensor

from vidspec_kernels import LOWEST, WINDOW, Looseness, Tally, TreeShapes, accept

TOP_N = 10  # video tokens whose mean cosine with a draft is its relevance (LVSpec eq. 8)
FLY_TOP_K = 3  # the most likely tokens, whose part of the entropy counts: vLLM's own FLy
# Every scorer, and by what it accepts a mismatch; `position_shift` adds SHIFT to LVSpec's.
RULES = {"strict": 0, "loose": LOWEST, "random": LOWEST, "fly": WINDOW, "fly-entropy": WINDOW}


class ScoreInputs(NamedTuple):
    """One verify step of a batch; a request has a logits row for its root (the last committed token) and each draft."""

    target_tokens: Tensor  # `[num_logits]` int64 samples of the target after each row, under vanilla's noise
    draft_tokens: Tensor  # `[num_logits]` int32 input token of each row; -1 is invalid and never accepted
    cu_num_logits: Tensor  # `[num_reqs + 1]` int32, where each request's rows begin
    max_drafts: int  # K, the most drafts that a request can have
    trees: TreeShapes | None = None  # The drafts' shapes; None where all are chains
    looseness: Looseness | None = None  # Which mismatches may be accepted; None: none
    tally: Tally | None = None  # Counters of the step, and what is kept of each row; None: nothing is counted


class Scored(NamedTuple):
    """The accepted tokens of a batch."""

    sampled: Tensor  # `[num_reqs, K + 1]` int64 emitted tokens, zeros past `num_sampled`
    num_sampled: Tensor  # `[num_reqs]` int32, accepted drafts + 1
    path: Tensor | None = None  # `[num_reqs, K + 1]` int32 node behind output j, past the accepted j; None: chains
    # `[num_reqs, K + 1]` int8: why output j was accepted: 1 it is exact, 2 loosened, 3 shifted; 0: it is the target's
    # own token, or there is none. None where all accepted drafts are exact.
    kinds: Tensor | None = None


def score(inputs: ScoreInputs) -> Scored:
    """Accept the longest path, of equals the first, of drafts that are exact or may mismatch (LVSpec eq. 9-11; FLy).

    Under `strict`, and without looseness, that is the longest path from the root that the target itself samples, which
    is lossless at every temperature: every emitted token is then the target's own sample under vanilla's own noise
    (Gumbel-max coupling; Daliri, Musco, Suresh 2025, "Coupling without communication and drafter-invariant speculative
    decoding"). An accepted mismatch emits the draft's token; what follows it is the target's sample given that token.
    """
    return Scored(*accept(*inputs))


def top_entropy(logits: Tensor, top_k: int = 0) -> Tensor:
    """Return the part of each row's entropy, `[n]` float32 nats, that its `top_k` likeliest tokens make; 0: all."""
    logits = logits.float()
    if not 0 < top_k < logits.shape[1]:
        return torch.special.entr(logits.softmax(dim=1)).sum(dim=1)
    top = logits.topk(top_k, dim=1).values - logits.logsumexp(dim=1, keepdim=True)
    return torch.special.entr(top.exp()).sum(dim=1)
