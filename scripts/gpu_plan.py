"""The plan of the GPU runner's measurements: sizes of kernels, engines, and what memory an engine takes.

Standard library only: the runner reads it without torch.
"""

from dataclasses import dataclass

from made_up import SHAPES

from vllm_vidspec.planning.shapes import FP8, ModelShape

FAMILY = "qwen2.5-vl"
BATCHES = (1, 4, 8)

# ---- kernels ---------------------------------------------------------------------------------------------------------

# Values for the axes of `benchmarks/kernel_cases`: the shapes of the engines below, over the video.
KERNELS: dict[str, tuple[str, ...]] = {
    "tree_attention": ("shape=40x8x128", "context=25000", "num_reqs=1,8", "nodes=25,64"),
    "candidates": ("num_reqs=1,8",),
    "guidance_scores": ("shape=28x4x128", "num_keys=25000"),
    "visual_relevance": ("store=bfloat16", "hidden=5120", "batch=1x6,1x26,8x26", "num_tokens=25000"),
    "draw": ("num_reqs=1,8",),
    "kv_compact": ("num_reqs=1,8",),
}
WITH_PEERS = ("tree_attention",)
# For a dry run: every kernel once.
TINY_KERNELS: dict[str, tuple[str, ...]] = {
    "tree_attention": ("shape=4x2x32", "context=200", "num_reqs=2", "nodes=8"),
    "guidance_scores": ("shape=8x2x64", "num_keys=128", "num_queries=16"),
    "visual_relevance": ("store=bfloat16", "hidden=128", "batch=1x6", "num_tokens=128"),
    "draw": ("temperature=0.8", "num_reqs=1", "vocab_size=2048"),
    "candidates": ("temperature=0.8", "num_reqs=1", "vocab_size=2048"),
    "kv_compact": ("path=scattered", "num_reqs=1"),
}

# ---- engines: the plan -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Models:
    """A target and a draft, keys of `made_up.SHAPES`; None is the bundled pair, for a dry run."""

    target: str | None
    draft: str | None
    fp8: bool


_DRAFT = "Qwen2.5-VL 7B"
MODELS = {
    "32b-bf16": Models("Qwen2.5-VL 32B", _DRAFT, False),
    "32b-fp8": Models("Qwen2.5-VL 32B", _DRAFT, True),
    "72b-fp8": Models("Qwen2.5-VL 72B", _DRAFT, True),
}
AUTO = ("32b-bf16", "32b-fp8")  # the first that fits is taken, unless one is named
DRY_RUN_MODELS = Models(None, None, True)


@dataclass(frozen=True)
class Engine:
    """An engine of the plan.

    Attributes:
        method: What drafts.
        graphs: Whether decode steps are CUDA graphs.
        num_drafts: K, 0 for vanilla.
        depth: The longest path of drafts.
        tau_of: The published method that it is (`vidspec_tools/bench/published.py`).
    """

    method: str
    graphs: bool
    num_drafts: int = 0
    depth: int = 0
    tau_of: str = ""

    @property
    def name(self) -> str:
        return f"{self.method}-{'graphs' if self.graphs else 'eager'}"

    @property
    def is_ours(self) -> bool:
        return self.method in ("chain", "tree-static", "parallel")


# The most informative ones first.
ENGINES = {
    engine.name: engine
    for engine in (
        Engine("vanilla", True),
        Engine("tree-static", True, 25, 5, "SpecVLM"),
        Engine("chain", True, 5, 5, "SD"),
        Engine("blind", True, 5, 5, "OnSD"),
        Engine("parallel", True, 5, 5, "ParallelVLM"),
        Engine("vanilla", False),
        Engine("chain", False, 5, 5, "SD"),
        Engine("tree-static", False, 25, 5, "SpecVLM"),
    )
}
_COST_RATIO = 3  # of the published pair: a target's step over its draft's


