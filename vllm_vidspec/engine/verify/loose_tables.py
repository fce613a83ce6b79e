"""Which mismatches may stand, request by request: the tables behind the scorers that let some through."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.torch_utils import async_tensor_h2d

from vidspec_kernels import CHANCE, RELEVANCE, SHIFT, WINDOW, LooseTables, loosen
from vllm_vidspec.config import DIGITS, PROTECTED_TOKENS, VidSpecConfig
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.requests import NewRequest
from vllm_vidspec.engine.verify.step import VerifySlice
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.scoring import FLY_TOP_K, RULES, Looseness, top_entropy
from vllm_vidspec.scoring.choices import Choice, choose, strict_reason
from vllm_vidspec.scoring.token_bits import ids_of_words, num_words, pack_ids


class LooseRules:
    """Every request's rule by persistent row, and the tokens that it may neither gain nor lose. A `RowTable`."""

    def __init__(
        self, knobs: Knobs, vllm_config: Any, max_num_reqs: int, vocab_size: int, sampler: Any, counters: Counters
    ):
        self._knobs, self._counters, self._sampler = knobs, counters, sampler
        self._device, self._model_config = vllm_config.device_config.device, vllm_config.model_config
        self._choices: dict[int, Choice] = {}  # by row, of requests that are not strict
        # [4, max_num_reqs]: rules, windows, the bits of the float32 shares, and where the scores come from
        self._table_np = np.zeros((4, max_num_reqs), dtype=np.int32)
        self._launches: dict = {}  # see `LooseTables.known`
        self._table: tuple[torch.Tensor, ...] | None = None  # the same on the device, until a request comes or goes
        self._shape = (max_num_reqs, num_words(vocab_size))
        self._protect_words(knobs.current)
        knobs.on_change(self._protect_words)

    def _protect_words(self, config: VidSpecConfig) -> None:
        self._base = pack_ids(protected_ids(config, self._model_config), self._shape[1])  # [num_words]
        # [max_num_reqs, num_words] int32: bit v of a row: token v is protected; the request ends with token v
        self.protected = async_tensor_h2d(np.tile(self._base, (self._shape[0], 1)), device=self._device)
        self._ends = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        self._stop_ids: dict[int, frozenset[int]] = {}  # by row, what its two table rows hold

    def add(self, request: NewRequest) -> None:
        """Give a request its rule. One that needs relevance is strict until `ready`."""
        req_state_idx, sampling = request.req_state_idx, request.sampling
        self.remove(req_state_idx)
        if sampling is None:
            return
        try:
            choice = choose(sampling.extra_args, self._knobs.current)
        except VidSpecError:  # the API server has refused it already; one that came past it is served strictly
            self._counters.add("strict_error")
            return
        if choice.scorer == "strict":
            return
        if reason := strict_reason(sampling):
            self._counters.add(f"strict_{reason}")
            return
        self._choices[req_state_idx] = choice
        stops = frozenset(sampling.all_stop_token_ids)
        if self._stop_ids.get(req_state_idx) != stops:  # else the row's tables have them already
            ends = pack_ids(stops, self._shape[1])
            packed = async_tensor_h2d(np.stack((self._base | ends, ends)), device=self._device)
            self.protected[req_state_idx], self._ends[req_state_idx] = packed
            self._stop_ids[req_state_idx] = stops
        if choice.scorer != "loose":
            self._set(req_state_idx)

    def needs_relevance(self, req_state_idx: int) -> bool:
        """Whether a row's request is verified by LVSpec's rule, once its relevance can be measured."""
        choice = self._choices.get(req_state_idx)
        return choice is not None and choice.scorer == "loose"

    def ready(self, req_state_idx: int) -> None:
        """Let a request be loose whose prefill is done and whose relevance can be measured."""
        if req_state_idx in self._choices:
            self._set(req_state_idx)

    def remove(self, req_state_idx: int) -> None:
        """Let a row be strict: its request ended, or a new one takes it."""
        if self._choices.pop(req_state_idx, None) is not None and self._table_np[0, req_state_idx]:
            self._table_np[:, req_state_idx] = 0
            self._table = None

    def active_rows(self) -> Iterable[int]:
        return self._choices

    def _set(self, req_state_idx: int) -> None:
        (scorer, share), config = self._choices[req_state_idx], self._knobs.current
        shift = SHIFT if scorer == "loose" and config.position_shift else 0
        window = config.fly_window if scorer == "fly" else 0
        source = {"loose": RELEVANCE, "random": CHANCE}.get(scorer, 0)
        self._table_np[:, req_state_idx] = (RULES[scorer] | shift, window, np.float32(share).view(np.int32), source)
        self._table = None

    @property
    def is_predicting(self) -> bool:
        """Whether a draft's relevance is that of the row which predicts it, not of its own."""
        return self._knobs.current.relevance_rows == "prediction"

    def any_loose(self, idx_mapping_np: np.ndarray) -> bool:
        """Whether a mismatch of any of `[num_reqs]` persistent rows may stand."""
        return bool(self._table_np[0, idx_mapping_np].any())

    def any_by_relevance(self, idx_mapping_np: np.ndarray) -> bool:
        """Whether any of `[num_reqs]` persistent rows is verified by LVSpec's rule."""
        return bool((self._table_np[3, idx_mapping_np] == RELEVANCE).any())

    def looseness(self, part: VerifySlice, target_tokens: torch.Tensor, logits: torch.Tensor) -> Looseness:
        """Return what may stand of a slice's drafts, given `[num_logits]` int64 target samples and their logits."""
        config, (rules, windows, shares, sources) = self._knobs.current, self._on_device()
        seeds, parents = self._sampler.sampling_states.seeds.gpu, None if part.shapes is None else part.shapes.parents
        tables = LooseTables(self.protected, self._ends, sources, seeds, self._launches)
        rows = (part.expanded_idx_mapping, part.nodes, part.pos)
        scores, may_loosen = loosen(
            target_tokens, part.drafts, logits, *rows, tables, parents, part.relevance, is_predicting=self.is_predicting
        )
        entropies = scores  # any: they are not read
        if (self._table_np[0, part.idx_mapping_np] & WINDOW).any():
            entropies = top_entropy(logits, FLY_TOP_K)
        return Looseness(part.idx_mapping, rules, shares, windows, scores, entropies, may_loosen, config.fly_entropy)

    def _on_device(self) -> tuple[torch.Tensor, ...]:
        if self._table is None:
            rules, windows, shares, sources = async_tensor_h2d(self._table_np.copy(), device=self._device)
            self._table = rules, windows, shares.view(torch.float32), sources
        return self._table


def protected_ids(config: VidSpecConfig, model_config: Any) -> set[int]:
    """Return the ids of tokens that no mismatch of any request may put in or leave out."""
    ends = model_config.try_get_generation_config().get("eos_token_id")
    ids = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    if model_config.skip_tokenizer_init:
        return ids
    tokenizer = cached_tokenizer_from_config(model_config)
    words = PROTECTED_TOKENS if config.protected_tokens is None else config.protected_tokens
    found = ids_of_words(
        words, DIGITS in words, tokenizer.get_vocab(), lambda token: tokenizer.convert_tokens_to_string([token])
    )
    return ids | set(tokenizer.all_special_ids) | found
