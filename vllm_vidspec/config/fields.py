"""Every field of the configuration, with its range, default and text, in one group a room; needs pydantic only."""

import functools
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from vllm_vidspec.config.schedule import Shape
from vllm_vidspec.config.static_tree import SPECVLM_PATHS, Path, parse_paths
from vllm_vidspec.errors import nearest, quoted
from vllm_vidspec.names import PRUNERS

_PRUNER_ALIASES = {"window": "window:middle"}
AUTO = "auto"  # the pruner that is chosen while serving

IMAGE_PRUNE_RATIO = 0.8  # an image's tokens are fewer and less alike than a video's (SAGE's default)
# Images in a row that count as a video, by `frames_as_video`: two or three are more often compared than watched.
MIN_RUN = {"auto": 4, "always": 2}

DIGITS = "0-9"
# Small words that turn a sentence into its opposite, and yet have nothing to do with the video (LVSpec, limitations).
PROTECTED_TOKENS = (
    *("no", "not", "n't", "'t", "never", "none", "nothing", "nobody", "neither", "nor", "cannot", "without"),
    *(f"{verb}n't" for verb in ("is", "are", "was", "were", "do", "does", "did", "ca", "wo", "has", "have", "had")),
    *("isn", "aren", "wasn", "weren", "don", "doesn", "didn", "hasn", "haven", "hadn"),
    DIGITS,
)

MAX_CORES = 4096  # of a machine

ScorerName = Literal["strict", "loose", "fly", "fly-entropy", "random"]
REQUEST_SCORER, REQUEST_LAMBDA, REQUEST_RECORD = "vidspec_scorer", "vidspec_lambda", "vidspec_record"  # of `vllm_xargs`


