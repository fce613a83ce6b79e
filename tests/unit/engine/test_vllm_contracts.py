"""What we rely on is in the vLLM that is installed: 0.32 in `make test`, 0.33 too in `make test-cuda-host`."""

import ast
import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm.platforms import current_platform

from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.compat import linear
from vllm_vidspec.engine.compat.contract import MARK
from vllm_vidspec.scoring import FLY_TOP_K, top_entropy

ROOT, IS_CPU = Path(__file__).resolve().parents[3], current_platform.is_cpu()
SOURCES = ("vllm_vidspec", "kernels", "scripts", *(() if IS_CPU else ("benchmarks", "tests/null_gpu")))


# What the engine room relies on. A path is `module:Name.attribute`; where a version differs, `engine/compat` meets it.
GPU = "vllm.v1.worker.gpu"
_RUNNER = f"{GPU}.model_runner:GPUModelRunner"
LM_HEAD = "vllm.model_executor.layers.quantization.online.lm_head"

LOGITS_ROWS = "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos"
ATTENTION_FORWARD = "self layer query key value kv_cache attn_metadata output"


def table(text: str) -> dict[str, str]:
    """Return names by path: a path begins a line, and lines that are indented go on with its names."""
    lines = re.sub(r"\n +", " ", re.sub(r"(?m)^#.*\n", "", text)).strip().splitlines()
    return dict(line.split(maxsplit=1) for line in lines)


