"""The inputs and outputs of scoring."""

from typing import NamedTuple

from torch import Tensor

from vidspec_kernels import Looseness, Tally, TreeShapes


class ScoreInputs(NamedTuple):
    """One verify step of a batch.

    A request has one logits row for its root (the last committed token) and one for each draft token, in node order.

    Attributes:
        target_tokens: `[num_logits]` int64, what the target samples after the row's input token, under vanilla's noise.
        draft_tokens: `[num_logits]` int32 input token of each row; a draft token of -1 is invalid and never accepted.
        cu_num_logits: `[num_reqs + 1]` int32, where each request's rows begin.
        max_drafts: K, the most drafts that a request can have.
        trees: The drafts' shapes; None where all are chains.
        looseness: Which mismatches may be accepted; None: none.
        tally: Counters of the step, and what is kept of each row; None: nothing is counted.
    """

    target_tokens: Tensor
    draft_tokens: Tensor
    cu_num_logits: Tensor
    max_drafts: int
    trees: TreeShapes | None = None
    looseness: Looseness | None = None
    tally: Tally | None = None


class Scored(NamedTuple):
    """The accepted tokens of a batch.

    Attributes:
        sampled: `[num_reqs, K + 1]` int64 emitted tokens, zeros past `num_sampled`.
        num_sampled: `[num_reqs]` int32, accepted drafts + 1.
        path: `[num_reqs, K + 1]` int32: the node behind output j, and j itself past the accepted ones; None for chains.
        kinds: `[num_reqs, K + 1]` int8: why output j was accepted: 1 it is exact, 2 loosened, 3 shifted; 0: it is
            the target's own token, or there is none. None where all accepted drafts are exact.
    """

    sampled: Tensor
    num_sampled: Tensor
    path: Tensor | None = None
    kinds: Tensor | None = None
