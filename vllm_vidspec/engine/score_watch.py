"""What became of every token, for tools: its visual relevance, and why it stands."""

import itertools

import numpy as np
import torch

from vllm_vidspec.scoring import Scored


class ScoreWatch:
    """Records verify steps token by token; on the host, so an engine that is watched waits for every step.

    Args:
        is_predicting: Whether relevance is measured on the row that predicts a token, not on the token's own.
    """

    def __init__(self, is_predicting: bool):
        self._is_predicting = is_predicting
        self._records: dict[str, dict] = {}
        self._req_ids: list[str | None] = []

    def begin(self, req_ids: list[str], is_prefilling: np.ndarray) -> None:
        """Name the requests of the batch whose slices come next, and which of them are still `[num_reqs]` prefilling.

        A prefill verifies nothing: what it samples is seen as the root of the request's next step.
        """
        self._req_ids = [None if skip else req_id for req_id, skip in zip(req_ids, is_prefilling, strict=True)]

    def see(
        self, input_tokens: torch.Tensor, cu_num_logits: torch.Tensor, scored: Scored, relevance: torch.Tensor | None
    ) -> None:
        """Take in one slice of the batch, the next of its requests.

        Args:
            input_tokens: `[num_logits]` input token of each row.
            cu_num_logits: `[num_reqs + 1]` int32.
            scored: What stands.
            relevance: `[num_logits]` float32 of each row's own state, or None.
        """
        bounds, tokens = cu_num_logits.tolist(), input_tokens.tolist()
        of_row = [None] * len(tokens) if relevance is None else relevance.tolist()
        for i, (start, end) in enumerate(itertools.pairwise(bounds)):
            req_id = self._req_ids[i]
            if req_id is None or end == start:
                continue
            record = self._records.setdefault(req_id, {"tokens": [], "relevance": [], "kinds": []})
            count = int(scored.num_sampled[i])
            emitted = scored.sampled[i, :count].tolist()
            kinds = [0] * count if scored.kinds is None else scored.kinds[i, :count].tolist()
            if scored.kinds is None:
                kinds[: count - 1] = [1] * (count - 1)
            nodes = list(range(count)) if scored.path is None else scored.path[i, :count].tolist()
            if not record["tokens"]:  # what the prefill sampled was never verified
                self._append(record, tokens[start], None, 0)
            if self._is_predicting:
                measured = [of_row[start + node] for node in nodes]
            else:
                record["relevance"][-1] = of_row[start]  # the root: the last token of the step before
                measured = [*(of_row[start + node] for node in nodes[1:]), None]
            for token, value, kind in zip(emitted, measured, kinds, strict=True):
                self._append(record, token, value, kind)
        self._req_ids = self._req_ids[len(bounds) - 1 :]

    @staticmethod
    def _append(record: dict, token: int, relevance: float | None, kind: int) -> None:
        for name, value in (("tokens", token), ("relevance", relevance), ("kinds", kind)):
            record[name].append(value)

    def take(self) -> list[dict]:
        """Return what was seen, a record per request: `req_id`, `tokens`, `relevance`, `kinds`; and forget it."""
        records, self._records = self._records, {}
        return [{"req_id": req_id} | record for req_id, record in records.items()]
