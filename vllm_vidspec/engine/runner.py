"""Model Runner V2 with our speculator and verifier in the places of vLLM's own, and our hooks around its forward.

What a step of the engine passes here, in order: `finish_requests` and `add_requests` (both ends of a request's life,
one call each of `RequestRows`), `prepare_inputs` (hooks plan), the forward, `execute_model` (hooks collect),
`sample` (the verifier, then accepted KV moves together), and the speculator's `propose`, which is the loop.
"""

import contextlib
import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.utils.mem_utils import DeviceMemoryProfiler
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_vidspec import metrics
from vllm_vidspec.config import METHOD, VidSpecConfig
from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.compat import model as compat
from vllm_vidspec.engine.compat import scheduler
from vllm_vidspec.engine.hooks.protocol import Forward
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.parallel import launch
from vllm_vidspec.engine.parallel.supervisor import DrafterSupervisor
from vllm_vidspec.engine.parts import RunnerParts
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.report.observer import Observer
from vllm_vidspec.engine.report.request_metrics import PublishingOutput
from vllm_vidspec.engine.report.request_records import RequestRecorder
from vllm_vidspec.engine.requests import NewRequest, Phase, RequestRows
from vllm_vidspec.engine.verify.step import VerifyStep
from vllm_vidspec.families import adapter_for
from vllm_vidspec.scoring.choices import prune_variant_of
from vllm_vidspec.streams import Sizes


