"""Sampling parameters that look back (penalties, bad words, …) applied to tree nodes, each with its own path."""

from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vidspec_kernels import PenaltyTables, path_penalties
from vllm_vidspec.engine.compat import model as compat
from vllm_vidspec.engine.compat.contract import expect_parameters
from vllm_vidspec.engine.verify.step import VerifySlice
from vllm_vidspec.scoring import TreeShapes

_NUM_NATIVE_PROCESSORS = 3  # logit bias, penalties, bad words
MAX_PATH_BYTES = 256 << 20  # of paths that are laid out at a time, in float32


class PathSampler:
    """Samples tree nodes by vLLM's own sampler, each as if its path were a chain.

    vLLM's kernels take the drafts before a logits row from the rows before it, which holds for chains. Penalties are
    one launch in their place among vLLM's processors (`path_penalties`), with a path's tokens found along `parents`.
    What else looks back (bad words, thinking budgets, custom processors) gets a segment of rows for each of its
    nodes, the path laid out as a chain that ends in it, whose last row counts: the arithmetic stays vLLM's, bit for
    bit. So many segments run at a time that their float32 logits take MAX_PATH_BYTES at most, or one.
    """

    def __init__(self, sampler: Sampler, max_depth: int):
        self._sampler = sampler
        self._max_depth = max_depth
        natives = sampler.logits_processors[:_NUM_NATIVE_PROCESSORS]
        self._penalties, self._bad_words = natives[1:]
        self._has_custom = len(sampler.logits_processors) > _NUM_NATIVE_PROCESSORS
        self._shapes: TreeShapes | None = None  # of the rows that are being sampled, where they are nodes
        self._launches: dict[Any, Any] = {}
        compat.intercept_penalties(self._penalties, self._penalise)
        expect_parameters(
            Sampler.sample,
            *("logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos", "input_ids"),
            *("expanded_local_pos", "seq_lens_upper_bound_np", "return_logprobs"),
        )

    @property
    def tables(self) -> PenaltyTables:
        """Those of vLLM. Where the first three lie changes from step to step."""
        state = self._penalties
        vectors = (state.repetition_penalty.gpu, state.frequency_penalty.gpu, state.presence_penalty.gpu)
        return PenaltyTables(*vectors, state.prompt_bin_mask, state.output_bin_counts)

    def _penalise(self, logits: torch.Tensor, ctx: Any) -> bool:
        """Apply penalties to nodes; return whether the rows are nodes, so that vLLM has nothing to do."""
        if self._shapes is None:
            return False
        if self._penalties.use_penalty[ctx.idx_mapping_np].any():
            path_penalties(
                logits, ctx.expanded_idx_mapping, ctx.expanded_local_pos, ctx.input_ids, self._shapes.parents,
                self.tables, self._launches,
            )  # fmt: skip
        return True

    def _needs_segments(self, idx_mapping_np: np.ndarray) -> np.ndarray:
        """Return `[n]` bool: the request's parameters depend on its drafts, as by other parameters than penalties."""
        looks_back = self._bad_words.num_bad_words.np[idx_mapping_np] > 0
        thinking = self._sampler.thinking_budget_state
        if thinking.enabled:
            looks_back |= thinking.use_thinking_budget[idx_mapping_np]
        return np.ones_like(looks_back) if self._has_custom else looks_back

    def sample(
        self, part: VerifySlice, logits: torch.Tensor, input_ids: torch.Tensor, bound_np: np.ndarray, **options: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `[num_logits]` int64 tokens and `[num_logits, vocab_size]` processed logits, as vLLM's sampler."""
        in_segments = np.zeros(len(part.idx_mapping_np), dtype=bool)
        if part.shapes is not None:
            in_segments = self._needs_segments(part.idx_mapping_np)
        if in_segments.all():
            tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
            processed = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        else:
            self._shapes = part.shapes
            try:
                tokens, processed = self._sampler.sample(
                    logits, part.expanded_idx_mapping, part.idx_mapping, part.idx_mapping_np, part.pos, input_ids,
                    part.nodes, bound_np, **options,
                )  # fmt: skip
            finally:
                self._shapes = None
        if in_segments.any():  # what was sampled for these is in vLLM's own copy of the logits, and replaced
            self._sample_segments(in_segments, part, logits, input_ids, bound_np, options, tokens, processed)
        return tokens, processed

    def _sample_segments(
        self,
        in_segments: np.ndarray,
        part: VerifySlice,
        logits: torch.Tensor,
        input_ids: torch.Tensor,
        bound_np: np.ndarray,
        options: dict[str, bool],
        tokens: torch.Tensor,
        processed: torch.Tensor,
    ) -> None:
        """Write the tokens and processed logits of some requests, `[num_reqs]` bool; see `sample`."""
        device, length = logits.device, min(self._max_depth, int(part.num_logits_np.max()) - 1) + 1
        reqs_np = np.flatnonzero(in_segments)
        rows_np = np.flatnonzero(np.repeat(in_segments, part.num_logits_np))
        idx_mapping = part.idx_mapping[async_tensor_h2d(reqs_np, device=device)]
        per_chunk = max(1, MAX_PATH_BYTES // (4 * logits.shape[1] * length))
        for start in range(0, len(rows_np), per_chunk):
            rows = async_tensor_h2d(rows_np[start : start + per_chunk], device=device)
            segments, of_segments, pos, ids, local_pos = self._segments(part, logits, input_ids, rows, length)
            sampled = self._sampler.sample(
                segments, of_segments, idx_mapping, part.idx_mapping_np[reqs_np], pos, ids, local_pos,
                bound_np[reqs_np], **options,
            )  # fmt: skip
            tokens[rows], processed[rows] = (values[length - 1 :: length] for values in sampled)

    @staticmethod
    def _segments(
        part: VerifySlice, logits: torch.Tensor, input_ids: torch.Tensor, rows: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, ...]:
        """Return `[n * length]` logits, rows, positions, tokens and places of segments that end in `[n]` rows."""
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
