"""UV-Prune's guidance: how much closer visual tokens come to the text between two layers, from hidden states alone."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vidspec_kernels import uv_text_sum, uv_video_scores
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine import compat
from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.host_copy import HostCopy
from vllm_vidspec.engine.listen.prompts import Guided, Listener, Listeners, PendingScores, prefills
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.errors import VidSpecError


@dataclass(eq=False)
class _StateListener(Listener):
    has_begun: bool = False
    states: torch.Tensor | None = None  # [m, hidden_size] at `uv_layer`, model dtype
    low: torch.Tensor | None = None  # [m] float32, the embeddings' similarity with the text's
    text_low: torch.Tensor | None = None  # [hidden_size] float32, sum of the text's unit embeddings
    text_high: torch.Tensor | None = None  # [hidden_size] float32, the same at `uv_layer`, so far
    order: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # [m] prompt indices
    heard: torch.Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.bool)
    )  # [m] states kept, on the host
    text_ids: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))


class HiddenStateGuidance(Listeners):
    """UV-Prune (ParallelVLM eq. 2-4): how much closer a visual token comes to the text between layers 0 and `uv_layer`.

    The sum over layers telescopes and the sum over text tokens factors, so two layers are read: at layer 0 the text's
    embeddings are known before the prefill, so a visual token is scored when its chunk passes; at `uv_layer` the text
    that follows the video is not, so the video's states are kept until the prefill is done: m * hidden_size
    elements of the model's dtype, bounded by `guidance_bytes` over all requests. Hidden states are replicated over
    tensor-parallel ranks: nothing is reduced.
    """

    def __init__(
        self, config: VidSpecConfig, target: torch.nn.Module, vllm_config: Any, counters: Counters, agreement: Agreement
    ):
        super().__init__(config, counters, vllm_config.device_config.device, agreement)
        num_layers = vllm_config.model_config.get_total_num_hidden_layers()
        layer = config.prune.uv_layer if config.prune.uv_layer is not None else default_uv_layer(num_layers)
        if layer > num_layers:
            raise VidSpecError(f"uv_layer: the target has layers 1 to {num_layers}, not {layer}")
        compat.expose_hidden_states(target, (0, layer))
        self._embed = target.embed_input_ids
        self._dtype = vllm_config.model_config.dtype
        self._hidden_size = vllm_config.model_config.get_hidden_size()
        self._num_bytes = 0
        self._max_bytes = config.prune.guidance_bytes or 0
        self._batch: Any = None

    def reserve(self, available_bytes: int) -> int:
        """Keep `guidance_bytes` for hidden states; see `Guidance`."""
        if self.config.prune.guidance_bytes is None:
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
        found = list(prefills(batch, self._listeners))
        self._begin([listener for _, listener, _, _ in found if not listener.has_begun])
        for i, listener, start, end in found:
            if listener.missed is None:
                assert aux_hidden_states is not None
                rows = slice(int(batch.query_start_loc_np[i]), int(batch.query_start_loc_np[i]) + end - start)
                low, high = (states[rows] for states in aux_hidden_states)
                self._hear(listener, start, end, low, high)
        self.counters.add("guidance_us", int(1e6 * (time.perf_counter() - begin)))

    def _hear(self, listener: _StateListener, start: int, end: int, low: torch.Tensor, high: torch.Tensor) -> None:
        """Take one chunk `[end - start, hidden_size]` of a request in."""
        assert listener.low is not None and listener.states is not None
        inside = (listener.order >= start) & (listener.order < end)  # [m]
        is_text = torch.ones(end - start, dtype=torch.bool)
        if inside.any():
            into, rows = inside.nonzero()[:, 0], listener.order[inside] - start
            is_text[rows] = False
            listener.heard |= inside
            into, rows = (async_tensor_h2d(indices, device=self.device) for indices in (into, rows))
            listener.low[into] = uv_video_scores(low[rows], listener.text_low)
            listener.states[into] = high[rows]
        if is_text.any():
            listener.text_high = listener.text_high + uv_text_sum(high, async_tensor_h2d(is_text, device=self.device))

    def _begin(self, listeners: list[_StateListener]) -> None:
        """Make room for the requests whose first chunk this is, and embed their text; all ranks for the same ones."""
        for listener in listeners:
            listener.has_begun = True
            if listener.missed is None and not self._guard(self._allocate, listener):
                listener.missed = "error"
        heard_by_all = self._agreement.settle("guidance", [listener.missed is None for listener in listeners])
        chosen = [listener for listener, is_heard in zip(listeners, heard_by_all, strict=True) if is_heard]
        error = self._agreement.run("guidance", self._embed_text, chosen) if chosen else None
        if error is not None:
            self._guard.survive(error)
        for listener in listeners:
            if listener.missed is None and (error is not None or listener not in chosen):
                listener.missed = "error"

    def _allocate(self, listener: _StateListener) -> None:
        num_tokens = len(listener.order)
        num_bytes = num_tokens * self._hidden_size * self._dtype.itemsize
        if self._num_bytes + num_bytes > self._max_bytes:
            listener.missed = "memory"
            return
        listener.states = torch.empty(num_tokens, self._hidden_size, dtype=self._dtype, device=self.device)
        listener.low = torch.zeros(num_tokens, device=self.device)
        listener.heard = torch.zeros(num_tokens, dtype=torch.bool)
        listener.text_high = torch.zeros(self._hidden_size, device=self.device)
        self._num_bytes += num_bytes

    def _embed_text(self, listeners: list[_StateListener]) -> None:
        for listener in listeners:
            ids = async_tensor_h2d(listener.text_ids, device=self.device)
            is_text = torch.ones(len(ids), dtype=torch.bool, device=self.device)
            with self._agreement.collective():
                text = self._embed(ids)
            listener.text_low = uv_text_sum(text, is_text)

    def release(self, req_id: str) -> None:
        """Forget a request and its states; see `Guidance`."""
        listener = self._listeners.pop(req_id, None)
        if listener is not None and listener.states is not None:
            self._num_bytes -= listener.states.numel() * listener.states.element_size()

    def take(self, req_id: str) -> PendingScores | None:
        """Send the scores; see `Guidance`."""
        listener = self._listeners.get(req_id)
        if listener is None:
            return None
        self.release(req_id)
        sizes, complete = [len(item) for item in listener.items], [False] * len(listener.items)
        if listener.missed is None and listener.states is not None:
            # Part of a video that came from the prefix cache has no states: its scores would be of different text.
            complete = [bool(part.all()) for part in listener.heard.split(sizes)]
        agreed = self._agreement.settle("guidance", complete)
        if agreed != complete:
            listener.missed = "error"  # of another rank
        if not any(agreed):
            return PendingScores(None, lambda _: self._finish(listener, [None] * len(sizes)))
        scores = uv_video_scores(listener.states, listener.text_high) - listener.low
        listener.states = None  # its memory is given back

        def finish(scores: torch.Tensor) -> Guided:
            parts = scores.split(sizes)
            return self._finish(listener, [part if whole else None for part, whole in zip(parts, agreed, strict=True)])

        return PendingScores(HostCopy(scores), finish)


def default_uv_layer(num_layers: int) -> int:
    """Return the paper's Lmax, 20 of 28 layers and more, or as far into a shallower model."""
    return max(1, min(20, round(0.7 * num_layers)))
