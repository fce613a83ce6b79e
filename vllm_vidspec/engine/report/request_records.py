"""Records that requests ask for of themselves: where each token came from, and what the draft saw of their video.

A record reaches its own request alone: what a step knows of a request leaves with that request's own output tokens, and
no look-up is by a name that a client could choose.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from vllm_vidspec.config import REQUEST_RECORD
from vllm_vidspec.engine.report.observer import Observer
from vllm_vidspec.engine.requests import NewRequest, RequestRows
from vllm_vidspec.metrics import Kind
from vllm_vidspec.pruning.frames import PruneUnit
from vllm_vidspec.scoring import Scored

MAX_VISUAL_TOKENS = 1 << 16  # of an item whose kept tokens are recorded
_MOST = 255  # the score of the token that draws most
_NUM_PRIMING = 8  # tokens of the prompt's end that say how the first piece of the answer is spelled


class RequestRecorder(Observer):
    """The worker's side: what its steps do for the requests that ask, and `for_all` the kinds of each request's tokens,
    of which its metrics speak. A `RowTable`; without any request to speak of it does nothing.
    """

    def __init__(self, requests: RequestRows, device: torch.device, family: str, for_all: bool = False):
        self._requests, self._on_gpu, self._family = requests, device.type == "cuda", family
        self._for_all = for_all
        self._asking: dict[int, str] = {}  # request id by persistent row
        self._req_ids = np.full(len(requests.phase), "", dtype=object)  # [max_num_reqs] that are told of; "": not
        self._unsalted: set[int] = set()  # rows whose requests share what is cached with all others
        # Of the step in flight: requests of a slice, drafts of each, and copies of what was accepted.
        self._pending: list[tuple[np.ndarray, np.ndarray, torch.Tensor, torch.Tensor | None]] = []
        self._pruned: dict[str, list[dict[str, Any]]] = {}

    def add(self, request: NewRequest) -> None:
        if request.sampling is not None and (request.sampling.extra_args or {}).get(REQUEST_RECORD) is True:
            self._asking[request.req_state_idx] = request.req_id
            if not request.cache_salt:
                self._unsalted.add(request.req_state_idx)
        if self._for_all or request.req_state_idx in self._asking:
            self._req_ids[request.req_state_idx] = request.req_id

    def remove(self, req_state_idx: int) -> None:
        self._req_ids[req_state_idx] = ""
        self._unsalted.discard(req_state_idx)
        if (req_id := self._asking.pop(req_state_idx, None)) is not None:
            self._pruned.pop(req_id, None)

    def active_rows(self) -> Iterable[int]:
        return self._asking

    def verified(self, part: Any, scored: Scored) -> None:
        """Begin to copy what was accepted in a slice to the host, if one of its requests is told of."""
        if not (self._asking or self._for_all):
            return
        req_ids = self._req_ids[part.idx_mapping_np]
        if req_ids.any():
            drafts = np.where(self._requests.has_draft_np[part.idx_mapping_np], part.num_logits_np - 1, 0)
            kinds = None if scored.kinds is None else self._to_host(scored.kinds)
            self._pending.append((req_ids, drafts, self._to_host(scored.num_sampled), kinds))

    def _to_host(self, values: torch.Tensor) -> torch.Tensor:
        host = torch.empty_like(values, device="cpu", pin_memory=self._on_gpu)
        return host.copy_(values, non_blocking=True)

    def pruned(self, job: Any, kept: list[torch.Tensor]) -> None:
        """Take note of what the draft sees of a prompt.

        Scores of an earlier prompt reveal something of its question, and so do the tokens that they keep: a request
        without a salt, whose cached prompts may be another tenant's, gets neither.
        """
        if (req_id := self._asking.get(job.req_state_idx)) is not None:
            units = job.plan.units
            is_open = not (job.is_borrowed and job.req_state_idx in self._unsalted)
            found = (
                _pruned(unit, unit.merged(kept), score, is_open)
                for unit, score in zip(units, job.scores or [None] * len(units), strict=True)
            )
            self._pruned[req_id] = [{"family": self._family, **one} for one in found]

    def publisher(self) -> Callable[[], dict[str, dict[str, Any]]] | None:
        """Return what makes the step's records by request id, once the device is done with it; None for none."""
        if not (self._asking or self._pending):
            return None
        asking = list(self._asking.values())
        (pending, self._pending), (pruned, self._pruned) = (self._pending, []), (self._pruned, {})

        def records() -> dict[str, dict[str, Any]]:
            found: dict[str, dict[str, Any]] = {req_id: {"kinds": [], "drafted": 0} for req_id in asking}
            for req_ids, drafts, num_sampled, kinds in pending:
                for place, req_id in enumerate(req_ids):
                    if req_id:
                        told = _verified(int(drafts[place]), int(num_sampled[place]), kinds, place)
                        found[req_id] = told if req_id in found else {"kinds": told["kinds"]}
            for req_id, items in pruned.items():
                found[req_id]["pruned"] = items
            return found

        return records


