"""Sampling parameters that look back (penalties, bad words, …) applied to tree nodes, each with its own path."""

from collections.abc import Callable

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_vidspec.engine.compat import expect_parameters
from vllm_vidspec.scoring import TreeShapes

_NUM_NATIVE_PROCESSORS = 3  # logit bias, penalties, bad words


class PathSampler:
    """Samples tree nodes through vLLM's own sampler when that must know the tokens before a node.

    vLLM's kernels take the drafts before a logits row from the rows before it, which holds for chains. So each node
    gets a segment of rows of its own, its path laid out as a chain that ends in it, and only the last row of the
    segment is of interest: the arithmetic stays vLLM's, bit for bit, at depth + 1 times the memory, for such requests
    alone.

    Args:
        sampler: The runner's.
        max_depth: Most drafts on a path.
    """

    def __init__(self, sampler: Sampler, max_depth: int):
        self._sampler = sampler
        self._max_depth = max_depth
        natives = sampler.logits_processors[:_NUM_NATIVE_PROCESSORS]
        self._penalties, self._bad_words = natives[1:]
        self._has_custom = len(sampler.logits_processors) > _NUM_NATIVE_PROCESSORS
        expect_parameters(
            Sampler.sample,
            *("logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos", "input_ids"),
            *("expanded_local_pos", "seq_lens_upper_bound_np", "return_logprobs"),
        )

    def _looks_back(self, idx_mapping_np: np.ndarray) -> np.ndarray:
        """Return `[n]` bool: the request's parameters depend on its drafts."""
        looks = self._penalties.use_penalty[idx_mapping_np] | (self._bad_words.num_bad_words.np[idx_mapping_np] > 0)
        thinking = self._sampler.thinking_budget_state
        if thinking.enabled:
            looks |= thinking.use_thinking_budget[idx_mapping_np]
        return np.ones_like(looks) if self._has_custom else looks

    def are_needed(self, idx_mapping_np: np.ndarray) -> bool:
        """Whether any of `[n]` persistent rows needs its nodes' paths."""
        return bool(self._looks_back(idx_mapping_np).any())

    def over(
        self, shapes: TreeShapes, cu_num_logits: torch.Tensor, counts_np: np.ndarray, depths: torch.Tensor
    ) -> Callable:
        """Return a replacement of `Sampler.sample` for one batch.

        Args:
            shapes: Of the batch's drafts.
            cu_num_logits: `[num_reqs + 1]` int32; `counts_np` `[num_reqs]` the rows of each request on the host.
            depths: `[num_logits]` int32 depth of each row's node.
        """

        def sample(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            input_ids,
            local_pos,
            bound_np,
            return_logprobs,
        ):
            looks = self._looks_back(idx_mapping_np)
            by_row = np.repeat(looks, counts_np)
            some, others = (async_tensor_h2d(np.flatnonzero(x), device=logits.device) for x in (looks, ~looks))
            tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
            processed = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
            plain = np.flatnonzero(~by_row)
            if len(plain):
                rows = async_tensor_h2d(plain, device=logits.device)
                tokens[rows], processed[rows] = self._sampler.sample(
                    logits[rows],
                    expanded_idx_mapping[rows],
                    idx_mapping[others],
                    idx_mapping_np[~looks],
                    pos[rows],
                    input_ids[rows],
                    local_pos[rows],
                    bound_np[~looks],
                    return_logprobs=return_logprobs,
                )
            length = min(self._max_depth, int(counts_np.max()) - 1) + 1
            per_chunk = max(1, get_max_chunk_logits(logits.shape[1]) // length)
            chained = np.flatnonzero(by_row)
            for start in range(0, len(chained), per_chunk):
                rows = async_tensor_h2d(chained[start : start + per_chunk], device=logits.device)
                tokens[rows], processed[rows] = self._sample_segments(
                    logits, rows, length, expanded_idx_mapping, idx_mapping[some], idx_mapping_np[looks], pos,
                    input_ids, local_pos, bound_np[looks], return_logprobs, shapes, depths,
                )  # fmt: skip
            return tokens, processed

        return sample

    def _sample_segments(
        self,
        logits: torch.Tensor,  # [num_logits, vocab_size]
        rows: torch.Tensor,  # [n] int64 logits rows to sample
        length: int,  # of each segment
        expanded_idx_mapping: torch.Tensor,  # [num_logits]
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,  # [num_logits]
        input_ids: torch.Tensor,  # [num_logits]
        local_pos: torch.Tensor,  # [num_logits]
        bound_np: np.ndarray,
        return_logprobs: bool,
        shapes: TreeShapes,
        depths: torch.Tensor,  # [num_logits]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `[n]` tokens and `[n, vocab_size]` processed logits."""
        state_rows, node = expanded_idx_mapping[rows], local_pos[rows].long()
        first = rows - node  # the root's row
        num_rows = len(rows) * length
        segments = logits.new_zeros(num_rows, logits.shape[1])
        segments[length - 1 :: length] = logits[rows]
        ids = input_ids.new_zeros(len(rows), length)
        # The path, from the node up to the root; columns left of the root repeat it and are not read.
        for column in range(length - 1, -1, -1):
            ids[:, column] = input_ids[first + node]
            node = shapes.parents[state_rows, node].clamp(min=0).long()
        back = local_pos.new_zeros(len(rows), length)
        back[:, -1] = depths[rows]
        where = pos.new_zeros(len(rows), length)
        where[:, -1] = pos[rows]
        tokens, processed = self._sampler.sample(
            segments,
            state_rows.repeat_interleave(length),
            idx_mapping,
            idx_mapping_np,
            where.flatten(),
            ids.flatten(),
            back.flatten(),
            bound_np,
            return_logprobs=return_logprobs,
        )
        return tokens[length - 1 :: length], processed[length - 1 :: length]
