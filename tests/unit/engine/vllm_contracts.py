"""What the engine room relies on of vLLM, in tables: every supported version has it. Imports are read from our sources.

A path is `module:Name.attribute`. Where a version differs, the table says so, and `engine/compat` meets it.
"""

GPU = "vllm.v1.worker.gpu"
LOGITS_ROWS = (
    "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos "
    "seq_lens_upper_bound_np"
)
ATTENTION_FORWARD = "self layer query key value kv_cache attn_metadata output"
_RUNNER, _WORKER = f"{GPU}.model_runner:GPUModelRunner", "vllm.v1.worker.gpu_worker:Worker"
_OPENAI = "vllm.entrypoints.openai"

# Functions and the parameters that we give or take, in this order; what `engine/compat` patches it checks itself.
FUNCTIONS = {
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": "self usage_context",
    "vllm.config.vllm:VllmConfig.get_quantization_config": "model_config load_config",
    "vllm.sampling_params:SamplingParams._validate_spec_decode": "self speculative_config",
    "vllm.v1.engine.output_processor:RequestState._new_completion_output": "self token_ids finish_reason stop_reason",
    f"{_OPENAI}.chat_completion.serving:OpenAIServingChat.create_chat_completion": "self request raw_request",
    f"{_OPENAI}.completion.serving:OpenAIServingCompletion.create_completion": "self request raw_request",
    f"{_OPENAI}.responses.serving:OpenAIServingResponses.create_responses": "self request raw_request",
    # The worker and the runner
    f"{_WORKER}._maybe_get_memory_pool_context": "self tag",
    # The scheduler
    "vllm.plugins.endpoint_plugins.interface:EndpointPlugin.attach_router": "self app",
    "vllm.plugins.endpoint_plugins.interface:EndpointPlugin.init_state": "self engine_client state args",
    "vllm.v1.core.sched.output:strip_covered_mm_data": "mm_features num_computed_tokens uses_mrope",
    # Attention
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward": ATTENTION_FORWARD,
    "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.forward": ATTENTION_FORWARD,
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward": ATTENTION_FORWARD,
    "vllm.v1.attention.ops.triton_unified_attention:unified_attention": "q max_seqlen_q",
    "vllm.vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func": "q max_seqlen_q return_softmax_lse fa_version",
    "vllm.model_executor.models.interfaces:EagleModelMixin._set_aux_hidden_state_layers": "self layers",
    "vllm.model_executor.models.utils:extract_layer_index": "layer_name",
    # Sampling and verification
    f"{GPU}.sample.sampler:Sampler.__init__": (
        "self vllm_config max_num_reqs vocab_size device req_states num_speculative_tokens use_fp64_gumbel"
    ),
    f"{GPU}.sample.sampler:Sampler.sample": f"{LOGITS_ROWS} return_logprobs",
    f"{GPU}.sample.sampler:Sampler.apply_sampling_params": LOGITS_ROWS,
    "vllm.config.model:ModelConfig.get_diff_sampling_param": "self",
    f"{GPU}.sample.sampler:Sampler._sample_random": (
        "self processed_logits expanded_idx_mapping pos top_k top_p use_fused_sampler"
    ),
    f"{GPU}.sample.sampler:Sampler.get_logprobs_dims": "self idx_mapping_np include_token_ids",
    f"{GPU}.sample.gumbel:gumbel_sample": (
        "logits expanded_idx_mapping temperature seed pos apply_temperature is_drafting use_fp64"
    ),
    f"{GPU}.sample.gumbel:murmur3_uniform32": "seed pos offset",
    f"{GPU}.sample.gumbel:murmur3_uniform64": "seed pos offset",
    f"{GPU}.spec_decode.rejection_sampler:RejectionSampler.__init__": "self sampler spec_config device",
    f"{GPU}.states:RequestState.__init__": (
        "self max_num_reqs max_model_len max_num_batched_tokens num_speculative_steps vocab_size device"
    ),
    f"{GPU}.states:RequestState.add_request": "self req_id prompt_len all_token_ids num_computed_tokens max_tokens",
    # The draft's own forward
    "vllm.model_executor.warmup.deep_gemm_warmup:deep_gemm_warmup": "model max_tokens",
    f"{GPU}.attn_utils:init_kv_cache": "forward_context kv_cache_config kv_cache_allocation_context",
    f"{GPU}.attn_utils:build_attn_metadata": (
        "attn_groups num_reqs num_tokens query_start_loc_gpu query_start_loc_cpu max_query_len seq_lens "
        "max_seq_len block_tables slot_mappings kv_cache_config seq_lens_cpu_upper_bound is_prefilling"
    ),
    "vllm_vidspec.engine.compat.moved:get_kv_cache_groups": "vllm_config kv_cache_spec",
    "vllm_vidspec.engine.compat.moved:get_kv_cache_config_from_groups": "vllm_config kv_cache_groups available_memory",
    f"{GPU}.attn_utils:build_slot_mappings_by_layer": "slot_mappings kv_cache_config",
    f"{GPU}.attn_utils:init_attn_backend": "kv_cache_config vllm_config device",
    f"{GPU}.attn_utils:get_kv_cache_spec": "vllm_config",
    "vllm.v1.attention.backends.utils:resolve_kv_cache_layout": "vllm_config",
    "vllm.v1.attention.backends.utils:get_supported_kv_cache_layouts": "backends",
    "vllm.forward_context:set_forward_context": (
        "attn_metadata vllm_config num_tokens cudagraph_runtime_mode batch_descriptor slot_mapping"
    ),
    "vllm.multimodal.utils:group_and_batch_mm_kwargs": "mm_kwargs device pin_memory",
    "vllm.multimodal.encoder_budget:MultiModalBudget.__init__": "self vllm_config mm_registry enable_cache",
    "vllm.multimodal.encoder_budget:MultiModalBudget.get_dummy_encoder_profile_inputs": "self",
    "vllm.config.multimodal:MultiModalConfig.get_limit_per_prompt": "self modality",
    "vllm.utils.torch_utils:async_tensor_h2d": "data device",
    "vllm.v1.worker.gpu_worker:init_worker_distributed_environment": (
        "vllm_config rank distributed_init_method local_rank backend"
    ),
    "vllm.v1.worker.workspace:init_workspace_manager": "device",
    f"{GPU}.cudagraph_utils:CudaGraphManager.__init__": "self vllm_config device cudagraph_mode decode_query_len",
    f"{GPU}.cudagraph_utils:CudaGraphManager.capture": "self create_forward_fn progress_bar_desc",
    f"{GPU}.cudagraph_utils:CudaGraphManager.run_fullgraph": "self desc",
}

