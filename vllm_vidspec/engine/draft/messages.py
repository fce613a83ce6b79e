"""What the drafter receives and answers; no runner object crosses, so that it can live in another process."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_vidspec.drafting import DraftTree
from vllm_vidspec.engine.target_pruning import Placed


@dataclass(frozen=True)
class PrefillMessage:
    """A request whose target prefill is done."""

    req_id: str  # vLLM's request id, for the log
    req_state_idx: int
    token_ids: list[int]  # prompt, and after a preemption the output so far
    features: list[Any]  # vLLM's multimodal features in prompt order
    scores: list[torch.Tensor] | None = None  # the target's guidance, float32 [m] on the CPU by feature, or None
    outcome: tuple[str, ...] = ()  # counters to add to once the drafter has the prompt: what came of the guidance
    placed: Placed | None = None  # where the target has put the prompt, if it prunes videos itself; else None
    prune_variant: int = 0  # by which of `PruneKnobs.variants` it is pruned


class Admission(IntEnum):
    """What the drafter says to a request."""

    REFUSED = 0  # it will not be drafted for, and is counted by reason
    ADMITTED = 1
    FULL = 2  # there is no room for its prompt at present


@dataclass(frozen=True)
class PrefillStep:
    """A step of the running requests, as those of them see it whose prompts the draft has not seen whole."""

    idx_mapping_np: np.ndarray  # [num_reqs] int persistent rows
    num_tokens_upper_bound: np.ndarray  # [num_reqs] bound of their committed lengths, the last token included
    text: torch.Tensor  # [max_num_reqs, max_model_len] int32 committed text by persistent row, on the device


@dataclass(frozen=True)
class Prefilled:
    """What came of a step of prefilling."""

    ready: list[int]  # persistent rows that can be drafted for from this step on
    failed: list[int]  # those that will not be; they are counted


class Committed(NamedTuple):
    """The target's tables of what is committed, by persistent row, on the device; the drafter reads them."""

    num_tokens: torch.Tensor  # [max_num_reqs] int32 committed length, the target's last token included
    text: torch.Tensor  # [max_num_reqs, max_model_len] int32 committed text
    last_sampled: torch.Tensor  # [max_num_reqs, 1] int64 its last token
    # [max_num_reqs, K + 1] int32 nodes of the last trees that stand, from output 1 on; None where drafts are chains
    path: torch.Tensor | None


class DraftMessage(NamedTuple):
    """A step of the running requests. What the target has committed stands in its tables (`Committed`)."""

    batch_rows: torch.Tensor  # [num_reqs] int64 persistent rows of the target's batch
    picked: torch.Tensor | None  # [n] int64 batch rows of the requests that are drafted for; None: all of them are
    idx_mapping_np: np.ndarray  # [n] their persistent rows on the host
    num_sampled: torch.Tensor  # [num_reqs] int32 drafts of the last step that stand, and the target's own token
    was_verified: torch.Tensor | None  # [n] bool: the last step had drafts to verify; None where all had
    max_drafts: int  # draft tokens to propose at most
    shape: str = "chain"  # in which shape ("chain", "tree-static", "tree-adaptive")
    draft_batch: object | None = None  # what is derived from the rows holds while this is the same; None: never


class Drafts(NamedTuple):
    """What was proposed; it lives in the drafter's buffers, until its next step."""

    rows: torch.Tensor  # [n] int64 persistent rows
    tokens: torch.Tensor  # [n, K] int64, of which `max_drafts` columns or a tree's nodes mean something
    tree: DraftTree | None = None  # their shapes, by place in `rows`; None for chains
