"""How the draft samples: with the target's own sampling parameters and noise, so that both tend to the same token."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.sample import gumbel
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vidspec_kernels import Noise, SampleScratch, candidates, draw, warm_up

DRAFT_NOISE_SALT = 1 << 30  # added to positions by vLLM's sampler where a draft's noise is its own (`is_drafting`)
# Up to here drafts that ignore a parameter stand as often, to within a hundredth (docs/notebook/draft-parameters.md),
# and a step of them is one graph.
MOST_REPETITION, NEARLY_GREEDY = 1.05, 0.01
LEAST_TOP_K, LEAST_TOP_P = 20, 0.95
_ALL_TOKENS, _NO_PENALTIES = 1 << 30, {"repetition": 1.0, "frequency": 0.0, "presence": 0.0}
_log1p_neg_stable = gumbel._log1p_neg_stable
murmur3_uniform32 = gumbel.murmur3_uniform32
murmur3_uniform64 = gumbel.murmur3_uniform64


@triton.jit
def gumbel_noised(scores, token_ids, seed, pos, USE_FP64: tl.constexpr):
    """Add vLLM's Gumbel noise to a block of scores: its `gumbel_noised_argmax` in its own words, for the same bits."""
    if USE_FP64:
        uniform = murmur3_uniform64(seed, pos, token_ids)
        noise = -tl.log(-tl.log(uniform))
    else:
        uniform = murmur3_uniform32(seed, pos, token_ids)
        noise = -tl.log(-_log1p_neg_stable(uniform))
    return scores + noise


def _noise_on_host(seeds: np.ndarray, positions: np.ndarray, token_ids: np.ndarray, use_fp64: bool) -> np.ndarray:
    from vllm_vidspec.engine.cpu import kernels as cpu_kernels

    return cpu_kernels.gumbel_noise(seeds, positions, token_ids, use_fp64)


@dataclass(frozen=True)
class Processed:
    """What vLLM's processors of logits need of a step's requests, padding left out; they have branches on the host."""

    sampler: "CoupledSampler"
    rows: Tensor  # [num_reqs] int64 persistent rows; `rows_np` the same on the host
    rows_np: np.ndarray

    @property
    def num_reqs(self) -> int:
        return len(self.rows_np)

    def __call__(self, logits: Tensor, block: slice, pos: Tensor, input_ids: Tensor, width: int = 1) -> Tensor:
        """Return the `[n, vocab_size]` logits of a block of places, `width` of each request, under its parameters."""
        rows, rows_np = self.rows, self.rows_np
        if width > 1:
            rows, rows_np = rows.repeat_interleave(width), np.repeat(rows_np, width)
        return self.sampler.process(logits, rows[block], rows_np[block], pos, input_ids)


