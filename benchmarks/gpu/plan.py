"""What the GPU runner runs: its steps and their time-outs, the engines that it measures, and their sizes.

Standard library only: the runner reads it without torch.
"""

from dataclasses import dataclass

from benchmarks.kernels import KERNELS

FAMILY = "qwen2.5-vl"
BATCHES = (1, 2, 4, 8)
DRAFT = "Qwen2.5-VL 7B"
# The target and the format of all weights, by what `--models` takes (`benchmarks/made_up.py`).
MODELS: dict[str, tuple[str, str | None]] = {
    "32b-bf16": ("Qwen2.5-VL 32B", None),
    "32b-fp8": ("Qwen2.5-VL 32B", "fp8"),
    "72b-fp8": ("Qwen2.5-VL 72B", "fp8"),
}
_BF16_FROM = 120 * 2**30  # bytes of a device that has room for four requests of ours beside weights in bf16


def batches_of(total: int) -> tuple[int, ...]:
    """Return how many requests run at a time on a device of `total` bytes: below 120 GiB eight have no room."""
    return BATCHES if total >= _BF16_FROM else BATCHES[:-1]


def chosen_models(name: str, total: int) -> str:
    """Return a key of MODELS: the one named, or what leaves room for several requests on a device of `total` bytes."""
    if name != "auto":
        return name
    return "32b-bf16" if total >= _BF16_FROM else "32b-fp8"


@dataclass(frozen=True)
class Engine:
    method: str  # what drafts
    num_drafts: int = 0  # K, 0 for vanilla
    tau_of: str = ""  # the published method that it is (`benchmarks/methods.py`)

    @property
    def is_ours(self) -> bool:
        return self.method in ("chain", "tree-static", "parallel")


# The most informative ones first.
ENGINES = {
    engine.method: engine
    for engine in (
        Engine("vanilla"),
        Engine("tree-static", 25, "SpecVLM"),
        Engine("chain", 5, "SD"),
        Engine("policy", 5),
        Engine("blind", 5, "OnSD"),  # vLLM's own draft model, which sees no video
        Engine("parallel", 5, "ParallelVLM"),
    )
}


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
    turns: int = 12  # in which an engine plays vanilla and the policy
    turn_tokens: int = 96  # of each answer then

    @property
    def video_tokens(self) -> int:
        """Visual tokens of the target: two frames are merged, and patches of 28 x 28 pixels."""
        return self.num_frames // 2 * (self.height // 28) * (self.width // 28)


MAX_TOKENS = 1500  # of an answer, more than is generated before and while it is measured
TINY_SIZES, TINY_BATCHES = Sizes(4, 56, 56, skip=0, rounds=1, steps=2, turns=2, turn_tokens=4), (1,)


@dataclass(frozen=True)
class Step:
    """One step: its name, its time-out, and `module:function` of this package, called with a Context and `argument`."""

    name: str
    timeout_s: float
    call: str
    argument: str | None = None


# A kernel takes some 8 s for imports and 5 s a size to compile; FlexAttention takes 20 s.
_KERNEL_S = {"tree_attention": 140, "visual_relevance": 30, "candidates": 35}
_ENVIRONMENT = Step("environment", 20, "steps:environment")
# By part, the most informative steps first. An H100's host starts an engine of bundled models in 20 to 40 s, one of
# real shapes in 40 to 100 s, with torch.compile in three minutes.
PLAN: dict[str, tuple[Step, ...]] = {
    "smoke": (
        _ENVIRONMENT,
        Step("kernels", 135, "checks:kernels"),
        Step("identity-qwen2.5-vl", 150, "checks:identity", "qwen2.5-vl"),
        Step("real-chain", 300, "checks:real_shapes", "chain"),
        Step("sync-debug", 100, "checks:sync_debug"),
        Step("self-draft-bf16", 75, "checks:self_draft_bf16"),
        Step("real-vanilla", 240, "checks:real_shapes", ""),
        Step("real-tree-static", 300, "checks:real_shapes", "tree-static"),
        Step("two-ranks", 90, "checks:two_ranks"),
        Step("identity-llava-onevision", 150, "checks:identity", "llava-onevision"),
    ),
    "kernels": (
        _ENVIRONMENT,
        *(Step(f"kernel-{name}", _KERNEL_S.get(name, 15), "measure:kernel_rows", name) for name in KERNELS),
    ),
    "engines": (_ENVIRONMENT, *(Step(f"engine-{name}", 200, "measure:engine_rows", name) for name in ENGINES)),
    "decode": (
        _ENVIRONMENT,
        Step("decode-rates", 25, "decode:rates"),
        Step("decode-engine-32b", 300, "decode:roles_in_turn", "32b"),
        Step("decode-attention", 130, "decode:attention"),
        Step("decode-products-7B", 60, "decode:products", "7B"),
        Step("decode-products-32B", 60, "decode:products", "32B"),
        Step("decode-engine-7b", 200, "decode:roles_in_turn", "7b"),
    ),
}
HALVES = {1: "kernels", 2: "engines"}
STEPS = {step.name: step for part in PLAN.values() for step in part}
SECONDS = {part: sum(step.timeout_s for step in steps) for part, steps in PLAN.items()}
