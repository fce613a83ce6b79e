"""Sampling parameters that look back (penalties, bad words, …) applied to tree nodes, each with its own path."""

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_vidspec.engine.compat.contract import expect_parameters
from vllm_vidspec.engine.verify.step import VerifySlice

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

    def sample(
        self, part: VerifySlice, logits: torch.Tensor, input_ids: torch.Tensor, bound_np: np.ndarray, **options: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `[num_logits]` int64 tokens and `[num_logits, vocab_size]` processed logits, as vLLM's sampler does.

        Args:
            part: The requests and their drafts.
            logits: `[num_logits, vocab_size]`.
            input_ids: `[num_logits]` each row's input token.
            bound_np: `[num_reqs]` vLLM's bound of each sequence's length.
            options: vLLM's own.
        """
        if part.shapes is None or not (looks := self._looks_back(part.idx_mapping_np)).any():
            return self._sampler.sample(
                logits, part.expanded_idx_mapping, part.idx_mapping, part.idx_mapping_np, part.pos, input_ids,
                part.nodes, bound_np, **options,
            )  # fmt: skip
        by_row, device = np.repeat(looks, part.num_logits_np), logits.device
        tokens = torch.empty(len(logits), dtype=torch.int64, device=device)
        processed = torch.empty(logits.shape, dtype=torch.float32, device=device)
        longest = min(self._max_depth, int(part.num_logits_np.max()) - 1) + 1
        for looking, length in ((False, 1), (True, longest)):  # who does not look back needs no path
            reqs_np, rows_np = np.flatnonzero(looks == looking), np.flatnonzero(by_row == looking)
            idx_mapping = part.idx_mapping[async_tensor_h2d(reqs_np, device=device)]
            per_chunk = max(1, get_max_chunk_logits(logits.shape[1]) // length)
            for start in range(0, len(rows_np), per_chunk):
                rows = async_tensor_h2d(rows_np[start : start + per_chunk], device=device)
                segments, of_segments, pos, ids, local_pos = self._segments(part, logits, input_ids, rows, length)
                sampled = self._sampler.sample(
                    segments, of_segments, idx_mapping, part.idx_mapping_np[reqs_np], pos, ids, local_pos,
                    bound_np[reqs_np], **options,
                )  # fmt: skip
                tokens[rows], processed[rows] = (values[length - 1 :: length] for values in sampled)
        return tokens, processed

    @staticmethod
    def _segments(
        part: VerifySlice, logits: torch.Tensor, input_ids: torch.Tensor, rows: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, ...]:
        """Return `[n * length]` logits, persistent rows, positions, input tokens and places in the chain.

        Args:
            part: The requests and their drafts.
            logits: `[num_logits, vocab_size]`.
            input_ids: `[num_logits]`.
            rows: `[n]` int64 logits rows that a segment each ends in.
            length: Of each segment.
        """
        assert part.shapes is not None
        req_state_idx, node = part.expanded_idx_mapping[rows], part.nodes[rows].long()
        first = rows - node  # the root's row
        segments = logits.new_zeros(len(rows) * length, logits.shape[1])
        segments[length - 1 :: length] = logits[rows]
        local_pos = part.nodes.new_zeros(len(rows), length)
        local_pos[:, -1] = part.shapes.depths[req_state_idx, node]
        pos = part.pos.new_zeros(len(rows), length)
        pos[:, -1] = part.pos[rows]
        ids = input_ids.new_zeros(len(rows), length)
        # The path, from the node up to the root; columns left of the root repeat it and are not read.
        for column in range(length - 1, -1, -1):
            ids[:, column] = input_ids[first + node]
            node = part.shapes.parents[req_state_idx, node].clamp(min=0).long()
        of_segments = req_state_idx.repeat_interleave(length)
        return segments, of_segments, pos.flatten(), ids.flatten(), local_pos.flatten()
