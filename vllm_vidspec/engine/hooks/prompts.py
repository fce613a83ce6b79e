"""Guidance: observes the target's prefill and scores a prompt's visual tokens for the draft's pruner.

A request is observed over as many prefill chunks as it takes. What a cached prefix hides is taken from the last prompt
that vLLM would share that prefix with (`content_keys`); failing that there is no guidance, which is counted by reason,
and the pruner is `uniform`.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_vidspec.config import PruneKnobs
from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.hooks.protocol import TargetHook
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.requests import NewRequest
from vllm_vidspec.pruning import budget, get_pruner
from vllm_vidspec.pruning.frames import pruned_together
from vllm_vidspec.pruning.prompt import UnsupportedPrompt, embedding_indices

# Scores that are remembered, in tokens: 64 videos of 25,000, 6.4 MB. A frame that comes as an image has fewer, and
# counts for some at least, because a tensor takes a kilobyte by itself.
_MAX_REMEMBERED, _LEAST_REMEMBERED = 64 * 25_000, 256


class Remembered(NamedTuple):
    """What was observed of an image or video in an earlier prompt."""

    scores: torch.Tensor  # [m] float32 on the CPU
    num_rows: int = 0  # of the text after the last visual token, all of which they rest on; 0: not on whole text
    digest: bytes = b""  # of these rows' tokens


@dataclass(eq=False)
class ObservedPrompt:
    """A request whose prefill is being observed."""

    items: list[torch.Tensor]  # per image or video the prompt indices [m_i] int64 of its tokens
    keys: list[bytes]  # per item by what its scores are remembered
    token_ids: list[int]  # prompt, and after a preemption the output so far
    missed: str | None = None  # why there will be no scores, or None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def text_start(self) -> int:
        """The first index after the last visual token: from here on, text asks."""
        return max(int(item[-1]) for item in self.items) + 1

    def digest(self, num_rows: int) -> bytes:
        """Return what distinguishes so many tokens after the last visual one from others."""
        text = self.token_ids[self.text_start : self.text_start + num_rows]
        return hashlib.sha256(np.asarray(text, dtype=np.int64).tobytes()).digest()


class Guided(NamedTuple):
    """What a prompt's pruning goes by."""

    scores: list[torch.Tensor] | None  # one float32 [m_i] CPU tensor per item; None where there is no guidance
    outcome: tuple[str, ...]  # counters to add to once the drafter has the prompt: what came of observing it


class PendingScores:
    """A prefilled request's scores on their way to the host, without a wait on the critical path.

    On a GPU they are copied into pinned memory. Who asks a step later waits for the step before at most, which the host
    has to wait for anyway. `finish` makes scores of what was measured, if anything was.
    """

    def __init__(self, measured: torch.Tensor | None, finish: Callable[[Any], Guided]):
        # Whether `wait` returns at once: it follows from the device alone, so that tensor-parallel ranks agree.
        self.is_here = measured is None or measured.device.type == "cpu"
        self._measured, self._finish = measured, finish
        if measured is not None and not self.is_here:
            self._measured = torch.empty_like(measured, device="cpu", pin_memory=True)
            self._measured.copy_(measured, non_blocking=True)
            self._copied = torch.cuda.Event(blocking=True)  # a whole step may pass until then
            self._copied.record()

    def wait(self) -> Guided:
        if not self.is_here:
            self._copied.synchronize()
        return self._finish(self._measured)


