"""By what is kept of one request and given to another: who may see it, and what it depends on.

vLLM lets requests share a prefix's KV by a chain of hashes over tokens, media, LoRA adapter and `cache_salt`, by which
an operator keeps tenants apart. What hooks keep beside that KV is known by the same things, so that nothing goes
from one request to another which vLLM's own cache would not share.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_vidspec.engine.requests import NewRequest


def content_keys(request: NewRequest, shown: Sequence[Any], ends: Sequence[int]) -> list[bytes]:
    """Return a digest per image or video of all that the target computes up to its end, and for whom.

    Args:
        ends: `[n]` prompt index behind the last token of each.
    """
    digest = hashlib.sha256()

    def enter(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "little") + part)  # a client chooses salt and names: none runs into another

    enter(request.cache_salt.encode())
    enter(request.adapter.encode())
    token_ids, done, keys = np.asarray(request.token_ids, dtype=np.int64), 0, []
    wanted = {id(feature): end for feature, end in zip(shown, ends, strict=True)}
    for feature in request.features:  # what is not shown is observed all the same: audio, say
        enter(feature.identifier.encode())
        end = wanted.get(id(feature))
        if end is not None:
            enter(token_ids[done:end].tobytes())
            done = end
            keys.append(digest.digest())
    return keys
