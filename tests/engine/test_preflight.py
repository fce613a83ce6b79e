"""What is refused before any weight loads, and how our method becomes vLLM's own terms."""

import importlib.metadata
import json
import shutil

import pytest

from vllm_vidspec.bench import pairs
from vllm_vidspec.engine import preflight
from vllm_vidspec.errors import VidSpecError

FAMILY = "qwen2.5-vl"


def engine_args(target_family: str = FAMILY, spec: dict | None = None, **overrides):
    """Return vLLM's EngineArgs of a bundled pair; nothing is loaded."""
    from vllm.engine.arg_utils import EngineArgs

    spec = {
        "method": "vidspec",
        "model": pairs.checkpoint(FAMILY, "draft"),
        "num_speculative_tokens": 4,
        **(spec or {}),
    }
    return EngineArgs(model=pairs.checkpoint(target_family, "target"), speculative_config=spec, **overrides)


def refusal(*args, **kwargs) -> str:
    """Return the message that the arguments are refused with; always one line."""
    with pytest.raises(VidSpecError) as caught:
        preflight.translate(engine_args(*args, **kwargs))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_translation_and_its_idempotence():
    """Catches: a second `create_engine_config` on the same arguments that loses or repeats the translation."""
    args = engine_args(spec={"prune_ratio": 0.5})
    config = preflight.translate(args)
    first = dict(args.speculative_config)
    assert first == {
        "method": "draft_model",
        "model": pairs.checkpoint(FAMILY, "draft"),
        "num_speculative_tokens": 4,
    }
    assert preflight.translate(args) == config
    assert args.speculative_config == first
    assert args.worker_cls.startswith("vllm_vidspec.engine.worker.VidSpec")


def test_flags_work_like_the_dict():
    """`--spec-method vidspec --spec-model self --spec-tokens 3`."""
    args = engine_args()
    args.speculative_config = None
    args.spec_method, args.spec_model, args.spec_tokens = "vidspec", "self", 3
    config = preflight.translate(args)
    assert (config.model, config.num_speculative_tokens) == ("self", 3)
    assert args.speculative_config["model"] == args.model
    assert args.spec_method is None


def test_other_methods_are_left_alone():
    args = engine_args()
    args.speculative_config = {"method": "ngram", "num_speculative_tokens": 2}
    assert preflight.translate(args) is None
    assert args.speculative_config == {"method": "ngram", "num_speculative_tokens": 2}
    assert args.worker_cls == "auto"


def test_wrong_vllm_version(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.31.2")
    assert refusal() == "vllm_vidspec supports vLLM 0.32.*, this is 0.31.2: install 'vllm==0.32.*'"


def test_parallelism_that_the_draft_cannot_follow():
    assert "pipeline parallelism (2) is not supported" in refusal(pipeline_parallel_size=2)
    assert "decode context parallelism is not supported" in refusal(
        tensor_parallel_size=2, decode_context_parallel_size=2
    )
    assert "--worker-cls my.Worker" in refusal(worker_cls="my.Worker")
    assert "vision tower has 2 heads, which 4 tensor-parallel ranks cannot share" in refusal(tensor_parallel_size=4)


def test_draft_of_another_family():
    message = refusal(spec={"model": pairs.checkpoint("llava-onevision", "draft")})
    assert "qwen2.5-vl" in message and "llava-onevision" in message


def test_draft_of_another_geometry(tmp_path):
    """A Qwen2.5-VL whose patches or vocabulary differ is named with both values."""
    draft = tmp_path / "draft"
    draft.mkdir()
    config = json.loads((pairs.Path(pairs.checkpoint(FAMILY, "draft")) / "config.json").read_text())
    config["vision_config"]["patch_size"] = 16
    config["text_config"]["vocab_size"] += 1
    (draft / "config.json").write_text(json.dumps(config))
    message = refusal(spec={"model": str(draft)})
    assert "14" in message and "16" in message and "vocab" in message


def test_draft_that_is_not_there(tmp_path):
    assert refusal(spec={"model": str(tmp_path / "none")}).startswith("the draft model's path does not exist")
    shutil.copy(pairs.Path(pairs.checkpoint(FAMILY, "draft")) / "tokenizer.json", tmp_path)
    assert refusal(spec={"model": str(tmp_path)}).startswith("cannot read the draft model")


def test_lora_and_self_draft_do_not_go_together():
    args = engine_args(spec={"model": "self"}, enable_lora=True, dtype="float32")
    with pytest.raises(VidSpecError, match="LoRA adapters cannot be used"):
        args.create_engine_config()


def test_target_video_pruning_is_refused():
    with pytest.raises(VidSpecError, match="--video-pruning-rate prunes the target's own video"):
        engine_args(video_pruning_rate=0.5, dtype="float32").create_engine_config()


def test_auto_becomes_vllms_own_schedule():
    """Catches: a scheduler that plans another number of drafts than the shape has; two owners of one schedule."""
    table = [[1, 2, "tree-static", 25], [3, 16, "chain", 4]]
    spec = {"draft": "auto", "draft_table": table, "num_speculative_tokens": 25}
    args = engine_args(spec=spec)
    preflight.translate(args)
    assert args.speculative_config["num_speculative_tokens_per_batch_size"] == [(1, 2, 25), (3, 16, 4)]
    assert "drop one" in refusal(spec=spec | {"num_speculative_tokens_per_batch_size": [(1, 4, 3)]})
    assert "data parallelism cannot" in refusal(spec=spec, data_parallel_size=2)


@pytest.mark.parametrize(
    ("shape", "given", "expected"),
    [
        ("chain", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE"),
        ("tree-static", "FULL_AND_PIECEWISE", "PIECEWISE"),
        ("tree-static", "FULL", "NONE"),
        ("tree-static", "NONE", "NONE"),
    ],
)
def test_trees_keep_attention_out_of_captured_graphs(shape, given, expected):
    """Catches: a captured forward that replays the masks of its capture."""
    from types import SimpleNamespace

    from vllm.config import CUDAGraphMode

    config = preflight.translate(engine_args(spec={"draft": shape, "num_speculative_tokens": 25}))
    compilation = SimpleNamespace(cudagraph_mode=CUDAGraphMode[given])
    preflight.keep_attention_out_of_graphs(SimpleNamespace(compilation_config=compilation), config)
    assert compilation.cudagraph_mode.name == expected