# Functions and the parameters that we give or take, in this order; what `engine/compat` patches it checks itself.
FUNCTIONS = table(f"""
vllm.engine.arg_utils:EngineArgs.create_engine_config self usage_context
vllm.config.vllm:VllmConfig.get_quantization_config model_config load_config
vllm.v1.engine.output_processor:RequestState._new_completion_output self token_ids finish_reason stop_reason
vllm.v1.engine.output_processor:RequestState.make_request_output self new_token_ids pooling_output finish_reason
    stop_reason kv_transfer_params
vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.create_chat_completion self request raw_request
vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.create_completion self request raw_request
vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.create_responses self request raw_request
vllm.entrypoints.openai.chat_completion.batch_serving:OpenAIServingChatBatch.create_batch_chat_completion self request
    raw_request
vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens.serve_tokens self request raw_request
vllm.entrypoints.generate.generative_scoring.serving:ServingGenerativeScoring.create_generative_scoring self request
    raw_request
# The worker and the runner
vllm.v1.worker.gpu_worker:Worker._maybe_get_memory_pool_context self tag
# The scheduler
vllm.plugins.endpoint_plugins.interface:EndpointPlugin.attach_router self app
vllm.plugins.endpoint_plugins.interface:EndpointPlugin.init_state self engine_client state args
# Attention
vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward {ATTENTION_FORWARD}
vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.forward {ATTENTION_FORWARD}
vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward {ATTENTION_FORWARD}
vllm.v1.attention.ops.triton_unified_attention:unified_attention q max_seqlen_q
vllm.vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func q max_seqlen_q seqused_k causal block_table
    return_softmax_lse scheduler_metadata num_splits fa_version
vllm.vllm_flash_attn.flash_attn_interface:get_scheduler_metadata batch_size max_seqlen_q max_seqlen_k num_heads_q
    num_heads_kv headdim cache_seqlens qkv_dtype cu_seqlens_q page_size causal num_splits
vllm.model_executor.models.interfaces:EagleModelMixin._set_aux_hidden_state_layers self layers
vllm.model_executor.models.utils:extract_layer_index layer_name
# Sampling and verification
{GPU}.sample.sampler:Sampler.__init__ self vllm_config max_num_reqs vocab_size device req_states num_speculative_tokens
    use_fp64_gumbel
{GPU}.sample.sampler:Sampler.sample {LOGITS_ROWS} seq_lens_upper_bound_np return_logprobs
{GPU}.sample.sampler:Sampler.apply_sampling_params {LOGITS_ROWS} seq_lens_upper_bound_np
vllm.config.model:ModelConfig.get_diff_sampling_param self
{GPU}.sample.sampler:Sampler.get_logprobs_dims self idx_mapping_np include_token_ids
{GPU}.sample.logprob:compute_topk_scores logits num_logprobs sampled_token_ids cu_num_logits logprob_token_ids_state
    expanded_idx_mapping max_per_req_token_ids logits_mode
{GPU}.sample.gumbel:gumbel_sample logits expanded_idx_mapping temperature seed pos apply_temperature is_drafting
    use_fp64
{GPU}.sample.gumbel:murmur3_uniform32 seed pos offset
{GPU}.sample.gumbel:murmur3_uniform64 seed pos offset
{GPU}.spec_decode.rejection_sampler:RejectionSampler.__init__ self sampler spec_config device
{GPU}.states:RequestState.__init__ self max_num_reqs max_model_len max_num_batched_tokens num_speculative_steps
    vocab_size device
{GPU}.states:RequestState.add_request self req_id prompt_len all_token_ids num_computed_tokens max_tokens
# The draft's own forward
vllm.model_executor.warmup.deep_gemm_warmup:deep_gemm_warmup model max_tokens
{GPU}.block_table:BlockTables.append_block_ids req_index new_block_ids overwrite
{GPU}.attn_utils:init_kv_cache forward_context kv_cache_config kv_cache_allocation_context
{GPU}.attn_utils:build_attn_metadata attn_groups num_reqs num_tokens query_start_loc_gpu query_start_loc_cpu
    max_query_len seq_lens max_seq_len block_tables slot_mappings kv_cache_config seq_lens_cpu_upper_bound
    is_prefilling
vllm_vidspec.engine.compat.moved:get_kv_cache_groups vllm_config kv_cache_spec
vllm_vidspec.engine.compat.moved:get_kv_cache_config_from_groups vllm_config kv_cache_groups available_memory
{GPU}.attn_utils:build_slot_mappings_by_layer slot_mappings kv_cache_config
{GPU}.attn_utils:init_attn_backend kv_cache_config vllm_config device
{GPU}.attn_utils:get_kv_cache_spec vllm_config
vllm.v1.attention.backends.utils:resolve_kv_cache_layout vllm_config
vllm.v1.attention.backends.utils:get_supported_kv_cache_layouts backends
vllm.forward_context:set_forward_context attn_metadata vllm_config num_tokens cudagraph_runtime_mode batch_descriptor
    slot_mapping
vllm.multimodal.utils:group_and_batch_mm_kwargs mm_kwargs device pin_memory
vllm.multimodal.encoder_budget:MultiModalBudget.__init__ self vllm_config mm_registry enable_cache
vllm.multimodal.encoder_budget:MultiModalBudget.get_dummy_encoder_profile_inputs self
vllm.config.multimodal:MultiModalConfig.get_limit_per_prompt self modality
vllm.utils.torch_utils:async_tensor_h2d data device
vllm.v1.worker.gpu_worker:init_worker_distributed_environment vllm_config rank distributed_init_method local_rank
    backend
vllm.v1.worker.workspace:init_workspace_manager device
# Pipeline stages
vllm.distributed.utils:get_pp_indices num_hidden_layers pp_rank pp_size
{GPU}.spec_decode.utils:get_pp_safe_draft_load_config load_config
vllm.config.model:ModelConfig.get_total_num_hidden_layers self
{GPU}.cudagraph_utils:CudaGraphManager.__init__ self vllm_config device cudagraph_mode decode_query_len
{GPU}.cudagraph_utils:CudaGraphManager.capture self create_forward_fn progress_bar_desc
{GPU}.cudagraph_utils:CudaGraphManager.run_fullgraph self desc
""")

