"""Every field of the configuration, with its range, default and text; needs pydantic only."""

import functools
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from vllm_vidspec.config.schedule import Shape
from vllm_vidspec.config.static_tree import GROWN_DEPTHS, SPECVLM_PATHS, Path, grow_paths, parse_paths
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

# Who needs a field, by its `shelf`: everyone, some services, and who measures or calibrates.
SHELVES = ("first", "sometimes", "experts")
_first, _sometimes, _experts = (functools.partial(Field, json_schema_extra={"shelf": shelf}) for shelf in SHELVES)


def _in_64_bits(value: int) -> int:
    if value >= 1 << 63:
        raise ValueError(f"expected a 64-bit number, got {quoted(value)}")
    return value


_Natural = Annotated[int, Field(ge=0), AfterValidator(_in_64_bits)]
_Positive = Annotated[int, Field(ge=1), AfterValidator(_in_64_bits)]
_Share = Annotated[float, Field(ge=0.0, le=1.0)]


def _known(pruner: str, known: tuple[str, ...] = PRUNERS) -> str:
    """Return a pruner's name as it is registered; ValueError for an unknown one."""
    name = _PRUNER_ALIASES.get(pruner, pruner)
    if name not in known:
        raise ValueError(f"unknown pruner {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    return name


class Knobs(BaseModel):
    """Fields that a user may set; none changes once it is checked."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class PruneKnobs(Knobs):
    """What the draft sees of images and videos."""

    prune_ratio: _Share = _first(default=0.9)
    """Share of the video tokens dropped for the draft (the target always sees all). 0 keeps everything; 1.0 is a
    text-only draft."""
    image_prune_ratio: _Share | None = _sometimes(default=None)
    """The same for image tokens. Default: 0.8, or `prune_ratio` where that is lower or 1. Every image and every video
    of a prompt has a budget of its own: its tokens times 1 - ratio, rounded down, at least one token unless the ratio
    is 1. Images that are a video's frames (`frames_as_video`) are one video here."""
    frames_as_video: Literal["auto", "never", "always"] = _sometimes(default="auto")
    """Whether images of one size in a row, with little text between them, are pruned as the frames of one video: with
    one budget, at `prune_ratio`, and compared with each other where the pruner compares frames. `auto`: 4 images and
    more; `always`: 2 images and more; `never`: each image is one of its own."""
    pruner: str = _sometimes(default="specvlm")
    """Which tokens stay: `none`, `specvlm`, `attention`, `uv`, `uniform`, `random`, `window:front`, `window:middle`,
    `window:end`, `frame`, `fastvid`, `dycoke`. `specvlm` and `attention` follow the target's attention, `uv` its hidden
    states; the others look at neither. `uniform`, and what `specvlm` spreads, are even over rows, columns and frames;
    `uniform:stride` and `specvlm:stride` step through the tokens in order, as SpecVLM's code does. `none` keeps
    everything and ignores the ratios; `window` is short for `window:middle`.
    `auto` tries several on live requests and learns which serves best."""
    auto_pruners: tuple[str, ...] = _experts(default=("specvlm", "attention", "uv", "uniform"))
    """`auto`: the pruners to choose from. The target's attention or hidden states are observed for the requests whose
    pruner needs them."""
    lambda_r: _Share = _experts(default=0.4)
    """`specvlm`: share of the attention whose tokens are kept outright; the rest of the budget is spread evenly over
    the others. SpecVLM sets 0.4 for LLaVA-OneVision and 0.5 for Qwen2.5-VL by calibration, its released code 0.4 for
    both; the default is 0.4 for every family."""
    guidance_layers: Literal["all"] | tuple[_Natural, ...] = _experts(default="all")
    """`specvlm`, `attention`: the target's layers whose attention is summed, counted from 0."""
    uv_layer: _Positive | None = _experts(default=None)
    """`uv`: the target's layer whose hidden states are compared with the embeddings (the paper's Lmax). Default: 20, or
    seven tenths of the layers where that is less."""
    draft_positions: Literal["original", "compacted"] = _experts(default="original")
    """Positions of the draft's tokens: `original` keeps each kept token's position in the full prompt; `compacted`
    numbers the kept tokens anew, as SpecVLM's code does, and was accepted less on every pair here."""

    @field_validator("pruner")
    @classmethod
    def _known_pruner(cls, name: str) -> str:
        return _known(name, (*PRUNERS, AUTO))

    @field_validator("auto_pruners")
    @classmethod
    def _known_pruners(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not names:
            raise ValueError("auto_pruners names none")
        return tuple(dict.fromkeys(map(_known, names)))

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
        """How a request's prompt may be pruned: by these knobs, or with `auto` by each of `auto_pruners`."""
        if self.pruner != AUTO:
            return (self,)
        return tuple(self.model_copy(update={"pruner": pruner}) for pruner in self.auto_pruners)

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
            return self.prune_ratio
        if self.image_prune_ratio is not None:
            return self.image_prune_ratio
        return 1.0 if self.prune_ratio == 1.0 else min(self.prune_ratio, IMAGE_PRUNE_RATIO)


class ScoreKnobs(Knobs):
    """How drafts are verified."""

    scorer: ScorerName = _sometimes(default="strict")
    """Which draft tokens are accepted. `strict`: exactly what vanilla vLLM would have emitted (lossless at every
    temperature). The others give up that guarantee for longer acceptance: `loose` (LVSpec) accepts mismatches where the
    text has least to do with the video; `fly` where the target is unsure and the drafts that follow match, at most 6;
    `fly-entropy` where it is unsure; `random` anywhere, as a baseline for measurements."""
    request_scorers: tuple[ScorerName, ...] | None = _sometimes(default=None)
    """Scorers that a request may ask for with `vllm_xargs: {"vidspec_scorer": ...}`. Default: `strict` and the server's
    own."""
    lambda_loose: _Share = _sometimes(default=0.7)
    """`loose`, `random`: share of a step's drafts whose mismatches are accepted (LVSpec's lambda). It is also the most
    that a request may ask for with `vllm_xargs: {"vidspec_lambda": ...}`: clients can only be stricter."""
    protected_tokens: tuple[str, ...] | None = _sometimes(default=None)
    """Words that no accepted mismatch may add or drop: every token that is one of them, with or without a space before
    it, in any case; `"0-9"` is every token with a digit. Default: English negations and digits. Special tokens, the end
    of the text and a request's stop tokens are always protected."""
    position_shift: bool = _experts(default=True)
    """`loose`: a mismatch is also accepted where the target's token is among the step's drafts (LVSpec's
    position-shift tolerance)."""
    relevance_rows: Literal["token", "prediction"] = _experts(default="token")
    """`loose`: whose hidden state a draft's relevance is measured on: its own (`token`, LVSpec eq. 7) or the one that
    predicts it, a position earlier (`prediction`)."""
    fly_entropy: Annotated[float, Field(ge=0.0)] = _experts(default=0.3)
    """`fly`, `fly-entropy`: entropy of the target's distribution, in nats, above which it counts as unsure; measure
    and default are those of vLLM's own FLy."""

    @property
    def scorers(self) -> frozenset[str]:
        """Every scorer that a request of this server can have."""
        return frozenset({"strict", self.scorer, *(self.request_scorers or ())})


class ParallelKnobs(Knobs):
    """The parallel drafter: a process of its own, which drafts ahead while the target verifies (ParallelVLM)."""

    device: str | None = _sometimes(default=None, pattern=r"^(cpu|cuda(:\d{1,3})?)$")
    """Where the drafter's process runs: `cuda:2` counts as the server counts its devices, `cpu` is the CPU engine's.
    With it, drafting and verification overlap, and drafts are chains. Default: draft and target run sequentially in one
    process."""
    tensor_parallel_size: int = _sometimes(default=1, ge=1, le=64)
    """Ranks of the drafter, on as many devices from `device` on; it need not be the target's number."""
    cpu_cores: str | None = _experts(default=None, pattern=r"^\d+(-\d+)?(,\d+(-\d+)?)*$")
    """CPU cores of the drafter's process, as `1` or `2-5,8`. Default: those of the server."""

    @model_validator(mode="before")
    @classmethod
    def _dashes_as_underscores(cls, given: Any) -> Any:
        return {key.replace("-", "_"): value for key, value in given.items()} if isinstance(given, dict) else given

    @field_validator("cpu_cores")
    @classmethod
    def _real_cores(cls, cores: str | None) -> str | None:
        for part in (cores or "0").split(","):
            first, *last = part.split("-")
            if not len(part) < 12 or not int(first) <= int((last or [first])[0]) < MAX_CORES:
                raise ValueError(f"{quoted(part)} is no range of cores from 0 to {MAX_CORES - 1}")
        return cores

    @property
    def cores(self) -> tuple[int, ...]:
        """The numbers in `cpu_cores`."""
        if self.cpu_cores is None:
            return ()
        ends = [[int(end) for end in part.split("-")] for part in self.cpu_cores.split(",")]
        return tuple(core for first, *last in ends for core in range(first, (last or [first])[0] + 1))


class Fields(PruneKnobs, ScoreKnobs):
    """All fields of the speculative configuration."""

    model: str = _first()
    """Draft model: a Hugging Face name or a path, of the target's family; or "self" to draft with the target itself
    over a part of its own KV cache."""
    num_speculative_tokens: int = _first(ge=1, le=64)
    """K: draft tokens proposed, and verified, per step."""
    draft_shape: Literal["chain", "tree-2", "tree-3", "tree-4", "tree-static", "tree-adaptive", "auto"] = _first(
        default="chain"
    )
    """Shape of the draft: `chain` proposes K tokens one after another; `tree-2`, `tree-3` and `tree-4` a tree of K
    tokens in as many draft forwards; `tree-static` SpecVLM's tree of 25 tokens in 5 forwards, or your own
    (`tree_paths`); `tree-adaptive` (SAGE) at most K, deep and narrow where the draft is confident, shallow and wide
    where it is not; `auto` the first three, short chains or nothing, whichever gains most (`adaptive_tokens`), or a
    shape by batch size (`draft_table`). Requests with structured outputs draft chains only: with trees they run
    without speculation."""
    draft_table: tuple[tuple[_Positive, _Positive, Shape, _Natural], ...] | None = _sometimes(default=None)
    """`auto`: rows `[first batch size, last, shape, tokens per step]`, what is drafted by batch size. `none` with 0
    tokens: batches of these sizes run without speculation, and take it up again when fewer requests run."""
    num_speculative_tokens_per_batch_size: tuple[tuple[_Positive, _Positive, _Natural], ...] | None = _sometimes(
        default=None
    )
    """vLLM's own schedule: rows `[first batch size, last, tokens per step]` that no step exceeds, whatever the shape. 0
    is `none`, as in `draft_table`."""
    adaptive_tokens: bool = _sometimes(default=True)
    """Decide for every request and step how many tokens are drafted, from 0 to K (and with `draft_shape: auto` in which
    shape), by expected tokens over expected time, learned from the engine's own steps: drafting pauses for a request
    whose drafts do not pay, the draft does not prefill requests of a class that has not paid, and both are probed from
    time to time. The output is the same. `draft_table` and `num_speculative_tokens_per_batch_size` are upper bounds
    then. `false` always drafts K tokens, or what these say."""
    draft_vision: str = _sometimes(default="auto")
    """Whose vision tower the draft sees through. `own`: its own, which reads every frame once more. `target`: the
    target's, where both towers have the same weights. A file of `vidspec calibrate --eyes`: the target's, whose
    embeddings it maps to the draft's. With these two no tower of the draft is loaded. `auto`: `target` where that can
    be, else `own`."""
    calibration: str | None = _sometimes(default=None)
    """A file that `vidspec calibrate` wrote: its values replace the defaults of `draft_vision`, `guidance_layers`,
    `lambda_r` and `uv_layer`; what is given beside it wins."""
    parallel: ParallelKnobs = _sometimes(default=ParallelKnobs())
    """The parallel drafter."""
    draft_kv_bytes: _Positive | None = _sometimes(default=None)
    """Size of the draft's KV pool in bytes per rank, out of the KV memory. Default: as much as lets the draft hold its
    pruned copy of whatever fits in the target's cache. With "model": "self" that is a copy of the target's entries."""
    request_records: bool = _sometimes(default=False)
    """Whether a request may ask for a record of itself with `vllm_xargs: {"vidspec_record": true}`: which of its tokens
    were accepted drafts, and which video tokens the draft saw. Its response has it then as `vidspec_record`."""
    state_bytes: _Natural | None = _experts(default=None)
    """Bytes per rank, out of the KV memory, for what is kept of images and videos beside the caches: the target's
    hidden states (`uv`: of prompts that are being prefilled; `loose`: of running requests) and the draft's vision
    embeddings of recent ones, so that `n` answers, later turns of a chat and repeated videos are not encoded again.
    Where several are kept, each kind of states has 5 parts and embeddings 2. Default: a twentieth of the KV memory for
    each kind of states, a fiftieth for embeddings. A prompt without room is pruned uniformly, or verified strictly."""
    tree_paths: tuple[Path, ...] | None = _experts(default=None)
    """The tree of `tree-static` as rank paths, `[[0], [1], [0, 0], ...]`: `[0, 1]` is the second-best child of the best
    child of the root. Default: SpecVLM's 25 nodes of depth 5."""
    tree_fill: bool | None = _experts(default=None)
    """Fill every tree of `tree-adaptive` up to `num_speculative_tokens` with the next-best nodes, as leaves. Default:
    where vLLM schedules asynchronously and so verifies that many tokens anyway."""
    linear_backend_per_quant: dict[str, str] | None = _experts(default=None)
    """vLLM's own key of `--kernel-config`, for the draft's layers alone: kernels by how these are quantised, such as
    `{"fp8_w8a8": "marlin"}` or `{"mixed_precision": "marlin"}`. Default: what the target's layers have."""
    draft_lm_head_quantization: Literal["fp8", "nvfp4"] | None = _experts(default=None)
    """vLLM's own key (from 0.33 on): the draft's output head is quantised as it loads. The target's stays as it is."""
    draft_noise: Literal["shared", "independent", "greedy"] = _experts(default="shared")
    """How the draft samples when temperature > 0. `shared`: with the target's own noise (highest acceptance);
    `independent`: with noise of its own; `greedy`: argmax. The output is the same with each."""
    on_draft_error: Literal["skip", "raise"] = _experts(default="skip")
    """What an exception on the draft's side does: `skip` logs it, counts it and continues without speculation for those
    requests; `raise` stops the engine (for tests)."""
    max_draft_failures: _Positive = _experts(default=8)
    """Exceptions on the draft's side within a minute after which speculation is disabled for a minute; a failed batch
    counts once."""

    def paths_of(self, shape: str) -> tuple[Path, ...]:
        """Return the rank paths of a tree shape that is not adaptive; a VidSpecError if `tree_paths` is no tree."""
        if shape in GROWN_DEPTHS:
            return grow_paths(self.num_speculative_tokens, GROWN_DEPTHS[shape])
        return SPECVLM_PATHS if self.tree_paths is None else parse_paths(self.tree_paths)
