"""The speculator's book-keeping by itself: what it tells the drafter of a step, and what it forgets with a request."""

from types import SimpleNamespace

import numpy as np
import torch

from vllm_vidspec.engine.draft.messages import DraftMessage, Drafts
from vllm_vidspec.engine.speculator import VidSpecSpeculator

NUM_ROWS, K = 4, 3


class RecordingDrafter:
    """Answers with chains of zeros and keeps the messages."""

    def __init__(self) -> None:
        self.messages: list[DraftMessage] = []

    def draft(self, message: DraftMessage) -> Drafts:
        self.messages.append(message)
        return Drafts(torch.zeros(len(message.rows_np), K, dtype=torch.int64))

    def release(self, row: int) -> None:
        """Hold nothing."""


def make_speculator() -> VidSpecSpeculator:
    """Return a speculator without models: four rows, all of them drafted for in the last step."""
    speculator = object.__new__(VidSpecSpeculator)
    speculator.device = torch.device("cpu")
    speculator.config = SimpleNamespace(shape_for=lambda num_reqs: "chain")
    speculator.requests = SimpleNamespace(has_draft=torch.ones(NUM_ROWS, dtype=torch.bool))
    speculator.guidance = speculator.trees = None
    speculator._drafter = RecordingDrafter()
    speculator._arrivals, speculator._held = {}, {}
    speculator._state = np.ones(NUM_ROWS, dtype=np.int8)
    speculator._has_draft = np.ones(NUM_ROWS, dtype=bool)
    speculator._req_states = SimpleNamespace(
        req_id_to_index={f"request-{row}": row for row in range(NUM_ROWS)},
        total_len=SimpleNamespace(gpu=torch.full((NUM_ROWS,), 9, dtype=torch.int32)),
        all_token_ids=SimpleNamespace(gpu=torch.zeros(NUM_ROWS, 16, dtype=torch.int32)),
    )
    return speculator


def verified(speculator: VidSpecSpeculator, rows: list[int], num_drafts: list[int] | None) -> list[bool]:
    """Return what the drafter hears of a step that verified so many draft tokens, real ones or placeholders."""
    rows_np = np.array(rows)
    batch = SimpleNamespace(
        num_reqs=len(rows),
        idx_mapping=torch.from_numpy(rows_np),
        idx_mapping_np=rows_np,
        num_draft_tokens_per_req=None if num_drafts is None else np.array(num_drafts),
    )
    last_sampled, ones = torch.zeros(NUM_ROWS, 1, dtype=torch.int64), torch.ones(len(rows), dtype=torch.int32)
    output = torch.zeros(len(rows), K, dtype=torch.int64)
    speculator._draft(batch, np.arange(len(rows)), output, last_sampled, ones, np.full(len(rows), 10), K)
    return speculator._drafter.messages[-1].was_verified.tolist()


def test_placeholders_are_no_drafts():
    """A request that begins on a row whose last one was drafted for, with K placeholders verified in its first step.

    Catches: a flag that outlives its request, so that placeholders count as drafts that failed, and the policy learns a
    false acceptance of 0.
    """
    speculator = make_speculator()
    assert verified(speculator, [2, 0, 1], [K, 0, K]) == [True, False, True]
    assert verified(speculator, [2, 0, 1], None) == [False, False, False]
    speculator.release("request-2")
    assert speculator.requests.has_draft.tolist() == [True, True, False, True]
    assert verified(speculator, [2, 0, 1], [K, K, K]) == [False, True, True]