# Functions that a version has not got, and what meets that: path -> the versions that have it.
SOMETIMES = {
    # `compat/config.py`: a draft's context would shorten the target's
    "vllm.config.vllm:VllmConfig._limit_max_model_len_to_draft": ("0.33",),
    # `report/request_metrics.py`: PublishingOutput has it always
    "vllm.v1.outputs:AsyncModelRunnerOutput.get_kv_connector_output": ("0.33",),
    # `compat/backends.py`: up to how many rows keys are split, where that is more than one
    "vllm.v1.attention.ops.triton_unified_attention:MAX_3D_QUERY_LEN": ("0.33",),
    # `compat/linear.py`: refused in a line
    **dict.fromkeys(
        (f"{LM_HEAD}:{name}" for name in ("quantized_lm_head_copy", "_SOURCES", "_LM_HEAD_METHODS")), ("0.33",)
    ),
    # `compat/cpu.py`, which only the CPU engine imports
    f"{GPU}.structured_outputs:_build_grammar_mapping": ("0.32",),
}

# Classes and what we read or set on their instances.
MEMBERS = table(f"""
{GPU}.model_runner:GPUModelRunner vllm_config device model speculative_config speculator rejection_sampler max_num_reqs
    max_num_tokens max_model_len num_speculative_steps vocab_size dtype model_memory_usage
    use_aux_hidden_state_outputs encoder_cache req_states model_state execute_model_state block_tables kv_cache_config
    input_buffers sampler attn_groups use_pp
vllm.v1.worker.gpu_worker:Worker vllm_config device model_runner
{GPU}.model_runner:ExecuteModelState hidden_states aux_hidden_states num_spec_tokens_to_schedule input_batch
{GPU}.input_batch:InputBatch req_ids num_reqs num_tokens idx_mapping idx_mapping_np is_prefilling_np
    num_computed_tokens_np num_scheduled_tokens query_start_loc_np cu_num_logits cu_num_logits_np
    num_draft_tokens_per_req seq_lens_cpu_upper_bound prefill_len_np logits_indices positions
{GPU}.states:RequestState max_num_reqs max_model_len req_id_to_index index_to_req_id free_indices prompt_len total_len
    all_token_ids last_sampled_tokens max_seq_len remove_request apply_staged_writes
{GPU}.block_table:BlockTables input_block_tables block_tables
{GPU}.sample.sampler:Sampler use_flashinfer use_fp64_gumbel sampling_states req_states logits_processors
    needs_logits_processing thinking_budget_state logprob_token_ids_state return_sampling_mask logprobs_mode add_request
    apply_staged_writes
{GPU}.sample.states:SamplingStates temperature seeds min_p top_k top_p
{GPU}.sample.penalties:PenaltiesState use_penalty repetition_penalty frequency_penalty presence_penalty prompt_bin_mask
    output_bin_counts
{GPU}.sample.logits_processor.interface:LogitsContext expanded_idx_mapping idx_mapping_np expanded_local_pos input_ids
{GPU}.attn_utils:AttentionCGSupportInfo min_cg_support min_cg_attn_backend
{GPU}.sample.bad_words:BadWordsState num_bad_words
{GPU}.sample.logit_bias:LogitBiasState use_logit_bias
{GPU}.spec_decode.rejection_sampler:RejectionSampler sampler num_speculative_steps
{GPU}.spec_decode.speculator:BaseSpeculator num_extra_query_per_req
{GPU}.cudagraph_utils:CudaGraphManager compilation_config graphs _capture_descs
{GPU}.cudagraph_utils:BatchExecutionDescriptor cg_mode num_tokens num_reqs
{GPU}.mm.encoder_cache:EncoderCache encoder_outputs mm_features reset_encoder_cache
vllm.v1.attention.backend:AttentionLayer _q_scale _k_scale _v_scale
vllm.model_executor.layers.attention.attention:Attention query_quant kv_cache_dtype
vllm.v1.core.sched.output:SchedulerOutput scheduled_new_reqs finished_req_ids total_num_scheduled_tokens
    num_spec_tokens_to_schedule num_scheduled_tokens scheduled_spec_decode_tokens
vllm.v1.core.sched.output:NewRequestData req_id prompt_embeds prefill_token_ids mm_features sampling_params
    lora_request
vllm.v1.request:Request request_id mm_features sampling_params num_tokens num_computed_tokens cache_salt
vllm.v1.outputs:DraftTokenIds req_ids draft_token_ids
vllm.v1.metrics.stats:RequestSpecDecodeMetrics to_dict
vllm.v1.engine:EngineCoreOutput request_id new_token_ids kv_transfer_params
vllm.v1.engine.output_processor:RequestState detokenizer prompt_token_ids
vllm.v1.engine.detokenizer:FastIncrementalDetokenizer tokenizer num_output_tokens
vllm.multimodal.inputs:MultiModalFeatureSpec data modality identifier mm_position mm_hash
vllm.config.multimodal:MultiModalConfig skip_mm_profiling mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
    video_pruning_rate language_model_only
vllm.config.speculative:SpeculativeConfig draft_model_config draft_parallel_config num_speculative_tokens
    num_speculative_tokens_per_batch_size method kv_cache_dtype
vllm.config.parallel:ParallelConfig rank tensor_parallel_size pipeline_parallel_size data_parallel_size
    data_parallel_rank data_parallel_index world_size assigned_physical_gpu_ids disable_custom_all_reduce
    enable_batch_sharded_sampling use_ubatching is_moe_model
vllm.config.cache:CacheConfig cache_dtype block_size user_specified_block_size num_gpu_blocks_override
    kv_cache_memory_bytes gpu_memory_utilization kv_cache_dtype_skip_layers
vllm.config.compilation:CompilationConfig static_forward_context static_all_moe_layers cudagraph_mode
    cudagraph_capture_sizes max_cudagraph_capture_size ir_enable_torch_wrap
vllm.config.kernel:KernelConfig linear_backend linear_backend_per_quant
vllm.config.vllm:VllmConfig additional_config instance_id watermark_config kv_transfer_config offload_config
    attention_config kernel_config use_v2_model_runner
vllm.v1.attention.selector:AttentionSelectorConfig head_size dtype kv_cache_dtype block_size use_kv_connector
vllm.v1.attention.backend:AttentionBackend forward_includes_kv_cache_update get_name
vllm.v1.attention.backend:AttentionMetadataBuilder supports_draft_decode_metadata_update
vllm.v1.attention.backends.flash_attn:FlashAttentionImpl vllm_flash_attn_version logits_soft_cap sinks
vllm.v1.attention.backends.triton_attn:TritonAttentionImpl logits_soft_cap sinks
vllm.config.compilation:PassConfig fuse_attn_quant
vllm.v1.worker.utils:AttentionGroup backend metadata_builders
vllm.v1.kv_cache_interface:FullAttentionSpec page_size_bytes block_size
""")

