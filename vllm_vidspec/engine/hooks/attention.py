"""SpecVLM's guidance: the attention that a prompt's text pays to its visual tokens, from q and the paged K cache."""

import functools
import itertools
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import async_tensor_h2d

from vidspec_kernels import guidance_scores
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine import kv_views
from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.compat import model as compat
from vllm_vidspec.engine.hooks.prompts import Guidance, Guided, ObservedPrompt, PendingScores, prefills
from vllm_vidspec.engine.hooks.protocol import Forward
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.errors import VidSpecError

logger = init_logger("vllm.vidspec")

READER = kv_views.Reader(
    "attention guidance", "use a pruner that needs no attention, e.g. uv", (*kv_views.BACKENDS, kv_views.FLASHINFER)
)


@dataclass(eq=False)
class _AttentionPrompt(ObservedPrompt):
    total: torch.Tensor | None = None  # [text_start] float32 sums of softmax weights, of this rank's heads
    num_queries: int = 0
    first: int | None = None  # index of the first token after the last visual one that its own prefill computes
    known: list[torch.Tensor] = field(default_factory=list)  # mean scores [m_i] of what that leaves out, if known
    num_known: int = 0  # tokens that `known` are of, the first ones

    @property
    def rows(self) -> int:
        """How many tokens its scores rest on, if those are all after the last visual one, else 0."""
        assert self.first is not None
        is_whole = self.first <= self.text_start + self.num_known
        return self.num_tokens - self.text_start if is_whole else 0

    def __post_init__(self) -> None:
        if self.text_start >= self.num_tokens:
            self.missed = "no_text"


@dataclass
class _AttentionStep:
    """The guiding queries of one forward, compacted to the n requests that have any."""

    query_rows: torch.Tensor  # [num_queries] int64 rows of the step's query tensor
    query_start_loc: torch.Tensor  # [n + 1] int32
    query_pos: torch.Tensor  # [num_queries] int32 place in the sequence
    req_indices: torch.Tensor  # [n] int64 batch rows, for the block table
    num_keys: torch.Tensor  # [n] int32 keys to score
    sums: torch.Tensor  # [n, max(num_keys)] float32
    prompts: list[tuple[_AttentionPrompt, int]]  # the n requests and how many queries each has here
    out_rows: torch.Tensor  # [n] int64, 0 to n - 1
    max_queries: int  # most queries of one request
    max_row: int  # largest of `query_rows`
    num_observed: int = 0  # layers observed