def _known(pruner: str) -> str:
    """Return a pruner's name as it is registered; ValueError for an unknown one."""
    name = _PRUNER_ALIASES.get(pruner, pruner)
    if name not in PRUNERS:
        known = (*PRUNERS, AUTO)
        raise ValueError(f"unknown pruner {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    return name


class Group(BaseModel):
    """The knobs of one room. Each also has a flat name, by which it is set outside its group."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)

    prefix: ClassVar[str] = ""  # of the flat names
    renamed: ClassVar[dict[str, str]] = {}  # flat names that are not prefix + name

    @classmethod
    def flat_names(cls) -> dict[str, str]:
        """Return every knob's flat name by its name in the group."""
        return {name: cls.renamed.get(name, cls.prefix + name) for name in cls.model_fields}


class PruneKnobs(Group):
    """What the draft sees of images and videos."""

    renamed: ClassVar[dict[str, str]] = {
        "ratio": "prune_ratio",
        "image_ratio": "image_prune_ratio",
        "seed": "prune_seed",
        "positions": "draft_positions",
    }

    ratio: float = Field(default=0.9, ge=0.0, le=1.0)
    """Share of the video tokens dropped for the draft (the target always sees all). 0 keeps everything; 1.0 is a
    text-only draft."""
    image_ratio: float | None = Field(default=None, ge=0.0, le=1.0)
    """The same for image tokens. Default: 0.8, or `prune_ratio` where that is lower or 1. Every image and every video
    of a prompt has a budget of its own: its tokens times 1 - ratio, rounded down, at least one token unless the ratio
    is 1. Images that are a video's frames (`frames_as_video`) are one video here."""
    frames_as_video: Literal["auto", "never", "always"] = "auto"
    """Whether images of one size in a row, with little text between them, are pruned as the frames of one video: with
    one budget, at `prune_ratio`, and compared with each other where the pruner compares frames. `auto`: 4 images and
    more; `always`: 2 images and more; `never`: each image is one of its own."""
    pruner: str = "specvlm"
    """Which tokens stay: `none`, `specvlm`, `attention`, `uv`, `uniform`, `random`, `window:front`, `window:middle`,
    `window:end`, `frame`, `fastvid`, `dycoke`. `specvlm` and `attention` follow the target's attention, `uv` its hidden
    states; the others look at neither. `uniform`, and what `specvlm` spreads, are even over rows, columns and frames;
    `uniform:stride` and `specvlm:stride` step through the tokens in order, as SpecVLM's code does. `none` keeps
    everything and ignores the ratios; `window` is short for `window:middle`.
    `auto` tries several on live requests and learns which serves best."""
    auto_pruners: tuple[str, ...] = ("specvlm", "attention", "uv", "uniform")
    """`auto`: the pruners to choose from. The target's attention or hidden states are observed for the requests whose
    pruner needs them."""
    auto_ratios: tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...] | None = None
    """`auto`: the prune ratios to choose from. Default: `prune_ratio` alone."""
    auto_file: str | None = None
    """`auto`: a file that keeps what was learned, read at the start and written as requests end and at shutdown. It is
    a calibration file too, which names the pruner and the ratio that were best. Default: nothing is kept."""
    lambda_r: float = Field(default=0.4, ge=0.0, le=1.0)
    """`specvlm`: share of the attention whose tokens are kept outright; the rest of the budget is spread evenly over
    the others. SpecVLM sets 0.4 for LLaVA-OneVision and 0.5 for Qwen2.5-VL by calibration, its released code 0.4 for
    both; the default is 0.4 for every family."""
    guidance_layers: Literal["all"] | tuple[Annotated[int, Field(ge=0)], ...] = "all"
    """`specvlm`, `attention`: the target's layers whose attention is summed, counted from 0."""
    uv_layer: int | None = Field(default=None, ge=1)
    """`uv`: the target's layer whose hidden states are compared with the embeddings (the paper's Lmax). Default: 20, or
    seven tenths of the layers where that is less."""
    guidance_bytes: int | None = Field(default=None, ge=1)
    """`uv`: most memory per rank for the hidden states of prompts that are being prefilled; it is taken out of the KV
    memory. Default: a twentieth of that. A prompt that would exceed it is pruned uniformly."""
    seed: int = Field(default=0, ge=0)
    """Seed of the `random` pruner. One seed and one video size: one choice."""
    positions: Literal["original", "compacted"] = Field(
        default="original", json_schema_extra={"instruments": ["compacted"]}
    )
    """Positions of the draft's tokens: `original` keeps each kept token's position in the full prompt; `compacted`
    numbers the kept tokens anew, as SpecVLM's code does, and was accepted less on every pair here."""

    @field_validator("pruner")
    @classmethod
    def _known_pruner(cls, name: str) -> str:
        return name if name == AUTO else _known(name)

    @field_validator("auto_pruners")
    @classmethod
    def _known_pruners(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not names:
            raise ValueError("auto_pruners names none")
        return tuple(dict.fromkeys(map(_known, names)))

    @field_validator("auto_ratios")
    @classmethod
    def _some_ratios(cls, ratios: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if ratios == ():
            raise ValueError("auto_ratios names none")
        return None if ratios is None else tuple(dict.fromkeys(ratios))

    @field_validator("guidance_layers", mode="after")
    @classmethod
    def _distinct_layers(cls, layers: str | tuple[int, ...]) -> str | tuple[int, ...]:
        if isinstance(layers, str):
            return layers
        if not layers:
            raise ValueError('guidance_layers names no layer; give at least one, or "all"')
        return tuple(sorted(set(layers)))

    @functools.cached_property
    def variants(self) -> tuple["PruneKnobs", ...]:
        """How a request's prompt may be pruned: by these knobs, or with `auto` by each pruner at each ratio."""
        if self.pruner != AUTO:
            return (self,)
        ratios = self.auto_ratios or (self.ratio,)
        return tuple(
            self.model_copy(update={"pruner": pruner, "ratio": ratio})
            for pruner in self.auto_pruners
            for ratio in ratios
        )

    def variant(self, number: int) -> "PruneKnobs":
        """Return one of `variants`; the first where there is none of that number, as these knobs may have changed."""
        return self.variants[number if 0 <= number < len(self.variants) else 0]

    @property
    def min_run(self) -> int | None:
        """How many images in a row are a video at least; None where no number is."""
        return MIN_RUN.get(self.frames_as_video)

    def ratio_for(self, modality: str) -> float:
        """Return the prune ratio of a modality ("video" or "image"); `pruner: none` keeps everything."""
        if self.pruner == "none":
            return 0.0
        if modality != "image":
            return self.ratio
        if self.image_ratio is not None:
            return self.image_ratio
        return 1.0 if self.ratio == 1.0 else min(self.ratio, IMAGE_PRUNE_RATIO)


class TreeKnobs(Group):
    """The shapes of draft trees.

    All but the paths are those of `tree-adaptive`; the defaults are SAGE's (section 5.1).
    """

    prefix: ClassVar[str] = "tree_"

    paths: tuple[Path, ...] | None = None
    """The tree of `tree-static` as rank paths, `[[0], [1], [0, 0], ...]`: `[0, 1]` is the second-best child of the best
    child of the root. Default: SpecVLM's 25 nodes of depth 5."""
    depth_min: int = Field(default=3, ge=1, le=64)
    """Depth where the draft is least sure."""
    depth_max: int = Field(default=8, ge=1, le=64)
    """Depth where it is surest."""
    width_min: int = Field(default=2, ge=1, le=32)
    """Children of the root where the draft is surest."""
    width_max: int = Field(default=10, ge=1, le=32)
    """Children of the root where it is least sure."""
    entropy_top_k: int = Field(default=10, ge=2, le=32)
    """Tokens whose probabilities, renormalised, make the entropy."""
    threshold: float = Field(default=0.1, ge=0.0, lt=1.0)
    """A node at level l of a tree of depth D is kept only if its path's probability exceeds this times l / D."""
    history: int = Field(default=10, ge=0, le=1024)
    """Steps whose mean acceptance adapts the maximum depth; 0 keeps it fixed."""
    history_low: float = Field(default=2.0, ge=0.0)
    """Fewer accepted drafts per step than this make trees shallower."""
    history_high: float = Field(default=3.0, ge=0.0)
    """More than this make trees deeper, up to `tree_depth_max`."""
    lookahead: bool = True
    """The entropy of one step shapes the next step's tree, so that the host knows its depth in time.
    False uses the step's own entropy and always runs `tree_depth_max` draft forwards."""
    fill: bool | None = None
    """Fill every tree up to `num_speculative_tokens` with the next-best nodes, as leaves. Default:
    where vLLM schedules asynchronously and so verifies that many tokens anyway."""

    @model_validator(mode="after")
    def _ordered_ranges(self) -> Self:
        for low, high in (("depth_min", "depth_max"), ("width_min", "width_max"), ("history_low", "history_high")):
            lowest, highest = getattr(self, low), getattr(self, high)
            if lowest > highest:
                raise ValueError(f"tree_{low} {lowest} is more than tree_{high} {highest}")
        return self

    @property
    def static_paths(self) -> tuple[Path, ...]:
        """The static tree's rank paths; a VidSpecError if `paths` is no tree."""
        return SPECVLM_PATHS if self.paths is None else parse_paths(self.paths)


class ScoreKnobs(Group):
    """How drafts are verified."""

    scorer: ScorerName = Field(default="strict", json_schema_extra={"instruments": ["random"]})
    """Which draft tokens are accepted. `strict`: exactly what vanilla vLLM would have emitted (lossless at every
    temperature). The others give up that guarantee for longer acceptance: `loose` (LVSpec) accepts mismatches where the
    text has least to do with the video; `fly` where the target is unsure and the next `fly_window` drafts match,
    `fly-entropy` where it is unsure; `random` anywhere, as a baseline for measurements."""
    request_scorers: tuple[ScorerName, ...] | None = Field(default=None, json_schema_extra={"instruments": ["random"]})
    """Scorers that a request may ask for with `vllm_xargs: {"vidspec_scorer": ...}`. Default: `strict` and the server's
    own."""
    lambda_loose: float = Field(default=0.7, ge=0.0, le=1.0)
    """`loose`, `random`: share of a step's drafts whose mismatches are accepted (LVSpec's lambda)."""
    lambda_max: float | None = Field(default=None, ge=0.0, le=1.0)
    """The most that a request may ask for with `vllm_xargs: {"vidspec_lambda": ...}`. Default: `lambda_loose`, so that
    clients can only be stricter."""
    top_n: int = Field(default=10, ge=1, le=128)
    """`loose`: a draft's relevance is its mean cosine with so many video tokens."""
    position_shift: bool = True
    """`loose`: a mismatch is also accepted where the target's token is among the step's drafts (LVSpec's
    position-shift tolerance)."""
    relevance_rows: Literal["token", "prediction"] = "token"
    """`loose`: whose hidden state a draft's relevance is measured on: its own (`token`, LVSpec eq. 7) or the one that
    predicts it, a position earlier (`prediction`)."""
    relevance_dtype: Literal["auto", "fp8"] = "auto"
    """`loose`: how video tokens' hidden states are kept: in the model's dtype, or in one byte."""
    relevance_bytes: int | None = Field(default=None, ge=1)
    """`loose`: memory per rank for these hidden states; it is taken out of the KV memory. Default: a twentieth of that.
    A request that does not fit is verified strictly."""
    fly_entropy: float = Field(default=0.3, ge=0.0)
    """`fly`, `fly-entropy`: entropy of the target's distribution, in nats, above which it counts as unsure. Measure
    and default of this and the next two are those of vLLM's own FLy."""
    fly_window: int | None = Field(default=None, ge=1, le=64)
    """`fly`: drafts after a mismatch that must match exactly. Default: 6, or one less than the drafts that can follow
    each other where that is less."""
    fly_top_k: int = Field(default=3, ge=0)
    """`fly`, `fly-entropy`: the most likely tokens, whose part of the entropy counts; 0: the whole vocabulary."""
    protected_tokens: tuple[str, ...] | None = None
    """Words that no accepted mismatch may add or drop: every token that is one of them, with or without a space before
    it, in any case; `"0-9"` is every token with a digit. Default: English negations and digits. Special tokens, the end
    of the text and a request's stop tokens are always protected."""

    @model_validator(mode="after")
    def _reachable_scorers(self) -> Self:
        if self.request_scorers is not None and self.scorer not in (*self.request_scorers, "strict"):
            raise ValueError(f"request_scorers leaves out the server's own scorer, {self.scorer!r}")
        return self

    @property
    def scorers(self) -> frozenset[str]:
        """Every scorer that a request of this server can have."""
        return frozenset({"strict", self.scorer, *(self.request_scorers or ())})

    @property
    def max_lambda(self) -> float:
        """The greatest lambda that a request may ask for."""
        return self.lambda_loose if self.lambda_max is None else self.lambda_max


class PoolKnobs(Group):
    """The draft's memory."""

    prefix: ClassVar[str] = "draft_"

    kv_fraction: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Share of the KV memory that the draft's pool takes. Default: as much as lets the draft hold its pruned copy of
    whatever fits in the target's cache."""
    kv_bytes: int | None = Field(default=None, ge=1)
    """Size of the draft's KV pool in bytes per rank; excludes `draft_kv_fraction`."""
    encoder_bytes: int | None = Field(default=None, ge=0)
    """Memory per rank for the draft's vision embeddings of recent images and videos, so that `n` answers, later turns
    of a chat and repeated videos are not encoded again; it is taken out of the KV memory. Default: a fiftieth of that.
    0 keeps none."""

    @model_validator(mode="after")
    def _one_pool_size(self) -> Self:
        if self.kv_bytes is not None and self.kv_fraction is not None:
            raise ValueError("give draft_kv_fraction or draft_kv_bytes, not both")
        return self


class ParallelKnobs(Group):
    """The parallel drafter: a process of its own, which drafts ahead while the target verifies (ParallelVLM)."""

    prefix: ClassVar[str] = "parallel_"

    device: str | None = Field(default=None, pattern=r"^(cpu|cuda(:\d{1,3})?)$")
    """Where the drafter's process runs: `cuda:2` counts as the server counts its devices, `cpu` is the CPU engine's.
    With it, drafting and verification overlap, and drafts are chains. Default: draft and target run sequentially in one
    process."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """Ranks of the drafter, on as many devices from `parallel_device` on; it need not be the target's number."""
    cpu_cores: str | None = Field(default=None, pattern=r"^\d+(-\d+)?(,\d+(-\d+)?)*$")
    """CPU cores of the drafter's process, as `1` or `2-5,8`. Default: those of the server."""
    max_ahead: int = Field(default=24, ge=1, le=1024)
    """Most tokens that the draft may run ahead of a request's committed text."""
    wait_us: int = Field(default=0, ge=0, le=1_000_000)
    """Microseconds that a target step may wait for drafts that are not ready; a wait delays every request."""

    @field_validator("cpu_cores")
    @classmethod
    def _real_cores(cls, cores: str | None) -> str | None:
        for part in (cores or "0").split(","):
            first, *last = part.split("-")
            if not len(part) < 12 or not int(first) <= int((last or [first])[0]) < MAX_CORES:
                raise ValueError(f"parallel_cpu_cores: {quoted(part)} is no range of cores from 0 to {MAX_CORES - 1}")
        return cores

    @property
    def cores(self) -> tuple[int, ...]:
        """The numbers in `cpu_cores`."""
        if self.cpu_cores is None:
            return ()
        ends = [[int(end) for end in part.split("-")] for part in self.cpu_cores.split(",")]
        return tuple(core for first, *last in ends for core in range(first, (last or [first])[0] + 1))


class Fields(BaseModel):
    """The speculative configuration's own fields, and its groups."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)

    model: str
    """Draft model: a Hugging Face name or a path, of the target's family; or "self" to draft with the target's own
    weights (shared, not loaded twice) over the pruned video."""
    num_speculative_tokens: int = Field(ge=1, le=64)
    """K: draft tokens proposed, and verified, per step."""
    draft_shape: Literal["chain", "tree-static", "tree-adaptive", "auto"] = "chain"
    """Shape of the draft: `chain` proposes K tokens one after another; `tree-static` always the same tree of K tokens
    (`tree_paths`); `tree-adaptive` (SAGE) at most K, deep and narrow where the draft is confident, shallow and wide
    where it is not; `auto` chains or trees, whichever gains most (`adaptive_tokens`; the tree is `tree-static` where K
    is its number of nodes), or one of these by batch size (`draft_table`). Requests with structured outputs draft
    chains only: with trees they run without speculation. `draft` and `drafting` are other names of this key."""
    draft_table: tuple[tuple[PositiveInt, PositiveInt, Shape, NonNegativeInt], ...] | None = None
    """`auto`: rows `[first batch size, last, shape, tokens per step]`, what is drafted by batch
    size. One tree shape at most beside `chain`. `none` with 0 tokens: batches of these sizes run without
    speculation, and take it up again when fewer requests run."""
    num_speculative_tokens_per_batch_size: tuple[tuple[PositiveInt, PositiveInt, NonNegativeInt], ...] | None = None
    """vLLM's own schedule: rows `[first batch size, last, tokens per step]` that no step exceeds, whatever the shape. 0
    is `none`, as in `draft_table`."""
    adaptive_tokens: bool = True
    """Decide for every request and step how many tokens are drafted, from 0 to K (and with `draft_shape: auto` in which
    shape), by expected tokens over expected time, learned from the engine's own steps: drafting pauses for a request
    whose drafts do not pay, the draft does not prefill requests of a class that has not paid, and both are probed from
    time to time. The output is the same. `draft_table` and `num_speculative_tokens_per_batch_size` are upper bounds
    then. `false` always drafts K tokens, or what these say."""
    draft_noise: Literal["shared", "independent", "greedy"] = Field(
        "shared", json_schema_extra={"instruments": ["greedy"]}
    )
    """How the draft samples when temperature > 0. `shared`: with the target's own noise (highest acceptance);
    `independent`: with noise of its own; `greedy`: argmax. The output is the same with each."""
    max_draft_len: int | None = Field(default=None, ge=1)
    """Longest pruned prompt, in tokens, that is drafted for; longer ones run without speculation."""
    on_draft_error: Literal["skip", "raise"] = "skip"
    """What an exception on the draft's side does: `skip` logs it, counts it and continues without speculation for those
    requests; `raise` stops the engine (for tests)."""
    max_draft_failures: int = Field(default=8, ge=1)
    """Exceptions on the draft's side within `failure_window_s` seconds after which speculation is disabled for
    `cooldown_s` seconds; a failed batch counts once."""
    failure_window_s: float = Field(default=60.0, gt=0.0, allow_inf_nan=False)
    """See `max_draft_failures`."""
    cooldown_s: float = Field(default=60.0, gt=0.0, allow_inf_nan=False)
    """See `max_draft_failures`."""
    request_records: bool = False
    """Whether a request may ask for a record of itself with `vllm_xargs: {"vidspec_record": true}`: which of its tokens
    were accepted drafts, and which video tokens the draft saw. Its response has it then as `vidspec_record`."""
    calibration: str | None = None
    """A file that `vidspec calibrate` or `auto_file` wrote: its values replace the defaults of `draft_table`,
    `guidance_layers`, `lambda_r`, `prune_ratio`, `pruner`, `uv_layer`; what is given beside it wins."""
    prune: PruneKnobs = PruneKnobs()
    tree: TreeKnobs = TreeKnobs()
    score: ScoreKnobs = ScoreKnobs()
    pool: PoolKnobs = PoolKnobs()
    parallel: ParallelKnobs = ParallelKnobs()
