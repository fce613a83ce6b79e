"""The strict scorer: a draft token stands iff it is the token that the target samples there."""

from vidspec_kernels import accept
from vllm_vidspec.scoring.base import Scored, ScoreInputs


def score_strict(inputs: ScoreInputs) -> Scored:
    """Accept the longest path from the root that the target itself samples; lossless at every temperature.

    Every emitted token is the target's own sample under vanilla's own noise: the accepted drafts because they equal it,
    and the one after them because it is emitted in the rejected draft's place (Gumbel-max coupling; Daliri, Musco,
    Suresh 2025, "Coupling without communication and drafter-invariant speculative decoding").

    Args:
        inputs: The verify step.

    Returns:
        What stands; of a tree's matching paths the longest, the first of equals.
    """
    return Scored(
        *accept(inputs.target_tokens, inputs.draft_tokens, inputs.cu_num_logits, inputs.max_drafts, inputs.trees)
    )
