"""The configurations that run on the null GPU; imports no vLLM."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig

from benchmarks import made_up
from null_gpu import situations
from null_gpu.plants import allocate_while_capturing, plant_each
from null_gpu.situations import kernels_of_a_step, kernels_of_drafts, sums_of_guidance
from tests.engine import family_models
from vllm_vidspec import families
from vllm_vidspec.tools import pairs
from vllm_vidspec.visual_map import Shape, VisualMap

QWEN, LLAVA, QWEN3 = pairs.FAMILIES
NUM_FRAMES, FRAME_SIZE = 8, 112
MAPPED = "mapped"  # of `draft_vision`: by a map that is written for the case
# The host reads how deep the next trees are, as planned a step ago; this step's target forward is launched by then.
PLANNED_DEPTHS = "adaptive.py read"
# Counters on their way to /metrics; a block more for the draft, every sixteenth token.
TRANSFERS = ("counters.py flush", "kv.py reserve", "kv.py apply")
TWO_RANKS = {
    "tensor_parallel_size": 2,
    "disable_custom_all_reduce": True,  # it reads another process's device memory
    "worker_extension_cls": "null_gpu.probe.WorkerProbe",
}


def _compiled(*sizes: int, mode: int = 0, **how: Any) -> dict[str, Any]:
    """Return arguments of `LLM` for CUDA graphs of these numbers of tokens."""
    compilation = {"mode": mode, **how, "cudagraph_capture_sizes": [*sizes]}
    return {"enforce_eager": False, "compilation_config": compilation}


GRAPHS = _compiled(1, 2, 4, 8, 16, 32, 64)
GRAPHS_SIXTEEN = {"max_num_seqs": 16, **_compiled(1, 2, 4, 8, 16, 96)}
GRAPHS_65 = _compiled(1, 2, 65)  # room for one tree of 64 nodes and its root
GRAPHS_104 = _compiled(1, 2, 4, 32, 104)  # room for one or four trees of 25 nodes: three requests are padded
# Of compilation and capture nothing is said: torch.compile, FULL_AND_PIECEWISE.
DEFAULTS: dict[str, Any] = {"enforce_eager": False}
# FlashAttention as GPUs get it that are neither Hopper nor sm_100: it splits no keys over several query rows.
GRAPHS_FA2 = GRAPHS | {"attention_config": {"flash_attn_version": 2}}
GRAPHS_FP8 = GRAPHS | {"kv_cache_dtype": "fp8"}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20},
}
PIECES = _compiled(1, 2, 4, 8, 16, 32, mode=3, cudagraph_mode="PIECEWISE")
# Without NVIDIA's own kernels for it FlashInfer's attention stays outside of graphs.
FLASHINFER = PIECES | {"attention_config": {"backend": "FLASHINFER"}, "kv_cache_dtype": "fp8"}


@dataclass(frozen=True)
class Case:
    """One engine and the requests that it runs."""

    name: str  # in tests and tables
    spec: dict[str, Any] | None = None  # knobs of VidSpecConfig, None for vanilla vLLM
    vanilla: str = "vanilla"  # the case of vanilla vLLM in the same mode, whose waits and copies are the bound
    family: str = QWEN
    is_whole: bool = False  # a pair of published size, with made-up weights and a user's defaults
    # A family, and of it a target and a draft as released, with two layers each and made-up weights.
    released: tuple[str, str, str] | None = None
    weights: str | None = None  # of such a pair: a key of `made_up.QUANTISED`, and few layers
    device_gb: int = 80
    overrides: dict[str, Any] = field(default_factory=dict)  # arguments of `LLM`
    batch: int = 1  # requests at a time
    num_videos: int = 1  # of each prompt
    sampling: dict[str, Any] = field(default_factory=dict)  # arguments of `SamplingParams`
    skip: int = 6  # steps after the first token that are not counted
    steps: int = 10  # that are counted
    timed_steps: int = 20  # afterwards
    allowed: tuple[str, ...] = ()  # `file.py function` of lines that may wait once a step, for a good reason
    transfers: tuple[str, ...] = TRANSFERS  # and of ours that may copy between host and device once a step
    most_launches: int = 0  # a step's budget: those counted, plus a few
    before: Callable[[], None] | None = None  # the engine starts
    decide: Callable[..., Any] | None = None  # in place of the policy's own, while the case runs
    after: Callable[[Any], dict[str, Any]] | None = None  # its requests are aborted: measures more of the session
    is_planted: bool = False  # it carries defects on purpose
    is_slow: bool = False  # only `make test-slow` runs it

    @property
    def num_ranks(self) -> int:
        return self.overrides.get("tensor_parallel_size", 1)

    @property
    def num_devices(self) -> int:
        return 2 if (self.spec or {}).get("parallel") else self.num_ranks

    @property
    def has_whole_graphs(self) -> bool:
        if self.is_whole or self.overrides == DEFAULTS:
            return True
        return "compilation_config" in self.overrides and "cudagraph_mode" not in self.overrides["compilation_config"]

    def shares_engine(self, other: "Case") -> bool:
        engines = [(case.spec, case.family, case.is_whole, case.released, case.overrides) for case in (self, other)]
        return engines[0] == engines[1] and other.before is None

    def llm_kwargs(self) -> dict[str, Any]:
        if self.is_whole:
            few = {"weights": self.weights, "share": 14} if self.weights else {}
            where = made_up.write_pair(self.family, Path(tempfile.mkdtemp(prefix="null-gpu-")), **few)
            if self.spec is None:
                return made_up.user_kwargs(where, None)
            spec = {"draft": where["draft"], "on_draft_error": "raise", **self.spec}
            if spec.get("draft_vision") == MAPPED:
                spec["draft_vision"] = _write_map(where["target"], where["draft"])
            return made_up.user_kwargs(where, pairs.speculative_config(self.family, **spec))
        released = self._write_released() if self.released else {}
        overrides = {"dtype": "bfloat16", "kv_cache_memory_bytes": 64 << 20, "disable_log_stats": True}
        overrides |= self.overrides | released.pop("overrides", {})
        if self.spec is None:
            return pairs.llm_kwargs(self.family, overrides=overrides)
        spec = {"calibration": None, "on_draft_error": "raise", "draft": "draft"} | self.spec | released
        if spec.get("draft_vision") == MAPPED:
            spec["draft_vision"] = _write_map(*(pairs.checkpoint(self.family, role) for role in ("target", "draft")))
        return pairs.llm_kwargs(self.family, spec.pop("draft"), overrides=overrides, **spec)

    def _write_released(self) -> dict[str, Any]:
        """Write the checkpoints of `released`; return what they change."""
        assert self.released is not None
        name, *models = self.released
        folder = Path(tempfile.mkdtemp(prefix="null-gpu-"))
        target, draft = (family_models.write_released(name, one, 2, folder / one.split("/")[1]) for one in models)
        family = family_models.FAMILIES[name]
        limits = dict.fromkeys(family.limits, 0) | {"video": 1}
        overrides = {"model": target, "load_format": "dummy", "limit_mm_per_prompt": limits}
        return {"draft": draft, "overrides": overrides | family.overrides}

    def prompts(self, seed: int = 0) -> list[dict]:
        """Return a prompt with videos of its own for each request; other seeds, other videos."""
        noise = np.random.default_rng(seed)
        shape = (self.num_videos, NUM_FRAMES, FRAME_SIZE, FRAME_SIZE, 3)
        videos = [noise.integers(0, 255, shape, dtype=np.uint8) for _ in range(self.batch)]
        if self.released:
            name, few = self.released[0], slice(NUM_FRAMES // 2)
            return [family_models.prompt(name, "what is it?", [clip[few] for clip in clips]) for clips in videos]
        return [pairs.media_prompt(self.family, pairs.DEFAULT_QUESTION, videos=list(clips)) for clips in videos]


def _write_map(target: str, draft: str) -> str:
    """Write a map with a hidden layer between the towers of two checkpoints; its weights mean nothing."""
    configs = [AutoConfig.from_pretrained(path) for path in (target, draft)]
    widths = [config.get_text_config().hidden_size for config in configs]
    levels = [families.adapter_for(config).num_media_levels(config) for config in configs]
    shape = Shape(*widths, *levels, widths[1])
    path = Path(tempfile.mkdtemp(prefix="null-gpu-"), "map.safetensors")
    VisualMap(shape).bfloat16().save(path, {"towers": [families.tower_of(target), families.tower_of(draft)]})
    return str(path)


_ONE_STEP = {"steps": 1, "timed_steps": 0}
# Small steps, so that eight clips are far more than the target encodes at a time.
_EIGHT_CLIPS = {
    "overrides": {
        "limit_mm_per_prompt": {"video": 8, "image": 0},
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": None,
        "gpu_memory_utilization": 0.02,
    },
    "num_videos": 8,
    "after": situations.peak_of_a_prompt,
    **_ONE_STEP,
}
# The policy's kernels take long in the interpreter, and every step is like the one before.
_FEW_STEPS, _FEWER_STEPS = {"skip": 3, "steps": 3}, {"skip": 2, "steps": 2}
# A variant of a case whose ten steps have a block added among them.
_VARIANT = {"skip": 3, "steps": 4}
# Logits without meaning accept trees of 64 nodes to the end: a context holds thirty such steps.
_LONG_STEPS = {"skip": 3, "steps": 3, "timed_steps": 10}
_BATCH, _THREE = {"batch": 4, **_VARIANT}, {"batch": 3, **_VARIANT}
_TOP_P, _WARM = {"sampling": {"temperature": 1.0, "top_p": 0.9}}, {"sampling": {"temperature": 1.0}}
_GRAPHS, _FA2, _SLOW = {"overrides": GRAPHS}, {"overrides": GRAPHS_FA2}, {"is_slow": True}
_BESIDE_THREE = "vanilla graphs batch"
_SIXTEEN = {"overrides": GRAPHS_SIXTEEN, "batch": 16, **_SLOW, **_VARIANT}
_OFFLOADS = {"overrides": GRAPHS | {"kv_transfer_config": OFFLOADING}, **_SLOW, **_VARIANT}
_PIECES = {"overrides": PIECES, **_SLOW, **_VARIANT}
_PLANNED = {"allowed": (PLANNED_DEPTHS,), "transfers": (*TRANSFERS, "adaptive.py send")}
_STATIC, _ADAPTIVE, _SELF = {"drafting": "tree-static"}, {"drafting": "tree-adaptive"}, {"draft": "target"}
# The drafter on a second device, in a process that nobody measures here.
_PARALLEL = {"parallel": {"device": "cuda:1"}, "pruner": "uniform"}
# A thread of its own waits for what a step has sampled, and for what it has taken of streams.
_COMMITS = ("commits.py _write_down", "commits.py _write_down")
# What was sampled on its way to the drafter, and, when that changes, how long windows may be on its way to the device.
# What the drafter says, the device reads itself: a copy of it would be a line of shared.py.
_STREAMS = ("commits.py _send", "remote_backend.py _cut")
_CONTROLLED = {"adaptive_tokens": True}
_AUTO = {"drafting": "auto", "num_speculative_tokens": 24, "adaptive_tokens": True}

_OMNI = "Qwen/Qwen2.5-Omni-7B", "Qwen/Qwen2.5-Omni-3B"
_OMNI3 = "Qwen/Qwen3-Omni-30B-A3B-Thinking", "Qwen/Qwen3-Omni-30B-A3B-Instruct"
_NEXT_VIDEO = "llava-hf/LLaVA-NeXT-Video-7B-DPO-hf", "llava-hf/LLaVA-NeXT-Video-7B-hf"
_INTERNVL = "OpenGVLab/InternVL3_5-8B-HF", "OpenGVLab/InternVL3_5-1B-HF"
_GLM = "zai-org/GLM-4.6V", "zai-org/GLM-4.6V-Flash"


def _whole(name: str, family: str, device_gb: int) -> tuple[Case, ...]:
    """Return the cases of a whole pair: an engine each, with its memory by owner."""
    shared: dict[str, Any] = {
        "family": family,
        "is_whole": True,
        "device_gb": device_gb,
        "is_slow": True,
        "after": situations.memory_by_owner,
        "skip": 12,  # until staging memory of each size is there: PyTorch pins a size of it at its first use
        "timed_steps": 10,
    }
    chain, static = {"drafting": "chain"}, {"drafting": "tree-static"}
    return (
        Case(f"vanilla {name}", None, f"vanilla {name}", **shared),
        Case(f"chain {name}", chain, f"vanilla {name}", most_launches=30, **shared),
        Case(f"static {name}", static, f"vanilla {name}", most_launches=36, **shared),
        Case(f"chain {name} mapped", chain | {"draft_vision": MAPPED}, f"vanilla {name}", most_launches=30, **shared),
    )


# Launches grow with the layers of target and draft: these budgets are those of the bundled pair, counted plus a little.
# Those with the same engine follow each other and share it.
_ALL = (
    # First, while no earlier engine has left anything in the process.
    Case("eight clips", {}, **_EIGHT_CLIPS),
    Case("eight clips mapped", {"draft_vision": MAPPED}, **_EIGHT_CLIPS, **_SLOW),
    Case("vanilla"),
    Case("vanilla batch", **_BATCH),
    Case("vanilla sampled", **_TOP_P, **_VARIANT),
    Case("chain", {}, most_launches=356, after=sums_of_guidance),
    Case("chain batch", {}, "vanilla batch", **_BATCH, most_launches=357),
    Case("chain sampled", {}, "vanilla sampled", **_TOP_P, **_VARIANT, most_launches=417),
    Case("planted", {}, steps=3, timed_steps=0, after=plant_each, is_planted=True),
    Case("static", _STATIC, **_VARIANT, most_launches=364),
    Case("adaptive", _ADAPTIVE, **_PLANNED, **_FEW_STEPS, **_SLOW, most_launches=255),
    Case("adaptive batch", _ADAPTIVE, "vanilla batch", batch=2, **_PLANNED, **_FEWER_STEPS, **_SLOW, most_launches=256),
    Case("adaptive sampled", _ADAPTIVE, **_WARM, **_PLANNED, **_FEWER_STEPS, **_SLOW, most_launches=254),
    Case("loose uv", {"scorer": "loose", "pruner": "uv"}, **_VARIANT, most_launches=361),
    Case("self", _SELF, **_SLOW, **_VARIANT, most_launches=429),
    Case("parallel", _PARALLEL, allowed=_COMMITS, transfers=(*TRANSFERS, *_STREAMS), most_launches=88),
    Case("vanilla graphs", **_GRAPHS),
    Case("vanilla graphs batch", **_GRAPHS, **_THREE),
    Case("vanilla graphs sampled", **_GRAPHS, **_WARM, **_VARIANT),
    Case("chain graphs", {}, "vanilla graphs", **_GRAPHS, most_launches=30, after=kernels_of_drafts),
    Case("chain graphs mapped", {"draft_vision": MAPPED}, "vanilla graphs", **_GRAPHS, **_VARIANT, most_launches=30),
    Case("chain graphs batch", {}, _BESIDE_THREE, **_GRAPHS, **_THREE, most_launches=30, after=kernels_of_a_step),
    Case("chain graphs sampled", {}, "vanilla graphs sampled", **_GRAPHS, **_WARM, **_VARIANT, most_launches=28),
    Case("chain graphs processed", {}, "vanilla graphs sampled", **_GRAPHS, **_TOP_P, **_VARIANT, most_launches=105),
    # Caches of e4m3: the target's, whose queries come in float8 as well; the draft's beside a plain one; FlashInfer's.
    Case("vanilla fp8 cache", overrides=GRAPHS_FP8, **_VARIANT),
    Case("static fp8 cache", _STATIC, "vanilla fp8 cache", overrides=GRAPHS_FP8, **_VARIANT, most_launches=50),
    Case("static fp8 draft cache", _STATIC | {"kv_cache_dtype": "fp8"}, "vanilla graphs", **_GRAPHS, **_VARIANT,
         most_launches=50),
    Case("chain FlashInfer", {}, overrides=FLASHINFER, before=situations.stand_in_for_flashinfer,
         after=sums_of_guidance, **_ONE_STEP),
    Case("chain fp8 as it loads", {"quantization": "fp8_per_tensor"},
         overrides=GRAPHS | {"quantization": "fp8_per_tensor"}, **_ONE_STEP),
    *(Case(f"chain {name} weights", {}, is_whole=True, weights=name, **_SLOW, **_ONE_STEP)
      for name in made_up.QUANTISED),
    Case("chain graphs FA2", {}, _BESIDE_THREE, **_FA2, **_THREE, most_launches=31, after=kernels_of_a_step),
    # A batch in which one request is paused has whole graphs, padded; one that is paused whole launches no draft.
    Case("one paused", _CONTROLLED, _BESIDE_THREE, **_GRAPHS, **_THREE, most_launches=34,
         decide=situations.pause_the_first),
    Case("all paused", _CONTROLLED, _BESIDE_THREE, **_GRAPHS, **_THREE, most_launches=24, decide=situations.pause_all,
         after=situations.decide_by_chance),
    Case("static graphs", _STATIC, "vanilla graphs", overrides=GRAPHS_104, most_launches=36, after=kernels_of_drafts),
    Case("static graphs batch", _STATIC, _BESIDE_THREE, overrides=GRAPHS_104, **_THREE, most_launches=39),
    Case("auto graphs", _AUTO, "vanilla graphs", overrides=GRAPHS_104, **_VARIANT, most_launches=36,
         decide=situations.pause_the_first, after=situations.decide_by_chance),
    Case("adaptive graphs", _ADAPTIVE, "vanilla graphs", overrides=GRAPHS_65, **_PLANNED, **_LONG_STEPS,
         most_launches=38, after=kernels_of_drafts),
    Case("self graphs", _SELF, "vanilla graphs", **_GRAPHS, **_SLOW, **_VARIANT, most_launches=30),
    Case("vanilla graphs sixteen", **_SIXTEEN),
    Case("chain graphs sixteen", {}, "vanilla graphs sixteen", **_SIXTEEN, most_launches=30),
    Case("vanilla offloads", **_OFFLOADS),
    Case("chain offloads", {}, "vanilla offloads", **_OFFLOADS, most_launches=30),
    Case("vanilla pieces", **_PIECES),
    Case("static pieces", _STATIC, "vanilla pieces", **_PIECES, most_launches=46),
    Case("vanilla defaults", overrides=DEFAULTS, **_VARIANT),
    Case("chain defaults", {}, "vanilla defaults", overrides=DEFAULTS, **_VARIANT, most_launches=30),
    Case("qwen2.5-omni two layers", {}, released=("qwen2.5-omni", *_OMNI), **_GRAPHS, **_SLOW, **_ONE_STEP),
    Case("internvl two layers", _STATIC, released=("internvl", *_INTERNVL), overrides=GRAPHS_104, **_SLOW, **_ONE_STEP),
    Case("glm-v two layers", {}, released=("glm-v", *_GLM), **_GRAPHS, **_SLOW, **_ONE_STEP),
    Case("qwen3-omni two layers", {}, released=("qwen3-omni", *_OMNI3), **_GRAPHS, **_SLOW, **_ONE_STEP),
    Case("llava-next-video two layers", {}, released=("llava-next-video", *_NEXT_VIDEO),
         overrides=GRAPHS | {"kv_cache_memory_bytes": 256 << 20}, **_SLOW, **_ONE_STEP),
    *_whole("7b", QWEN, 80),
    *_whole("qwen3 8b", QWEN3, 141),
    # The Qwen pair's three vision heads are not for two ranks.
    Case("vanilla two ranks", family=LLAVA, overrides=TWO_RANKS, **_VARIANT),
    Case("chain two ranks", {}, "vanilla two ranks", LLAVA, overrides=TWO_RANKS, **_VARIANT, most_launches=337),
    Case("sleep", {}, overrides={"enable_sleep_mode": True}, after=situations.sleep_and_wake, **_ONE_STEP),
    # The last of its process: the plant stays.
    Case("planted capture", {}, overrides=GRAPHS, before=allocate_while_capturing, is_planted=True),
)  # fmt: skip
CASES = {case.name: case for case in _ALL}
# What runs on each supported vLLM; everything else on the oldest, which all budgets were counted on.
ON_EVERY_VERSION = ("vanilla", "chain", "vanilla graphs batch", "chain graphs batch", "static graphs batch")
