"""Guidance: listens to the target's prefill and scores a prompt's visual tokens for the draft's pruner.

It only reads: the target's own computation, and so its output, stays bit for bit what it was. A request is heard over
as many prefill chunks as it takes. What a cached prefix keeps from being heard is taken from the last prompt that
showed the same image or video; failing that there is no guidance, which is counted by reason, and the pruner is
`uniform`.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import async_tensor_h2d

from vidspec_kernels import guidance_scores, uv_text_sum, uv_video_scores
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine import compat
from vllm_vidspec.engine.counters import Counters
from vllm_vidspec.engine.prompt import UnsupportedPrompt, embedding_indices
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.pruning import budget, get_pruner


@dataclass
class Listener:
    """A request whose prefill is being heard.

    Attributes:
        items: Per image or video the prompt indices `[m_i]` int64 of its tokens.
        names: Per item vLLM's identifier of its content.
        num_tokens: Length of the prompt, and after a preemption of the output so far.
        missed: Why there will be no scores, or None.
    """

    items: list[torch.Tensor]
    names: list[str]
    num_tokens: int
    missed: str | None = None

    @property
    def text_start(self) -> int:
        """The first index after the last visual token: from here on, text asks."""
        return max(int(item[-1]) for item in self.items) + 1


class Guidance(Protocol):
    """Scores visual tokens during the target's prefill."""

    def reserve(self, available_bytes: int) -> int:
        """Return how many of a rank's KV memory bytes the guidance keeps for itself."""
        ...

    def arrive(self, req_id: str, token_ids: list[int], features: list[Any]) -> None:
        """Begin to listen to a request, if there is anything to choose in it."""
        ...

    def check_cache(self) -> None:
        """Refuse a KV cache that cannot be read; called once it exists.

        Raises:
            VidSpecError: One line naming the way out.
        """
        ...

    def before_forward(self, batch: Any) -> None:
        """Plan a step, given vLLM's `InputBatch`."""
        ...

    def after_forward(self, aux_hidden_states: list[torch.Tensor] | None) -> None:
        """Collect what the step showed."""
        ...

    def take(self, req_id: str) -> list[torch.Tensor] | None:
        """Return a prefilled request's scores, one float32 `[m_i]` CPU tensor per item, and forget the request.

        None where there was nothing to choose, or no guidance (counted by reason). Every rank of a tensor-parallel
        group must call it for the same requests in the same order; all get the same scores.
        """
        ...

    def release(self, req_id: str) -> None:
        """Forget a request that ended before its prefill did."""
        ...


def make_guidance(
    config: VidSpecConfig, target: torch.nn.Module, vllm_config: Any, counters: Counters
) -> Guidance | None:
    """Install what the configured pruner needs on the loaded target; None if it needs nothing of it.

    Raises:
        VidSpecError: The target's attention backend or model class cannot be listened to, or a layer does not exist.
    """
    needs = get_pruner(config.pruner).needs
    if "attention" in needs:
        return AttentionGuidance(config, vllm_config, counters)
    if "uv" in needs:
        return HiddenStateGuidance(config, target, vllm_config, counters)
    return None


_MAX_REMEMBERED = 64  # images and videos; 100 kB each at 25,000 tokens


