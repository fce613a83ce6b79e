"""The draft network: its own forward context, KV layers and attention metadata, beside the target in one process."""

import functools
import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn as nn
from vllm.compilation.backends import set_model_tag
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import get_tp_group
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.worker.gpu.attn_utils import (
    build_attn_metadata,
    build_slot_mappings_by_layer,
    get_kv_cache_spec,
    init_attn_backend,
    init_kv_cache,
)

from vidspec_kernels import candidates_reference
from vllm_vidspec import families
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.compat import model as compat
from vllm_vidspec.engine.compat.linear import quantise_head
from vllm_vidspec.engine.compat.moved import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm_vidspec.engine.draft.model_config import (
    draft_config,
    follow,
    kv_bytes_per_token,
    of_two_rows,
    unhooked,
    with_usual_kernels,
    without_override,
)
from vllm_vidspec.engine.draft.score_blocks import rows_per_block
from vllm_vidspec.engine.draft.vision_cache import VisionCache
from vllm_vidspec.engine.kv_views import attention_layers
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.visual_map import VisualMap


def rope_positions(language_model: nn.Module, max_model_len: int) -> int:
    """Return how many rope positions a language model has: the rows of its smallest table, where it has any.

    Under M-RoPE a video's positions follow its duration: vLLM's tables have four times the rows of the context.
    """
    tables = (getattr(module, "cos_sin_cache", None) for module in language_model.modules())
    return min((len(table) for table in tables if isinstance(table, torch.Tensor)), default=max_model_len)


