"""The draft's KV pool: how much of a rank's KV memory it takes; the engine allocates it by this. Plain Python."""

import math

TEXT_SHARE = 0.05  # over the kept share: for text, of prompts and answers
# The pool has room for so many tokens of one request, if that takes no more than so much of the KV memory.
LEAST_TOKENS = 8192
MOST_LEAST_SHARE = 0.1
VISION_SHARE = 0.02  # of the KV memory, for the draft's vision embeddings
PIXEL_SHARE = 0.01  # of the KV memory, for pixels that the draft is to see: 25,000 tokens are 236 MB


def pool_bytes(
    available_bytes: int, target_token_bytes: float, draft_token_bytes: float, kept: float, max_tokens: int, block: int
) -> int:
    """Return the bytes of a pool that holds the pruned copy of all that the target's cache holds beside it.

    And at least one request of `LEAST_TOKENS`, or a pruned one of the longest context, `max_tokens`, as far as
    `MOST_LEAST_SHARE` goes, with the block that nobody gets. `available_bytes` is a rank's KV memory, target and draft
    together; `kept` is the share of a prompt's visual tokens that the draft sees, `block` tokens a KV block.
    """
    share = min(1.0, kept + TEXT_SHARE)
    by_share = int(available_bytes * share * draft_token_bytes / (target_token_bytes + share * draft_token_bytes))
    num_tokens = min(max_tokens, max(math.ceil(share * max_tokens), LEAST_TOKENS))
    least = int((-(-num_tokens // block) + 1) * block * draft_token_bytes)
    return max(by_share, min(least, int(MOST_LEAST_SHARE * available_bytes)))
