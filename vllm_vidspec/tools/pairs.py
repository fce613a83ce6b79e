"""How to run the bundled target/draft pairs: engine and server arguments, prompts; imports no vLLM."""

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_vidspec import assets
from vllm_vidspec.config import CALIBRATED_KEYS, METHOD, SELF
from vllm_vidspec.errors import VidSpecError

DEFAULT_QUESTION = "describe the video"
FRAME_RATE = 2.0  # of the shape-world videos; Qwen2.5-VL's temporal positions and Qwen3-VL's times depend on it
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 8
KV_CACHE_BYTES = 512 * 2**20
# Drafting is fixed: what a table says of a setting is of that setting, not of what the policy makes of it.
DEFAULT_SPEC: dict[str, Any] = {
    "num_speculative_tokens": 5,
    "prune_ratio": 0.9,
    "pruner": "specvlm",
    "adaptive_tokens": False,
}
# What a shape has instead: as many nodes as SpecVLM's tree, as many as SAGE may take.
TREE_SPEC: dict[str, dict[str, Any]] = {
    "tree-static": {"num_speculative_tokens": 25},
    "tree-adaptive": {"num_speculative_tokens": 64},
}


def num_speculative_tokens(drafting: str) -> int:
    """Return K of a shape where none is given."""
    return (DEFAULT_SPEC | TREE_SPEC.get(drafting, {}))["num_speculative_tokens"]


@dataclass(frozen=True)
class Pair:
    """What differs between the families when one runs a bundled checkpoint."""

    num_frames: int  # what a video is sampled to, as vLLM's loader samples
    visual: dict[str, str]  # modality -> what a prompt holds in the item's place
    chat: str  # one user turn, as the checkpoint's chat template renders it
    with_metadata: bool  # whether the family's processor wants the video's frame rate
    bound: str  # by which of vLLM's `media_io_kwargs` its loader takes fewer frames of a video
    every: int = 1  # which frames of a video it is shown


_QWEN = Pair(
    num_frames=32,
    visual={
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
    },
    chat="<|im_start|>user\n{visual}{question}<|im_end|>\n<|im_start|>assistant\n",
    with_metadata=True,
    bound="max_frames",
)
PAIRS: dict[str, Pair] = {
    "qwen2.5-vl": _QWEN,
    "llava-onevision": Pair(
        num_frames=16,
        visual={"video": "<video>\n", "image": "<image>\n"},
        chat="<|im_start|>user {visual}{question}<|im_end|><|im_start|>assistant\n",
        with_metadata=False,
        bound="num_frames",
    ),
    "qwen3-vl": _QWEN,
}
FAMILIES = tuple(PAIRS)  # those that are always there
PAIRS[assets.PLAIN] = _QWEN
# No patch of LLaVA-OneVision's covers two frames: at one frame a second a video has as many tokens as Qwen2.5-VL's.
for _name, _every in zip(assets.LONG_PAIRS, (1, 2), strict=True):
    PAIRS[_name] = replace(PAIRS[_name.removesuffix("-long")], num_frames=2048, every=_every)


def pair_for(family: str) -> Pair:
    """Return the pair of a family."""
    if family not in PAIRS:
        raise VidSpecError(f"unknown family {family!r}; bundled: {', '.join(FAMILIES)}")
    if family in assets.CLONE_ONLY and not assets.checkpoint(family, "target").is_dir():
        raise VidSpecError(f"{family} is in a clone of the repository alone, not in what pip installs")
    return PAIRS[family]


def checkpoint(family: str, role: str) -> str:
    """Return the directory of a bundled checkpoint (`role`: "target", "draft" or "far")."""
    pair_for(family)
    try:
        return str(assets.checkpoint(family, role))
    except ValueError as error:
        raise VidSpecError(str(error)) from None


def check_checkpoint(option: str, name: str) -> None:
    """Refuse what is neither a checkpoint's folder nor a name whose configuration an engine finds."""
    if Path(name, "config.json").is_file():
        return
    if name.count("/") == 1 and not name.startswith(("/", ".", "~")) and not Path(name).exists():
        if engine_env()["HF_HUB_OFFLINE"] != "1":
            return
        from huggingface_hub import try_to_load_from_cache

        with contextlib.suppress(ValueError):  # no name that a repository can have
            if isinstance(try_to_load_from_cache(name, "config.json"), str):
                return
    raise VidSpecError(f"{option}: no such checkpoint: {name}")


def check_draft(family: str, draft: str) -> None:
    """Refuse a draft that is none of `speculative_config`'s."""
    if draft in ("draft", assets.FAR):
        checkpoint(family, draft)
    elif draft != "target":
        try:
            check_checkpoint("--draft", draft)
        except VidSpecError:
            raise VidSpecError(f"--draft: {draft!r} is neither a role of the bundled pair nor a checkpoint") from None


def calibration(family: str) -> Path:
    """Return what `vidspec calibrate` found for a bundled pair, for its target's use; the plain pair has none."""
    return Path(checkpoint(family, "target")).with_name("calibration.json")


def calibrated(family: str) -> dict[str, Any]:
    """Return the knobs that a bundled pair is calibrated to, none where it is not."""
    path = calibration(family)
    return json.loads(path.read_text())["config"] if path.is_file() else {}


def sample_video() -> Path:
    """Return the bundled mp4 file, a held-out video at FRAME_RATE; one file for all families."""
    return assets.SAMPLE_VIDEO