def held_bytes(device: torch.device) -> int:
    """Return the memory that this process holds: what torch has allocated on a GPU, the resident set on a CPU."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


@dataclass(frozen=True)
class Layout:
    """How the tokens of a forward belong to its requests."""

    query_start_loc: torch.Tensor  # [num_reqs + 1] int32; `query_start_loc_np` the same on the host
    query_start_loc_np: np.ndarray
    num_queries: torch.Tensor  # [num_reqs] int32 tokens of each request
    max_queries: int  # the most tokens of a request

    @classmethod
    def uniform(cls, num_reqs: int, width: int, device: torch.device) -> "Layout":
        starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=device) * width
        starts_np = np.arange(num_reqs + 1, dtype=np.int32) * np.int32(width)
        return cls(starts, starts_np, torch.full_like(starts[1:], width), width)


class DraftModel:
    """A model that vLLM's KV manager does not see: its layers live in a `static_forward_context` of its own."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_self_draft: bool, agreement: Agreement):
        self.target_config, self.device, self.is_self_draft = vllm_config, device, is_self_draft
        self._agreement = agreement  # every collective of a prefill is entered under it
        self.max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.max_encoder_tokens = vllm_config.scheduler_config.max_num_encoder_input_tokens
        self.num_positions: int  # rope positions that the draft has, from 0 on
        self.has_own_tower = True
        self.model: nn.Module
        self._encoder: nn.Module  # the network whose tower encodes: the target's where the draft has none of its own
        self._map: VisualMap | None = None  # from the target's embeddings to the draft's; None where they are the same
        self.config: VllmConfig

    def load(self, target: Any, knobs: VidSpecConfig) -> int:
        """Load the draft's weights, or take the `target`'s where it drafts for itself; return the bytes they hold.

        `knobs` say how its layers and its output head compute.
        """
        before = held_bytes(self.device)
        self.has_own_tower = knobs.has_own_tower
        self.config = draft_config(
            self.target_config, self.is_self_draft, knobs.linear_backend_per_quant, self.has_own_tower
        )
        if self.is_self_draft:
            # Attention finds its layer by name in the forward context: the same network run under a context of copied
            # attention layers is a second model without a second copy of any weight, which the target's hooks pass by.
            self.model = target
            ours, theirs = (it.compilation_config.static_forward_context for it in (self.config, self.target_config))
            ours.update({name: unhooked(layer) for name, layer in theirs.items()})
        else:
            # No prefix: what a quantised checkpoint leaves out, it names as its own modules are called. Kernels are
            # chosen by the current configuration, of some formats only once weights are there.
            with set_model_tag("draft_model"), compat.one_stage(), set_current_vllm_config(self.config):
                self.model = get_model(vllm_config=self.config)
            if knobs.draft_lm_head_quantization is not None:
                with compat.one_stage(), set_current_vllm_config(with_usual_kernels(self.config)):
                    quantise_head(self.model, knobs.draft_lm_head_quantization)
            if not self.has_own_tower and self.num_media_levels > 1:
                width = self.config.model_config.get_inputs_embeds_size()
                like = torch.empty(0, width, dtype=self.dtype, device=self.device)
                compat.keep_deepstack(self.model, self.num_media_levels - 1, self.max_num_tokens, like)
        model_config = self.config.model_config
        self._encoder = self.model if self.has_own_tower else target
        if knobs.draft_map is not None:
            self._map = VisualMap.load(Path(knobs.draft_map), self.dtype, self.device)
        self.num_positions = rope_positions(self.model.get_language_model(), model_config.max_model_len)
        self.uses_mrope = model_config.uses_mrope
        self.num_axes = model_config.mrope_num_dims if self.uses_mrope else 1
        # The stride of vLLM's own buffer, which compiled code may have been specialised on: a draft that shares the
        # target's network shares that code. One column more than any batch keeps the slices non-contiguous.
        self._positions = torch.zeros(self.num_axes, self.max_num_tokens + 1, dtype=torch.int64, device=self.device)
        # [max_num_seqs] on the host; the draft's own prefills need no flag, their chunks are ordinary segments
        max_num_seqs = self.config.scheduler_config.max_num_seqs
        self._never_prefilling = torch.zeros(max_num_seqs, dtype=torch.bool)
        self._longest = torch.zeros(max_num_seqs, dtype=torch.int32)  # bounds of what the host does not know
        return max(0, held_bytes(self.device) - before)

    def use_cudagraph_mode(self, mode: CUDAGraphMode) -> None:
        """Take the draft's mode, for its metadata builders, which the next `init_kv` makes."""
        resolved, ours = self.target_config.compilation_config, self.config.compilation_config
        ours.cudagraph_mode = mode
        ours.cudagraph_capture_sizes = resolved.cudagraph_capture_sizes
        ours.max_cudagraph_capture_size = resolved.max_cudagraph_capture_size

    @property
    def hidden_size(self) -> int:
        return self.config.model_config.get_hidden_size()

    @property
    def dtype(self) -> torch.dtype:
        return self.config.model_config.dtype

    @property
    def why_no_graphs(self) -> str:
        """Why whole forwards cannot be captured, "" where they can. The KV cache must exist.

        A graph holds several forwards of growing lengths, the first of two tokens a request.
        """
        builders = (builder for groups in self._attn_groups for group in groups for builder in group.metadata_builders)
        if not all(builder.supports_draft_decode_metadata_update for builder in builders):
            return "the draft's attention backend plans its work on the host"
        if self._graph_support.min_cg_support.value < AttentionCGSupport.UNIFORM_BATCH.value:
            return f"{self._graph_support.min_cg_attn_backend} captures no draft forwards of two tokens a request"
        return ""

    @property
    def hf_config(self) -> Any:
        return self.config.model_config.hf_config

    @property
    def max_model_len(self) -> int:
        return self.config.model_config.max_model_len

    @functools.cached_property
    def vocab_size(self) -> int:
        """Logits of a row: as many as the target's, whose noise and parameters they are sampled under."""
        return self.target_config.model_config.get_vocab_size()

    @functools.cached_property
    def num_embeddings(self) -> int:
        """Token ids that the draft has rows of; both count rows that only pad a vocabulary to a round size."""
        return self.config.model_config.get_vocab_size()

    @functools.cached_property
    def family(self) -> families.FamilyAdapter:
        return families.adapter_for(self.hf_config)

    @functools.cached_property
    def num_media_levels(self) -> int:
        """Embeddings side by side that the tower makes of a visual token; see `FamilyAdapter`."""
        return self.family.num_media_levels(self.hf_config)

    @property
    def media_width(self) -> int:
        """Of a visual token's embeddings, all levels."""
        return self.num_media_levels * self.config.model_config.get_inputs_embeds_size()

    def make_vision_cache(self, num_bytes: int) -> VisionCache:
        """Allocate a cache of vision embeddings, of so many bytes a rank."""
        return VisionCache(_smallest_of_ranks(num_bytes), self.media_width, self.dtype, self.device)

    @functools.cached_property
    def block_size(self) -> int:
        return self._kv_groups()[0].kv_cache_spec.block_size

    @property
    def bytes_per_block(self) -> int:
        return kv_bytes_per_token(self.config) * self.block_size

    def resolve_layout(self) -> None:
        """Choose the KV cache's layout where no engine has: the draft is all that its process runs."""
        layouts = get_supported_kv_cache_layouts(get_current_attn_backends(self.config))
        resolve_kv_cache_layout(
            self.config, [[layout.name for layout in layouts]], get_kv_cache_spec(self.config).values()
        )

    def _kv_groups(self) -> list[Any]:
        follow(self.config, self.target_config)
        groups = get_kv_cache_groups(self.config, get_kv_cache_spec(self.config))
        if len(groups) != 1:
            raise VidSpecError("drafts that mix attention kinds (several KV cache groups) are not supported")
        return groups

    def init_kv(self, num_bytes: int, allocation: AbstractContextManager) -> int:
        """Allocate the KV cache of so many bytes a rank, inside `allocation`, and bind it; return its blocks."""
        with set_current_vllm_config(self.config):
            self._kv_config = self._plan_kv(self.num_blocks_in(num_bytes))
            init_kv_cache(
                self.config.compilation_config.static_forward_context,
                self._kv_config,
                self.device,
                self._init_attention(),
                self.config,
                kv_cache_allocation_context=allocation,
                attn_groups=(attn_group for groups in self._attn_groups for attn_group in groups),
            )
        return self._kv_config.num_blocks

    def share_kv(self) -> None:
        """Bind the KV cache of a target that drafts for itself, which has the blocks of `widened`."""
        with set_current_vllm_config(self.config):
            self._kv_config = self._plan_kv(1)
            self._init_attention()
        layers = attention_layers(self.target_config)
        for name, layer in attention_layers(self.config).items():
            layer.bind_kv_cache(layers[name].kv_cache)

    def widened(self, kv_cache_config: Any, num_own: int) -> Any:
        """Return the `KVCacheConfig` of a target that drafts for itself, with so many blocks behind its own that its
        scheduler never hears of.
        """
        with set_current_vllm_config(self.config):
            more = self._plan_kv(kv_cache_config.num_blocks + num_own)
        return replace(kv_cache_config, num_blocks=more.num_blocks, kv_cache_tensors=more.kv_cache_tensors)

    def num_blocks_in(self, num_bytes: int) -> int:
        """Return how many blocks so many bytes of a rank hold, the same on all ranks."""
        return _smallest_of_ranks(num_bytes // self.bytes_per_block)

    def _plan_kv(self, num_blocks: int) -> Any:
        """Return vLLM's `KVCacheConfig` of a cache of so many blocks."""
        size = num_blocks * self.bytes_per_block
        return get_kv_cache_config_from_groups(without_override(self.config), self._kv_groups(), size)

    def _init_attention(self) -> list[int]:
        """Make the metadata builders of the planned cache; return the block sizes of its groups' kernels."""
        config = of_two_rows(self.config, self.target_config.speculative_config)
        self._attn_groups, self._graph_support, sizes = init_attn_backend(self._kv_config, config, self.device)
        return sizes

    def forward(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,  # [num_axes, num_tokens] int64 rope positions
        layout: Layout,
        *,
        seq_lens: torch.Tensor,  # [num_reqs] int32 KV entries of each request after this forward
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,  # [num_tokens] int64 physical slots
        seq_lens_upper_bound: np.ndarray | None = None,  # [num_reqs] on the host; None: what the block table holds
    ) -> torch.Tensor:
        """Run one paged forward over a batch of segments; return `[num_tokens, hidden_size]` final hidden states.

        It can be captured: without a bound of its own no number of the host follows from the step, and what metadata
        the backend computes on the device is computed in the graph.
        """
        num_reqs, slot_mappings = len(seq_lens), slot_mapping[None]
        if seq_lens_upper_bound is None:
            max_seq_len = block_table.shape[1] * self.block_size
            bound = self._longest[:num_reqs].fill_(max_seq_len)
        else:
            bound = torch.from_numpy(seq_lens_upper_bound.astype(np.int32))
            max_seq_len = int(seq_lens_upper_bound.max())
        metadata = build_attn_metadata(
            attn_groups=self._attn_groups,
            num_reqs=num_reqs,
            num_tokens=embeds.shape[0],
            query_start_loc_gpu=layout.query_start_loc,
            query_start_loc_cpu=torch.from_numpy(layout.query_start_loc_np),
            max_query_len=layout.max_queries,
            seq_lens=seq_lens,
            max_seq_len=max_seq_len,
            block_tables=[block_table],
            slot_mappings=slot_mappings,
            kv_cache_config=self._kv_config,
            seq_lens_cpu_upper_bound=bound,
            is_prefilling=self._never_prefilling[:num_reqs],
        )
        return self._run(embeds, positions, metadata, build_slot_mappings_by_layer(slot_mappings, self._kv_config))

    def profile(self) -> None:
        """Run the largest forwards, so that the memory profile (and compilation) sees the draft."""
        multimodal = self.target_config.model_config.multimodal_config
        held: list[torch.Tensor] = []  # as many of the largest items as a step may hold
        if not self.has_own_tower and not self.is_self_draft:  # for whom nothing is encoded
            target = self.target_config.model_config
            width = self.family.num_media_levels(target.hf_config) * target.get_inputs_embeds_size()
            held = [self.as_own(torch.zeros(self.max_encoder_tokens, width, dtype=self.dtype, device=self.device))]
        elif self.has_own_tower and multimodal is not None and not multimodal.skip_mm_profiling:
            budget = MultiModalBudget(self.target_config, MULTIMODAL_REGISTRY, enable_cache=False)
            held = self._encode(budget.get_dummy_encoder_profile_inputs())
        width = self.config.model_config.get_inputs_embeds_size()
        embeds = torch.zeros(self.max_num_tokens, width, dtype=self.dtype, device=self.device)
        hidden = self._run(embeds, torch.zeros_like(self._positions[:, : self.max_num_tokens]), None, None)
        # More scores than one block's never live at a time.
        logits = self.compute_logits(hidden[: rows_per_block(self.vocab_size)])
        best = torch.empty(len(logits), 1, device=self.device)
        candidates_reference(logits, log_probs=best, ids=best.long())
        del held

    def warm_up(self) -> None:
        """Compile DeepGEMM's kernels of block-FP8 layers, as vLLM does for the target: else the first video waits."""
        from vllm import envs
        from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup
        from vllm.utils.deep_gemm import is_deep_gemm_supported

        if is_deep_gemm_supported() and envs.VLLM_DEEP_GEMM_WARMUP != "skip":
            deep_gemm_warmup(self.model, self.max_num_tokens)

    def _run(self, embeds: torch.Tensor, positions: torch.Tensor, metadata: Any, slots: Any) -> torch.Tensor:
        num_tokens = embeds.shape[0]
        buffer = self._positions[:, :num_tokens]
        buffer.copy_(positions)
        with (
            self._agreement.collective(),
            compat.without_kv_connector(),
            compat.one_stage(),
            set_forward_context(
                metadata,
                self.config,
                num_tokens=num_tokens,
                slot_mapping=slots,
                cudagraph_runtime_mode=CUDAGraphMode.NONE,
                batch_descriptor=BatchDescriptor(num_tokens=num_tokens),
            ),
        ):
            output = self.model(
                input_ids=None, positions=buffer if self.uses_mrope else buffer[0], inputs_embeds=embeds
            )
        # A target that drafts for itself and whose hidden states guide the pruning returns those too.
        return output[0] if isinstance(output, tuple) else output

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return `[n, vocab_size]` logits of `[n, hidden_size]` hidden states; what either has no row of is -inf."""
        logits = self.model.compute_logits(hidden_states)
        missing = self.vocab_size - self.num_embeddings
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def embed(self, token_ids: torch.Tensor, media: list[torch.Tensor], where: torch.Tensor | None) -> torch.Tensor:
        """Return `[n, hidden_size]` input embeddings of the next forward: of `[n]` int64 tokens, and in `[num_media]`
        int64 places of items' `[m_i, num_media_levels * hidden_size]`; those of deeper layers wait for it in the model.
        """
        is_own = where is not None and self.family.embeds_by_itself
        if where is not None and not is_own:
            token_ids = token_ids.index_fill(0, where, 0)  # a visual token's own id may be outside the vocabulary
        if self.num_embeddings < self.vocab_size:
            token_ids = token_ids.clamp(max=self.num_embeddings - 1)  # the target's padding, which means nothing
        with self._agreement.collective():
            if is_own:
                is_media = torch.zeros_like(token_ids, dtype=torch.bool).index_fill_(0, where, True)
                return self.model.embed_input_ids(token_ids, multimodal_embeddings=media, is_multimodal=is_media)
            embeds = self.model.embed_input_ids(token_ids)
        if media:
            # By index, not by vLLM's mask, which has to become one on the host first.
            features, size = torch.cat(media).to(embeds.dtype), embeds.shape[1]
            embeds.index_copy_(0, where, features[:, :size])
            if self.num_media_levels > 1:
                deeper = embeds.new_zeros(len(embeds), features.shape[1] - size)
                deeper.index_copy_(0, where, features[:, size:])
                self.model._set_deepstack_input_embeds(deeper.view(len(embeds), -1, size).transpose(0, 1))
        return embeds

    def encode(self, features: list[Any], frames: Sequence[range | None]) -> list[torch.Tensor]:
        """Run the vision tower over vLLM's multimodal features, of each over some frames of its grid (see
        `FamilyAdapter.frames`), None for all; return `[m_i, num_media_levels * hidden_size]` of each, in their order.
        """
        items = zip(features, frames, strict=True)
        return self._encode([(feature.modality, self._cut(feature.data, some)) for feature, some in items])

    def _cut(self, item: Any, frames: range | None) -> Any:
        if frames is None:
            return item
        data = {key: element.data for key, element in item.items()}
        changed = self.family.some_frames(data, frames)
        return type(item)({key: replace(element, data=changed.get(key, element.data)) for key, element in item.items()})

    def _encode(self, items: list[tuple[str, Any]]) -> list[torch.Tensor]:
        order = sorted(range(len(items)), key=lambda i: items[i][0])
        outputs: list[torch.Tensor] = []
        groups = group_and_batch_mm_kwargs([items[i] for i in order], device=self.device, pin_memory=PIN_MEMORY)
        for _, _, kwargs in groups:
            with self._agreement.collective():
                embeddings = self._encoder.embed_multimodal(**kwargs)
            outputs.extend(map(self.as_own, embeddings))
        return [outputs[i] for i in np.argsort(order)]

    def as_own(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return `[m, num_media_levels * hidden_size]` of an item's embeddings as the encoder's tower has made them."""
        embeddings = embeddings.flatten(0, -2)  # LLaVA-OneVision's videos of unequal length come as [1, m, hidden_size]
        if self._map is not None:
            return self._map(embeddings.to(self.dtype))
        return embeddings if self.has_own_tower else embeddings[:, : self.media_width]  # positions may come behind

    def full_positions(self, token_ids: list[int], features: list[Any]) -> tuple[torch.Tensor, int]:
        """Return the full prompt's rope positions `[num_axes, num_tokens]` and the delta of the text after it."""
        if not self.uses_mrope:
            return torch.arange(len(token_ids))[None], 0
        return self.model.get_mrope_input_positions(token_ids, features)


def _smallest_of_ranks(value: int) -> int:
    """Return the smallest of the tensor-parallel ranks' values, so that all allocate alike."""
    group = get_tp_group()
    values = torch.tensor([value], dtype=torch.int64)
    if group.world_size > 1:
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(values)