class CoupledSampler:
    """Draws draft tokens under the target sampler's per-request state (shared-noise coupling).

    vLLM salts its own drafts' noise apart, because its test is a ratio of probabilities; ours is equality, so sharing
    the noise is right: the two models then agree with probability at least (1 - TV) / (1 + TV) per position (Daliri,
    Musco, Suresh 2025). Penalties count the committed text; drafts under construction are not in the counts, which
    costs acceptance and never exactness. `noise` is "shared", "independent" or "greedy" (`VidSpecConfig.draft_noise`).
    """

    def __init__(self, sampler: Sampler, noise: str):
        self._sampler, self._noise = sampler, noise
        salt = DRAFT_NOISE_SALT if noise == "independent" else 0
        self.noise = Noise(gumbel_noised, _noise_on_host, salt, sampler.use_fp64_gumbel)
        self._scratch: SampleScratch  # of `reserve`, which comes first
        # What vLLM's processors ask of every row, the same in every step: its place among drafts, the longest text.
        self._place = torch.empty(0, dtype=torch.int32)
        # Temperatures with zeros where top-k leaves one token: on the host, and the same on the device.
        self._greedy: tuple[np.ndarray, Tensor] | None = None
        self._max_lens = np.empty(0, dtype=np.int32)

    # ---- as the target's state is read, before a step ---------------------------------------------------------------

    def reserve(self, max_rows: int, vocab_size: int, device: torch.device, num_candidates: int = 0) -> None:
        """Make room for draws from so many rows of logits at once, and for candidates of each; once, before use."""
        self._scratch = SampleScratch(max_rows, vocab_size, device, num_candidates, self.noise.use_fp64)
        self._place = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._max_lens = np.full(max_rows, self._sampler.req_states.max_model_len, dtype=np.int32)

    @property
    def temperature(self) -> Tensor | None:
        """`[max_num_reqs]` float32 for `begin_step`, None: drafts are greedy; its address changes from step to step.
        It is the target's, but 0 where top-k leaves one token: that is the best one, whatever the noise.
        """
        if self._noise == "greedy":
            return None
        states = self._sampler.sampling_states
        is_single = states.top_k.np == 1
        if not is_single.any():
            return states.temperature.gpu
        wanted = np.where(is_single, np.float32(0.0), states.temperature.np)
        if self._greedy is None or not np.array_equal(wanted, self._greedy[0]):
            self._greedy = wanted, async_tensor_h2d(wanted, device=self._place.device)
        return self._greedy[1]

    @property
    def seeds(self) -> Tensor:
        """`[max_num_reqs]` int64 for `begin_step`. Its address changes from step to step."""
        return self._sampler.sampling_states.seeds.gpu

    def needs_processors(self, rows_np: np.ndarray) -> bool:
        """Whether logits of any of `[n]` persistent rows need more than temperature and noise; host tables only."""
        sampler, states = self._sampler, self._sampler.sampling_states
        if self._noise == "greedy":
            return False
        # vLLM's own flag also counts a temperature, which a draw applies itself.
        rows = rows_np[sampler.needs_logits_processing[rows_np]]
        if not len(rows):
            return False
        bias, penalties, bad_words, *custom = sampler.logits_processors
        thinking = sampler.thinking_budget_state
        kept = (states.temperature, states.top_k, states.top_p, states.min_p)
        asked = (penalties.repetition_penalty, penalties.frequency_penalty, penalties.presence_penalty)
        return bool(
            custom  # they do not say which requests they concern
            or np.any(bias.use_logit_bias[rows])
            or np.any(bad_words.num_bad_words.np[rows])
            or np.any(costs_drafts(*(table.np[rows] for table in (*kept, *asked))))
            or (thinking.enabled and np.any(thinking.use_thinking_budget[rows]))
        )

    def processes_by_default(self, model_config: Any) -> bool:
        """Whether a request that names no sampling parameters, and gets the model's own, needs processors."""
        if self._noise == "greedy":
            return False
        asked = model_config.get_diff_sampling_param()
        top_k = asked.get("top_k", 0)
        kept = (asked.get("temperature", 1.0), top_k if top_k > 0 else _ALL_TOKENS, asked.get("top_p", 1.0))
        penalties = (asked.get(f"{name}_penalty", default) for name, default in _NO_PENALTIES.items())
        return bool(costs_drafts(*map(np.asarray, (*kept, asked.get("min_p", 0.0), *penalties))))

    # ---- inside a captured step --------------------------------------------------------------------------------------

    def draw_into(
        self, logits: Tensor, temperature: Tensor, seeds: Tensor, pos: Tensor, is_processed: bool = False, **out: Any
    ) -> None:
        """Draw a token of every row, see the kernel `draw`; logits that come from `process` have the temperature."""
        out |= {"scratch": self._scratch, "apply_temperature": not is_processed}
        draw(logits, temperature, seeds, pos, self.noise, **out)

    def candidates_into(
        self, logits: Tensor, temperature: Tensor, seeds: Tensor, pos: Tensor, is_processed: bool = False, **out: Any
    ) -> None:
        """Choose candidates of every row as the kernel `candidates` says; see `draw_into`."""
        out |= {"scratch": self._scratch, "apply_temperature": not is_processed}
        candidates(logits, temperature, seeds, pos, self.noise, **out)

    def warm_up(self, dtype: torch.dtype, draws: bool, with_log_probs: Collection[bool]) -> None:
        """Compile and load what is launched on logits of a dtype: draws, and each kind of candidates."""
        if draws:
            warm_up.warm_draw(self.noise, self._scratch, dtype)
        for kind in with_log_probs:
            warm_up.warm_candidates(self.noise, self._scratch, dtype, kind)

    # ---- eager -------------------------------------------------------------------------------------------------------

    def process(self, logits: Tensor, rows: Tensor, rows_np: np.ndarray, pos: Tensor, input_ids: Tensor) -> Tensor:
        """Return the `[n, vocab_size]` logits under the target's sampling parameters, the temperature included.

        A copy, or the logits where no row asks for anything but a temperature of 0 or 1. `pos` `[n]` is the logical
        position of each row's input token: the key of the noise.
        """
        place, max_lens = self._place[: len(rows_np)], self._max_lens[: len(rows_np)]
        return self._sampler.apply_sampling_params(
            logits, rows, rows, rows_np, pos, input_ids.to(torch.int32), place, max_lens
        )


def costs_drafts(
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    repetition: np.ndarray,
    frequency: np.ndarray,
    presence: np.ndarray,
) -> np.ndarray:
    """Return `[n]` bool: drafts that ignore these parameters of vLLM's, which have a value a request, stand less often.

    A repetition penalty near 1 costs a nearly greedy request nothing, nor do top-k, top-p and min-p a greedy one.
    """
    temperature = np.where(top_k == 1, 0.0, temperature)
    is_cut = (temperature > 0) & ((min_p > 0) | (top_k < LEAST_TOP_K) | (top_p < LEAST_TOP_P))
    is_mild = (np.maximum(repetition, 1 / repetition) <= MOST_REPETITION) & (temperature <= NEARLY_GREEDY)
    is_penalised = (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)
    return is_cut | (is_penalised & ~(is_mild & (frequency == 0.0) & (presence == 0.0)))