class VidSpecModelRunner(GPUModelRunner):
    """Adds to vLLM's runner: the draft, what guides its pruning, our verifier and our counters."""

    def __init__(self, vllm_config, device: torch.device):
        super().__init__(vllm_config, device)
        self.speculator: Any = None  # vLLM's own has buffers only; ours is built on the target's weights
        self.rejection_sampler: Any = None
        self.knobs = Knobs(VidSpecConfig(**vllm_config.additional_config[METHOD]))
        # What memory is taken in whose contents may be lost while the engine sleeps; the worker says.
        self.kv_allocation: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        self.requests = RequestRows(self.max_num_reqs, device)
        self.counters = Counters(vllm_config, device, self.num_speculative_steps, self.requests)
        self.agreement = Agreement(get_tp_group())
        self.observers: list[Observer] = []  # of pruning and verification: the recorder, and tools for a while
        # Of the first rank, whose output reaches the scheduler; None where no response says anything of its request.
        self.recorder: RequestRecorder | None = None
        for_all = vllm_config.observability_config.per_request_spec_decode_metrics != "none"
        if self.agreement.is_first and (for_all or self.knobs.current.request_records):
            family = adapter_for(self.model_config.hf_config).name
            self.recorder = RequestRecorder(self.requests, device, family, for_all)
            self.observers.append(self.recorder)
        self._num_told_skips = 0  # of `RequestRows.num_skips`, those that the scheduler's side knows of
        self.drafter_supervisor: DrafterSupervisor | None = (
            None  # of the first rank, where the draft is another process's
        )

    # ---- set-up ----------------------------------------------------------------------------------------------------

    def load_model(self, *args, **kwargs) -> None:
        config = self.knobs.current
        if config.is_parallel and self.agreement.is_first:  # the drafter loads while the target does
            sizes = Sizes(self.max_num_reqs, self.max_model_len, len(metrics.NAMES))
            launch.fetch_weights(self.vllm_config)
            packed = launch.pack_config(self.vllm_config, config)
            self.drafter_supervisor = DrafterSupervisor(packed, config, sizes, self.vocab_size)
            self.drafter_supervisor.start()
        super().load_model(*args, **kwargs)
        compat.keep_shared_noise(self.sampler)
        weights = (weight.numel() * weight.element_size() for weight in self.model.parameters())
        num_stages = self.parallel_config.pipeline_parallel_size  # a step passes all, each as large as this one
        self.counters.set("target_load_bytes", num_stages * sum(weights))
        with DeviceMemoryProfiler() as profiler:
            self.parts = RunnerParts(self)
        self.model_memory_usage += profiler.consumed_memory
        self.hooks, self.trees = self.parts.hooks, self.parts.trees
        self.speculator, self.rejection_sampler = self.parts.speculator, self.parts.verifier
        self.use_aux_hidden_state_outputs = any(guide.reads_hidden_states for guide in self.parts.guides)

    def shutdown(self) -> None:
        if self.drafter_supervisor is not None:
            self.drafter_supervisor.close()
            self.drafter_supervisor = None
        super().shutdown()

    def reserve(self, available_bytes: int) -> int:
        """Return how many of a rank's bytes of KV memory are not for the target's cache."""
        observed = self.hooks.reserve(available_bytes)
        taken = observed + self.speculator.backend.reserve(available_bytes - observed)
        self.counters.set("observed_bytes", observed)
        self.counters.set("target_kv_bytes", available_bytes - taken)
        return taken

    def initialize_kv_cache(self, kv_cache_config, is_profiling: bool = False, **kwargs) -> None:
        if not is_profiling:  # while it is, nothing is reserved yet
            kv_cache_config = self.speculator.backend.widen_kv(kv_cache_config)
        super().initialize_kv_cache(kv_cache_config, is_profiling=is_profiling, **kwargs)
        if not is_profiling:
            self.hooks.init_kv(self)
        self.speculator.backend.init_kv(self.block_tables, self.kv_allocation, is_profiling)

    @torch.inference_mode()
    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        """Profile a step's end as vLLM does, with a row of logits a request; then with those of a verify step."""
        super()._dummy_sampler_run(hidden_states)
        if hidden_states.device.type != "cpu":  # where vLLM sizes the KV cache without a profile
            num_rows = min(self.max_num_reqs * (self.num_speculative_steps + 1), self.max_num_tokens)
            logits = self.model.compute_logits(hidden_states.new_zeros(num_rows, hidden_states.shape[1]))
            self.rejection_sampler.profile(logits)

    def get_draft_model(self):
        return self.speculator.model

    # ---- requests --------------------------------------------------------------------------------------------------

    def add_requests(self, scheduler_output) -> None:
        super().add_requests(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            found = self._new_request(request)
            self.counters.begin_request(found)
            self.requests.add(found)
        if scheduler_output.scheduled_new_reqs:
            self._publish_active()

    def _new_request(self, request: Any) -> NewRequest:
        return NewRequest(
            req_id=request.req_id,
            req_state_idx=self.req_states.req_id_to_index[request.req_id],
            token_ids=request.prefill_token_ids,
            # Copies, which keep the pixels: vLLM may drop its own once the target has encoded them.
            features=[copy.copy(feature) for feature in request.mm_features],
            sampling=request.sampling_params,
            adapter=request.lora_request.lora_name if request.lora_request is not None else "",
            cache_salt=scheduler.salt_of(request),
            has_embeds=request.prompt_embeds is not None,
            prune_variant=prune_variant_of(request.sampling_params),
            is_admitted=scheduler.is_admitted(request),
        )

    def _remove_request(self, req_id: str) -> bool:
        # Finished, aborted and preempted requests all pass here, as does one that is about to be added again.
        req_state_idx = self.req_states.req_id_to_index.get(req_id)
        if req_state_idx is not None:
            self.requests.remove(req_state_idx)
        return super()._remove_request(req_id)

    def finish_requests(self, scheduler_output) -> None:
        super().finish_requests(scheduler_output)
        if scheduler_output.finished_req_ids or scheduler_output.preempted_req_ids:
            # Without those that are preempted.
            self.counters.end_requests(scheduler_output.finished_req_ids, self._was_paused)
            self._publish_active()

    def _was_paused(self, req_id: str) -> bool:
        return self.speculator is None or self.speculator.was_paused(req_id)

    def _publish_active(self) -> None:
        """Show what running requests hold; vLLM makes a step of its own for the last one's end."""
        self.counters.set("held_requests", self.requests.num_active())
        if self.parts.visual is not None:
            self.counters.set("relevance_held_bytes", self.parts.visual.store.held_bytes)

    def forget_kv(self) -> None:
        self.speculator.backend.give_up_all()
        self.hooks.forget_kv()

    def reset_encoder_cache(self) -> None:
        super().reset_encoder_cache()
        if self.speculator is not None:
            self.speculator.backend.forget_media()

    # ---- a step ----------------------------------------------------------------------------------------------------

    def prepare_inputs(self, *args, **kwargs):
        batch = super().prepare_inputs(*args, **kwargs)
        self.hooks.before_forward(batch)
        return batch

    def execute_model(self, scheduler_output, *args, **kwargs):
        if self.speculator is not None:
            self.speculator.decision = scheduler.decision_of(scheduler_output)
        is_empty = not scheduler_output.total_num_scheduled_tokens
        if is_empty:
            self.counters.flush()  # the last step's, which no later one publishes
        output = super().execute_model(scheduler_output, *args, **kwargs)
        if is_empty and (carried := self.counters.carried()) is not None:
            output = copy.copy(output)  # it may be every empty step's
            scheduler.attach(output, scheduler.Attached(carried=carried))
        state = self.execute_model_state
        states = (None, None) if state is None else (state.hidden_states, state.aux_hidden_states)
        self.hooks.after_forward(Forward(*states))
        return output

    def sample(self, hidden_states, input_batch, grammar_output):
        self.rejection_sampler.begin(VerifyStep(hidden_states))
        output, num_sampled, num_rejected = super().sample(hidden_states, input_batch, grammar_output)
        self.rejection_sampler.end()
        nans = output.num_nans
        if nans is not None and len(nans) > input_batch.num_reqs:  # of each row: vLLM takes row i's for request i's
            bounds = input_batch.cu_num_logits.long()
            output.num_nans = torch.nn.functional.pad(nans.cumsum(0), (1, 0))[bounds].diff()
        if self.trees is not None:
            self.trees.compact()  # before anything counts the accepted tokens as computed
        return output, num_sampled, num_rejected

    def sample_tokens(self, grammar_output):
        verified = self._verified()  # until `propose` puts the next drafts in their place
        output = super().sample_tokens(grammar_output)
        self.counters.drafted(self.requests.in_flight)
        self.counters.flush()
        carried = self.counters.carried()
        report = None if self.speculator.decision is None else self._report(verified)
        records = None if self.recorder is None else self.recorder.publisher()
        if report is None and carried is None and records is None:
            return output
        published = PublishingOutput(
            output, lambda: scheduler.Attached(report or scheduler.StepReport(), carried, records and records())
        )
        return published if isinstance(output, AsyncModelRunnerOutput) else published.finish(output)

    def _verified(self) -> frozenset[str]:
        """Return the requests whose drafts this step verifies; with pipeline stages those of some steps ago."""
        if not self.use_pp or self.execute_model_state is None:
            return self.requests.in_flight
        batch = self.execute_model_state.input_batch
        return frozenset(itertools.compress(batch.req_ids, self.requests.has_draft_np[batch.idx_mapping_np]))

    def _report(self, verified: frozenset[str]) -> scheduler.StepReport | None:
        """Return what the policy beside the scheduler learns of a step; None for nothing."""
        reading, skipped = self.speculator.reading, ()
        if self.requests.num_skips != self._num_told_skips:
            self._num_told_skips = self.requests.num_skips
            rows = self.req_states.req_id_to_index.items()
            skipped = tuple(req_id for req_id, row in rows if self.requests.phase[row] == Phase.SKIPPED)
        if not (verified or reading.req_ids or skipped):
            return None
        return scheduler.StepReport(verified, reading.req_ids, reading.seconds, skipped)

    def take_draft_token_ids(self):
        """Offer what was drafted: nothing for requests without speculation, or that have ended in a step that has begun
        since (a scheduler that runs ahead asks late), and a tree's nodes and no more.
        """
        if not self.requests.in_flight and not self.use_pp:  # of whose stages another batch's may be
            return None
        drafts = super().take_draft_token_ids()
        if drafts is not None:
            num_drafts, rows = self.requests.num_drafts(self.num_speculative_steps), self.req_states.req_id_to_index
            drafts.draft_token_ids = [
                tokens[: num_drafts[rows[req_id]]] if req_id in rows else []
                for req_id, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
            ]
        return drafts

    def uncounted(self) -> contextlib.AbstractContextManager:
        return self.counters.paused()
