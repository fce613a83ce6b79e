"""TargetHook: what observes the target at work. It reads; if one writes, its own docstring says what and why."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from vllm.logger import init_logger

from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.requests import NewRequest, RowTable

logger = init_logger("vllm.vidspec")


class Forward(NamedTuple):
    """What a forward of the target left."""

    hidden_states: torch.Tensor | None  # [num_tokens, hidden_size] final ones; None where the step ran no forward
    aux_hidden_states: list[torch.Tensor] | None  # the same of each layer that was asked for; None where none was


class TargetHook(RowTable):
    """Observes the target's requests and forwards; what a hook has no use for, it leaves as it is here."""

    loss: str  # what an exception costs, for the log

    def reserve(self, available_bytes: int) -> int:
        """Return how many bytes of a rank's KV memory it takes; a VidSpecError if a knob asks for too much."""
        return 0

    def init_kv(self, runner: Any) -> None:
        """Take its memory, in the runner's `kv_allocation()` where it may be lost; refuse a KV cache it cannot read."""

    def before_forward(self, batch: Any) -> None:
        """Plan a step, given vLLM's `InputBatch`."""

    def after_forward(self, forward: Forward) -> None:
        """Collect what the step showed."""

    def forget_kv(self) -> None:
        """Give up what lies in KV memory, because its contents are about to be lost."""

    def fail(self, error: Exception) -> None:
        """Pay for an exception in one of the above; raise it where the answer would be wrong without."""
        raise error


class RelevanceRules(Protocol):
    """What decides, for the hook that measures visual relevance, which requests' verification needs it."""

    def needs_relevance(self, req_state_idx: int) -> bool: ...

    def ready(self, req_state_idx: int) -> None:
        """Take note that every rank can measure a row's relevance from here on."""


class Guard:
    """Says what becomes of an exception in a hook that only observes: `on_draft_error: raise` lets it through, and ends
    the engine where other ranks would wait for this one.
    """

    def __init__(self, knobs: Knobs, agreement: Agreement, loss: str):
        self._knobs, self._agreement, self._loss = knobs, agreement, loss
        self._has_failed = False

    def survive(self, error: Exception) -> None:
        raises = self._knobs.current.on_draft_error == "raise"
        if raises and self._agreement.is_alone:
            raise error
        if raises or not self._has_failed:
            logger.error("vidspec: %s", self._loss, exc_info=error)
        if raises:
            self._agreement.abort(str(error))
        self._has_failed = True


class TargetHooks:
    """Calls all of them, as a table of rows too. An exception in one costs what that one says, never the forward; while
    memory is set up it is a refusal.
    """

    def __init__(self, hooks: Sequence[TargetHook], knobs: Knobs, agreement: Agreement):
        self._guarded = [(hook, Guard(knobs, agreement, hook.loss)) for hook in hooks]

    def reserve(self, available_bytes: int) -> int:
        """Return how many of a rank's KV memory bytes they take, each of what the ones before it have left."""
        taken = 0
        for hook, _ in self._guarded:
            taken += hook.reserve(available_bytes - taken)
        return taken

    def init_kv(self, runner: Any) -> None:
        for hook, _ in self._guarded:
            hook.init_kv(runner)

    def add(self, request: NewRequest) -> None:
        """Take a request in that has just got its row; one that the draft does not read costs the target nothing."""
        if request.is_admitted:
            self._call("add", request)

    def before_forward(self, batch: Any) -> None:
        self._call("before_forward", batch)

    def after_forward(self, forward: Forward) -> None:
        self._call("after_forward", forward)

    def remove(self, req_state_idx: int) -> None:
        self._call("remove", req_state_idx)

    def active_rows(self) -> Iterable[int]:
        return (row for hook, _ in self._guarded for row in hook.active_rows())

    def forget_kv(self) -> None:
        self._call("forget_kv")

    def _call(self, what: str, *args: Any) -> None:
        for hook, guard in self._guarded:
            try:
                getattr(hook, what)(*args)
            except Exception as error:
                guard.survive(error)
                hook.fail(error)
