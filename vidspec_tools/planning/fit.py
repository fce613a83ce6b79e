"""How many requests of a video a card holds beside a draft; plain Python."""

from dataclasses import dataclass

from vidspec_tools.planning.roofline import ASSUMED, kv_bytes, weight_bytes
from vllm_vidspec.planning.pool import PIXEL_SHARE, VISION_SHARE, pool_bytes
from vllm_vidspec.planning.shapes import ModelShape

CONTEXT = 25_000 + 512  # tokens of a request: video and text
KEPT = 0.2  # of images, which have the lower ratio by default: what the engine sizes its pool by
BLOCK = 16  # tokens of a KV block


@dataclass(frozen=True)
class Fit:
    """What a card holds of requests of one video.

    Attributes:
        vanilla: Requests without a draft; 0: the target does not start, or holds no request.
        drafted: Requests with one; None: ranks cannot share the draft's heads.
        pool_tokens: That the draft's pool holds, pruned; the longest request that is drafted for.
    """

    vanilla: int
    drafted: int | None
    pool_tokens: int = 0

    def __str__(self) -> str:
        """Return a cell of a table."""
        drafted = "-" if self.drafted is None else str(self.drafted)
        return f"{drafted} of {self.vanilla}" if self.vanilla else "-"


def fit(target: ModelShape, draft: ModelShape, ranks: int, memory_bytes: float) -> Fit:
    """Return how many requests of a video are in a rank's KV cache at a time.

    KV memory = usable share x card - weights; with a draft less its weights, the cache of vision embeddings and the
    draft's pool, which the engine sizes by the same function. A request takes its tokens' KV in the target's cache.

    Args:
        target: The target.
        draft: The draft.
        ranks: Tensor-parallel ranks of both.
        memory_bytes: Of a card.
    """
    free = ASSUMED.usable_frac * memory_bytes - weight_bytes(target, ranks)
    request = kv_bytes(target, ranks, 1, CONTEXT)
    vanilla = max(0, int(free // request))
    if not draft.is_shared_by(ranks):
        return Fit(vanilla, None)
    free = (1 - VISION_SHARE - PIXEL_SHARE) * (free - weight_bytes(draft, ranks))
    if free <= 0:
        return Fit(vanilla, 0)
    token = kv_bytes(draft, ranks, 1, 1)
    pool = pool_bytes(int(free), kv_bytes(target, ranks, 1, 1), token, KEPT, CONTEXT, BLOCK)
    return Fit(vanilla, max(0, int((free - pool) // request)), int(pool / token) - BLOCK)