class _Listeners:
    """What both kinds share: who is listened to, and the scores of what was shown lately."""

    def __init__(self, config: VidSpecConfig, counters: Counters, device: torch.device):
        self.config = config
        self.counters = counters
        self.device = device
        self._listeners: dict[str, Any] = {}
        self._remembered: OrderedDict[str, torch.Tensor] = OrderedDict()  # identifier -> [m] float32 on the CPU

    def _listen(self, features: list[Any]) -> list[torch.Tensor]:
        """Return the items' prompt indices; [] where pruning chooses nothing or the draft will refuse the prompt."""
        try:
            items = [embedding_indices(feature) for feature in features]
        except UnsupportedPrompt:
            return []
        ratios = [self.config.ratio_for(feature.modality) for feature in features]
        kept = [budget(len(item), ratio) for item, ratio in zip(items, ratios, strict=True)]
        chooses = any(0 < keep < len(item) for keep, item in zip(kept, items, strict=True))
        return items if chooses else []

    def reserve(self, available_bytes: int) -> int:
        """Keep nothing; see `Guidance`."""
        return 0

    def check_cache(self) -> None:
        """Accept any; see `Guidance`."""

    def release(self, req_id: str) -> None:
        """Forget a request; see `Guidance`."""
        self._listeners.pop(req_id, None)

    def _finish(self, listener: Listener, heard: list[torch.Tensor | None]) -> list[torch.Tensor] | None:
        """Return a request's scores, remembered ones where this prefill did not compute them; count what came of it.

        Args:
            listener: Whose prefill is done.
            heard: Per item the scores `[m_i]` of this prefill, or None.
        """
        scores = [
            self._remembered.get(name) if fresh is None else fresh
            for name, fresh in zip(listener.names, heard, strict=True)
        ]
        for name, fresh in zip(listener.names, heard, strict=True):
            if fresh is not None:
                self._remembered[name] = fresh
                self._remembered.move_to_end(name)
        while len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)
        if any(score is None for score in scores):
            self.counters.add(f"unguided_{listener.missed or 'cached'}")
            return None
        self.counters.add("guided_prompts")
        if any(fresh is None for fresh in heard):
            self.counters.add("reused_guidance")
        return scores  # type: ignore[return-value]

    def _prefills(self, batch: Any):
        """Yield (batch index, listener, first position, end position) of the listened requests in a step."""
        for i in np.flatnonzero(batch.is_prefilling_np):
            listener = self._listeners.get(batch.req_ids[i])
            if listener is not None:
                start = int(batch.num_computed_tokens_np[i])
                yield int(i), listener, start, min(start + int(batch.num_scheduled_tokens[i]), listener.num_tokens)


# ---- attention (SpecVLM) -------------------------------------------------------------------------------------------


@dataclass
class _AttentionListener(Listener):
    total: torch.Tensor | None = None  # [text_start] float32 sums of softmax weights, of this rank's heads
    num_queries: int = 0


@dataclass
class _AttentionStep:
    """The guiding queries of one forward, compacted to the n requests that have any.

    Attributes:
        query_rows: `[num_queries]` int64 rows of the step's query tensor.
        query_start_loc: `[n + 1]` int32.
        query_pos: `[num_queries]` int32 place in the sequence.
        batch_rows: `[n]` int64 rows of the step's block table.
        num_keys: `[n]` int32 keys to score.
        sums: `[n, max(num_keys)]` float32.
        listeners: The n requests and how many queries each has here.
        out_rows: `[n]` int64, 0 to n - 1.
        max_queries: Most queries of one request.
        max_row: Largest of `query_rows`.
        num_observed: Layers heard.
    """

    query_rows: torch.Tensor
    query_start_loc: torch.Tensor
    query_pos: torch.Tensor
    batch_rows: torch.Tensor
    num_keys: torch.Tensor
    sums: torch.Tensor
    listeners: list[tuple[_AttentionListener, int]]
    out_rows: torch.Tensor
    max_queries: int
    max_row: int
    num_observed: int = 0


