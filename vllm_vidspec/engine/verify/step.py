"""VerifyStep and VerifySlice: what the verifier knows of a batch, and of the part of it that it sees at once."""

from typing import NamedTuple

import numpy as np
import torch

from vllm_vidspec.scoring import TreeShapes


class VerifySlice(NamedTuple):
    """Requests that are verified at once: one row of logits for a request's root, one for each node of its draft."""

    idx_mapping: torch.Tensor  # [num_reqs] int64 persistent rows
    idx_mapping_np: np.ndarray  # the same on the host
    cu_num_logits: torch.Tensor  # [num_reqs + 1] int32, where each request's rows begin
    num_logits_np: np.ndarray  # [num_reqs] rows of each request
    expanded_idx_mapping: torch.Tensor  # [num_logits] persistent row of each row's request
    nodes: torch.Tensor  # [num_logits] each row's node in the request's draft
    pos: torch.Tensor  # [num_logits] position of each row's input token in the text that it belongs to
    drafts: torch.Tensor  # [num_logits] int32 that input token; -1 where it is an invalid draft
    relevance: torch.Tensor | None  # [num_logits] float32 of each row's state, NaN: not measured; None: not needed
    shapes: TreeShapes | None  # of the drafts; None where all are chains


class VerifyStep:
    """A batch on its way through the verifier, slice by slice; `[num_tokens, hidden_size]` states to measure on."""

    def __init__(self, hidden_states: torch.Tensor | None = None):
        self.hidden_states = hidden_states
        self.logprobs_dims: tuple[int, int] | None = None  # of the batch, as vLLM's `Sampler.get_logprobs_dims` says
        self.slice: VerifySlice | None = None  # the last
        self.output_order: torch.Tensor | None = None  # [num_logits] row behind each output of the last slice
        self._cu_num_logits_np: np.ndarray | None = None  # of the requests whose slices come next
        self._relevance: torch.Tensor | None = None

    def open(self, cu_num_logits_np: np.ndarray, relevance: torch.Tensor | None) -> None:
        self._cu_num_logits_np, self._relevance = cu_num_logits_np, relevance
        self.hidden_states = None  # they have been measured

    def advance(self, num_reqs: int, num_logits: int) -> tuple[np.ndarray, torch.Tensor | None]:
        """Return `[num_reqs]` rows of each of the next requests, and their `[num_logits]` relevance."""
        bounds = self._cu_num_logits_np
        assert bounds is not None, "a slice of a batch that was not opened"
        num_logits_np = bounds[1 : num_reqs + 1] - bounds[:num_reqs]
        self._cu_num_logits_np = bounds[num_reqs:]
        relevance, self.output_order = self._relevance, None
        if relevance is not None:
            relevance, self._relevance = relevance.tensor_split((num_logits,))
        return num_logits_np, relevance