def speculative_config(family: str, draft: str, *, drafting: str = "chain", **spec: Any) -> dict[str, Any]:
    """Return the `speculative_config` of one configuration; `spec` is any knob of VidSpecConfig beside DEFAULT_SPEC.

    `draft` is "draft" (the bundled one of the family), "far" (one that is wrong more often), "target" (the target
    drafts for itself) or a path; `drafting` is VidSpecConfig's `draft_shape`.
    """
    model = SELF if draft == "target" else checkpoint(family, draft) if draft in ("draft", assets.FAR) else draft
    shape = {"draft_shape": drafting, **TREE_SPEC.get(drafting, {})}
    return {"method": METHOD, "model": model, **DEFAULT_SPEC, **shape, **spec}


def llm_kwargs(
    family: str,
    draft: str | None = None,
    *,
    target: str | None = None,
    overrides: dict[str, Any] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """Return the arguments of an in-process `vllm.LLM` on a bundled pair, or on another `target` in its place.

    They are fp32, eager, with a fixed KV cache, so that two engines on one machine behave alike. `draft` is None for
    vanilla, otherwise as in `speculative_config`, as `spec` is; `overrides` are `LLM` arguments that replace ours.
    """
    pair_for(family)
    kwargs: dict[str, Any] = {
        "model": target or checkpoint(family, "target"),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "limit_mm_per_prompt": {"video": 2, "image": 2},
        "disable_log_stats": False,
        "seed": 0,
    }
    if draft is not None:
        # Who gives one of what is calibrated wants none of the others.
        if target is None and calibration(family).is_file() and not spec.keys() & CALIBRATED_KEYS:
            spec.setdefault("calibration", str(calibration(family)))
        kwargs["speculative_config"] = speculative_config(family, draft, **spec)
    return kwargs | (overrides or {})


def serve_args(
    family: str,
    draft: str | None = None,
    *,
    target: str | None = None,
    port: int = 8000,
    overrides: dict[str, Any] | None = None,
    **spec: Any,
) -> list[str]:
    """Return what follows `vllm serve` on a bundled pair; the same engine as `llm_kwargs`, four sequences at most.

    `overrides` are `LLM` arguments in their Python spelling, of which False or None leaves a flag out.
    """
    kwargs = llm_kwargs(family, draft, target=target, **spec)
    kwargs |= {"max_num_seqs": 4, "media_io_kwargs": {"video": video_sampling(family, pair_for(family).num_frames)}}
    kwargs |= overrides or {}
    del kwargs["disable_log_stats"]
    args = [kwargs.pop("model"), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "target"]
    for name, value in kwargs.items():
        if value is not None and value is not False:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            args += ["--" + name.replace("_", "-"), *([] if value is True else [text])]
    return args


def engine_env() -> dict[str, str]:
    """Return the environment of an engine process: this one's, offline, quiet and pinned to one OpenMP thread."""
    defaults = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return defaults | {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}


def video_sampling(family: str, num_frames: int) -> dict[str, int]:
    """Return what vLLM's `media_io_kwargs` say of a family's videos so that no more frames are read of one."""
    return {pair_for(family).bound: num_frames}


def chat_prompt(family: str, question: str, media: Sequence[str] = ()) -> str:
    """Return the text that the checkpoint's chat template makes of one user turn."""
    pair = pair_for(family)
    return pair.chat.format(visual="".join(pair.visual[modality] for modality in media), question=question)


def sample_frames(family: str, frames: np.ndarray, num_frames: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
    """Sample `[total_frames, height, width, 3]` uint8, RGB, at FRAME_RATE, as vLLM's loader does; return `num_frames`
    (by default the pair's, all if there are fewer) and the metadata.
    """
    pair = pair_for(family)
    frames = frames[:: pair.every]
    total = len(frames)
    indices = np.linspace(0, total - 1, min(total, num_frames or pair.num_frames), dtype=int)
    metadata = {
        "fps": FRAME_RATE,
        "total_num_frames": total,
        "duration": total / FRAME_RATE,
        "frames_indices": indices.tolist(),
        "video_backend": "opencv",
        "do_sample_frames": len(indices) == total,
    }
    return np.ascontiguousarray(frames[indices]), metadata


def video_prompt(family: str, frames: np.ndarray, question: str = DEFAULT_QUESTION) -> dict[str, Any]:
    """Return `media_prompt` of one video, `[num_frames, height, width, 3]` uint8, RGB."""
    return media_prompt(family, question, videos=[frames])


def media_prompt(
    family: str,
    question: str,
    *,
    videos: Sequence[np.ndarray] = (),
    images: Sequence[np.ndarray] = (),
    num_frames: int | None = None,
) -> dict[str, Any]:
    """Return one prompt of `LLM.generate`: videos `[num_frames, height, width, 3]` uint8, RGB, images, the question."""
    text = chat_prompt(family, question, ["video"] * len(videos) + ["image"] * len(images))
    data: dict[str, Any] = {}
    if videos:
        sampled = [sample_frames(family, frames, num_frames) for frames in videos]
        data["video"] = sampled if pair_for(family).with_metadata else [frames for frames, _ in sampled]
    if images:
        from PIL import Image

        data["image"] = [Image.fromarray(image) for image in images]
    return {"prompt": text, "multi_modal_data": data} if data else {"prompt": text}
