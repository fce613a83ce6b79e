"""The plan of the GPU runner's measurements: sizes of kernels, engines and their models.

Standard library only: the runner reads it without torch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vidspec_tools.bench.methods import Figure

FAMILY = "qwen2.5-vl"
BATCHES = (1, 2, 4, 8)

# Of `benchmarks/kernel_cases`; last the one whose peers compile longest.
KERNELS = ("draw", "candidates", "guidance_scores", "visual_relevance", "tree_attention")


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
DRY_RUN_MODELS = Models(None, None, True)
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
    method: str  # What drafts
    num_drafts: int = 0  # K, 0 for vanilla
    depth: int = 0  # The longest path of drafts
    tau_of: str = ""  # The published method that it is (`vidspec_tools/bench/methods.py`)

    @property
    def is_ours(self) -> bool:
        return self.method in ("chain", "tree-static", "parallel")


# The most informative ones first.
ENGINES = {
    engine.method: engine
    for engine in (
        Engine("vanilla"),
        Engine("tree-static", 25, 5, "SpecVLM"),
        Engine("chain", 5, 5, "SD"),
        Engine("controller", 5, 5),
        Engine("blind", 5, 5, "OnSD"),
        Engine("parallel", 5, 5, "ParallelVLM"),
    )
}


def published_of(engine: Engine) -> "Figure | None":
    """Return what is published of an engine's method; None for vanilla and the controller."""
    from vidspec_tools.bench.methods import QWEN, TABLE_1

    return TABLE_1[QWEN].get(engine.tau_of)


def step_tokens(engine: Engine, step_ms: float, draft_ms: float | None) -> tuple[float | None, str]:
    """Return the tokens that a step of one request emits, and what they are: counted, published or modelled.

    A length that is counted over rejections is of several steps: a stream that is right as often is followed with the
    step's and the draft forward's times (None of them: no tokens are told). M is taken not to have the target's own
    token, the reading with which it is more.
    """
    from vidspec_tools.bench.methods import STEP
    from vidspec_tools.planning.acceptance import Agreement, rate_of_stream
    from vidspec_tools.planning.speed import run_streams

    found = published_of(engine)
    if found is None:
        return 1.0, "counted"
    if found.over == STEP:
        return found.acceptance_length, "published"
    if not draft_ms:
        return None, "modelled"
    agreement = Agreement((rate_of_stream(found.tau, counts_own_token=False),))
    run = run_streams(agreement, engine.num_drafts, step_ms, draft_ms, answer=20_000)
    return round(run.tokens_per_step, 2), "modelled"


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
    turns: int = 12  # in which an engine plays vanilla and the controller
    turn_tokens: int = 96  # of each answer then

    @property
    def video_tokens(self) -> int:
        """Visual tokens of the target: two frames are merged, and patches of 28 x 28 pixels."""
        return self.num_frames // 2 * (self.height // 28) * (self.width // 28)


MAX_TOKENS = 1500  # of an answer, more than is generated before and while it is measured
MAX_STEPS = 200  # until all requests draft
TINY_SIZES, TINY_BATCHES = Sizes(4, 56, 56, skip=0, rounds=1, steps=2, turns=2, turn_tokens=4), (1,)
