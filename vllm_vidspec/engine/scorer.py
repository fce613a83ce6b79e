"""Our scorers in vLLM's rejection-sampler slot: verification by shared-noise coupling."""

import torch
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_vidspec.engine.compat import expect_parameters
from vllm_vidspec.engine.counters import Counters
from vllm_vidspec.scoring import ScoreInputs, get_scorer


class CoupledVerifier(RejectionSampler):
    """Samples the target at every draft position exactly as vanilla would, and lets a scorer say which drafts stand.

    vLLM's noise is a function of (request seed, position of the input token, token id), so the target's sample at a
    draft position is the token that vanilla vLLM would have drawn there: the output is vanilla's, token for token, at
    any temperature with the strict scorer. Logprobs, chunking over large vocabularies and grammar-invalid drafts are
    vLLM's own code, inherited.

    Args:
        sampler: The runner's sampler.
        speculative_config: vLLM's.
        device: Where logits live.
        scorer: Name of a scorer (`VidSpecConfig.scorer`).
        counters: Told the outcome of every step.
    """

    def __init__(self, sampler, speculative_config, device: torch.device, scorer: str, counters: Counters):
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
        self._score = get_scorer(scorer)
        self._counters = counters

    def _verify(
        self,
        logits: torch.Tensor,  # [num_logits, vocab_size]
        draft_logits: torch.Tensor | None,  # unused: equality needs no draft distribution
        draft_sampled: torch.Tensor,  # [num_logits] input token of each logits row
        pos: torch.Tensor,  # [num_logits] logical position of that token: the key of the noise
        cu_num_logits: torch.Tensor,  # [num_reqs + 1]
        idx_mapping: torch.Tensor,  # [num_reqs]
        idx_mapping_np,  # [num_reqs]
        expanded_idx_mapping: torch.Tensor,  # [num_logits]
        expanded_local_pos: torch.Tensor,  # [num_logits]
        seq_lens_upper_bound_np,  # [num_reqs]
        verify_draft_sampled: torch.Tensor,  # [num_logits] draft_sampled with invalid drafts as -1
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `(processed_logits [num_logits, vocab_size], sampled [num_reqs, K + 1], num_sampled [num_reqs])`."""
        target_tokens, processed_logits = self.sampler.sample(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
            return_logprobs=self.sampler.get_logprobs_dims(idx_mapping_np, include_token_ids=False) is not None,
        )
        drafts = verify_draft_sampled.to(torch.int64)
        sampled, num_sampled = self._score(
            ScoreInputs(target_tokens, drafts, cu_num_logits, self.num_speculative_steps)
        )
        self._counters.observe(idx_mapping, num_sampled, cu_num_logits)
        return processed_logits, sampled, num_sampled