class AttentionGuidance(Guidance):
    """SpecVLM eq. 4-5: the attention that each visual token receives from the text after the last visual token.

    Mean over queries, heads and layers of the softmax weight, softmax over all keys. A query is scored in the chunk
    that computes it, against keys that are in the cache by then, of whatever forward. A cached prefix may reach into
    the text (a repeated prompt, another turn): the mean over the tokens that are not computed is that of the earlier
    prompt, if the text is the same; other tokens that are left out have no say.
    """

    _kind, need = _AttentionPrompt, "attention"

    def __init__(self, knobs: Knobs, vllm_config: Any, counters: Counters, agreement: Agreement):
        super().__init__(knobs, counters, vllm_config.device_config.device, agreement)
        layers = {extract_layer_index(name): layer for name, layer in kv_views.attention_layers(vllm_config).items()}
        if not layers:
            raise VidSpecError(f"{READER.what} finds no attention layer of the target: {READER.way_out}")
        # Rank-local heads, and how many of them all ranks have together.
        self._num_heads = next(iter(layers.values())).impl.num_heads * get_tensor_model_parallel_world_size()
        self.attention = layers
        self._step: _AttentionStep | None = None
        self._error: Exception | None = None  # of an observer, until `after_forward`
        self._num_layers = vllm_config.model_config.get_total_num_hidden_layers()
        if len(layers) < self._num_layers:
            where = (min(layers), max(layers), self._num_layers)
            logger.info("vidspec: guidance observes the last pipeline stage, layers %d to %d of %d", *where)
        self._select(knobs.current)
        knobs.on_change(self._select)
        for layer in layers.values():
            kv_views.check_readable(layer, READER)
        self._switches = [
            compat.observe_attention(layer, functools.partial(self._observe, index)) for index, layer in layers.items()
        ]

    def _select(self, config: VidSpecConfig) -> None:
        self._layers = chosen_layers(config.guidance_layers, self._num_layers, self.attention)

    def init_kv(self, runner: Any) -> None:
        kv_views.check_layout(self.attention.values(), READER)
        for group in itertools.chain(*runner.attn_groups):
            if group.backend.get_name() == kv_views.FLASHINFER:
                for builder in group.metadata_builders:
                    compat.keep_block_table(builder)

    def before_forward(self, batch: Any) -> None:
        self._watch(None)
        rows, positions, found, req_indices = [], [], [], []
        for req_idx, prompt, start, end in prefills(batch, self._prompts):
            first = max(start, prompt.text_start)
            if prompt.first is None and first < end:
                prompt.first = first
                if first > prompt.text_start:
                    prompt.known, prompt.num_known = self._known_text(prompt)
            first = max(first, prompt.text_start + prompt.num_known)
            if first < end:
                offset = int(batch.query_start_loc_np[req_idx]) - start
                positions.append(np.arange(first, end))
                rows.append(positions[-1] + offset)
                found.append((prompt, end - first))
                req_indices.append(req_idx)
        if not found:
            return
        upload = functools.partial(async_tensor_h2d, device=self.device)
        num_keys, counts = [prompt.text_start for prompt, _ in found], [count for _, count in found]
        query_rows = np.concatenate(rows)
        step = _AttentionStep(
            query_rows=upload(query_rows, dtype=torch.int64),
            query_start_loc=upload(np.cumsum([0, *counts]), dtype=torch.int32),
            query_pos=upload(np.concatenate(positions), dtype=torch.int32),
            req_indices=upload(np.array(req_indices), dtype=torch.int64),
            num_keys=upload(np.array(num_keys), dtype=torch.int32),
            sums=torch.zeros(len(found), max(num_keys), dtype=torch.float32, device=self.device),
            prompts=found,
            out_rows=torch.arange(len(found), device=self.device),
            max_queries=max(counts),
            max_row=int(query_rows.max()),
        )
        self._watch(step)

    def _watch(self, step: _AttentionStep | None) -> None:
        """Observe the layers while there is something to see in a step."""
        if (step is None) != (self._step is None):
            for switch in self._switches:
                switch(step is not None)
        self._step = step

    def _observe(self, index: int, *args: Any) -> None:
        """Observe one layer in the forward, which an exception must not leave: `after_forward` raises it."""
        try:
            self.observe(index, *args)
        except Exception as error:
            self._error = error

    def observe(
        self, index: int, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any,
        lse: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Add one layer's weights, after its own attention, from a cache that holds this step's keys."""
        step = self._step
        # A captured graph or a split batch does not carry this step's rows; `after_forward` notices the missing layer.
        if step is None or index not in self._layers or metadata is None or query.shape[0] <= step.max_row:
            return
        begin = time.perf_counter()
        impl = layer.impl
        guidance_scores(
            query.view(query.shape[0], impl.num_heads, impl.head_size)[step.query_rows],
            kv_views.cache_views(kv_cache, layer)[0],
            metadata.block_table[step.req_indices],
            step.query_start_loc,
            step.query_pos,
            step.sums,
            step.out_rows,
            step.num_keys,
            impl.scale,
            scales=kv_views.cache_scales(layer, query),
            lse=lse if lse is None else lse.index_select(1, step.query_rows).T,
            max_queries_per_req=step.max_queries,
        )
        step.num_observed += 1
        self.counters.add("guidance_us", int(1e6 * (time.perf_counter() - begin)))

    def after_forward(self, forward: Forward) -> None:
        step = self._step
        self._watch(None)
        error, self._error = self._error, None
        if error is not None:
            raise error
        if step is None:
            return
        for sums, (prompt, num_queries) in zip(step.sums, step.prompts, strict=True):
            if step.num_observed != len(self._layers):
                prompt.missed = prompt.missed or "unobserved"
                continue
            total = sums[: prompt.text_start]
            prompt.total = total if prompt.total is None else prompt.total + total
            prompt.num_queries += num_queries

    def take(self, req_state_idx: int) -> PendingScores | None:
        """Send the scores, see `Guidance`, by one all-reduce of `[text_start + 1]` floats, whatever was observed."""
        prompt = self._prompts.pop(req_state_idx, None)
        if prompt is None:
            return None
        was_observed = prompt.missed is None and (prompt.total is not None or prompt.num_known > 0)
        total = torch.zeros(prompt.text_start + 1, dtype=torch.float32, device=self.device)
        if was_observed and prompt.total is not None:
            total[:-1] = prompt.total
        elif not was_observed:
            total[-1:].fill_(1.0)  # how many ranks have not observed it, summed with the rest
        if not self._agreement.is_alone:
            with self._agreement.collective():
                total = tensor_model_parallel_all_reduce(total)
        return PendingScores(total, lambda total: self._score(prompt, was_observed, total))

    def _score(self, prompt: _AttentionPrompt, was_observed: bool, total: torch.Tensor) -> Guided:
        """Make scores of all ranks' sums `[text_start + 1]`, the last of which says how many ranks observed nothing."""
        if total[-1] != 0:
            if was_observed:
                prompt.missed = "error"  # of another rank
            return self._finish(prompt, [None] * len(prompt.items))
        sums = total[:-1] / (self._num_heads * len(self._layers))
        num_tokens = prompt.num_queries + prompt.num_known
        scores = [sums[item] / num_tokens for item in prompt.items]
        for score, known in zip(scores, prompt.known, strict=False):  # of all items or none
            score += known * (prompt.num_known / num_tokens)
        return self._finish(prompt, scores, prompt.rows, is_reused=prompt.num_known > 0)  # type: ignore[arg-type]


def chosen_layers(layers: str | tuple[int, ...], num_layers: int, here: Collection[int]) -> frozenset[int]:
    """Return the layers that `guidance_layers` means, of those that are `here`: a pipeline stage observes its own."""
    chosen = range(num_layers) if layers == "all" else layers
    if wrong := [index for index in chosen if not 0 <= int(index) < num_layers]:
        raise VidSpecError(f"guidance_layers: the target has layers 0 to {num_layers - 1}, not {wrong[0]}")
    if not (found := frozenset(int(index) for index in chosen).intersection(here)):
        raise VidSpecError(
            f"guidance_layers: only the last pipeline stage is observed, which has layers {min(here)} to {max(here)}: "
            "name some of them, or all"
        )
    return found
