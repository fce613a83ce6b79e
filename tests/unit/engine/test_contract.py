"""The names and signatures of vLLM 0.32 that the engine room relies on; the first thing to read after an upgrade."""

import dataclasses
import importlib
import inspect
from types import SimpleNamespace

import pytest

from vllm_vidspec.engine.compat import model as compat
from vllm_vidspec.engine.compat.contract import MARK, expect_parameters
from vllm_vidspec.errors import VidSpecError

GPU = "vllm.v1.worker.gpu"
# What a sampler is told of each logits row.
LOGITS_ROWS = (
    "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos "
    "seq_lens_upper_bound_np"
)
ATTENTION_FORWARD = "self layer query key value kv_cache attn_metadata output"
CONTRACT = {
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": "self usage_context",
    "vllm.config.speculative:SpeculativeConfig.verify_equal_vocab_size_if_draft_model": "self",
    "vllm.sampling_params:SamplingParams._validate_spec_decode": "self speculative_config",
    "vllm.v1.worker.gpu_worker:Worker._make_model_runner": "self",
    "vllm.v1.worker.cpu_worker:CPUWorker.init_device": "self",
    f"{GPU}.model_runner:GPUModelRunner._remove_request": "self req_id",
    f"{GPU}.model_runner:GPUModelRunner.finish_requests": "self scheduler_output",
    f"{GPU}.model_runner:GPUModelRunner.add_requests": "self scheduler_output",
    f"{GPU}.model_runner:GPUModelRunner.initialize_kv_cache": "self kv_cache_config is_profiling",
    f"{GPU}.model_runner:GPUModelRunner.sample_tokens": "self grammar_output",
    f"{GPU}.model_runner:GPUModelRunner.take_draft_token_ids": "self",
    f"{GPU}.model_runner:GPUModelRunner.execute_model": "self scheduler_output",
    f"{GPU}.model_runner:GPUModelRunner.prepare_inputs": "self scheduler_output",
    f"{GPU}.model_runner:GPUModelRunner.reset_encoder_cache": "self",
    "vllm.v1.core.sched.scheduler:Scheduler.__init__": "self vllm_config",
    "vllm.v1.core.sched.output:strip_covered_mm_data": "mm_features num_computed_tokens uses_mrope",
    "vllm.model_executor.models.interfaces:EagleModelMixin._set_aux_hidden_state_layers": "self layers",
    "vllm.model_executor.models.utils:extract_layer_index": "layer_name",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward": ATTENTION_FORWARD,
    "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.forward": ATTENTION_FORWARD,
    f"{GPU}.sample.sampler:Sampler.sample": f"{LOGITS_ROWS} return_logprobs",
    f"{GPU}.sample.sampler:Sampler.apply_sampling_params": LOGITS_ROWS,
    f"{GPU}.sample.sampler:Sampler._sample_random": (
        "self processed_logits expanded_idx_mapping pos top_k top_p use_fused_sampler"
    ),
    f"{GPU}.model_runner:GPUModelRunner.get_draft_model": "self",
    "vllm.v1.worker.gpu_worker:Worker.sleep": "self level",
    "vllm.v1.worker.gpu_worker:Worker.discard": "self tags",
    "vllm.v1.worker.gpu_worker:Worker.initialize_from_config": "self kv_cache_config",
    "vllm.v1.worker.gpu_worker:Worker._maybe_get_memory_pool_context": "self tag",
    f"{GPU}.attn_utils:init_kv_cache": "forward_context kv_cache_config kv_cache_allocation_context",
    f"{GPU}.sample.gumbel:gumbel_sample": (
        "logits expanded_idx_mapping temperature seed pos apply_temperature is_drafting use_fp64"
    ),
    f"{GPU}.attn_utils:build_attn_metadata": (
        "attn_groups num_reqs num_tokens query_start_loc_gpu query_start_loc_cpu max_query_len seq_lens "
        "max_seq_len block_tables slot_mappings kv_cache_config seq_lens_cpu_upper_bound is_prefilling"
    ),
    f"{GPU}.attn_utils:init_attn_backend": "kv_cache_config vllm_config device",
    f"{GPU}.attn_utils:get_kv_cache_spec": "vllm_config",
    "vllm.v1.core.kv_cache_utils:get_kv_cache_config_from_groups": "vllm_config kv_cache_groups available_memory",
    "vllm.forward_context:set_forward_context": "attn_metadata vllm_config num_tokens slot_mapping",
    "vllm.multimodal.utils:group_and_batch_mm_kwargs": "mm_kwargs device pin_memory",
    "vllm.multimodal.encoder_budget:MultiModalBudget.__init__": "self vllm_config mm_registry enable_cache",
    "vllm.multimodal.encoder_budget:MultiModalBudget.get_dummy_encoder_profile_inputs": "self",
    "vllm.config.multimodal:MultiModalConfig.get_limit_per_prompt": "self modality",
}