# Functions that a version has not got, and what meets that: path -> the versions that have it.
SOMETIMES = {
    # `compat/config.py`: a draft's context would shorten the target's
    "vllm.config.vllm:VllmConfig._limit_max_model_len_to_draft": ("0.33",),
    # `report/request_metrics.py`: PublishingOutput has it always
    "vllm.v1.outputs:AsyncModelRunnerOutput.get_kv_connector_output": ("0.33",),
    # `compat/backends.py`: up to how many rows keys are split, where that is more than one
    "vllm.v1.attention.ops.triton_unified_attention:MAX_3D_QUERY_LEN": ("0.33",),
    # `compat/cpu.py`, which only the CPU engine imports
    f"{GPU}.structured_outputs:_build_grammar_mapping": ("0.32",),
}

# Classes and what we read or set on their instances.
MEMBERS = {
    _RUNNER: (
        "vllm_config device model speculative_config speculator rejection_sampler max_num_reqs max_num_tokens "
        "max_model_len num_speculative_steps vocab_size dtype model_memory_usage use_aux_hidden_state_outputs "
        "encoder_cache req_states model_state execute_model_state block_tables kv_cache_config input_buffers sampler"
    ),
    _WORKER: "use_v2_model_runner vllm_config device model_runner",
    f"{GPU}.model_runner:ExecuteModelState": "hidden_states aux_hidden_states num_spec_tokens_to_schedule",
    f"{GPU}.input_batch:InputBatch": (
        "req_ids num_reqs num_tokens idx_mapping idx_mapping_np is_prefilling_np num_computed_tokens_np "
        "num_scheduled_tokens query_start_loc_np cu_num_logits cu_num_logits_np num_draft_tokens_per_req "
        "seq_lens_cpu_upper_bound prefill_len_np logits_indices positions"
    ),
    f"{GPU}.states:RequestState": (
        "max_num_reqs max_model_len req_id_to_index index_to_req_id free_indices prompt_len total_len all_token_ids "
        "last_sampled_tokens max_seq_len remove_request apply_staged_writes"
    ),
    f"{GPU}.block_table:BlockTables": "input_block_tables block_tables",
    f"{GPU}.sample.sampler:Sampler": (
        "use_flashinfer use_fp64_gumbel sampling_states req_states logits_processors needs_logits_processing "
        "thinking_budget_state return_sampling_mask logprobs_mode add_request apply_staged_writes"
    ),
    f"{GPU}.sample.states:SamplingStates": "temperature seeds min_p top_k top_p",
    f"{GPU}.sample.penalties:PenaltiesState": (
        "use_penalty repetition_penalty frequency_penalty presence_penalty prompt_bin_mask output_bin_counts"
    ),
    f"{GPU}.sample.logits_processor.interface:LogitsContext": (
        "expanded_idx_mapping idx_mapping_np expanded_local_pos input_ids"
    ),
    f"{GPU}.attn_utils:AttentionCGSupportInfo": "min_cg_support min_cg_attn_backend",
    f"{GPU}.sample.bad_words:BadWordsState": "num_bad_words",
    f"{GPU}.sample.logit_bias:LogitBiasState": "use_logit_bias",
    f"{GPU}.spec_decode.rejection_sampler:RejectionSampler": "sampler num_speculative_steps",
    f"{GPU}.spec_decode.speculator:BaseSpeculator": "num_extra_query_per_req",
    f"{GPU}.cudagraph_utils:CudaGraphManager": "compilation_config graphs _capture_descs",
    f"{GPU}.cudagraph_utils:BatchExecutionDescriptor": "cg_mode num_tokens num_reqs",
    f"{GPU}.mm.encoder_cache:EncoderCache": "encoder_outputs reset_encoder_cache",
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "scheduled_new_reqs finished_req_ids total_num_scheduled_tokens num_spec_tokens_to_schedule "
        "num_scheduled_tokens scheduled_spec_decode_tokens"
    ),
    "vllm.v1.core.sched.output:NewRequestData": (
        "req_id prompt_embeds prefill_token_ids mm_features sampling_params lora_request"
    ),
    "vllm.v1.outputs:DraftTokenIds": "req_ids draft_token_ids",
    "vllm.v1.metrics.stats:RequestSpecDecodeMetrics": "to_dict",
    "vllm.multimodal.inputs:MultiModalFeatureSpec": "data modality identifier mm_position mm_hash",
    "vllm.config.multimodal:MultiModalConfig": (
        "skip_mm_profiling mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path video_pruning_rate"
    ),
    "vllm.config.speculative:SpeculativeConfig": (
        "draft_model_config draft_parallel_config num_speculative_tokens num_speculative_tokens_per_batch_size method"
    ),
    "vllm.config.parallel:ParallelConfig": (
        "rank tensor_parallel_size pipeline_parallel_size data_parallel_size data_parallel_rank data_parallel_index "
        "world_size assigned_physical_gpu_ids disable_custom_all_reduce enable_batch_sharded_sampling use_ubatching "
        "is_moe_model"
    ),
    "vllm.config.cache:CacheConfig": (
        "cache_dtype block_size user_specified_block_size num_gpu_blocks_override kv_cache_memory_bytes "
        "gpu_memory_utilization kv_cache_dtype_skip_layers"
    ),
    "vllm.config.compilation:CompilationConfig": (
        "static_forward_context static_all_moe_layers cudagraph_mode cudagraph_capture_sizes "
        "max_cudagraph_capture_size ir_enable_torch_wrap"
    ),
    "vllm.config.vllm:VllmConfig": (
        "additional_config instance_id watermark_config kv_transfer_config offload_config attention_config "
        "kernel_config use_v2_model_runner"
    ),
    "vllm.v1.attention.selector:AttentionSelectorConfig": "head_size dtype kv_cache_dtype block_size use_kv_connector",
    "vllm.v1.attention.backend:AttentionBackend": "forward_includes_kv_cache_update get_name get_builder_cls",
    "vllm.v1.attention.backend:AttentionMetadataBuilder": "supports_draft_decode_metadata_update",
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl": "vllm_flash_attn_version logits_soft_cap sinks",
    "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl": "logits_soft_cap sinks",
    "vllm.config.compilation:PassConfig": "fuse_attn_quant",
    "vllm.v1.worker.utils:AttentionGroup": "metadata_builders",
    "vllm.v1.kv_cache_interface:FullAttentionSpec": "page_size_bytes block_size",
}