# All that a step, or vLLM's front end after it, can tell of a request: a verify step carries it as a step without
# drafts does (`tests/engine/test_outputs.py`). Of a field that is new somebody says how, there, before it stands here.
TOLD = table(f"""
{GPU}.sample.output:SamplerOutput sampled_token_ids logprobs_tensors num_nans num_sampled num_rejected
    sampling_mask_tensors
{GPU}.sample.output:SamplingMaskTensors token_ids packed_mask counts vocab_size rows_per_request
vllm.v1.outputs:LogprobsTensors logprob_token_ids logprobs selected_token_ranks cu_num_generated_tokens
    cu_num_generated_tokens_tensor
# Pooling, connectors and experts are told of by vLLM's forward, not of its logits.
vllm.v1.outputs:ModelRunnerOutput req_ids req_id_to_index sampled_token_ids logprobs prompt_logprobs_dict
    prompt_token_id_logprobs_dict pooler_output kv_connector_output ec_connector_output num_nans_in_logits
    cudagraph_stats aux_output_connector_output sampling_masks
vllm.outputs:CompletionOutput index text token_ids cumulative_logprob logprobs routed_experts finish_reason stop_reason
    lora_request sampling_mask spec_decode_metrics weight_versions
""")
# What vLLM's sampler keeps and knows: a verify step reads it as well, or vLLM refuses it with drafts (traces).
SAMPLER = (
    "logprobs_mode compute_nans use_fp64_gumbel req_states sampling_states penalties_state logits_processors "
    "logprob_token_ids_state thinking_budget_state trace_replay_state needs_logits_processing num_speculative_tokens "
    "return_sampling_mask use_flashinfer use_xpu_sampler"
)

