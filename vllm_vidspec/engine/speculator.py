"""The step: after each of the target's forwards vLLM calls `propose`, and this page is all of it.

    observe    what vLLM has committed, and what is decided beside the scheduler                         `Step`
    verify     has happened: `verify/` stands in vLLM's rejection-sampler slot                           `sample`
    roll back  rows without drafts in this step keep the committed text, and no drafts of it             backend
    admit      requests whose prompt the target has read, once what guides their pruning is known        here
    prefill    a bounded piece of the pruned prompts in the queue                                        backend
    draft      for every request that the draft has read, all in one batch                               backend
    publish    to vLLM and to the rows: what is in flight, which the target verifies in its next step    `RequestRows`

The backend is where the draft runs: in this process (`draft/local_backend.py`) or in one of its own
(`parallel/remote_backend.py`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_vidspec.engine.draft_backend import DraftBackend, Reading, Step
from vllm_vidspec.engine.failures import DraftFailures
from vllm_vidspec.engine.hooks.prompts import Guidance
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.policy import Decision
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.requests import DraftBatch, Phase, Request, RequestRows


class Speculator(BaseSpeculator):
    """vLLM's speculator slot: one step, in order, over a backend."""

    supports_mm_inputs = False  # the target's embeddings are of no use to the draft: it has a vision tower of its own
    draft_logits = None
    num_extra_query_per_req = 0

    def __init__(
        self,
        knobs: Knobs,
        requests: RequestRows,
        guides: Sequence[Guidance],
        counters: Counters,
        failures: DraftFailures,
        backend: DraftBackend,
    ):
        self._knobs, self._requests, self._guides = knobs, requests, guides
        self._counters, self._failures = counters, failures
        self.backend = backend
        self.decision: Decision | None = None  # of the step that runs; None while vLLM warms up
        self._undrafted: tuple[bool, Decision | None] = (False, None)  # of the last step: whether it was, and by what
        self.reading = Reading()  # of the last step
        self.graphs: Any = None  # vLLM's memory profile looks for managers among our attributes, and drops them

    @property
    def model(self) -> torch.nn.Module | None:
        return self.backend.model

    def init_cudagraph_manager(self, cudagraph_mode) -> None:
        """Take the mode that vLLM has resolved; it comes before the KV cache, whose builders ask for it."""
        self.graphs = self.backend.make_graphs(cudagraph_mode)

    def capture(self) -> None:
        self.backend.capture()

    @property
    def _is_idle(self) -> bool:
        """Whether a step drafts nothing, and no draft is in flight or due to be rolled back."""
        if self.decision is None or self.decision.option.num_tokens or self.backend.reads_while_paused:
            return False
        return not self._requests.in_flight and not self._requests.is_drafting

    def was_paused(self, req_id: str) -> bool:
        """Return whether nothing was to be drafted in the last step, or not for this request."""
        is_undrafted, decision = self._undrafted
        return is_undrafted or (decision is not None and req_id in decision.paused)

    @torch.inference_mode()
    def propose(
        self,
        input_batch,
        attn_metadata,
        slot_mappings,
        last_hidden_states,
        aux_hidden_states,
        num_sampled,
        num_rejected,
        last_sampled,  # [max_num_reqs, 1]
        next_prefill_tokens,
        temperature,
        seeds,
        dp_sync_state=None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs=None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Return `[num_reqs, K]` int64 draft tokens, of trees in node order; requests without speculation have zeros.

        vLLM has already committed this step: `total_len` and `all_token_ids` include its tokens.
        """
        if dummy_run:
            return self.backend.dummy_run(input_batch.num_reqs, is_profile)
        if self._is_idle:
            self._undrafted, self.reading = (True, self.decision), Reading()
            self._counters.add("undrafted_steps")
            return self.backend.dummy_run(input_batch.num_reqs, is_profile=False)
        plan = self._knobs.current.plan_for(input_batch.num_reqs)
        step = Step.of(input_batch, num_sampled, plan, self.decision, num_speculative_tokens)
        self._undrafted = not step.plan.num_tokens, self.decision
        self.backend.roll_back(step)
        self._admit(step)
        self.reading = self.backend.prefill(step)
        tokens, counts = self.backend.propose(step, self._draft_batch(step))
        # A draft that has failed has changed who is drafted for.
        self._requests.publish(input_batch.idx_mapping, input_batch.req_ids, self._draft_batch(step), counts)
        return tokens

    def _draft_batch(self, step: Step) -> DraftBatch:
        return self._requests.draft_batch(step.batch.idx_mapping_np, step.is_done)

    def _admit(self, step: Step) -> None:
        """Hand over the requests whose target prefill has finished, and those that wait for blocks of the draft's."""
        if not self._requests.unstarted:
            return
        is_starting = step.is_done & self._requests.are_in(
            step.batch.idx_mapping_np, Phase.UNSEEN, Phase.WAITING_FOR_BLOCKS
        )
        if not self.backend.reads_while_paused:
            if self.decision is not None and not step.plan.num_tokens:
                return  # no prompt is read while nothing is drafted
            is_starting = step.active(is_starting)
        self._failures.run("start of drafts", self._start, step, np.flatnonzero(is_starting), is_careful=True)

    def _start(self, step: Step, indices: np.ndarray) -> None:
        rows = step.batch.idx_mapping_np[indices]
        found: list[Request] = []
        for row in rows[self._requests.are_in(rows, Phase.UNSEEN)].tolist():
            request = self._requests.unstarted.get(row)
            if request is None:
                continue
            is_guided = self._wait_for_guidance(request)
            if refusal := self.backend.refusal(request):
                reason, detail = refusal
                self._requests.skip(row, reason)
                if detail:
                    self._counters.skip(reason, request.new.req_id, detail)
            elif is_guided:
                found.append(request)
        self.backend.start(step, rows, found)

    def _wait_for_guidance(self, request: Request) -> bool:
        """Return whether a request's scores are on the host; they are sent there first, and asked for a step later."""
        pending = request.pending
        if pending is None:
            taken = (guide.take(request.new.req_state_idx) for guide in self._guides)
            pending = next((scores for scores in taken if scores is not None), None)
            if pending is None:
                return True
            if not pending.is_here:
                request.pending = pending
                return False
        request.pending, request.guided = None, pending.wait()
        return True