def _verified(num_drafts: int, num_sampled: int, kinds: torch.Tensor | None, place: int) -> dict[str, Any]:
    """Return what a verify step did for a request: the kinds of its output, and how many drafts it had."""
    own, exact = int(Kind.OWN), int(Kind.EXACT)
    if not num_drafts:  # placeholders, and no drafts
        return {"kinds": [own] * num_sampled, "drafted": 0}
    found = [exact] * (num_sampled - 1) + [own] if kinds is None else kinds[place, :num_sampled].tolist()
    return {"kinds": found, "drafted": num_drafts}


def _pruned(unit: PruneUnit, kept: torch.Tensor, scores: torch.Tensor | None, is_open: bool) -> dict[str, Any]:
    """Return what the draft sees of an item, its scores as shares of the highest, in 255ths; or only how much of it."""
    grid = unit.grid
    found: dict[str, Any] = {"grid": [grid.num_frames, grid.height, grid.width, grid.num_trailing]}
    if grid.num_tokens > MAX_VISUAL_TOKENS or not is_open:
        return found | {"num_kept": len(kept), "kept": None, "scores": None}
    if scores is not None:
        scores = scores.float().nan_to_num(0.0, 0.0, 0.0)
        low, high = min(float(scores.min()), 0.0), float(scores.max())
        scores = ((scores - low) * (_MOST / max(high - low, 1e-30))).round()
    found |= {"num_kept": len(kept), "kept": kept.tolist()}
    return found | {"scores": None if scores is None else scores.int().tolist()}


class AnswerRecord:
    """The API server's side: one answer's record, a step of it with each of the engine's outputs.

    Args:
        state: vLLM's `RequestState`, whose detokenizer knows how many tokens of the engine's are the answer's.
    """

    def __init__(self, state: Any):
        self._detokenizer, self._spell = state.detokenizer, _speller(state)
        self._num_tokens = 0
        self._steps: list[dict[str, Any]] = []

    def add(self, record: dict[str, Any]) -> None:
        """Take in what came with the engine's output, after the detokenizer has: a stop string may have cut it."""
        tokens = record["tokens"][: self._detokenizer.num_output_tokens() - self._num_tokens]
        self._num_tokens += len(tokens)
        kinds = (record["kinds"] + [int(Kind.OWN)] * len(tokens))[: len(tokens)]
        step = {"tokens": tokens, "text": [self._spell(token) for token in tokens], "kinds": kinds}
        step["drafted"] = record["drafted"]
        if "pruned" in record:
            step["pruned"] = record["pruned"]
        self._steps.append(step)

    def take(self) -> list[dict[str, Any]]:
        """Return the steps since the last call."""
        steps, self._steps = self._steps, []
        return steps


def _speller(state: Any) -> Callable[[int], str]:
    """Return what spells an answer's tokens one after the other; several may make one character, which the last has."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    tokenizer = getattr(state.detokenizer, "tokenizer", None)
    stream = DecodeStream(ids=list((state.prompt_token_ids or [])[-_NUM_PRIMING:]), skip_special_tokens=True)

    def spell(token: int) -> str:
        with contextlib.suppress(Exception):  # here vLLM hands outputs to all requests: no spelling is worth an answer
            if isinstance(tokenizer, Tokenizer):
                return stream.step(tokenizer, token) or ""
            return "" if tokenizer is None else tokenizer.decode([token], skip_special_tokens=True)
        return ""

    return spell
