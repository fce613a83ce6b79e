"""Our scorers in vLLM's rejection-sampler slot: verification by shared-noise coupling."""

from typing import Any

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler, get_max_chunk_logits

from vllm_vidspec.engine.compat import model as compat
from vllm_vidspec.engine.compat.contract import expect_parameters
from vllm_vidspec.engine.hooks.trees import TargetTrees
from vllm_vidspec.engine.hooks.visual_states import VisualStates
from vllm_vidspec.engine.verify.loose_tables import LooseRules
from vllm_vidspec.engine.verify.node_paths import PathSampler
from vllm_vidspec.engine.verify.step import VerifySlice, VerifyStep
from vllm_vidspec.scoring import Scored, ScoreInputs, score


class CoupledVerifier(RejectionSampler):
    """Samples the target at every draft position exactly as vanilla would, and lets a scorer say which drafts stand.

    vLLM's noise is a function of (request seed, position of the input token, token id), so the target's sample at a
    draft position is the token that vanilla vLLM would have drawn there, at any temperature. A tree node's position is
    its depth past the root. Chunks of large vocabularies and grammars are vLLM's own code, inherited; logprobs are what
    vLLM's sampler makes of a step without drafts.
    """

    def __init__(
        self,
        runner: Any,  # the model runner
        trees: TargetTrees | None,  # where drafts can be trees; None where all are chains
        max_path: int,  # the most drafts that can follow each other
        rules: LooseRules | None,  # which mismatches may stand; None where every request is verified strictly
        visual: VisualStates | None,  # the video's hidden states; None where no rule needs them
    ):
        super().__init__(runner.sampler, runner.speculative_config, runner.device)
        expect_parameters(
            RejectionSampler._verify,
            *("logits", "draft_logits", "draft_sampled", "pos", "cu_num_logits", "idx_mapping", "idx_mapping_np"),
            *("expanded_idx_mapping", "expanded_local_pos", "seq_lens_upper_bound_np", "verify_draft_sampled"),
        )
        logprobs = ("sampled", "num_sampled", "logits", "cu_num_logits", "cu_num_logits_np")
        expect_parameters(RejectionSampler._get_logprobs_tensors, *logprobs)
        compat.gather_token_logprobs(runner.sampler)
        self._score = score  # every request by its own rule; strictly where none may be loose
        self._counters, self._observers = runner.counters, runner.observers
        self._trees, self._rules, self._visual = trees, rules, visual
        self._step = VerifyStep()
        self.paths = PathSampler(runner.sampler, max_path)

    def begin(self, step: VerifyStep) -> None:
        self._step = step

    def end(self) -> None:
        self._step = VerifyStep()

    def profile(self, logits: torch.Tensor) -> None:
        """Take and give back what a verify step takes beside its logits: a float32 chunk, and again for paths."""
        chunk = logits[: get_max_chunk_logits(logits.shape[1])]
        processed = torch.empty_like(chunk, dtype=torch.float32)
        paths = torch.empty_like(processed)
        del processed, paths

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: Any,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ):
        """Verify a batch as vLLM asks. Its logits rows are the roots' and the drafts', in node order."""
        relevance, rules = None, self._rules
        if self._visual is not None and rules is not None and rules.any_by_relevance(input_batch.idx_mapping_np):
            assert self._step.hidden_states is not None
            relevance = self._visual.relevance(self._step.hidden_states, input_batch, self.num_speculative_steps + 1)
        self._step.open(input_batch.cu_num_logits_np, relevance)
        self._step.logprobs_dims = self.sampler.get_logprobs_dims(input_batch.idx_mapping_np)
        return super().__call__(logits, input_batch, draft_logits, invalid_drafts)

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
        num_logits_np, relevance = self._step.advance(len(idx_mapping_np), len(logits))
        return_logprobs = self._step.logprobs_dims is not None
        shapes = None
        if self._trees is not None and self._trees.is_active:
            shapes = self._trees.shapes(idx_mapping)
            # The noise is keyed by depth: vanilla would have reached the node after that many tokens.
            pos = pos + (shapes.depths[expanded_idx_mapping, expanded_local_pos] - expanded_local_pos)
        rows = (expanded_idx_mapping, expanded_local_pos, pos, verify_draft_sampled, relevance)
        part = VerifySlice(idx_mapping, idx_mapping_np, cu_num_logits, num_logits_np, *rows, shapes)
        self._step.slice = part
        target_tokens, processed_logits = self.paths.sample(
            part, logits, draft_sampled, seq_lens_upper_bound_np, return_logprobs=return_logprobs
        )
        scored = self._judge(part, target_tokens, processed_logits)
        if scored.path is not None and (return_logprobs or self.sampler.return_sampling_mask):
            self._step.output_order = _output_order(scored, part)
            if self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES or self.sampler.return_sampling_mask:
                processed_logits = processed_logits[self._step.output_order]
        return processed_logits, scored.sampled, scored.num_sampled

    def _judge(self, part: VerifySlice, target_tokens: torch.Tensor, logits: torch.Tensor) -> Scored:
        """Return which of a slice's drafts stand, given what the target samples and from which logits; count them."""
        looseness = None
        if self._rules is not None and self._rules.any_loose(part.idx_mapping_np):
            looseness = self._rules.looseness(part, target_tokens, logits)
        tally = self._counters.tally(part.idx_mapping)
        if self._trees is not None:
            tally = self._trees.remember(tally)
        rows = (target_tokens, part.drafts, part.cu_num_logits)
        scored = self._score(ScoreInputs(*rows, self.num_speculative_steps, part.shapes, looseness, tally))
        for observer in self._observers:
            observer.verified(part, scored)
        return scored

    def _get_logprobs_tensors(self, sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, *_):
        """Return the sampler's log-probabilities of a slice's tokens `[num_reqs, K + 1]`, of which each request has
        `num_sampled`: row j of a request is of its output token j, the logits too. None where no request asks for any.

        vLLM's own reads neither `logprob_token_ids` nor whose they are.
        """
        dims, order, part = self._step.logprobs_dims, self._step.output_order, self._step.slice
        if dims is None:
            return None
        assert part is not None
        if order is not None and self.sampler.logprobs_mode not in PROCESSED_LOGPROBS_MODES:
            logits = logits[order]
        req_idx = _req_indices(part)
        tokens = sampled[req_idx, part.nodes].masked_fill(part.nodes >= num_sampled[req_idx], 0)
        return compute_topk_scores(
            logits,
            dims[0],
            tokens,
            None if len(tokens) == len(sampled) else cu_num_logits_np.tolist(),
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=part.expanded_idx_mapping,
            max_per_req_token_ids=dims[1],
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )


def _req_indices(part: VerifySlice) -> torch.Tensor:
    """Return `[num_logits]` int64 whose row each is, by place in the slice."""
    bounds = part.cu_num_logits
    req_idx = torch.arange(len(part.num_logits_np), device=bounds.device)
    return req_idx.repeat_interleave(bounds[1:] - bounds[:-1], output_size=len(part.nodes))


def _output_order(scored: Scored, part: VerifySlice) -> torch.Tensor:
    """Return `[num_logits]` int64: for output j of each request, the logits row of the node that it came from."""
    assert scored.path is not None
    req_idx = _req_indices(part)
    return part.cu_num_logits[req_idx].long() + scored.path[req_idx, part.nodes]
