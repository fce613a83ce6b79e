"""TargetHook: what observes the target at work. It reads; if one writes, its own docstring says what and why."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from vllm_vidspec.engine.requests import NewRequest


class Forward(NamedTuple):
    """What a forward of the target left."""

    hidden_states: torch.Tensor | None  # [num_tokens, hidden_size] final ones; None where the step ran no forward
    # [num_tokens, hidden_size] of each layer that was asked for; None where none was
    aux_hidden_states: list[torch.Tensor] | None


class TargetHook:
    """Observes the target's requests and forwards; what a hook has no use for, it leaves as it is here.

    Attributes:
        loss: What an exception costs, for the log.
    """

    loss: str

    def reserve(self, available_bytes: int) -> int:
        """Return how many bytes of a rank's KV memory it takes for itself.

        Raises:
            VidSpecError: A knob asks for more than there is.
        """
        return 0

    def init_kv(self, runner: Any) -> None:
        """Take its memory, and refuse a KV cache that it cannot read; called once the target's cache exists.

        Args:
            runner: vLLM's model runner; `kv_allocation()` is entered where memory is taken whose contents may be lost
                while the engine sleeps.

        Raises:
            VidSpecError: One line naming the way out.
        """

    def add(self, request: NewRequest) -> None:
        """Take a request in."""

    def before_forward(self, batch: Any) -> None:
        """Plan a step, given vLLM's `InputBatch`."""

    def after_forward(self, forward: Forward) -> None:
        """Collect what the step showed."""

    def remove(self, req_state_idx: int) -> None:
        """Forget a row's request; harmless where nothing is known of it."""

    def active_rows(self) -> Iterable[int]:
        """Return the rows of which it holds something that `remove` gives back."""
        return ()

    def forget_kv(self) -> None:
        """Give up what lies in KV memory, because its contents are about to be lost."""

    def fail(self, error: Exception) -> None:
        """Pay for an exception in one of the above; raise it where the answer would be wrong without."""
        raise error
