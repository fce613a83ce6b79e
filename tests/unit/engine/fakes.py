"""What the engine's unit tests share: one rank, counters that only add, knobs, requests, and hooks of no target."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.multimodal.inputs import PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.draft import kv
from vllm_vidspec.engine.hooks.protocol import Forward, TargetHook, TargetHooks
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.requests import NewRequest

NUM_ROWS, NUM_TOKENS, HIDDEN = 4, 8, 4
VIDEO = np.arange(1, 5)  # prompt indices
CPU = torch.device("cpu")
GROUP = SimpleNamespace(rank_in_group=0, world_size=1)
ALONE = Agreement(GROUP)
NOTHING = Forward(None, None)  # what a step leaves that ran no forward


class Counts(dict):
    """Stands in for `Counters`: it only adds; `who` lists the requests that were skipped, `why` what was said of it."""

    is_paused = False

    def add(self, name: str, value: int = 1) -> None:
        self[name] = self.get(name, 0) + value

    def set(self, name: str, value: int) -> None:
        self[name] = value

    def skip(self, reason: str, req_id: str, detail: str) -> None:
        assert "\n" not in detail
        self.add(f"skipped_{reason}")
        self.setdefault("who", []).append(req_id)
        self.setdefault("why", []).append(detail)


def make_knobs(**knobs: Any) -> Knobs:
    return Knobs(VidSpecConfig(**{"model": "draft", "num_speculative_tokens": 3} | knobs))


def in_list(*hooks: TargetHook, on_draft_error: str = "skip") -> TargetHooks:
    return TargetHooks(hooks, make_knobs(on_draft_error=on_draft_error), ALONE)


def new_request(
    req_state_idx: int = 2, name: str = "video", num_tokens: int = NUM_TOKENS, sampling: Any = None, **more: Any
) -> NewRequest:
    """Return a request whose prompt shows one video, or text alone where `name` is ""."""
    place = PlaceholderRange(offset=int(VIDEO[0]), length=len(VIDEO))
    feature = SimpleNamespace(mm_position=place, modality="video", identifier=name, data={"pixel_values": None})
    sampling = sampling or SimpleNamespace(structured_outputs=None)
    tokens, features = list(range(num_tokens)), [feature] if name else []
    return NewRequest(f"request-{req_state_idx}", req_state_idx, tokens, features, sampling, **more)


def batch_of(*rows: int, count: int = NUM_TOKENS) -> SimpleNamespace:
    num_reqs = len(rows)
    return SimpleNamespace(
        idx_mapping_np=np.array(rows, dtype=np.int32),
        is_prefilling_np=np.ones(num_reqs, dtype=bool),
        num_computed_tokens_np=np.zeros(num_reqs, dtype=np.int64),
        num_scheduled_tokens=np.full(num_reqs, count),
        query_start_loc_np=np.arange(num_reqs + 1) * count,
    )


def attention_layer(name: str = "FLASH_ATTN") -> SimpleNamespace:
    """Return an attention layer of a GPU backend, "layer", whose own forward writes -1 everywhere."""

    def forward(layer, query, key, value, kv_cache, attn_metadata, output):
        output.fill_(-1)
        return output

    backend = SimpleNamespace(get_name=lambda: name, forward_includes_kv_cache_update=False)
    return SimpleNamespace(
        layer_name="layer",
        impl=SimpleNamespace(forward=forward, num_heads=2, num_kv_heads=1, head_size=4, scale=0.5),
        get_attn_backend=lambda: backend,
        kv_cache_dtype="auto",
    )


def model_state() -> SimpleNamespace:
    """Return what `TargetTrees` wraps of a runner's model state."""

    def prepare_attn(
        input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, kv_cache_config, for_capture=False
    ):
        return {"layer": SimpleNamespace(block_table=block_tables[0])}

    return SimpleNamespace(
        prepare_inputs=lambda input_batch, req_states: {},
        prepare_dummy_inputs=lambda num_reqs, num_tokens: {},
        prepare_attn=prepare_attn,
    )


def vllm_sampler(asked: dict[int, dict], vocab_size: int) -> Any:
    """Return vLLM's sampler with one request a row, which has said a few tokens, some of them twice; on a CPU only."""
    import vllm_vidspec.engine.cpu_worker  # noqa: F401  buffers that a device would map

    states, config = RequestState(8, 64, 64, 7, vocab_size, CPU), SimpleNamespace(reasoning_config=None)
    sampler = Sampler(config, 8, vocab_size, CPU, states, num_speculative_tokens=7)
    for row, arguments in asked.items():
        params = SamplingParams(**{name: value for name, value in arguments.items() if name != "bad_words"})
        params._bad_words_token_ids = arguments.get("bad_words")
        states.free_indices = [row]
        states.add_request(f"request {row}", 4, [row + 2, 7, 7, 11, 3, 9, 9, row], 0, 50)
        sampler.add_request(row, params)
    states.apply_staged_writes()
    sampler.apply_staged_writes()
    return sampler


class StagedWrites:
    """Stands in for vLLM's `StagedWriteTensor`, whose kernel reads what is staged from host memory that it maps."""

    def __init__(self, size: Any, dtype: torch.dtype, device: torch.device, **_options: Any):
        self.gpu = torch.zeros(size, dtype=dtype, device=device)
        self._staged: list[tuple[int, int, list]] = []

    def stage_write(self, row: int, start: int, values: Any) -> None:
        self._staged.append((row, start, list(values)))

    def stage_write_elem(self, row: int, value: int) -> None:
        self._staged.append((row, 0, [value]))

    def apply_write(self) -> None:
        memory = self.gpu.numpy().reshape(len(self.gpu), -1)
        for row, start, values in self._staged:
            memory[row, start : start + len(values)] = values
        self.clear_staged_writes()

    def clear_staged_writes(self) -> None:
        self._staged.clear()


def staged(patch: pytest.MonkeyPatch) -> None:
    """Let a draft's KV pool stage its writes so."""
    patch.setattr(kv, "StagedWriteTensor", StagedWrites)
