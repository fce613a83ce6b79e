"""What the drafter is told and answers; no runner object crosses, so that it can live in another process."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_vidspec.drafting import DraftTree


@dataclass(frozen=True)
class PrefillMessage:
    """A request whose target prefill is done.

    Attributes:
        req_id: vLLM's request id, for the log.
        req_state_idx: Its persistent row.
        token_ids: Prompt, and after a preemption the output so far.
        features: vLLM's multimodal features in prompt order.
        scores: The target's guidance, one float32 `[m]` CPU tensor per feature; None where there is none.
        outcome: Counters to add to once the draft is shown the prompt: what came of the guidance.
    """

    req_id: str
    req_state_idx: int
    token_ids: list[int]
    features: list[Any]
    scores: list[torch.Tensor] | None = None
    outcome: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrefillStep:
    """A step of the running requests, as those of them see it whose prompts the draft has not seen whole.

    Attributes:
        idx_mapping_np: `[num_reqs]` int persistent rows.
        num_tokens_upper_bound: `[num_reqs]` host bound of their committed lengths, the target's last token included.
        text: `[max_num_reqs, max_model_len]` int32 committed text by persistent row, on the device.
    """

    idx_mapping_np: np.ndarray
    num_tokens_upper_bound: np.ndarray
    text: torch.Tensor


@dataclass(frozen=True)
class Prefilled:
    """What came of a step of prefilling.

    Attributes:
        ready: Persistent rows that can be drafted for from this step on.
        failed: Those that will not be; they are counted.
    """

    ready: list[int]
    failed: list[int]


@dataclass(frozen=True)
class DraftMessage:
    """A step of the running requests; its `num_tokens` commit what the target accepted.

    Attributes:
        idx_mapping: `[num_reqs]` int64 persistent rows; `idx_mapping_np` the same on the host.
        last_tokens: `[num_reqs, 2]` int64, the committed text's last two tokens.
        num_tokens: `[max_num_reqs]` int32 committed length by persistent row, the target's last token included.
        num_tokens_upper_bound: `[num_reqs]` host bound of `num_tokens`.
        num_accepted: `[num_reqs]` int32 drafts of the last step that stand.
        was_verified: `[num_reqs]` bool: the last step had drafts to verify, so that `num_accepted` tells something;
            None where it does of all.
        path: `[num_reqs, K + 1]` int32 their nodes, from output 1 on; None where only chains are drafted.
        max_drafts: Draft tokens to propose at most; `shape` in which shape ("chain", "tree-static", "tree-adaptive").
    """

    idx_mapping: torch.Tensor
    idx_mapping_np: np.ndarray
    last_tokens: torch.Tensor
    num_tokens: torch.Tensor
    num_tokens_upper_bound: np.ndarray
    num_accepted: torch.Tensor
    was_verified: torch.Tensor | None
    path: torch.Tensor | None
    max_drafts: int
    shape: str = "chain"


@dataclass(frozen=True)
class Drafts:
    """What was proposed.

    Attributes:
        tokens: `[num_reqs, <= K]` int64.
        tree: Their shapes, by batch row; None for chains.
    """

    tokens: torch.Tensor
    tree: DraftTree | None = None