# What vLLM's runner, its graphs and its warm-up read of a speculator: ours have it, or it is read of vLLM's own alone
# (after `isinstance`), or where a feature is on that we refuse (watermarking) or never turn on (adaptive verification).
READERS = (f"{GPU}.model_runner", f"{GPU}.cudagraph_utils", f"{GPU}.warmup", "vllm.v1.worker.gpu_worker")
READ_OF_OURS = "model propose capture init_cudagraph_manager supports_mm_inputs draft_logits num_extra_query_per_req"
READ_OF_THEIRS = (
    "num_query_per_req load_model set_attn observe_verification draft_attn_layer_names dcp_size pcp_manager "
    "prepare_watermarking draft_token_confidence_probs"
)

# Calls that a function of vLLM makes in this order, whatever else it calls, up to the last of them.
ORDER = {
    # A request is known before its step is planned; then the target's metadata, then its positions.
    f"{_RUNNER}.execute_model": (
        "finish_requests free_states add_requests prepare_inputs prepare_attn prepare_attn prepare_inputs"
    ),
    # The verifier, then what the step has committed, then the draft.
    f"{_RUNNER}.sample_tokens": "sample postprocess_sampled propose set_draft_tokens",
    # What we replace is made by the time that `load_model` returns.
    f"{_RUNNER}.load_model": "load_model load_model Sampler RejectionSampler",
    # The memory profile ends with the logits of the requests' last rows.
    f"{_RUNNER}.profile_run": "_dummy_run _dummy_sampler_run",
}