# What vLLM's runner, its graphs and its warm-up read of a speculator: ours have it, or it is read of vLLM's own alone
# (after `isinstance`), or where a feature is on that we refuse (watermarking) or never turn on (adaptive verification).
READERS = (f"{GPU}.model_runner", f"{GPU}.cudagraph_utils", f"{GPU}.warmup", "vllm.v1.worker.gpu_worker")
READ_OF_OURS = "model propose capture init_cudagraph_manager supports_mm_inputs draft_logits num_extra_query_per_req"
READ_OF_THEIRS = (
    "num_query_per_req load_model set_attn observe_verification draft_attn_layer_names dcp_size pcp_manager "
    "prepare_watermarking draft_token_confidence_probs"
)

# Calls that a function of vLLM makes in this order, whatever else it calls, up to the last of them.
ORDER = table(f"""
# A request is known before its step is planned; then the target's metadata, then its positions.
{_RUNNER}.execute_model finish_requests free_states add_requests prepare_inputs prepare_attn prepare_attn prepare_inputs
# The verifier, then what the step has committed, then the draft.
{_RUNNER}.sample_tokens sample postprocess_sampled propose set_draft_tokens
# What we replace is made by the time that `load_model` returns.
{_RUNNER}.load_model load_model load_model Sampler RejectionSampler
# The memory profile ends with the logits of the requests' last rows.
{_RUNNER}.profile_run _dummy_run _dummy_sampler_run
""")

# Arguments by name of a call in a function of vLLM: what the target's noise depends on, what a draft is asked with.
KEYWORDS = {
    # No cache of logits, with which the seed would be another one (from 0.33 on).
    (f"{GPU}.sample.sampler:Sampler._sample_random", "gumbel_sample"): "apply_temperature is_drafting use_fp64",
    (f"{_RUNNER}.sample_tokens", "propose"): "dp_sync_state mm_inputs num_speculative_tokens",
}

# Functions that ours repeat to the bit, and a digest of their code in 0.32 and 0.33.
GUMBEL = (
    "_murmur3_rotl32 _murmur3_mix _murmur3_fmix32 murmur3_hash32 murmur3_uniform32 murmur3_uniform64 "
    "_uniform64_from_random53 _log1p_neg_stable gumbel_noised_argmax"
)
NOISE = (f"{GPU}.sample.penalties:_penalties_kernel", *(f"{GPU}.sample.gumbel:{name}" for name in GUMBEL.split()))
NOISE_DIGEST = "01666a1721be0764"

# Our classes, of which each method takes what vLLM's own takes.
OURS = (
    *("runner:VidSpecModelRunner", "worker:VidSpecGPUWorker", "speculator:Speculator"),
    *("verify.verifier:CoupledVerifier", "draft.graphs:DraftGraphs", "report.request_metrics:PublishingOutput"),
)


def resolve(path: str) -> Any:
    """Return what `module:Name.attribute` names in vLLM, whatever we have put in its place."""
    module, _, names = path.partition(":")
    found = importlib.import_module(module)
    for name in filter(None, names.split(".")):
        found = getattr(found, name)
    found = getattr(found, MARK, found)
    return getattr(found, "fn", found)  # of a Triton kernel


def has(path: str) -> bool:
    for one in (path, path.replace(":", ".")):  # a name in a module, or a module
        with contextlib.suppress(ImportError, AttributeError):
            resolve(one)
            return True
    return False


def code(path: str) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(resolve(path))))


def last(values: Any) -> str:
    return str(values).split(":")[-1][:40]


