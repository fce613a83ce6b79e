"""Our scorers in vLLM's rejection-sampler slot: verification by shared-noise coupling."""

from typing import Any

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_vidspec.engine.compat import expect_parameters
from vllm_vidspec.engine.listen.trees import TargetTrees
from vllm_vidspec.engine.listen.visual_states import VisualStates
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.verify.node_paths import PathSampler
from vllm_vidspec.engine.verify.rules import LooseRules
from vllm_vidspec.engine.verify.watch import ScoreWatch
from vllm_vidspec.scoring import Scored, ScoreInputs, get_scorer


class CoupledVerifier(RejectionSampler):
    """Samples the target at every draft position exactly as vanilla would, and lets a scorer say which drafts stand.

    vLLM's noise is a function of (request seed, position of the input token, token id), so the target's sample at a
    draft position is the token that vanilla vLLM would have drawn there: the output is vanilla's, token for token, at
    any temperature with the strict scorer. In a tree a node's position is its depth past the root, whatever its slot.
    Logprobs, chunking over large vocabularies and grammar-invalid drafts are vLLM's own code, inherited.

    Args:
        sampler: The runner's sampler.
        speculative_config: vLLM's.
        device: Where logits live.
        counters: Told the outcome of every step.
        trees: Where drafts can be trees; None where all are chains.
        max_path: The most drafts that can follow each other.
        rules: Which mismatches may stand; None where every request is verified strictly.
        visual: The video's hidden states; None where no rule needs them.
    """

    def __init__(
        self,
        sampler,
        speculative_config,
        device: torch.device,
        counters: Counters,
        trees: TargetTrees | None = None,
        max_path: int = 1,
        rules: LooseRules | None = None,
        visual: VisualStates | None = None,
    ):
        super().__init__(sampler, speculative_config, device)
        expect_parameters(
            RejectionSampler._verify,
            "logits",
            "draft_logits",
            "draft_sampled",
            "pos",
            "cu_num_logits",
            "idx_mapping",
            "idx_mapping_np",
            "expanded_idx_mapping",
            "expanded_local_pos",
            "seq_lens_upper_bound_np",
            "verify_draft_sampled",
        )
        expect_parameters(
            RejectionSampler._get_logprobs_tensors,
            "sampled",
            "num_sampled",
            "logits",
            "cu_num_logits",
            "cu_num_logits_np",
        )
        self._score = get_scorer("loose")  # every request by its own rule; strictly where none may be loose
        self._counters = counters
        self._trees = trees
        self._rules = rules
        self._visual = visual
        self.hidden_states: torch.Tensor | None = None  # [num_tokens, hidden_size] of the forward, set by the runner
        self._relevance: torch.Tensor | None = None  # [num_logits] of the batch, what `_verify` has yet to see
        self.watch: ScoreWatch | None = None
        self._sample_paths = PathSampler(sampler, max_path)
        self._order: torch.Tensor | None = None  # [num_logits] logits row behind each output, of the last `_verify`

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: Any,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ):
        """Verify a batch; see vLLM's. Its logits rows are the roots' and the drafts', in node order."""
        self._unverified = input_batch.cu_num_logits_np  # what `_verify`, which sees slices, takes its bounds from
        self._relevance = self._measure(input_batch)
        if self.watch is not None:
            self.watch.begin(input_batch.req_ids, input_batch.is_prefilling_np)
        return super().__call__(logits, input_batch, draft_logits, invalid_drafts)

    def _measure(self, input_batch: Any) -> torch.Tensor | None:
        """Return `[num_logits]` relevance of a batch's rows; None where nobody asks for it."""
        rows_np = input_batch.idx_mapping_np
        if self._visual is None or self._rules is None or not self._rules.need_relevance(rows_np):
            return None
        assert self.hidden_states is not None
        return self._visual.relevance(self.hidden_states, input_batch, self.num_speculative_steps + 1)

    def _verify(
        self,
        logits: torch.Tensor,  # [num_logits, vocab_size]
        draft_logits: torch.Tensor | None,  # unused: equality needs no draft distribution
        draft_sampled: torch.Tensor,  # [num_logits] input token of each logits row
        pos: torch.Tensor,  # [num_logits] logical position of that token's slot
        cu_num_logits: torch.Tensor,  # [num_reqs + 1]
        idx_mapping: torch.Tensor,  # [num_reqs]
        idx_mapping_np,  # [num_reqs]
        expanded_idx_mapping: torch.Tensor,  # [num_logits]
        expanded_local_pos: torch.Tensor,  # [num_logits]
        seq_lens_upper_bound_np,  # [num_reqs]
        verify_draft_sampled: torch.Tensor,  # [num_logits] draft_sampled with invalid drafts as -1
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `(processed_logits [num_logits, vocab_size], sampled [num_reqs, K + 1], num_sampled [num_reqs])`."""
        shapes = None
        counts_np = np.diff(self._unverified[: len(idx_mapping_np) + 1])
        self._unverified = self._unverified[len(idx_mapping_np) :]
        return_logprobs = self.sampler.get_logprobs_dims(idx_mapping_np, include_token_ids=False) is not None
        sample = self.sampler.sample
        if self._trees is not None and self._trees.is_active:
            shapes = self._trees.shapes(idx_mapping)
            # The noise is keyed by depth: vanilla would have reached the node after that many tokens.
            depths = shapes.depths[expanded_idx_mapping, expanded_local_pos]
            pos = pos + (depths - expanded_local_pos)
            if self._sample_paths.are_needed(idx_mapping_np):
                sample = self._sample_paths.over(shapes, cu_num_logits, counts_np, depths)
        target_tokens, processed_logits = sample(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
            return_logprobs=return_logprobs,
        )
        drafts, max_drafts = verify_draft_sampled.to(torch.int64), self.num_speculative_steps
        relevance, looseness = self._relevance, None
        if relevance is not None:
            relevance, self._relevance = relevance.tensor_split((len(logits),))
        if self._rules is not None and self._rules.any_loose(idx_mapping_np):
            looseness = self._rules.of_step(
                idx_mapping,
                idx_mapping_np,
                expanded_idx_mapping,
                expanded_local_pos,
                target_tokens,
                drafts,
                processed_logits,
                pos,
                relevance,
                shapes,
            )
        scored = self._score(ScoreInputs(target_tokens, drafts, cu_num_logits, max_drafts, shapes, looseness))
        self._counters.observe(idx_mapping, idx_mapping_np, scored.num_sampled, cu_num_logits, shapes, scored.kinds)
        if self.watch is not None:
            self.watch.see(idx_mapping_np, pos, cu_num_logits, scored, relevance)
        self._order = None
        if self._trees is not None:
            self._trees.remember(idx_mapping, scored.path)
        if scored.path is not None and (return_logprobs or self.sampler.return_sampling_mask):
            self._order = _output_order(scored, cu_num_logits, expanded_local_pos, counts_np)
            if self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES or self.sampler.return_sampling_mask:
                processed_logits = processed_logits[self._order]
        return processed_logits, scored.sampled, scored.num_sampled

    def _get_logprobs_tensors(self, sampled, num_sampled, logits, *args):
        """Let row j of a request hold the logits that its output token j came from, as in a chain."""
        if self._order is not None and self.sampler.logprobs_mode not in PROCESSED_LOGPROBS_MODES:
            logits = logits[self._order]
        return super()._get_logprobs_tensors(sampled, num_sampled, logits, *args)


def _output_order(
    scored: Scored, cu_num_logits: torch.Tensor, expanded_local_pos: torch.Tensor, counts_np: np.ndarray
) -> torch.Tensor:
    """Return `[num_logits]` int64: for output j of each request, the logits row of the node that it came from."""
    assert scored.path is not None
    num_reqs, num_logits = len(counts_np), len(expanded_local_pos)
    req_idx = torch.arange(num_reqs, device=cu_num_logits.device)
    counts = cu_num_logits[1:] - cu_num_logits[:-1]
    req_idx = req_idx.repeat_interleave(counts, output_size=num_logits)  # [num_logits]
    node = scored.path[req_idx, expanded_local_pos]
    return cu_num_logits[req_idx].long() + node