class Guidance(TargetHook):
    """Scores visual tokens during the target's prefill: what both kinds share. Where there are both (`pruner: auto`),
    one of them observes a request: the one that its own pruner needs.
    """

    _kind = ObservedPrompt
    need = ""  # what a pruner asks for that is guided by this
    reads_hidden_states = False  # whether the target's forward must return some beside its last ones
    loss = "guidance failed; these prompts are pruned uniformly (further ones: counted)"

    def __init__(self, knobs: Knobs, counters: Counters, device: torch.device, agreement: Agreement):
        self.knobs, self.counters, self.device, self._agreement = knobs, counters, device, agreement
        self.attention: dict[int, Any] = {}  # the target's attention layers that are observed, by index
        self._prompts: dict[int, Any] = {}  # by persistent row
        # By content key that of the last prompt; and, as a question may come again after others, by its text, too.
        self._remembered: OrderedDict[bytes, Remembered] = OrderedDict()

    def add(self, request: NewRequest) -> None:
        """Begin to observe a request, if there is anything to choose in it."""
        if request.has_embeds:
            return  # its tokens mean nothing, and the draft will refuse it
        knobs = self.knobs.current.variant(request.prune_variant)
        if self.need not in get_pruner(knobs.pruner).needs:
            return  # another hook observes it, or none
        if items := self._choosable(request.features, knobs):
            keys = content_keys(request, request.features, [int(item[-1]) + 1 for item in items])
            self._prompts[request.req_state_idx] = self._kind(items, keys, request.token_ids)

    def _choosable(self, features: list[Any], knobs: PruneKnobs) -> list[torch.Tensor]:
        """Return the items' prompt indices; [] where pruning chooses nothing or the draft will refuse the prompt."""
        try:
            items = [embedding_indices(feature) for feature in features]
        except UnsupportedPrompt:
            return []
        # Images of as many tokens each are taken for one size here, where no grid is known. If they are not, a prompt
        # may be observed for nothing, or, where videos alone keep nothing, its images are pruned uniformly.
        sizes = [len(item) for item in items]
        units = pruned_together([feature.modality for feature in features], items, sizes, knobs)
        full = [sum(sizes[place] for place in places) for places, _ in units]
        kept = [budget(size, knobs.ratio_for(modality)) for size, (_, modality) in zip(full, units, strict=True)]
        return items if any(0 < keep < size for keep, size in zip(kept, full, strict=True)) else []

    def take(self, req_state_idx: int) -> PendingScores | None:
        """Send a prefilled request's scores to the host and forget it; None where there was nothing to choose.

        Ranks call it for the same requests in the same order; all get the same scores, none where one of them has none.
        """
        raise NotImplementedError

    def remove(self, req_state_idx: int) -> None:
        self._prompts.pop(req_state_idx, None)

    def active_rows(self) -> Iterable[int]:
        return self._prompts

    def fail(self, error: Exception) -> None:
        """Give up the prompts that are being observed; they are counted where they are pruned."""
        for prompt in self._prompts.values():
            prompt.missed = "error"

    def forget_scores(self) -> None:
        """Forget what was observed of earlier prompts, because some ranks may have kept what others have not."""
        self._remembered.clear()

    def _finish(
        self, prompt: ObservedPrompt, observed: list[torch.Tensor | None], num_rows: int = 0, is_reused: bool = False
    ) -> Guided:
        """Return a request's scores, of each item those `[m_i]` of this prefill or else remembered ones.

        `num_rows` is how much text they rest on, if that is all of it, else 0; then they do not take the place of
        scores that rest on more. `is_reused` says that they are an earlier prompt's in part.
        """
        digest = prompt.digest(num_rows) if num_rows else b""
        scores = []
        for key, fresh in zip(prompt.keys, observed, strict=True):
            known = self._remembered.get(key)
            if fresh is None:
                scores.append(known and known.scores)
                continue
            scores.append(fresh)
            if num_rows or known is None or not known.num_rows:
                # A copy: it may be a view, which would keep the whole prompt's.
                known = Remembered(fresh.clone(), num_rows, digest)
            for name in (key, key + digest):
                self._remembered[name] = known
                self._remembered.move_to_end(name)
        sizes = {key: max(_LEAST_REMEMBERED, len(one.scores)) for key, one in self._remembered.items()}
        total = sum(sizes.values())
        while total > _MAX_REMEMBERED:
            total -= sizes[self._remembered.popitem(last=False)[0]]
        if any(score is None for score in scores):
            return Guided(None, (f"unguided_{prompt.missed or 'cached'}",))
        is_reused = is_reused or any(fresh is None for fresh in observed)
        return Guided(scores, ("guided_prompts", "reused_guidance") if is_reused else ("guided_prompts",))  # type: ignore[arg-type]

    def _known_text(self, prompt: ObservedPrompt) -> tuple[list[torch.Tensor], int]:
        """Return scores `[m_i]` of each item from an earlier prompt whose text this one's begins with, and how many of
        its tokens that is; [], 0 where there is none.
        """
        same = prompt.digest(prompt.num_tokens - prompt.text_start)
        found = [self._remembered.get(key + same, self._remembered.get(key)) for key in prompt.keys]
        first = found[0]
        if first is None or not first.num_rows or prompt.text_start + first.num_rows > prompt.num_tokens:
            return [], 0
        # All of one prompt, or their means are of different text.
        if any(one is None or one[1:] != first[1:] for one in found) or prompt.digest(first.num_rows) != first.digest:
            return [], 0
        return [one.scores for one in found if one is not None], first.num_rows


def content_keys(request: NewRequest, items: Sequence[Any], ends: Sequence[int]) -> list[bytes]:
    """Return a digest per image or video of all that the target computes up to its end (`ends` `[n]`: prompt
    indices behind their last tokens), and for whom.

    vLLM lets requests share a prefix's KV by a chain of hashes over tokens, media, LoRA adapter and `cache_salt`; hooks
    know what they keep beside that KV by the same things, so that no tenant gets what vLLM would not share.
    """
    digest = hashlib.sha256()

    def enter(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "little") + part)  # a client chooses salt and names: none runs into another

    enter(request.cache_salt.encode())
    enter(request.adapter.encode())
    token_ids, done, keys = np.asarray(request.token_ids, dtype=np.int64), 0, []
    wanted = {id(feature): end for feature, end in zip(items, ends, strict=True)}
    for feature in request.features:  # what is no item is part of the digest all the same: audio, say
        enter(feature.identifier.encode())
        end = wanted.get(id(feature))
        if end is not None:
            enter(token_ids[done:end].tobytes())
            done = end
            keys.append(digest.digest())
    return keys


def prefills(batch: Any, prompts: Mapping[int, Any]) -> Iterator[tuple[int, Any, int, int]]:
    """Yield (req_idx, prompt, first position, end position) of the requests in prefill that are observed."""
    if not prompts:  # the usual decode step
        return
    for req_idx in np.flatnonzero(batch.is_prefilling_np).tolist():
        prompt = prompts.get(int(batch.idx_mapping_np[req_idx]))
        if prompt is not None:
            start = int(batch.num_computed_tokens_np[req_idx])
            yield req_idx, prompt, start, min(start + int(batch.num_scheduled_tokens[req_idx]), prompt.num_tokens)
