"""Model Runner V2 with our speculator and scorer in the places of vLLM's own."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.utils.mem_utils import DeviceMemoryProfiler
from vllm.v1.outputs import AsyncModelRunnerOutput

from vllm_vidspec.config import METHOD, VidSpecConfig
from vllm_vidspec.engine import compat
from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.kv_views import attention_layers
from vllm_vidspec.engine.listen.attention import AttentionGuidance
from vllm_vidspec.engine.listen.guidance import make_guidance
from vllm_vidspec.engine.listen.hidden_states import HiddenStateGuidance
from vllm_vidspec.engine.listen.prompts import Guidance
from vllm_vidspec.engine.listen.trees import TargetTrees
from vllm_vidspec.engine.listen.visual_states import VisualStates
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.report.request_metrics import PublishingOutput
from vllm_vidspec.engine.speculator import VidSpecSpeculator
from vllm_vidspec.engine.verify.rules import LooseRules
from vllm_vidspec.engine.verify.verifier import CoupledVerifier
from vllm_vidspec.engine.verify.watch import ScoreWatch
from vllm_vidspec.errors import VidSpecError

_TUNABLE = {"lambda_r", "guidance_layers", "prune_ratio", "image_prune_ratio"}
_TUNABLE_RULES = {
    *("scorer", "lambda_loose", "top_n", "position_shift", "relevance_rows"),
    *("fly_entropy", "fly_window", "fly_top_k", "protected_tokens"),
}


@functools.cache
def vidspec_runner(base: type) -> type:
    """Return our subclass of a vLLM model runner class (GPU or CPU)."""

    class VidSpecModelRunner(base):
        """Adds to vLLM's runner: the draft and its KV pool, what guides its pruning, our scorer and our counters."""

        def __init__(self, vllm_config, device: torch.device):
            super().__init__(vllm_config, device)  # builds vLLM's own speculator; it owns buffers only
            self.vidspec_config = VidSpecConfig(**vllm_config.additional_config[METHOD])
            # What memory is taken in whose contents may be lost while the engine sleeps; the worker says.
            self.kv_allocation: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
            self.guidance: Guidance | None = None
            self.trees: TargetTrees | None = None
            self.rules: LooseRules | None = None
            self.visual: VisualStates | None = None
            self.counters = Counters(vllm_config, device, self.max_num_reqs, self.num_speculative_steps)
            self.agreement = Agreement(get_tp_group())
            self.speculator = VidSpecSpeculator(vllm_config, self.vidspec_config, device, self.counters, self.agreement)

        def load_model(self, *args, **kwargs) -> None:
            super().load_model(*args, **kwargs)
            compat.keep_shared_noise(self.sampler)
            with DeviceMemoryProfiler() as profiler:
                self.speculator.load(self.model, self.req_states, self.sampler)
            self.model_memory_usage += profiler.consumed_memory
            # After the draft: one that shares the target's weights must not share its listeners.
            self.guidance = make_guidance(
                self.vidspec_config, self.model, self.vllm_config, self.counters, self.agreement
            )
            self.use_aux_hidden_state_outputs = isinstance(self.guidance, HiddenStateGuidance)
            self.speculator.guidance = self.guidance
            if self.vidspec_config.shapes - {"chain"}:
                self.trees = TargetTrees(
                    attention_layers(self.vllm_config).values(),
                    self.model_state,
                    self.max_num_reqs,
                    self.num_speculative_steps,
                    self.max_num_tokens,
                    self.device,
                )
            self.speculator.trees = self.trees
            self._init_rules()
            self.rejection_sampler = CoupledVerifier(
                self.sampler,
                self.speculative_config,
                self.device,
                self.counters,
                self.trees,
                self.vidspec_config.max_path,
                self.rules,
                self.visual,
            )

        def _init_rules(self) -> None:
            """Prepare what the scorers need that let mismatches stand, if any request can have one."""
            config = self.vidspec_config
            if config.score.scorers == {"strict"}:
                return
            self.rules = LooseRules(
                config, self.vllm_config, self.max_num_reqs, self.vocab_size, self.sampler, self.counters
            )
            if "loose" in config.score.scorers:
                self.visual = VisualStates(
                    config, self.vllm_config, self.max_num_reqs, self.counters, self.rules.ready, self.agreement
                )

        def initialize_kv_cache(self, kv_cache_config, is_profiling: bool = False, **kwargs) -> None:
            super().initialize_kv_cache(kv_cache_config, is_profiling=is_profiling, **kwargs)
            if not is_profiling:
                if self.guidance is not None:
                    self.guidance.check_cache()
                if self.trees is not None:
                    self.trees.init_kv(len(self.kv_cache_config.kv_cache_groups))
                if self.visual is not None:
                    self.visual.init_pool(self.kv_allocation())
                self.speculator.init_kv(self.encoder_cache, self.kv_allocation)

        def get_draft_model(self):
            """Return the draft network, whose weights vLLM can exchange; None while it is the target itself."""
            return self.speculator.model

        def forget_kv(self) -> None:
            """Give up what the draft and relevance know of running requests; see the worker."""
            self.speculator.forget_all()
            if self.visual is not None:
                self.visual.forget_all()

        def reset_encoder_cache(self) -> None:
            super().reset_encoder_cache()
            if self.speculator is not None:
                self.speculator.forget_media()

        def add_requests(self, scheduler_output) -> None:
            super().add_requests(scheduler_output)
            for request in scheduler_output.scheduled_new_reqs:
                sampling = request.sampling_params
                is_structured = sampling is not None and sampling.structured_outputs is not None
                has_embeds = request.prompt_embeds is not None
                self.speculator.arrive(
                    request.req_id, request.prefill_token_ids, request.mm_features, is_structured, has_embeds
                )
                row = self.req_states.req_id_to_index[request.req_id]
                self.counters.begin_request(row, request.req_id)
                if self.rules is not None and sampling is not None:
                    self._admit(request, row)

        def _admit(self, request, row: int) -> None:
            """Give a request its rule of verification, and listen to its video."""
            assert self.rules is not None
            is_needed = self.rules.admit(row, request.sampling_params)
            if self.visual is not None:
                adapter = request.lora_request.lora_name if request.lora_request is not None else ""
                text, features = request.prefill_token_ids, request.mm_features
                self.visual.arrive(request.req_id, row, text, features, adapter, is_needed)

        def prepare_inputs(self, *args, **kwargs):
            batch = super().prepare_inputs(*args, **kwargs)
            if self.guidance is not None:
                self.guidance.guarded(self.guidance.before_forward, batch)
            if self.trees is not None:
                self.trees.before_forward(batch)
            if self.visual is not None:
                self.visual.before_forward(batch)
            return batch

        def _remove_request(self, req_id: str) -> bool:
            # Finished, aborted and preempted requests all pass here, as does one that is about to be re-added.
            self.speculator.release(req_id)
            if self.visual is not None:
                self.visual.release(req_id)
            row = self.req_states.req_id_to_index.get(req_id)
            if row is not None and self.rules is not None:
                self.rules.forget(row)
            return super()._remove_request(req_id)

        def finish_requests(self, scheduler_output) -> None:
            super().finish_requests(scheduler_output)
            for req_id in scheduler_output.finished_req_ids:  # without those that are preempted
                self.counters.end_request(req_id)

        def execute_model(self, scheduler_output, *args, **kwargs):
            self.counters.flush()
            output = super().execute_model(scheduler_output, *args, **kwargs)
            if self.trees is not None:
                self.trees.after_forward()
            state = self.execute_model_state
            if self.guidance is not None:
                aux_hidden_states = state.aux_hidden_states if state is not None else None
                self.guidance.guarded(self.guidance.after_forward, aux_hidden_states)
            if self.visual is not None:
                self.visual.after_forward(state.hidden_states if state is not None else None)
            return output

        def sample(self, hidden_states, input_batch, grammar_output):
            self.rejection_sampler.hidden_states = hidden_states
            output, num_sampled, num_rejected = super().sample(hidden_states, input_batch, grammar_output)
            self.rejection_sampler.hidden_states = None
            if self.trees is not None:
                self.trees.compact(num_sampled - 1)  # before anything counts the accepted tokens as computed
            return output, num_sampled, num_rejected

        def sample_tokens(self, grammar_output):
            output = super().sample_tokens(grammar_output)
            self.counters.flush()
            publish = self.counters.publisher()
            if publish is None:
                return output
            if isinstance(output, AsyncModelRunnerOutput):
                return PublishingOutput(output, publish)
            publish()
            return output

        def retune(self, knobs: dict[str, Any]) -> None:
            """Change knobs of the pruning between requests; see `worker.vidspec_retune`."""
            tunable = _TUNABLE | (_TUNABLE_RULES if self.rules is not None else set())
            if fixed := sorted(set(knobs) - tunable):
                raise VidSpecError(f"{fixed[0]} cannot change while the engine runs")
            config = self.vidspec_config.changed(knobs)
            if "loose" in config.score.scorers and self.visual is None:
                raise VidSpecError("scorer cannot change to loose: the engine keeps no hidden states")
            if isinstance(self.guidance, AttentionGuidance):
                self.guidance.select(config.prune.guidance_layers, self.guidance.num_layers)
            for part in (self.guidance, self.visual):
                if part is not None:
                    part.config = config
            if self.rules is not None:
                self.rules.retune(config)
            self.vidspec_config = self.speculator.config = self.speculator.drafter.prefills.config = config

        def watch_scores(self, on: bool) -> list[dict[str, Any]]:
            """Return what became of every token since watching began, and go on or not; see the worker."""
            watch = self.rejection_sampler.watch
            records = [] if watch is None else watch.take()
            is_predicting = self.vidspec_config.score.relevance_rows == "prediction"
            self.rejection_sampler.watch = ScoreWatch(self.req_states, is_predicting) if on else None
            return records

        def take_draft_token_ids(self):
            """Offer what was drafted: nothing for requests without speculation, a tree's nodes and no more."""
            drafts = super().take_draft_token_ids()
            if drafts is not None:
                num_drafted = self.speculator.num_drafted()
                drafts.draft_token_ids = [
                    tokens[: num_drafted.get(req_id, 0)]
                    for req_id, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
                ]
            return drafts

    return VidSpecModelRunner
