"""How the draft samples: with the target's own sampling parameters and noise, so that both tend to the same token."""

import numpy as np
import torch
import triton
import triton.language as tl
from vllm.v1.worker.gpu.sample import gumbel
from vllm.v1.worker.gpu.sample.sampler import Sampler

_BLOCK = 1024
# Added to positions by vLLM's sampler where a draft's noise is its own (`is_drafting`).
DRAFT_NOISE_SALT = 1 << 30
_log1p_neg_stable = gumbel._log1p_neg_stable
murmur3_uniform32 = gumbel.murmur3_uniform32


@triton.jit
def _add_noise_kernel(
    # [n, vocab_size] float32, in place
    logits_ptr,
    logits_stride,
    # [n]
    rows_ptr,
    # [max_num_reqs]
    seeds_ptr,
    # [n]
    pos_ptr,
    # [max_num_reqs]
    temperature_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
):
    idx = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + idx)
    if tl.load(temperature_ptr + row) == 0.0:
        return
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = block < vocab_size
    logits = tl.load(logits_ptr + idx * logits_stride + block, mask=mask)
    uniform = murmur3_uniform32(tl.load(seeds_ptr + row), tl.load(pos_ptr + idx), block)
    # The same expression as in vLLM's sampler: the noise must be bit-equal to the target's.
    noise = -tl.log(-_log1p_neg_stable(uniform))
    tl.store(logits_ptr + idx * logits_stride + block, logits + noise, mask=mask)


class CoupledSampler:
    """Draws draft tokens under the target sampler's per-request state (shared-noise coupling).

    vLLM salts its own drafts' noise apart, because its test is a ratio of probabilities; ours is equality, so sharing
    the noise is right: the two models then agree with probability at least (1 - TV) / (1 + TV) per position (Daliri,
    Musco, Suresh 2025). Penalties count the committed text; drafts under construction are not in the counts, which
    costs acceptance and never exactness.

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
        if self.is_plain(rows_np):
            return logits.argmax(dim=-1)
        sampler, states = self._sampler, self._sampler.sampling_states
        tokens = gumbel.gumbel_sample(
            self._process(logits, rows, rows_np, pos, input_ids),
            rows,
            states.temperature.gpu,
            states.seeds.gpu,
            pos,
            apply_temperature=False,
            is_drafting=self._noise == "independent",
            use_fp64=sampler.use_fp64_gumbel,
        )
        # Among NaN logits the kernel may find the best one in the padding behind the vocabulary.
        return tokens.clamp_(max=logits.shape[1] - 1)

    def scores(
        self, logits: torch.Tensor, rows: torch.Tensor, rows_np: np.ndarray, pos: torch.Tensor, input_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return `[n, vocab_size]` scores whose argmax is what `__call__` draws, for the runners-up of a tree.

        At temperature > 0 these are the noised logits: given the noise, which the target shares, the runner-up is the
        token that the target most likely draws instead, and a softmax over them says how likely. Same arguments as
        `__call__`; `logits` may be overwritten.
        """
        states = self._sampler.sampling_states
        processed = self._process(logits, rows, rows_np, pos, input_ids).float()
        salt = DRAFT_NOISE_SALT if self._noise == "independent" else 0
        if processed.device.type == "cpu":
            from vllm_vidspec.engine.cpu import kernels as cpu_kernels

            noisy = states.temperature.gpu[rows].numpy() != 0.0
            noise = cpu_kernels.gumbel_noise(
                states.seeds.gpu[rows].numpy()[noisy],
                pos.numpy()[noisy] + salt,
                np.arange(processed.shape[1], dtype=np.uint32),
            )
            processed[torch.from_numpy(noisy)] += torch.from_numpy(noise)
            return processed
        _add_noise_kernel[(len(rows), triton.cdiv(processed.shape[1], _BLOCK))](
            processed,
            processed.stride(0),
            rows,
            states.seeds.gpu,
            pos + salt,
            states.temperature.gpu,
            processed.shape[1],
            BLOCK=_BLOCK,
        )
        return processed

    def is_plain(self, rows_np: np.ndarray) -> bool:
        """Whether the most likely token is the draw, for every one of `[n]` persistent rows: logits are scores then."""
        sampler = self._sampler
        is_greedy = not np.any(sampler.sampling_states.temperature.np[rows_np])
        return self._noise == "greedy" or (is_greedy and not np.any(sampler.needs_logits_processing[rows_np]))

    def _process(
        self, logits: torch.Tensor, rows: torch.Tensor, rows_np: np.ndarray, pos: torch.Tensor, input_ids: torch.Tensor
    ) -> torch.Tensor:
        """Apply the target's sampling parameters."""
        return self._sampler.apply_sampling_params(
            logits,
            rows,
            rows,
            rows_np,
            pos,
            input_ids.to(torch.int32),
            torch.zeros_like(rows, dtype=torch.int32),
            np.full(len(rows_np), self._sampler.req_states.max_model_len, dtype=np.int32),
        )