class AttentionGuidance(_Listeners):
    """SpecVLM eq. 4-5: the attention that each visual token receives from the text after the last visual token.

    Mean over queries, heads and layers of the softmax weight, softmax over all keys. Taken per layer in the attention
    backend from q and the paged K cache, so that chunks, cached prefixes and several requests in one forward all work:
    a query is scored in the chunk that computes it, against keys that are in the cache by then, whoever computed them.
    """

    def __init__(self, config: VidSpecConfig, vllm_config: Any, counters: Counters):
        super().__init__(config, counters, vllm_config.device_config.device)
        layers = {
            extract_layer_index(name): layer
            for name, layer in vllm_config.compilation_config.static_forward_context.items()
            if isinstance(layer, Attention)
        }
        self.select(config.guidance_layers, len(layers))
        self._step: _AttentionStep | None = None
        # Rank-local heads, and how many of them all ranks have together.
        self._num_heads = next(iter(layers.values())).impl.num_heads * get_tensor_model_parallel_world_size()
        self._attention = layers
        for index, layer in layers.items():
            check_readable(layer)
            compat.observe_attention(layer, _LayerObserver(self, index))

    def check_cache(self) -> None:
        """Refuse keys packed in a way that no view describes (bf16 on AMX); see `Guidance`."""
        packed = {getattr(layer, "isa", None) for layer in self._attention.values()} - {None, *_CPU_LAYOUTS}
        if packed:
            raise VidSpecError(
                f"attention guidance cannot read the CPU cache layout {packed.pop()!r}: use --dtype float32, or the "
                "pruner uv"
            )

    def select(self, layers: str | tuple[int, ...], num_layers: int) -> None:
        """Choose the layers to sum.

        Raises:
            VidSpecError: The target has no such layer.
        """
        chosen = range(num_layers) if layers == "all" else layers
        if wrong := [index for index in chosen if not 0 <= int(index) < num_layers]:
            raise VidSpecError(f"guidance_layers: the target has layers 0 to {num_layers - 1}, not {wrong[0]}")
        self._layers = frozenset(int(index) for index in chosen)
        self.num_layers = num_layers

    def arrive(self, req_id: str, token_ids: list[int], features: list[Any]) -> None:
        """Begin to listen; see `Guidance`."""
        if items := self._listen(features):
            self._listeners[req_id] = _AttentionListener(items, [f.identifier for f in features], len(token_ids))

    def before_forward(self, batch: Any) -> None:
        """Gather the step's guiding queries; see `Guidance`."""
        self._step = None
        rows, positions, found, batch_rows = [], [], [], []
        for i, listener, start, end in self._prefills(batch):
            first = max(start, listener.text_start)
            if first < end:
                offset = int(batch.query_start_loc_np[i]) - start
                positions.append(np.arange(first, end))
                rows.append(positions[-1] + offset)
                found.append((listener, end - first))
                batch_rows.append(i)
        if not found:
            return
        num_keys, counts = [listener.text_start for listener, _ in found], [count for _, count in found]
        query_rows = np.concatenate(rows)
        self._step = _AttentionStep(
            query_rows=self._upload(query_rows, torch.int64),
            query_start_loc=self._upload(np.cumsum([0, *counts]), torch.int32),
            query_pos=self._upload(np.concatenate(positions), torch.int32),
            batch_rows=self._upload(np.array(batch_rows), torch.int64),
            num_keys=self._upload(np.array(num_keys), torch.int32),
            sums=torch.zeros(len(found), max(num_keys), dtype=torch.float32, device=self.device),
            listeners=found,
            out_rows=torch.arange(len(found), device=self.device),
            max_queries=max(counts),
            max_row=int(query_rows.max()),
        )

    def _upload(self, values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return async_tensor_h2d(values, device=self.device, dtype=dtype)

    def observe(self, index: int, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any) -> None:
        """Add one layer's weights; called inside the target's forward, after the layer's own attention.

        Args:
            index: Layer.
            layer: vLLM's `Attention`.
            query: `[num_tokens, num_heads * head_size]` or `[num_tokens, num_heads, head_size]`, rotated.
            kv_cache: The layer's paged cache; it holds this step's keys.
            metadata: The backend's metadata of this step.
        """
        step = self._step
        # A captured graph or a split batch does not carry this step's rows; `after_forward` notices the missing layer.
        if step is None or index not in self._layers or metadata is None or query.shape[0] <= step.max_row:
            return
        begin = time.perf_counter()
        impl = layer.impl
        guidance_scores(
            query.view(query.shape[0], impl.num_heads, impl.head_size)[step.query_rows],
            key_view(kv_cache, layer),
            metadata.block_table[step.batch_rows],
            step.query_start_loc,
            step.query_pos,
            step.sums,
            step.out_rows,
            step.num_keys,
            impl.scale,
            max_queries_per_req=step.max_queries,
        )
        step.num_observed += 1
        self.counters.add("guidance_us", int(1e6 * (time.perf_counter() - begin)))

    def after_forward(self, aux_hidden_states: list[torch.Tensor] | None) -> None:
        """Add the step's sums to its requests; see `Guidance`."""
        step, self._step = self._step, None
        if step is None:
            return
        for row, (listener, num_queries) in enumerate(step.listeners):
            if step.num_observed != len(self._layers):
                listener.missed = "unobserved"
                continue
            sums = step.sums[row, : listener.text_start]
            listener.total = sums if listener.total is None else listener.total + sums
            listener.num_queries += num_queries

    def take(self, req_id: str) -> list[torch.Tensor] | None:
        """Return the scores; see `Guidance`. One all-reduce of `[text_start]` floats."""
        listener = self._listeners.pop(req_id, None)
        if listener is None:
            return None
        if listener.missed is not None or listener.total is None:
            return self._finish(listener, [None] * len(listener.items))
        total = tensor_model_parallel_all_reduce(listener.total)
        mean = (total / (listener.num_queries * self._num_heads * len(self._layers))).cpu()
        return self._finish(listener, [mean[item] for item in listener.items])


@dataclass(frozen=True)
class _LayerObserver:
    """What `compat.observe_attention` calls for one layer."""

    guidance: AttentionGuidance
    index: int

    def __call__(self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any) -> None:
        self.guidance.observe(self.index, layer, query, kv_cache, metadata)


_CPU_LAYOUTS = ("vec", "vec16")


def check_readable(layer: Any) -> None:
    """Refuse an attention layer whose paged keys we cannot read or whose softmax is not the plain one.

    Raises:
        VidSpecError: One line naming the backend or the feature, and the way out.
    """
    impl, name = layer.impl, layer.get_attn_backend().get_name()
    way_out = "use a pruner that needs no attention, e.g. uv"
    if name not in ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN"):
        raise VidSpecError(f"attention guidance reads FLASH_ATTN, TRITON_ATTN and CPU_ATTN, not {name}: {way_out}")
    if layer.kv_cache_dtype.startswith("fp8"):
        raise VidSpecError(f"attention guidance does not read fp8 KV caches: {way_out}")
    windowed = getattr(impl, "sliding_window", None) not in (None, -1, (-1, -1))
    if windowed or getattr(impl, "alibi_slopes", None) is not None or getattr(impl, "sinks", None) is not None:
        raise VidSpecError(f"attention guidance knows no sliding windows, ALiBi or sinks: {way_out}")


def key_view(kv_cache: torch.Tensor, layer: Any) -> torch.Tensor:
    """Return the keys of a paged cache as a view `[num_blocks, block_size, num_kv_heads, head_size]`.

    Args:
        kv_cache: `[num_blocks, num_kv_heads, block_size, 2 * head_size]`, vLLM's logical shape.
        layer: Its attention layer.
    """
    head_size = layer.impl.head_size
    if getattr(layer, "isa", None) is None:  # not the CPU backend
        return kv_cache.transpose(1, 2)[..., :head_size]
    # A block's first half is K, stored [head_size, block_size] per head.
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    block, head, _, _ = kv_cache.stride()
    return kv_cache.as_strided((num_blocks, block_size, num_kv_heads, head_size), (block, 1, head, block_size))


# ---- hidden states (UV-Prune) --------------------------------------------------------------------------------------


@dataclass
class _StateListener(Listener):
    states: torch.Tensor | None = None  # [m, hidden_size] at `uv_layer`, model dtype
    low: torch.Tensor | None = None  # [m] float32, the embeddings' similarity with the text's
    text_low: torch.Tensor | None = None  # [hidden_size] float32, sum of the text's unit embeddings
    text_high: torch.Tensor | None = None  # [hidden_size] float32, the same at `uv_layer`, so far
    order: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # [m] prompt indices
    heard: torch.Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.bool)
    )  # [m] states kept, on the host
    text_ids: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))


