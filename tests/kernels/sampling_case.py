"""A toy noise with its numpy twin, for the tests of `draw` and `candidates`; vLLM's own is tested with the engine."""

import numpy as np
import torch
import triton
import triton.language as tl

from vidspec_kernels import Noise, SampleScratch, candidates, draw
from vidspec_kernels.sampling.noise import BLOCK

# Vocabularies around a block, and one of a few blocks.
VOCAB_SIZES = [1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 52]


@triton.jit
def toy_noise(scores, token_ids, seed, pos, USE_FP64: tl.constexpr):
    """Numbers that floating point holds exactly, so that order and fusion of operations do not matter."""
    word = (token_ids.to(tl.int64) * 40503 + pos * 2654435 + seed * 97) % 1009
    return scores + word.to(tl.float32) / 64.0


def toy_reference(seeds, positions, token_ids, use_fp64):
    word = token_ids.astype(np.int64) * 40503 + positions[:, None] * 2654435 + seeds[:, None] * 97
    return (word % 1009).astype(np.float64 if use_fp64 else np.float32) / 64


def toy(salt: int = 0, use_fp64: bool = False) -> Noise:
    return Noise(toy_noise, toy_reference, salt, use_fp64)


class SamplingCase:
    """Logits in eighths, so that many tie, cut out of wider rows, `width` a request; every third request is greedy."""

    def __init__(self, num_rows, vocab_size, device, dtype=torch.float32, width=1, first=0, seed=0, step=8):
        generator = torch.Generator().manual_seed(seed)
        num_reqs = -(-(first + num_rows) // width)
        logits = (torch.randn(num_rows, vocab_size + 3, generator=generator) * 4 * step).round() / step
        self.logits = logits.to(device, dtype)[:, :vocab_size]
        self.temperature = torch.tensor([0.5, 0.0, 2.0, 1.0])[torch.arange(num_reqs + 1) % 4].to(device)
        self.seeds = torch.randint(0, 1000, (num_reqs + 1,), generator=generator).to(device)
        self.pos = torch.randint(0, 5000, (num_rows + 1,), generator=generator).to(device)
        self.num_rows, self.vocab_size, self.device, self.width, self.first = num_rows, vocab_size, device, width, first

    def scores(self, noise: Noise, apply_temperature: bool = True) -> torch.Tensor:
        """Return what is to be ordered, [n, vocab_size]: a row at a time."""
        rows = []
        for i in range(self.num_rows):
            req_idx, row = (self.first + i) // self.width, self.logits[i].float().cpu()
            heat = float(self.temperature[req_idx])
            if heat:
                keys = np.arange(self.vocab_size, dtype=np.uint32)
                pos = np.array([int(self.pos[i]) + noise.salt])
                added = noise.reference(np.array([int(self.seeds[req_idx])]), pos, keys, noise.use_fp64)[0]
                row = (row / heat if apply_temperature else row) + torch.from_numpy(added)
            rows.append(row)
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def scratch(self, num_candidates: int = 0, use_fp64: bool = False) -> SampleScratch:
        return SampleScratch(self.num_rows + 1, self.vocab_size, self.device, num_candidates, use_fp64)

    def draw_arguments(self, noise: Noise, level: int | torch.Tensor) -> dict:
        """Arguments of `draw`, into wider buffers full of -7."""
        return self._noised(noise) | {
            "level": level, "scratch": self.scratch(use_fp64=noise.use_fp64),
            "out_tokens": torch.full((self.num_rows + 2, 4), -7, device=self.device),
            "out_ids": torch.full((self.num_rows + 2,), -7, dtype=torch.int32, device=self.device),
        }  # fmt: skip

    def candidates_arguments(self, num_candidates: int, noise: Noise | None) -> dict:
        """Arguments of `candidates`, into wider buffers full of -7; without noise logits are scores."""
        shape = (self.num_rows + 2, num_candidates)
        return ({"logits": self.logits} if noise is None else self._noised(noise)) | {
            "log_probs": torch.full(shape, -7.0, device=self.device), "ids": torch.full(shape, -7, device=self.device),
            "scratch": self.scratch(num_candidates), "width": self.width, "first": self.first,
        }  # fmt: skip

    def _noised(self, noise: Noise) -> dict:
        requests = {"temperature": self.temperature, "seeds": self.seeds, "pos": self.pos}
        return {"logits": self.logits, **requests, "noise": noise}


def draw_case(device, num_rows=5, vocab_size=2100):
    """A draw whose level lies on the device."""
    level = torch.tensor([2], dtype=torch.int32, device=device)
    return draw, SamplingCase(num_rows, vocab_size, device).draw_arguments(toy(), level)


def candidates_case(device, num_rows=4, vocab_size=300, num_candidates=4):
    """The best of noised logits."""
    case = SamplingCase(num_rows, vocab_size, device, width=2)
    return candidates, case.candidates_arguments(num_candidates, toy())
