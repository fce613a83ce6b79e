"""The strict scorer: a draft token stands iff it is the token that the target samples there."""

from torch import Tensor

from vidspec_kernels import accept_chain
from vllm_vidspec.scoring.base import ScoreInputs


def score_strict(inputs: ScoreInputs) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix of each chain that the target itself samples; lossless at every temperature.

    Every emitted token is the target's own sample under vanilla's own noise: the accepted drafts because they equal it,
    and the one after them because it is emitted in the rejected draft's place (Gumbel-max coupling; Daliri, Musco,
    Suresh 2025, "Coupling without communication and drafter-invariant speculative decoding").

    Args:
        inputs: The verify step.

    Returns:
        `sampled` int64 `[num_reqs, K + 1]` and `num_sampled` int32 `[num_reqs]`, accepted drafts + 1.
    """
    return accept_chain(inputs.target_tokens, inputs.draft_tokens, inputs.cu_num_logits, inputs.max_drafts)
