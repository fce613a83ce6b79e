"""Two networks of integers, and stand-ins for the parts of vLLM around them; kernels are functions of host tensors."""

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from null_gpu.emulate import to_host
from vidspec_kernels import CacheList
from vllm_vidspec.engine.compat import backends
from vllm_vidspec.engine.cpu import kernels as cpu_kernels
from vllm_vidspec.engine.draft.vision_cache import VisionCache

VOCAB, BLOCK_SIZE, MAX_REQS, MAX_LEN = 32, 4, 4, 160
NUM_BLOCKS = 1 + MAX_REQS * (MAX_LEN // BLOCK_SIZE + 8)
CPU = torch.device("cpu")


def hashed(*words: Any) -> np.ndarray:
    """Return `[...]` int64 >= 0: a hash of integers or arrays of them."""
    value = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        for word in words:
            value = (value ^ np.asarray(word).astype(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
            value = value ^ (value >> np.uint64(29))
    return (value >> np.uint64(2)).astype(np.int64)


def attend(
    cache: torch.Tensor,  # [num_blocks, BLOCK_SIZE, 1, 2] int64, tokens and positions
    tokens: torch.Tensor,  # [n]
    positions: torch.Tensor,  # [n]
    query_start_loc: np.ndarray,  # [num_reqs + 1]
    seq_lens: torch.Tensor,  # [num_reqs]
    block_table: torch.Tensor,  # [num_reqs, max_blocks]
    slot_mapping: torch.Tensor,  # [n]
    step: dict[str, Any] | None,  # of `TreeStep`
) -> torch.Tensor:
    """Write a forward's entries and return `[n, 3]` int64: a hash of what each attends to, and its last two tokens."""
    flat = cache.numpy().reshape(-1, 2)
    slots, table = slot_mapping.numpy(), block_table.numpy()
    is_written = slots >= 0
    flat[slots[is_written]] = np.stack((tokens.numpy(), positions.numpy()), axis=1)[is_written]
    in_trees = {} if step is None else {int(row): i for i, row in enumerate(step["rows"].numpy())}
    hidden = np.zeros((len(slots), 3), dtype=np.int64)
    for request, (low, high) in enumerate(itertools.pairwise(query_start_loc)):
        for query in range(low, high):
            if request in in_trees:
                tree = in_trees[request]
                mask = int(step["masks"][tree, query - low])
                prefix, nodes = int(step["prefix_lens"][tree]), [bit for bit in range(64) if mask >> bit & 1]
            else:
                prefix, nodes = int(seq_lens[request]) - (high - query) + 1, []
            if prefix > table.shape[1] * BLOCK_SIZE:
                raise IndexError(f"a prefix of {prefix} entries")
            seen = np.array([*range(prefix), *(prefix + bit for bit in nodes)], dtype=np.int64)
            if not len(seen):  # padding
                continue
            entries = flat[table[request, seen // BLOCK_SIZE] * BLOCK_SIZE + seen % BLOCK_SIZE]
            last = entries[-2:, 0]
            hidden[query] = hashed(entries[:, 0], entries[:, 1], 7).sum() >> 8, last[0], last[-1]
    return torch.from_numpy(hidden)


def logits_of(hidden: torch.Tensor, salt: int, spread: int) -> torch.Tensor:
    """Return `[n, VOCAB]` float32: what follows from the last two tokens, ties among it, and a network's own part."""
    everything, previous, last = hidden.numpy().T[:, :, None]
    agreed = (hashed(previous, last, np.arange(VOCAB)) % 40 / 8).astype(np.float32)
    own = hashed(everything, np.arange(VOCAB), salt) % spread / 8
    return torch.from_numpy(agreed + own.astype(np.float32))


target_logits = functools.partial(logits_of, salt=1, spread=8)
draft_logits = functools.partial(logits_of, salt=2, spread=12)


def as_dict(step: Any) -> dict[str, Any] | None:
    return None if step is None else vars(step)


class FakeDraft:
    num_axes, block_size = 3, BLOCK_SIZE
    max_num_tokens = 24  # so that wide levels are fed in parts
    vocab_size, max_model_len, num_positions = VOCAB, MAX_LEN, MAX_LEN
    hidden_size, dtype = 3, torch.int64
    hf_config = full_positions = None
    bytes_per_block, is_self_draft, model, why_no_graphs = 0, False, None, ""

    def __init__(self, device: torch.device, launch: Callable):
        self.device, self._launch = device, launch
        self.cache = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 1, 2, dtype=torch.int64, device=device)
        self.config = SimpleNamespace(cache=self.cache)
        self.attention: FakeAttention | None = None

    def load(self, _target: None, _config: Any) -> int:
        """Load; the weights hold no bytes."""
        return 0

    def make_vision_cache(self, num_bytes: int) -> VisionCache:
        return VisionCache(num_bytes, 1, torch.float32, self.device)

    def init_kv(self, _num_bytes: int, _allocation: Any) -> int:
        return NUM_BLOCKS

    def embed(self, token_ids: torch.Tensor, media: list, is_media: Any) -> torch.Tensor:
        assert token_ids.device == self.device
        return token_ids.long()[:, None]

    def forward(self, embeds, positions, layout, **arguments: Any) -> torch.Tensor:
        axes = to_host(positions)
        assert torch.equal(axes[0], axes[2])
        starts = layout.query_start_loc_np
        assert np.array_equal(starts, to_host(layout.query_start_loc).numpy())
        step = None if self.attention is None else as_dict(self.attention.step)
        return self._launch(attend)(
            self.cache, embeds[:, 0], positions[1], query_start_loc=starts, step=step, **arguments
        )

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._launch(draft_logits)(hidden)


class FakeAttention:
    """Stands in for `TreeAttention`: one layer whose keys are the cache, and whose values follow them."""

    def __init__(self, layers: Any, device: torch.device, *, is_targets: bool = False):
        [self._cache] = layers
        self.layers = [SimpleNamespace(layer_name="layer")]
        self.step: Any = None

    def outruns(self, num_rows: int) -> bool:
        return not backends.splits_keys(self._cache, num_rows)

    def caches(self) -> CacheList:
        return CacheList([(self._cache[..., :1], self._cache[..., 1:])])


class FakeSampler:
    """Stands in for vLLM's sampler: temperature and its noise."""

    use_fp64_gumbel = return_sampling_mask = False
    logprobs_mode = "raw_logprobs"
    thinking_budget_state = SimpleNamespace(enabled=False)
    req_states = SimpleNamespace(max_model_len=MAX_LEN)

    def __init__(self, world: Any, temperature: float):
        heat = np.full(MAX_REQS, temperature, dtype=np.float32)
        heat[1::2] = 0.0  # greedy requests beside the others
        self.needs_logits_processing = heat > 0
        nobody = np.zeros(MAX_REQS, dtype=bool)
        self.sampling_states = SimpleNamespace(
            temperature=SimpleNamespace(np=heat, gpu=world.put(heat)),
            seeds=SimpleNamespace(gpu=world.put(np.arange(MAX_REQS) * 2**40 + 11)),
            min_p=SimpleNamespace(np=np.zeros(MAX_REQS)),
            top_k=SimpleNamespace(np=np.array([4] + [VOCAB] * (MAX_REQS - 1))),  # the first one's logits are processed
            top_p=SimpleNamespace(np=np.ones(MAX_REQS)),
            vocab_size=VOCAB,
        )
        nothing = SimpleNamespace(np=np.zeros(MAX_REQS, dtype=np.float32))
        bias, penalties = SimpleNamespace(use_logit_bias=nobody), SimpleNamespace(
            use_penalty=nobody, repetition_penalty=SimpleNamespace(np=np.ones(MAX_REQS, dtype=np.float32)),
            frequency_penalty=nothing, presence_penalty=nothing, apply=lambda logits, ctx: logits,
        )  # fmt: skip
        bad_words = SimpleNamespace(num_bad_words=SimpleNamespace(np=np.zeros(MAX_REQS, dtype=np.int32)))
        self.logits_processors = [bias, penalties, bad_words]
        self._world = world

    def get_logprobs_dims(self, idx_mapping_np: np.ndarray, include_token_ids: bool = True) -> None:
        return None

    def apply_sampling_params(self, logits, rows, idx_mapping, rows_np, pos, input_ids, local_pos, bound_np):
        heat = self.sampling_states.temperature.gpu[rows][:, None]
        return logits.float() / torch.where(heat == 0, 1.0, heat)

    def sample(
        self, logits, rows, idx_mapping, rows_np, pos, input_ids, local_pos, bound_np, return_logprobs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        processed = self.apply_sampling_params(logits, rows, None, rows_np, pos, input_ids, local_pos, bound_np)
        states = self.sampling_states
        tokens = self._world.launch(gumbel_sample)(processed, rows, states.temperature.gpu, states.seeds.gpu, pos)
        return tokens, processed


def gumbel_sample(logits, rows, temperature, seeds, pos) -> torch.Tensor:
    """Stand in for vLLM's kernel, with shared noise."""
    noisy, is_noisy = logits.clone(), temperature[rows].numpy() != 0
    keys = np.arange(logits.shape[1], dtype=np.uint32)
    values = cpu_kernels.gumbel_noise(seeds[rows].numpy()[is_noisy], pos.numpy()[is_noisy], keys)
    noisy.numpy()[is_noisy] += values
    return noisy.argmax(dim=-1)
