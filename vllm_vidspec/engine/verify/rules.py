"""Which mismatches may stand, request by request: the tables behind the scorers that let some through."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.torch_utils import async_tensor_h2d

from vidspec_kernels import SHIFT, WINDOW
from vidspec_kernels.dispatch import as_array
from vllm_vidspec.config import DIGITS, PROTECTED_TOKENS, VidSpecConfig
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.scoring import RULES, Looseness, TreeShapes, normalized_entropy, random_scores
from vllm_vidspec.scoring.choices import Choice, choose, strict_reason

_WORD_BITS = 32
_RELEVANCE, _CHANCE = 1, 2  # where a request's scores come from


class LooseRules:
    """Every request's rule by persistent row, and the tokens that it may neither gain nor lose.

    Args:
        config: The server's defaults and bounds.
        vllm_config: vLLM's, for the tokenizer.
        max_num_reqs: Persistent rows.
        vocab_size: Of the logits.
        sampler: The runner's, for the seeds of random scores.
        counters: Told who is verified strictly against its wish, and why.
    """

    def __init__(
        self,
        config: VidSpecConfig,
        vllm_config: Any,
        max_num_reqs: int,
        vocab_size: int,
        sampler: Any,
        counters: Counters,
    ):
        self.counters = counters
        self.device = vllm_config.device_config.device
        self._sampler = sampler
        self._choices: dict[int, Choice] = {}  # by row, of requests that are not strict
        # [4, max_num_reqs]: rules, windows, the bits of the float32 shares, and where the scores come from
        self._table_np = np.zeros((4, max_num_reqs), dtype=np.int32)
        self._table: torch.Tensor | None = None  # the same on the device, until a request comes or goes
        self._model_config = vllm_config.model_config
        self._shape = (max_num_reqs, -(-vocab_size // _WORD_BITS))
        self.retune(config)

    def retune(self, config: VidSpecConfig) -> None:
        """Take other knobs, while no request runs."""
        self.config = config
        self._base = _as_bits(protected_ids(config, self._model_config), self._shape[1])  # [num_words]
        # [max_num_reqs, num_words] int32: bit v of a row: token v is protected; the request ends with token v
        self._protected = async_tensor_h2d(np.tile(self._base, (self._shape[0], 1)), device=self.device)
        self._ends = torch.zeros(self._shape, dtype=torch.int32, device=self.device)
        self._stop_ids: dict[int, frozenset[int]] = {}  # by row, what its two table rows hold

    # ---- requests --------------------------------------------------------------------------------------------------

    def admit(self, row: int, sampling: Any) -> bool:
        """Give a request its rule; return whether it waits for `ready`, because it needs the video's states."""
        self.forget(row)
        try:
            choice = choose(sampling.extra_args, self.config.score)
        except VidSpecError:  # the API server has refused it already; whoever comes another way is served strictly
            self.counters.add("strict_error")
            return False
        if choice.scorer == "strict":
            return False
        if reason := strict_reason(sampling):
            self.counters.add(f"strict_{reason}")
            return False
        self._choices[row] = choice
        self._protect(row, sampling.all_stop_token_ids)
        if choice.scorer == "loose":
            return True
        self._set(row)
        return False

    def ready(self, row: int) -> None:
        """Let a request be loose whose prefill is done and whose relevance can be measured."""
        if row in self._choices:
            self._set(row)

    def forget(self, row: int) -> None:
        """Let a row be strict: its request ended, or a new one takes it."""
        if self._choices.pop(row, None) is not None and self._table_np[0, row]:
            self._table_np[:, row] = 0
            self._table = None

    def _set(self, row: int) -> None:
        scorer, share = self._choices[row]
        shift = SHIFT if scorer == "loose" and self.config.score.position_shift else 0
        window = self.config.score.fly_window if scorer == "fly" else 0
        source = {"loose": _RELEVANCE, "random": _CHANCE}.get(scorer, 0)
        self._table_np[:, row] = (RULES[scorer] | shift, window, np.float32(share).view(np.int32), source)
        self._table = None

    def _protect(self, row: int, stop_ids: Iterable[int]) -> None:
        """Write a request's stop tokens, if they are not what the row has already."""
        num_words = len(self._base)
        stops = frozenset(i for i in stop_ids if i < num_words * _WORD_BITS)
        if self._stop_ids.get(row) != stops:
            ends = _as_bits(stops, num_words)
            self._protected[row], self._ends[row] = async_tensor_h2d(
                np.stack((self._base | ends, ends)), device=self.device
            )
            self._stop_ids[row] = stops

    # ---- verification ----------------------------------------------------------------------------------------------

    def any_loose(self, rows_np: np.ndarray) -> bool:
        """Whether a mismatch of any of `[num_reqs]` persistent rows may stand."""
        return bool(self._table_np[0, rows_np].any())

    def need_relevance(self, rows_np: np.ndarray) -> bool:
        """Whether any of `[num_reqs]` persistent rows is verified by LVSpec's rule."""
        return bool((self._table_np[3, rows_np] == _RELEVANCE).any())

    def of_step(
        self,
        rows: torch.Tensor,
        rows_np: np.ndarray,
        row_of_logits: torch.Tensor,
        node: torch.Tensor,
        target_tokens: torch.Tensor,
        draft_tokens: torch.Tensor,
        logits: torch.Tensor,
        positions: torch.Tensor,
        relevance: torch.Tensor | None,
        shapes: TreeShapes | None,
    ) -> Looseness:
        """Return what may stand in one verify step.

        Args:
            rows: `[num_reqs]` int64 persistent rows; `rows_np` the same on the host.
            row_of_logits: `[num_logits]` persistent row of each logits row.
            node: `[num_logits]` its node in the request's draft.
            target_tokens: `[num_logits]` int64, what the target samples after each row.
            draft_tokens: `[num_logits]` int64 input token of each row, -1 where invalid.
            logits: `[num_logits, vocab_size]` as sampled from: -inf where the request forbids a token.
            positions: `[num_logits]` of the input tokens, for random scores.
            relevance: `[num_logits]` float32 of each row's own state, NaN where it could not be measured; None if no
                request needs it.
            shapes: Of the drafts; None where all are chains.
        """
        num_logits = len(draft_tokens)
        index = torch.arange(num_logits, device=self.device)
        if shapes is None:
            parent = index - (node > 0).long()
        else:
            parent = index - node + shapes.parents[row_of_logits, node].clamp(min=0)
        draft = draft_tokens.clamp(min=0)
        # What the request's sampling parameters forbid stays forbidden; so does what must not be gained or lost.
        may = torch.isfinite(logits[parent, draft])
        for table, tokens in (
            (self._protected, draft),
            (self._protected, target_tokens[parent]),
            (self._ends, draft[parent]),  # after the end of the text there is nothing to gain
        ):
            may &= ~_has_bit(table, row_of_logits, tokens)
        rules, windows, shares, sources = self._on_device()
        entropies = scores = torch.zeros(num_logits, device=self.device)
        if (self._table_np[0, rows_np] & WINDOW).any():
            entropies = normalized_entropy(logits, self.config.score.fly_top_k)
        if relevance is not None:
            scores = relevance[parent] if self.config.score.relevance_rows == "prediction" else relevance
            # NaN: it could not be measured, and who asks for it is verified strictly.
            may &= ~(scores.isnan() & (sources[row_of_logits] == _RELEVANCE))
        if (self._table_np[3, rows_np] == _CHANCE).any():
            by_chance = random_scores(self._sampler.sampling_states.seeds.gpu[row_of_logits], positions)
            scores = torch.where(sources[row_of_logits] == _CHANCE, by_chance, scores)
        return Looseness(
            rows=rows,
            rules=rules,
            shares=shares.view(torch.float32),
            windows=windows,
            scores=scores,
            entropies=entropies,
            may_loosen=may,
            min_entropy=self.config.score.fly_entropy,
        )

    def _on_device(self) -> torch.Tensor:
        if self._table is None:
            self._table = async_tensor_h2d(self._table_np.copy(), device=self.device)
        return self._table