def imports(file: Path) -> Iterator[str]:
    """Yield `module:name`, or a module, of each import of vLLM in a file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from (f"{node.module}:{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "vllm")


def patches() -> Iterator[tuple[str, str]]:
    """Yield what `engine/compat` replaces in vLLM by name, and the parameters that it relies on: path, names."""
    for file in sorted((ROOT / "vllm_vidspec/engine/compat").glob("*.py")):
        tree = ast.parse(file.read_text())
        owners = {path.replace(":", ".").split(".")[-1]: path for path in imports(file)}
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) >= 3):
            owner, name, _, *names = call.args
            if ast.unparse(call.func) not in ("wrap", "replace") or not isinstance(name, ast.Constant):
                continue
            root, *rest = ast.unparse(owner).split(".")
            if root in owners and all(isinstance(one, ast.Constant) for one in names):
                path = ".".join((owners[root], *rest, name.value))
                if path.split(":")[1] not in {one.split(":")[-1] for one in SOMETIMES}:
                    yield path, " ".join(one.value for one in names)


PATCHES = dict(patches())


def test_every_import_of_ours_is_there():
    """Catches: a name that vLLM has moved or dropped, inside functions too."""
    files = (file for folder in SOURCES for file in (ROOT / folder).rglob("*.py"))
    found = {
        path
        for file in files
        for path in imports(file)
        if file.name != "moved.py"  # which tries one module after the other
        and (IS_CPU or not ("cpu" in file.parts or file.name == "cpu.py" or ".cpu" in path))
    }
    assert len(found) > 80, "our own imports are not seen"
    assert [path for path in sorted(found) if not has(path)] == []
    assert not has("vllm.utils.torch_utils:renamed") and not has("vllm.renamed")


@pytest.mark.parametrize(("path", "names"), FUNCTIONS.items(), ids=last)
def test_functions_take_what_we_give(path, names):
    """Catches: a parameter that is renamed, moved or dropped."""
    taken = inspect.signature(resolve(path)).parameters
    assert [name for name in taken if name in names.split()] == names.split()


@pytest.mark.parametrize(("path", "names"), PATCHES.items(), ids=last)
def test_patches_find_what_they_replace(path, names):
    """Catches: a patch that a process refuses when it starts, or puts on what nobody calls."""
    assert len(PATCHES) > 12, "our own patches are not seen"
    owner, _, name = path.rpartition(".")
    assert name in vars(resolve(owner)), f"{owner} has no {name} of its own"
    test_functions_take_what_we_give(path, names)


@pytest.mark.parametrize("path", OURS)
def test_our_methods_take_what_theirs_do(path):
    """Catches: a class that cannot be made any more; a method that vLLM's arguments do not reach, or has renamed."""
    ours = resolve(f"vllm_vidspec.engine.{path}")
    theirs = next(base for base in ours.__mro__ if base.__module__.startswith("vllm."))
    assert not inspect.isabstract(ours)
    methods = {name: method for name, method in inspect.getmembers(ours, inspect.isfunction) if name != "__init__"}
    shared = [name for name in methods if name in dir(theirs) and methods[name] is not getattr(theirs, name)]
    assert shared
    for name in shared:
        own, wanted = (inspect.signature(owner).parameters for owner in (methods[name], getattr(theirs, name)))
        named = [n for n, one in own.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        assert named == [*wanted][: len(named) if len(named) < len(own) else None], name


@pytest.mark.parametrize(("path", "where"), SOMETIMES.items(), ids=last)
def test_what_a_version_lacks_is_known(path, where):
    """Catches: a special case of ours that has lost its reason, or needs another one."""
    assert has(path) == vllm.__version__.startswith(where)


@pytest.mark.parametrize(("path", "names"), MEMBERS.items(), ids=last)
def test_classes_have_what_we_read(path, names):
    """Catches: a renamed field of a step, attribute of the runner, knob of a configuration."""
    members: set[str] = set()
    for base in (base for base in resolve(path).__mro__ if base.__module__.startswith("vllm.")):
        members |= {*vars(base), *inspect.get_annotations(base), *re.findall(r"self\.(\w+)", inspect.getsource(base))}
    assert not set(names.split()) - members


@pytest.mark.parametrize(("path", "names"), TOLD.items(), ids=last)
def test_nothing_else_is_told_of_a_request(path, names):
    """Catches: an output that vLLM adds, and that a verify step may leave out."""
    told = resolve(path)
    fields = getattr(told, "_fields", None) or [field.name for field in dataclasses.fields(told)]
    assert set(fields) <= set(names.split())


def test_the_quantisations_that_kernels_are_chosen_by_are_known():
    """Catches: a name that vLLM adds, and that a draft of ours would be refused for; one that it no longer reads."""
    source = inspect.getsource(importlib.import_module("vllm.model_executor.kernels.linear"))
    named = re.findall(r'quantization ?= ?(?:"(\w+)"(?: if \w+ else "(\w+)")?)', source)
    assert {name for pair in named for name in pair if name} == {*linear.SCHEMES}


def test_the_sampler_keeps_nothing_else():
    """Catches: what a request can ask of vLLM's sampler, and what vLLM's rejection sampler does not read."""
    kept = re.findall(
        r"self\.(\w+)(?:: [^=]+)? = ", inspect.getsource(resolve(f"{GPU}.sample.sampler:Sampler.__init__"))
    )
    assert set(kept) <= set(SAMPLER.split())


def test_a_model_asks_the_process_for_its_stage():
    """Catches: a group that is kept elsewhere than where the draft's is put in its place."""
    assert "return _PP" in inspect.getsource(resolve("vllm.distributed.parallel_state:get_pp_group"))


def test_vllm_reads_nothing_else_of_a_speculator():
    """Catches: an attribute that vLLM begins to read, and that ours do not have."""
    trees = [ast.parse(inspect.getsource(importlib.import_module(module))) for module in READERS]
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    read = {node.attr for node in nodes if ast.unparse(node.value) in ("self.speculator", "speculator")}
    ours = READ_OF_OURS.split()
    assert read <= {*ours, *READ_OF_THEIRS.split()}
    source = (ROOT / "vllm_vidspec/engine/speculator.py").read_text()
    assert all(f"def {name}(" in source or f"    {name} = " in source for name in ours)


@pytest.mark.parametrize(("path", "names"), ORDER.items(), ids=last)
def test_vllm_calls_in_this_order(path, names):
    calls = re.findall(r"(?<!def )\b(\w+)\(", inspect.getsource(resolve(path)))
    assert [name for name in calls if name in names.split()] == names.split()


@pytest.mark.parametrize(("path", "name"), KEYWORDS, ids=last)
def test_vllm_calls_with_these_arguments(path, name):
    calls = (node for node in ast.walk(code(path)) if isinstance(node, ast.Call))
    (call,) = (node for node in calls if ast.unparse(node.func).split(".")[-1] == name)
    assert sorted(keyword.arg or "**" for keyword in call.keywords) == KEYWORDS[path, name].split()


def test_the_noise_is_the_same_in_every_version():
    """Catches: noise that one version draws otherwise, where ours are the words of another."""
    text = "\n".join(ast.unparse(code(path)) for path in NOISE)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == NOISE_DIGEST


def test_fly_has_vllms_defaults_and_measure():
    """Catches: a threshold that means something else than vLLM's own (0.33 is the first that has FLy)."""
    fly = pytest.importorskip("vllm.v1.spec_decode.fly")
    logits = torch.randn(64, 100, generator=torch.Generator().manual_seed(0)) * 4
    logits[:, ::7] = -torch.inf
    for top_k in (1, 3, 100):
        torch.testing.assert_close(top_entropy(logits, top_k), fly.compute_fly_entropy(logits, top_k, from_logits=True))
    ours = VidSpecConfig(model="self", num_speculative_tokens=9)
    config = "vllm.config.speculative:SpeculativeConfig"
    fields = {
        ast.unparse(node.target): ast.unparse(node.value)
        for node in ast.walk(code(config))
        if isinstance(node, ast.AnnAssign) and node.value
    }
    assert fields["fly_entropy_threshold"] == f"Field(default={ours.fly_entropy}, ge=0)"
    assert fields["fly_entropy_top_k"] == f"Field(default={FLY_TOP_K}, ge=1)"
    assert "self.fly_window_size = min(6, self.num_speculative_tokens - 1)" in ast.unparse(code(config))
    assert ours.fly_window == 6
