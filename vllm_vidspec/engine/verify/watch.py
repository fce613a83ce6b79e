"""What became of every token, for tools: its visual relevance, and why it stands."""

import itertools
from typing import Any

import numpy as np

from vllm_vidspec.engine.verify.step import VerifySlice
from vllm_vidspec.metrics import Kind
from vllm_vidspec.scoring import Scored


class ScoreWatch:
    """Records verify steps token by token, on the host: an engine that is watched waits for every step.

    Args:
        req_states: The runner's: what was emitted without being verified (by a prefill, a step without drafts), and
            what a preempted request keeps of its last step, is seen in the text.
        is_predicting: Whether relevance is measured on the row that predicts a token, not on the token's own.
    """

    def __init__(self, req_states: Any, is_predicting: bool):
        self._req_states = req_states
        self._is_predicting = is_predicting
        self._records: dict[str, dict] = {}
        self._req_ids: list[str | None] = []

    def begin(self, req_ids: list[str], is_prefilling: np.ndarray) -> None:
        """Name the requests of the batch whose slices come next, and which of them are still `[num_reqs]` prefilling.

        A prefill verifies nothing: what it samples is seen as the root of the request's next step.
        """
        self._req_ids = [None if skip else req_id for req_id, skip in zip(req_ids, is_prefilling, strict=True)]

    def see(self, part: VerifySlice, scored: Scored) -> None:
        bounds, positions = part.cu_num_logits.tolist(), part.pos.tolist()
        of_row = [None] * len(positions) if part.relevance is None else part.relevance.tolist()
        for i, (start, end) in enumerate(itertools.pairwise(bounds)):
            req_id = self._req_ids[i]
            if req_id is None or end == start:
                continue
            record = self._records.setdefault(req_id, {"tokens": [], "relevance": [], "kinds": []})
            self._catch_up(record, int(part.idx_mapping_np[i]), positions[start] + 1)
            count = int(scored.num_sampled[i])
            exact = [int(Kind.EXACT)] * (count - 1) + [int(Kind.OWN)]
            kinds = exact if scored.kinds is None else scored.kinds[i, :count].tolist()
            nodes = list(range(count)) if scored.path is None else scored.path[i, :count].tolist()
            if self._is_predicting:
                measured = [of_row[start + node] for node in nodes]
            else:
                record["relevance"][-1] = of_row[start]  # the root: the last token of the step before
                measured = [*(of_row[start + node] for node in nodes[1:]), None]
            self._append(record, scored.sampled[i, :count].tolist(), measured, kinds)
        self._req_ids = self._req_ids[len(bounds) - 1 :]

    def _catch_up(self, record: dict, req_state_idx: int, length: int) -> None:
        """Let a record be that of a text of `length` tokens, prompt included, the root being its last."""
        prompt_len = int(self._req_states.prompt_len.np[req_state_idx])
        for values in record.values():
            del values[length - prompt_len :]
        known = prompt_len + len(record["tokens"])
        unseen = self._req_states.all_token_ids.gpu[req_state_idx, known:length].tolist()
        self._append(record, unseen, [None] * len(unseen), [int(Kind.OWN)] * len(unseen))

    @staticmethod
    def _append(record: dict, tokens: list[int], relevance: list[float | None], kinds: list[int]) -> None:
        for name, values in (("tokens", tokens), ("relevance", relevance), ("kinds", kinds)):
            record[name] += values

    def take(self) -> list[dict]:
        """Return what was seen, a record per request: `req_id`, `tokens`, `relevance`, `kinds`, and forget it."""
        records, self._records = self._records, {}
        return [{"req_id": req_id} | record for req_id, record in records.items()]