def published_of(engine: Engine) -> tuple[float | None, float | None]:
    """Return the published acceptance length and speedup; None for vanilla."""
    from vidspec_tools.bench.published import published

    found = published(FAMILY, _COST_RATIO, engine.tau_of)
    return found["published_m"], found["published_speedup"]  # type: ignore[return-value]


_TEXT_TOKENS = 64  # of a prompt, at most
MAX_STEPS = 400  # until all requests draft


@dataclass(frozen=True)
class Sizes:
    """The video of every request, and how long an engine is measured: `rounds` of `steps` decode steps after `skip` of
    them, all requests drafting."""

    num_frames: int = 128
    height: int = 392
    width: int = 784
    skip: int = 8
    rounds: int = 3
    steps: int = 16

    @property
    def video_tokens(self) -> int:
        """Visual tokens of the target: two frames are merged, and patches of 28 x 28 pixels."""
        return self.num_frames // 2 * (self.height // 28) * (self.width // 28)

    def max_model_len(self, engine: Engine) -> int:
        """Return a length that no request reaches while it is measured."""
        measured = (self.skip + self.rounds * self.steps + 2) * (engine.depth + 1)
        return self.video_tokens + _TEXT_TOKENS + MAX_STEPS + measured


TINY_SIZES, TINY_BATCHES = Sizes(4, 56, 56, skip=0, rounds=1, steps=2), (1,)

# ---- engines: memory -------------------------------------------------------------------------------------------------

KEPT = 0.1  # of the video, by the draft
_WORKSPACE_BYTES = 6 * 2**30  # activations of a prefill chunk, logits, vision encoders, graphs, the CUDA context
_USABLE = 0.97


@dataclass(frozen=True)
class Memory:
    """Bytes of an engine: weights, vLLM's KV cache, the draft's KV pool, the draft's vision embeddings."""

    weights: int
    cache: int
    pool: int
    embeddings: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.pool + self.embeddings + _WORKSPACE_BYTES


def weight_bytes(shape: ModelShape, fp8: bool) -> int:
    """Return the bytes of all weights; in fp8 those of the language model's layers have one byte each."""
    return int(shape.quantised(FP8).weight_bytes + shape.vision_params if fp8 else shape.weight_bytes)


def memory_of(models: Models, engine: Engine, batch: int, sizes: Sizes) -> Memory:
    """Return the memory that an engine takes; a blind draft's KV is in vLLM's cache."""
    if models.target is None or models.draft is None:
        return Memory(0, 128 * 2**20, 32 * 2**20, 2 * 2**20 if engine.is_ours else 0)
    target, draft = SHAPES[models.target], SHAPES[models.draft]
    weights = weight_bytes(target, models.fp8) + (weight_bytes(draft, models.fp8) if engine.num_drafts else 0)
    length = sizes.max_model_len(engine) + 256  # whole blocks, one step ahead
    cache = target.kv_bytes_per_token + (draft.kv_bytes_per_token if engine.method == "blind" else 0)
    if not engine.is_ours:
        return Memory(weights, batch * length * cache, 0, 0)
    kept = length - round((1 - KEPT) * sizes.video_tokens)
    embeddings = 3 * draft.hidden * sizes.video_tokens
    return Memory(weights, batch * length * cache, batch * kept * draft.kv_bytes_per_token, embeddings)


def does_not_fit(models: Models, engine: Engine, batch: int, sizes: Sizes, total: int) -> str:
    """Return why so many requests do not fit into `total` bytes, "" if they do."""
    need = memory_of(models, engine, batch, sizes).total
    if need <= _USABLE * total:
        return ""
    return f"needs {need / 2**30:.0f} GiB, the device has {total / 2**30:.0f} GiB"


def chosen_models(name: str, sizes: Sizes, total: int) -> str:
    """Return a key of MODELS: the one named, or the first of AUTO that leaves room for four requests of any engine."""
    if name != "auto":
        return name
    fits = lambda key: not any(does_not_fit(MODELS[key], e, 4, sizes, total) for e in ENGINES.values())  # noqa: E731
    return next(filter(fits, AUTO), AUTO[-1])