def _has_bit(table: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return `[n]` bool: whether bit `tokens` of row `rows` is set, `[n]` each, in `[max_num_reqs, num_words]`."""
    token = as_array(tokens)
    words = as_array(table)[as_array(rows), token // _WORD_BITS]
    return torch.as_tensor((words >> (token % _WORD_BITS)) & 1 != 0)


def protected_ids(config: VidSpecConfig, model_config: Any) -> set[int]:
    """Return the ids of tokens that no mismatch of any request may put in or leave out."""
    ends = model_config.try_get_generation_config().get("eos_token_id")
    ids = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    if model_config.skip_tokenizer_init:
        return ids
    tokenizer = cached_tokenizer_from_config(model_config)
    ids.update(tokenizer.all_special_ids)
    words = PROTECTED_TOKENS if config.score.protected_tokens is None else config.score.protected_tokens
    wanted, with_digits = {word.strip().lower() for word in words}, DIGITS in words
    for token, i in tokenizer.get_vocab().items():
        text = tokenizer.convert_tokens_to_string([token]).strip().lower()
        if text in wanted or (with_digits and any(letter.isdigit() for letter in text)):
            ids.add(i)
    return ids


def _as_bits(ids: Iterable[int], num_words: int) -> np.ndarray:
    """Return `[num_words]` int32 with one bit per token id."""
    bits = np.zeros(num_words * _WORD_BITS, dtype=bool)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32).copy()
