"""How the draft samples: with the target's own sampling parameters and noise, so that both tend to the same token."""

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.sampler import Sampler


class CoupledSampler:
    """Samples draft tokens under the target sampler's per-request state (shared-noise coupling).

    vLLM salts its own drafts' noise apart, because its test is a ratio of probabilities; ours is equality, so sharing
    the noise is right: the two models then agree with probability at least (1 - TV) / (1 + TV) per position (Daliri,
    Musco, Suresh 2025). Penalties count the committed text; tokens of the chain under construction are not in the
    counts, which costs acceptance and never exactness.

    Args:
        sampler: The target's sampler.
        noise: "shared", "independent" or "greedy" (`VidSpecConfig.draft_noise`).
    """

    def __init__(self, sampler: Sampler, noise: str):
        self._sampler = sampler
        self._noise = noise

    def __call__(
        self, logits: torch.Tensor, rows: torch.Tensor, rows_np: np.ndarray, pos: torch.Tensor, input_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return one token a row.

        Args:
            logits: `[n, vocab_size]` float.
            rows: `[n]` int64 persistent rows; `rows_np` the same on the host.
            pos: `[n]` int64 logical position of the input token: the key of the noise.
            input_ids: `[n]` input tokens.

        Returns:
            `[n]` int64 token ids.
        """
        sampler, states = self._sampler, self._sampler.sampling_states
        plain = not np.any(states.temperature.np[rows_np]) and not np.any(sampler.needs_logits_processing[rows_np])
        if plain or self._noise == "greedy":
            return logits.argmax(dim=-1)
        processed = sampler.apply_sampling_params(
            logits,
            rows,
            rows,
            rows_np,
            pos,
            input_ids.to(torch.int32),
            torch.zeros_like(rows, dtype=torch.int32),
            np.full(len(rows_np), sampler.req_states.max_model_len, dtype=np.int32),
        )
        return gumbel_sample(
            processed,
            rows,
            states.temperature.gpu,
            states.seeds.gpu,
            pos,
            apply_temperature=False,
            is_drafting=self._noise == "independent",
            use_fp64=sampler.use_fp64_gumbel,
        )