def resolve(path: str):
    """Return the object that `module:Name.attribute` names."""
    module, _, names = path.partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return getattr(found, MARK, found)


@pytest.mark.parametrize(("path", "parameters"), CONTRACT.items(), ids=[path.split(":")[1] for path in CONTRACT])
def test_vllm_still_has(path, parameters):
    """Catches: an upstream rename, before it becomes a wrong answer."""
    expect_parameters(resolve(path), *parameters.split())


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (
            f"{GPU}.input_batch:InputBatch",
            "req_ids is_prefilling_np num_computed_tokens_np num_scheduled_tokens query_start_loc_np",
        ),
        ("vllm.v1.core.sched.output:NewRequestData", "prompt_embeds prefill_token_ids mm_features"),
        ("vllm.multimodal.inputs:MultiModalFeatureSpec", "data modality identifier mm_position mm_hash"),
        (
            "vllm.config:MultiModalConfig",
            "skip_mm_profiling mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path",
        ),
    ],
)
def test_fields_are_still_there(path, names):
    """Catches: renamed fields of a step, by which guidance finds a request's rows, or of what a new request brings."""
    assert {field.name for field in dataclasses.fields(resolve(path))}.issuperset(names.split())


def test_the_shared_encoder_cache_is_still_one():
    cache = resolve(f"{GPU}.mm.encoder_cache:EncoderCache")()
    outputs = cache.encoder_outputs
    cache.reset_encoder_cache()
    assert cache.encoder_outputs is outputs


def test_propose_matches_the_interface():
    """Catches: a `propose` of ours that vLLM's keyword arguments no longer reach."""
    theirs = resolve(f"{GPU}.spec_decode.speculator:BaseSpeculator.propose")
    ours = resolve("vllm_vidspec.engine.speculator:VidSpecSpeculator.propose")
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


def test_a_renamed_parameter_is_one_clear_line():
    """Catches: a check that passes whatever it is given."""
    with pytest.raises(VidSpecError, match=r"no longer takes \(path, nothing\); vllm_vidspec needs vLLM 0.32"):
        expect_parameters(resolve, "path", "nothing")


def test_patches_are_applied_once():
    """Registering twice leaves one wrapper, with vLLM's own function under it."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_vidspec.plugin import register

    register()
    first = EngineArgs.create_engine_config
    register()
    assert EngineArgs.create_engine_config is first
    assert not hasattr(getattr(first, MARK), MARK)


def test_the_sampler_keeps_to_its_own_noise():
    """Catches: FlashInfer's sampler, with noise of its own, for batches with top-p and no seed; a renamed switch."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    used = []
    states = SimpleNamespace(
        get_top_k_top_p=lambda *_: (None, 0.9), any_greedy=lambda _: False, any_explicit_seed=lambda _: False
    )
    sampler = SimpleNamespace(
        use_flashinfer=True,
        use_xpu_sampler=False,
        logprobs_mode="raw_logprobs",
        sampling_states=states,
        apply_sampling_params=lambda *_, **__: None,
        _sample_random=lambda *arguments: used.append(arguments[-1]),
        trace_replay_state=None,
        return_sampling_mask=False,
    )
    for _ in range(2):
        Sampler.sample(sampler, *[None] * 8)
        compat.keep_shared_noise(sampler)
    assert used == [True, False]
    with pytest.raises(VidSpecError, match="no longer says use_flashinfer"):
        compat.keep_shared_noise(SimpleNamespace())


def test_kv_connectors_do_not_see_drafts(monkeypatch):
    """Catches: a draft's layers offered to the connector, under the target's names where it drafts for itself."""
    from vllm.distributed.kv_transfer import has_kv_transfer_group, kv_transfer_state

    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", "a connector")
    with compat.without_kv_connector():
        assert not has_kv_transfer_group()
    with pytest.raises(ValueError, match="of the draft"), compat.without_kv_connector():
        raise ValueError("of the draft")
    assert kv_transfer_state.get_kv_transfer_group() == "a connector"
