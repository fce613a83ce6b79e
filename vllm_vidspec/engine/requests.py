"""RequestRows: the one owner of what each persistent row is doing. Tables keyed by row hear of both ends of a request.

A request enters with `admit` and leaves with `forget`: one call each, whatever it was (finished, aborted, preempted, or
about to be added again). Every table that knows something of a row registers here, so that none is cleaned at another
time than the others.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class Arrival:
    """A request that has got a row: new, or back after a preemption.

    Attributes:
        req_id: vLLM's request id.
        req_state_idx: Its persistent row.
        token_ids: Prompt, and after a preemption the output so far.
        features: vLLM's multimodal features in prompt order; copies that keep the pixels.
        sampling: vLLM's `SamplingParams`; None for a request that samples nothing.
        adapter: Name of its LoRA adapter, "" for none.
        has_embeds: Whether the prompt is one of embeddings, whose `token_ids` mean nothing.
    """

    req_id: str
    req_state_idx: int
    token_ids: list[int]
    features: list[Any]
    sampling: Any
    adapter: str = ""
    has_embeds: bool = False


class RowTable(Protocol):
    """What knows something of persistent rows."""

    def admit(self, arrival: Arrival) -> None:
        """Take a request in that has just got its row."""
        ...

    def forget(self, req_state_idx: int) -> None:
        """Forget a row, whose request has ended or lost it; harmless where nothing is known of it."""
        ...


class Phase(IntEnum):
    """What a row is doing."""

    UNSEEN = 0  # the target's prefill is under way, or its scores are on their way to the host
    PREFILLING = 1  # the draft reads its prompt
    DRAFTING = 2
    SKIPPED = 3  # it runs without speculation, for good


class RequestRows:
    """What every persistent row is doing, and what its draft in flight is.

    Args:
        max_num_reqs: Persistent rows.
        device: Where `has_draft` lives.
    """

    def __init__(self, max_num_reqs: int, device: torch.device):
        self.phase = np.full(max_num_reqs, Phase.UNSEEN, dtype=np.int8)  # [max_num_reqs]
        # [max_num_reqs] whether the row's scheduled draft tokens are real (vLLM pads rows without drafts); on the host
        # as the device will have it once the step's uploads are done
        self.has_draft_np = np.zeros(max_num_reqs, dtype=bool)
        self.has_draft = torch.zeros(max_num_reqs, dtype=torch.bool, device=device)
        self.is_tree = np.zeros(max_num_reqs, dtype=bool)  # [max_num_reqs] shape of the draft in flight
        self._tables: list[RowTable] = []

    def register(self, table: RowTable) -> None:
        """Tell a table of every row's ends from here on, in the order of registration."""
        self._tables.append(table)

    def admit(self, arrival: Arrival) -> None:
        """Take a request in."""
        for table in self._tables:
            table.admit(arrival)

    def forget(self, req_state_idx: int) -> None:
        """Forget a row in every table."""
        for table in self._tables:
            table.forget(req_state_idx)
        self.phase[req_state_idx] = Phase.UNSEEN
