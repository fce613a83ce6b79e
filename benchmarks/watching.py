"""Looks into a running engine of ours: what became of each token, beside what was pruned of each prompt.

`LLM.collective_rpc(scores, args=(True,))` begins, the same with False returns what was seen since, by rank.
"""

import itertools
from typing import Any

from vllm_vidspec.engine.report.observer import Observer
from vllm_vidspec.metrics import Kind
from vllm_vidspec.tools.watching import PruneWatch, prompts_of, pruning, put_watch  # noqa: F401 - the other half


def scores(worker: Any, on: bool) -> list[dict[str, Any]]:
    """Return what became of every token since watching began, and go on watching or not.

    Per request `req_id`, and per output token `tokens`, `relevance` (None if not measured) and `kinds` (`Kind`).
    """
    runner = worker.model_runner
    if not hasattr(runner, "parts"):
        return []
    rules = runner.parts.rules
    is_predicting = rules is not None and rules.is_predicting
    watch = put_watch(runner.observers, ScoreWatch(runner.req_states, is_predicting) if on else None, ScoreWatch)
    return [] if watch is None else [{"req_id": req_id} | record for req_id, record in watch.records.items()]


class ScoreWatch(Observer):
    """Records verify steps token by token, on the host: an engine that is watched waits for every step.

    What was emitted without being verified (by a prefill, a step without drafts), and what a preempted request keeps of
    its last step, is seen in the text. Relevance may be measured on the row that predicts a token, not on its own.
    """

    def __init__(self, req_states: Any, is_predicting: bool) -> None:
        self._req_states, self._is_predicting = req_states, is_predicting
        self.records: dict[str, dict] = {}

    def verified(self, part: Any, scored: Any) -> None:
        bounds, positions, states = part.cu_num_logits.tolist(), part.pos.tolist(), self._req_states
        of_row = [None] * len(positions) if part.relevance is None else part.relevance.tolist()
        for i, (start, end) in enumerate(itertools.pairwise(bounds)):
            row = int(part.idx_mapping_np[i])
            # A prefill verifies nothing: what it samples is seen as the root of the request's next step.
            if end == start or positions[start] < states.prefill_len.np[row]:
                continue
            record = self.records.setdefault(states.index_to_req_id[row], {"tokens": [], "relevance": [], "kinds": []})
            self._catch_up(record, row, positions[start] + 1)
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
