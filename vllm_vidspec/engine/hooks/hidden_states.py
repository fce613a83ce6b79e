"""UV-Prune's guidance: how much closer visual tokens come to the text between two layers, from hidden states alone."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vidspec_kernels import uv_text_sum, uv_video_scores
from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.compat import model as compat
from vllm_vidspec.engine.hooks.prompts import Guidance, Guided, ObservedPrompt, PendingScores, prefills
from vllm_vidspec.engine.hooks.protocol import Forward
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.pruning.pruners import default_uv_layer


@dataclass(eq=False)
class _StatePrompt(ObservedPrompt):
    has_begun: bool = False
    states: torch.Tensor | None = None  # [m, hidden_size] at `uv_layer`, model dtype
    low: torch.Tensor | None = None  # [m] float32, the embeddings' similarity with the text's
    text_low: torch.Tensor | None = None  # [hidden_size] float32, sum of the text's unit embeddings
    text_high: torch.Tensor | None = None  # [hidden_size] float32, the same at `uv_layer`, so far

    def __post_init__(self) -> None:
        self.order = torch.cat(self.items)  # [m] prompt indices, on the host
        self.observed = torch.zeros(len(self.order), dtype=torch.bool)  # [m] states kept, on the host


class HiddenStateGuidance(Guidance):
    """UV-Prune (ParallelVLM eq. 2-4): how much closer a visual token comes to the text between layers 0 and `uv_layer`.

    The sum over layers telescopes and the sum over text tokens factors, so two layers are read: at layer 0 the text's
    embeddings are known before the prefill, so a visual token is scored when its chunk passes; at `uv_layer` the text
    that follows is not, so the video's states are kept until the prefill is done, bounded by `state_bytes` over all
    requests. Hidden states are replicated over tensor-parallel ranks: nothing is reduced.
    """

    _kind, need = _StatePrompt, "uv"
    reads_hidden_states = True

    def __init__(
        self, knobs: Knobs, target: torch.nn.Module, vllm_config: Any, counters: Counters, agreement: Agreement
    ):
        super().__init__(knobs, counters, vllm_config.device_config.device, agreement)
        num_layers = vllm_config.model_config.get_total_num_hidden_layers()
        chosen = knobs.current.uv_layer
        layer = default_uv_layer(num_layers) if chosen is None else chosen
        compat.expose_hidden_states(target, (0, layer))
        self._embed = target.embed_input_ids
        self._dtype = vllm_config.model_config.dtype
        self._hidden_size = vllm_config.model_config.get_hidden_size()
        self._num_bytes = self._max_bytes = 0
        self._batch: Any = None

    def reserve(self, available_bytes: int) -> int:
        wanted = self.knobs.current.state_bytes_for("guidance")
        self._max_bytes = available_bytes // 20 if wanted is None else wanted
        return self._max_bytes

    def before_forward(self, batch: Any) -> None:
        self._batch = batch

    def after_forward(self, forward: Forward) -> None:
        """Keep the states of the step's visual tokens and add up those of its text."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        begin = time.perf_counter()
        found = list(prefills(batch, self._prompts))
        if new := [prompt for _, prompt, _, _ in found if not prompt.has_begun]:
            error = self._agreement.run("guidance", self._begin, new)
            if error is not None:
                raise error
        for req_idx, prompt, start, end in found:
            if prompt.missed is None:
                assert forward.aux_hidden_states is not None
                first = int(batch.query_start_loc_np[req_idx])
                low, high = (states[first : first + end - start] for states in forward.aux_hidden_states)
                self._observe(prompt, start, end, low, high)
        self.counters.add("guidance_us", int(1e6 * (time.perf_counter() - begin)))

    def _observe(self, prompt: _StatePrompt, start: int, end: int, low: torch.Tensor, high: torch.Tensor) -> None:
        assert prompt.low is not None and prompt.states is not None
        inside = (prompt.order >= start) & (prompt.order < end)  # [m]
        is_text = torch.ones(end - start, dtype=torch.bool)
        if inside.any():
            here = prompt.order[inside] - start
            is_text[here] = False
            prompt.observed |= inside
            into, rows = (_place(indices, self.device) for indices in (inside.nonzero()[:, 0], here))
            prompt.low[into] = uv_video_scores(low[rows], prompt.text_low)
            prompt.states[into] = high[rows]
        if is_text.any():
            text = _place(is_text.nonzero()[:, 0], self.device)
            prompt.text_high = prompt.text_high + uv_text_sum(high[text])

    def _begin(self, prompts: list[_StatePrompt]) -> None:
        """Make room for the requests whose first chunk this is, and embed their text; all ranks for the same ones."""
        for prompt in prompts:
            prompt.has_begun = True
            if prompt.missed is None:
                self._allocate(prompt)
        observed_by_all = self._agreement.all_ranks_and("guidance", [prompt.missed is None for prompt in prompts])
        for prompt, is_observed in zip(prompts, observed_by_all, strict=True):
            if not is_observed:
                prompt.missed = prompt.missed or "error"  # of another rank
                continue
            is_text = torch.ones(prompt.num_tokens, dtype=torch.bool)
            is_text[prompt.order] = False
            ids = async_tensor_h2d(torch.tensor(prompt.token_ids, dtype=torch.int32)[is_text], device=self.device)
            with self._agreement.collective():
                text = self._embed(ids)
            prompt.text_low = uv_text_sum(text)

    def _allocate(self, prompt: _StatePrompt) -> None:
        num_tokens = len(prompt.order)
        num_bytes = num_tokens * self._hidden_size * self._dtype.itemsize
        if self._num_bytes + num_bytes > self._max_bytes:
            prompt.missed = "memory"
            return
        prompt.states = torch.empty(num_tokens, self._hidden_size, dtype=self._dtype, device=self.device)
        self._num_bytes += num_bytes
        prompt.low = torch.zeros(num_tokens, device=self.device)
        prompt.text_high = torch.zeros(self._hidden_size, device=self.device)

    def remove(self, req_state_idx: int) -> None:
        prompt = self._prompts.pop(req_state_idx, None)
        if prompt is not None and prompt.states is not None:
            self._num_bytes -= prompt.states.numel() * prompt.states.element_size()

    def take(self, req_state_idx: int) -> PendingScores | None:
        prompt = self._prompts.get(req_state_idx)
        if prompt is None:
            return None
        self.remove(req_state_idx)
        sizes, complete = [len(item) for item in prompt.items], [False] * len(prompt.items)
        if prompt.missed is None and prompt.states is not None:
            # Part of a video that came from the prefix cache has no states: its scores would be of different text.
            complete = [bool(part.all()) for part in prompt.observed.split(sizes)]
        agreed = self._agreement.all_ranks_and("guidance", complete)
        if agreed != complete:
            prompt.missed = "error"  # of another rank
        if not any(agreed):
            return PendingScores(None, lambda _: self._finish(prompt, [None] * len(sizes)))
        scores = uv_video_scores(prompt.states, prompt.text_high) - prompt.low
        prompt.states = None  # its memory is given back

        def finish(scores: torch.Tensor) -> Guided:
            parts = scores.split(sizes)
            return self._finish(prompt, [part if whole else None for part, whole in zip(parts, agreed, strict=True)])

        return PendingScores(scores, finish)


def _place(indices: torch.Tensor, device: torch.device) -> torch.Tensor | slice:
    """Return what picks `[n]` ascending host indices of a tensor: of adjacent ones a slice, which copies nothing."""
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 == len(indices):
        return slice(first, last + 1)
    return async_tensor_h2d(indices, device=device)