class HiddenStateGuidance(_Listeners):
    """UV-Prune (ParallelVLM eq. 2-4): how much closer a visual token comes to the text between layers 0 and `uv_layer`.

    The sum over layers telescopes and the sum over text tokens factors, so two layers are read: at layer 0 the text's
    embeddings are known before the prefill, so a visual token is scored when its chunk passes; at `uv_layer` the text
    that follows the video is not, so the video's states are kept until the prefill is done: m * hidden_size
    elements of the model's dtype, bounded by `guidance_bytes` over all requests. Hidden states are replicated over
    tensor-parallel ranks: nothing is reduced.
    """

    def __init__(self, config: VidSpecConfig, target: torch.nn.Module, vllm_config: Any, counters: Counters):
        super().__init__(config, counters, vllm_config.device_config.device)
        num_layers = vllm_config.model_config.get_total_num_hidden_layers()
        layer = config.uv_layer if config.uv_layer is not None else default_uv_layer(num_layers)
        if layer > num_layers:
            raise VidSpecError(f"uv_layer: the target has layers 1 to {num_layers}, not {layer}")
        compat.expose_hidden_states(target, (0, layer))
        self._embed = target.embed_input_ids
        self._dtype = vllm_config.model_config.dtype
        self._hidden_size = vllm_config.model_config.get_hidden_size()
        self._num_bytes = 0
        self._max_bytes = config.guidance_bytes or 0
        self._batch: Any = None

    def reserve(self, available_bytes: int) -> int:
        """Keep `guidance_bytes` for hidden states; see `Guidance`."""
        if self.config.guidance_bytes is None:
            self._max_bytes = available_bytes // 20
        return self._max_bytes

    def arrive(self, req_id: str, token_ids: list[int], features: list[Any]) -> None:
        """Begin to listen; see `Guidance`."""
        if items := self._listen(features):
            order = torch.cat(items)
            is_text = torch.ones(len(token_ids), dtype=torch.bool)
            is_text[order] = False
            ids = torch.tensor(token_ids, dtype=torch.int32)[is_text]
            names = [feature.identifier for feature in features]
            self._listeners[req_id] = _StateListener(items, names, len(token_ids), order=order, text_ids=ids)

    def before_forward(self, batch: Any) -> None:
        """Remember the step's layout; see `Guidance`."""
        self._batch = batch

    def after_forward(self, aux_hidden_states: list[torch.Tensor] | None) -> None:
        """Keep the states of the step's visual tokens and add up those of its text; see `Guidance`."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        begin = time.perf_counter()
        for i, listener, start, end in self._prefills(batch):
            if listener.missed is None:
                assert aux_hidden_states is not None
                rows = slice(int(batch.query_start_loc_np[i]), int(batch.query_start_loc_np[i]) + end - start)
                low, high = (states[rows] for states in aux_hidden_states)
                self._hear(listener, start, end, low, high)
        self.counters.add("guidance_us", int(1e6 * (time.perf_counter() - begin)))

    def _hear(self, listener: _StateListener, start: int, end: int, low: torch.Tensor, high: torch.Tensor) -> None:
        """Take one chunk `[end - start, hidden_size]` of a request in."""
        if listener.states is None and not self._begin(listener):
            return
        assert listener.low is not None and listener.states is not None
        inside = (listener.order >= start) & (listener.order < end)  # [m]
        is_text = torch.ones(end - start, dtype=torch.bool)
        if inside.any():
            into, rows = inside.nonzero()[:, 0], listener.order[inside] - start
            is_text[rows] = False
            listener.heard |= inside
            into, rows = into.to(self.device), rows.to(self.device)
            listener.low[into] = uv_video_scores(low[rows], listener.text_low)
            listener.states[into] = high[rows]
        if is_text.any():
            listener.text_high = listener.text_high + uv_text_sum(high, is_text.to(self.device))

    def _begin(self, listener: _StateListener) -> bool:
        num_tokens = len(listener.order)
        num_bytes = num_tokens * self._hidden_size * self._dtype.itemsize
        if self._num_bytes + num_bytes > self._max_bytes:
            listener.missed = "memory"
            return False
        self._num_bytes += num_bytes
        listener.states = torch.empty(num_tokens, self._hidden_size, dtype=self._dtype, device=self.device)
        listener.low = torch.zeros(num_tokens, device=self.device)
        listener.heard = torch.zeros(num_tokens, dtype=torch.bool)
        text = self._embed(listener.text_ids.to(self.device))
        listener.text_low = uv_text_sum(text, torch.ones(len(text), dtype=torch.bool, device=self.device))
        listener.text_high = torch.zeros(self._hidden_size, device=self.device)
        return True

    def release(self, req_id: str) -> None:
        """Forget a request and its states; see `Guidance`."""
        listener = self._listeners.pop(req_id, None)
        if listener is not None and listener.states is not None:
            self._num_bytes -= listener.states.numel() * listener.states.element_size()

    def take(self, req_id: str) -> list[torch.Tensor] | None:
        """Return the scores; see `Guidance`."""
        listener = self._listeners.get(req_id)
        if listener is None:
            return None
        self.release(req_id)
        heard: list[torch.Tensor | None] = [None] * len(listener.items)
        if listener.missed is None and listener.states is not None:
            sizes = [len(item) for item in listener.items]
            scores = (uv_video_scores(listener.states, listener.text_high) - listener.low).cpu()
            # Part of a video that came from the prefix cache has no states: its scores would be of different text.
            complete = [bool(part.all()) for part in listener.heard.split(sizes)]
            heard = [part if whole else None for part, whole in zip(scores.split(sizes), complete, strict=True)]
        return self._finish(listener, heard)


def default_uv_layer(num_layers: int) -> int:
    """Return the paper's Lmax, 20 of 28 layers and more, or as far into a shallower model."""
    return max(1, min(20, round(0.7 * num_layers)))
