"""Guidance: listens to the target's prefill and scores a prompt's visual tokens for the draft's pruner.

It only reads: the target's own computation, and so its output, stays bit for bit what it was. A request is heard over
as many prefill chunks as it takes. What a cached prefix keeps from being heard is taken from the last prompt that
showed the same image or video; failing that there is no guidance, which is counted by reason, and the pruner is
`uniform`.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.host_copy import HostCopy
from vllm_vidspec.engine.listen.guard import Guard
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.pruning import budget
from vllm_vidspec.pruning.prompt import UnsupportedPrompt, embedding_indices


@dataclass(eq=False)
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


class Guided(NamedTuple):
    """What a prompt's pruning goes by.

    Attributes:
        scores: One float32 `[m_i]` CPU tensor per item; None where there is no guidance.
        outcome: Counters to add to if the draft is shown the prompt: what came of listening to it.
    """

    scores: list[torch.Tensor] | None
    outcome: tuple[str, ...]


@dataclass(frozen=True)
class PendingScores:
    """A prefilled request's scores, on their way to the host.

    Attributes:
        copy: Of what was measured; None where nothing was.
        finish: Makes scores of it, and says what came of the request.
    """

    copy: HostCopy | None
    finish: Callable[[Any], Guided]

    @property
    def is_here(self) -> bool:
        """Whether `wait` returns at once; the same on all tensor-parallel ranks."""
        return self.copy is None or self.copy.is_here

    def wait(self) -> Guided:
        """Return the scores, once they are on the host."""
        return self.finish(None if self.copy is None else self.copy.wait())


class Guidance(Protocol):
    """Scores visual tokens during the target's prefill."""

    config: VidSpecConfig

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

    def guarded(self, step: Callable[..., None], *args: Any) -> None:
        """Call one of the two methods below; an exception costs the guidance, never the forward."""
        ...

    def before_forward(self, batch: Any) -> None:
        """Plan a step, given vLLM's `InputBatch`."""
        ...

    def after_forward(self, aux_hidden_states: list[torch.Tensor] | None) -> None:
        """Collect what the step showed."""
        ...

    def take(self, req_id: str) -> PendingScores | None:
        """Send a prefilled request's scores to the host and forget it; None where there was nothing to choose.

        Every rank of a tensor-parallel group must call it for the same requests in the same order; all get the same
        scores, none where one rank has not heard the request.
        """
        ...

    def release(self, req_id: str) -> None:
        """Forget a request that ended before its prefill did."""
        ...

    def forget_scores(self) -> None:
        """Forget what earlier prompts have shown, because some ranks may have kept what others have not."""
        ...


_MAX_REMEMBERED = 64  # images and videos; 100 kB each at 25,000 tokens


class Listeners:
    """What both kinds share: who is listened to, and the scores of what was shown lately."""

    def __init__(self, config: VidSpecConfig, counters: Counters, device: torch.device, agreement: Agreement):
        self.config = config
        self._agreement = agreement
        self.counters = counters
        self.device = device
        self._listeners: dict[str, Any] = {}
        message = "guidance failed; these prompts are pruned uniformly (further ones: counted)"
        self._guard = Guard(config, message, agreement)
        self._remembered: OrderedDict[str, torch.Tensor] = OrderedDict()  # identifier -> [m] float32 on the CPU

    def _listen(self, features: list[Any]) -> list[torch.Tensor]:
        """Return the items' prompt indices; [] where pruning chooses nothing or the draft will refuse the prompt."""
        try:
            items = [embedding_indices(feature) for feature in features]
        except UnsupportedPrompt:
            return []
        ratios = [self.config.prune.ratio_for(feature.modality) for feature in features]
        kept = [budget(len(item), ratio) for item, ratio in zip(items, ratios, strict=True)]
        chooses = any(0 < keep < len(item) for keep, item in zip(kept, items, strict=True))
        return items if chooses else []

    def reserve(self, available_bytes: int) -> int:
        """Keep nothing; see `Guidance`."""
        return 0

    def check_cache(self) -> None:
        """Accept any; see `Guidance`."""

    def guarded(self, step: Callable[..., None], *args: Any) -> None:
        """Run a step that is called within the target's forward; an exception costs the guidance, never the forward."""
        if not self._guard(step, *args):
            for listener in self._listeners.values():
                listener.missed = "error"

    def release(self, req_id: str) -> None:
        """Forget a request; see `Guidance`."""
        self._listeners.pop(req_id, None)

    def forget_scores(self) -> None:
        """Forget what is remembered of earlier prompts; see `Guidance`."""
        self._remembered.clear()

    def _finish(self, listener: Listener, heard: list[torch.Tensor | None]) -> Guided:
        """Return a request's scores, remembered ones where this prefill did not compute them; say what came of it.

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
            return Guided(None, (f"unguided_{listener.missed or 'cached'}",))
        is_reused = any(fresh is None for fresh in heard)
        return Guided(scores, ("guided_prompts", "reused_guidance") if is_reused else ("guided_prompts",))  # type: ignore[arg-type]


def prefills(batch: Any, listeners: Mapping[str, Any]) -> Iterator[tuple[int, Any, int, int]]:
    """Yield (batch index, listener, first position, end position) of the requests in prefill that are listened to.

    Args:
        batch: vLLM's `InputBatch`.
        listeners: By request id; each with the `num_tokens` of its prompt.
    """
    for i in np.flatnonzero(batch.is_prefilling_np):
        listener = listeners.get(batch.req_ids[i])
        if listener is not None:
            start = int(batch.num_computed_tokens_np[i])
            yield int(i), listener, start, min(start + int(batch.num_scheduled_tokens[i]), listener.num_tokens)
