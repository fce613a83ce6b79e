"""TargetPrefill: what a draft that is the target sees of a prompt. The target has read it: nothing is left to read."""

import torch

from vllm_vidspec.engine.draft.messages import Admission, Prefilled, PrefillStep
from vllm_vidspec.engine.draft.prefill import DraftPrefill
from vllm_vidspec.engine.draft.prefill_job import PrefillJob
from vllm_vidspec.engine.draft.target_kv import TargetKV
from vllm_vidspec.pruning.prompt import kept_tokens


class TargetPrefill(DraftPrefill):
    """See `DraftPrefill`; a request is ready as soon as it is admitted."""

    _kv: TargetKV

    def _take_blocks(self, job: PrefillJob, num_tokens: int) -> Admission:
        keep, plan = self._visible(job), job.plan
        whole = plan.num_tokens - plan.num_tokens % self._kv.block_size
        if not self._kv.take(job.req_state_idx, keep[:whole].numpy()):
            return Admission.FULL
        job.num_dropped = int((~keep).sum())
        job.num_kept = plan.num_tokens - job.num_dropped
        kept = [keep[item.where].nonzero()[:, 0] for item in plan.items]
        for observer in self.observers:
            observer.pruned(job, kept)
        return Admission.ADMITTED

    def _visible(self, job: PrefillJob) -> torch.Tensor:
        """Return which tokens of a prompt the draft sees, `[num_tokens]` bool: those that the pruner keeps, all of the
        block in which the prompt ends, and what makes the rest a number of whole blocks: the next best by the target's
        scores, or any where there are none.
        """
        plan, size = job.plan, self._kv.block_size
        keep = kept_tokens(plan, [kept for kept in job.kept if kept is not None])
        whole = plan.num_tokens - plan.num_tokens % size
        keep[whole:] = True
        scores = torch.rand(plan.num_tokens, generator=torch.Generator().manual_seed(plan.num_tokens))
        for unit, score in zip(plan.units, job.scores or (), strict=False):
            scores[torch.cat([plan.items[place].where for place in unit.places])] = score
        missing = -int(keep[:whole].sum()) % size
        keep[scores[:whole].masked_fill(keep[:whole], -torch.inf).topk(missing).indices] = True
        return keep

    def step(self, step: PrefillStep) -> Prefilled:
        ready = [row for row in step.idx_mapping_np.tolist() if row in self._queue]
        for row in ready:
            self._queue.pop(row).finish()
        return Prefilled(ready=ready, failed=[])