# Arguments by name of a call in a function of vLLM: what the target's noise depends on, what a draft is asked with.
KEYWORDS = {
    # No cache of logits, with which the seed would be another one (from 0.33 on).
    (f"{GPU}.sample.sampler:Sampler._sample_random", "gumbel_sample"): "apply_temperature is_drafting use_fp64",
    (f"{_RUNNER}.sample_tokens", "propose"): "dp_sync_state mm_inputs num_speculative_tokens",
}

# Functions that ours repeat to the bit, and a digest of their code in 0.32 and 0.33.
NOISE = (
    f"{GPU}.sample.penalties:_penalties_kernel",
    f"{GPU}.sample.gumbel:murmur3_hash32",
    f"{GPU}.sample.gumbel:murmur3_uniform32",
    f"{GPU}.sample.gumbel:murmur3_uniform64",
    f"{GPU}.sample.gumbel:_uniform64_from_random53",
    f"{GPU}.sample.gumbel:_log1p_neg_stable",
    f"{GPU}.sample.gumbel:gumbel_noised_argmax",
)
NOISE_DIGEST = "1272da36094914a6"

# Our classes, of which each method takes what vLLM's own takes.
OURS = (
    "runner:VidSpecModelRunner",
    "worker:VidSpecGPUWorker",
    "speculator:Speculator",
    "verify.verifier:CoupledVerifier",
    "draft.graphs:DraftGraphs",
    "report.request_metrics:PublishingOutput",
)
