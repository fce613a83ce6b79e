"""VidSpecConfig: every knob of `--speculative-config '{"method": "vidspec", ...}'`; needs pydantic only."""

import difflib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator, model_validator

from vllm_vidspec.errors import VidSpecError

METHOD = "vidspec"
SELF = "self"

PRUNERS = (
    "none",
    "specvlm",
    "attention",
    "uv",
    "uniform",
    "random",
    "window:front",
    "window:middle",
    "window:end",
    "frame",
    "fastvid",
    "dycoke",
)
_PRUNER_ALIASES = {"window": "window:middle"}

IMAGE_PRUNE_RATIO = 0.8  # an image's tokens are fewer and less alike than a video's (SAGE's default)

# What `vidspec calibrate` finds out for a pair, and on a machine.
CALIBRATED_KEYS = frozenset({"lambda_r", "guidance_layers", "uv_layer", "draft_table"})
# Other spellings of a knob's name.
_KEY_ALIASES = {"drafting": "draft"}

DIGITS = "0-9"
# Small words that turn a sentence into its opposite, and yet have nothing to do with the video (LVSpec, limitations).
PROTECTED_TOKENS = (
    *("no", "not", "n't", "'t", "never", "none", "nothing", "nobody", "neither", "nor", "cannot", "without"),
    *(f"{verb}n't" for verb in ("is", "are", "was", "were", "do", "does", "did", "ca", "wo", "has", "have", "had")),
    *("isn", "aren", "wasn", "weren", "don", "doesn", "didn", "hasn", "haven", "hadn"),
    DIGITS,
)

Shape = Literal["chain", "tree-static", "tree-adaptive"]
ScorerName = Literal["strict", "loose", "fly", "fly-entropy", "random"]
# Keys of a request's `vllm_xargs`.
REQUEST_SCORER, REQUEST_LAMBDA = "vidspec_scorer", "vidspec_lambda"

# Keys of vLLM's own speculative config that pass through unchanged.
PASS_THROUGH_KEYS = frozenset(
    {
        "quantization",
        "revision",
        "code_revision",
        "draft_load_config",
        "num_speculative_tokens_per_batch_size",
    }
)


class VidSpecConfig(BaseModel):
    """One validated speculative configuration. Unknown keys are refused with the nearest known name."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    model: str = Field(
        description='Draft model: a Hugging Face name or a path, of the target\'s family; or "self" to draft with the '
        "target's own weights (shared, not loaded twice) over the pruned video."
    )
    num_speculative_tokens: int = Field(ge=1, le=64, description="K: draft tokens proposed, and verified, per step.")
    prune_ratio: float = Field(
        0.9,
        ge=0.0,
        le=1.0,
        description="Share of the video tokens dropped for the draft (the target always sees all). 0 keeps everything; "
        "1.0 is a text-only draft.",
    )
    image_prune_ratio: float | None = Field(
        None,
        ge=0.0,
        le=1.0,
        description=f"The same for image tokens. Default: {IMAGE_PRUNE_RATIO}, or `prune_ratio` where that is lower or "
        "1. Every image and every video of a prompt has a budget of its own: its tokens times 1 - ratio, rounded down, "
        "at least one token unless the ratio is 1.",
    )
    pruner: str = Field(
        "specvlm",
        description="Which tokens stay: "
        + ", ".join(f"`{name}`" for name in PRUNERS)
        + ". `specvlm` and `attention` follow the target's attention, `uv` its hidden states; the others look at "
        "neither. `none` keeps everything and ignores the ratios; `window` is short for `window:middle`.",
    )
    lambda_r: float = Field(
        0.4,
        ge=0.0,
        le=1.0,
        description="`specvlm`: share of the attention whose tokens are kept outright; the rest of the budget is "
        "spread evenly over the others.",
    )
    guidance_layers: Literal["all"] | tuple[Annotated[int, Field(ge=0)], ...] = Field(
        "all",
        description="`specvlm`, `attention`: the target's layers whose attention is summed, counted from 0.",
    )
    uv_layer: int | None = Field(
        None,
        ge=1,
        description="`uv`: the target's layer whose hidden states are compared with the embeddings (the paper's Lmax). "
        "Default: 20, or seven tenths of the layers where that is less.",
    )
    guidance_bytes: int | None = Field(
        None,
        ge=1,
        description="`uv`: most memory per rank for the hidden states of prompts that are being prefilled; it is taken "
        "out of the KV memory. Default: a twentieth of that. A prompt that would exceed it is pruned uniformly.",
    )
    calibration: str | None = Field(
        None,
        description="A file that `vidspec calibrate` wrote: its values replace the defaults of "
        + ", ".join(f"`{name}`" for name in sorted(CALIBRATED_KEYS))
        + "; what is given beside it wins.",
    )
    prune_seed: int = Field(
        0, ge=0, description="Seed of the `random` pruner. One seed and one video size: one choice."
    )
    draft: Literal["chain", "tree-static", "tree-adaptive", "auto"] = Field(
        "chain",
        description="Shape of the draft: `chain` proposes K tokens one after another; `tree-static` always the same "
        "tree of K tokens (`tree_paths`); `tree-adaptive` (SAGE) at most K, deep and narrow where the draft is "
        "confident, shallow and wide where it is not; `auto` one of these by batch size (`draft_table`). Requests with "
        "structured outputs draft chains only: with trees they run without speculation.",
    )
    draft_table: tuple[tuple[PositiveInt, PositiveInt, Shape, PositiveInt], ...] | None = Field(
        None,
        description="`auto`: rows `[first batch size, last, shape, tokens per step]`, as `vidspec calibrate --costs` "
        "measures them on a machine. One tree shape at most beside `chain`.",
    )
    tree_paths: tuple[tuple[int, ...], ...] | None = Field(
        None,
        description="`tree-static`: the tree as rank paths, `[[0], [1], [0, 0], ...]`: `[0, 1]` is the second-best "
        "child of the best child of the root. Default: SpecVLM's 25 nodes of depth 5.",
    )
    tree_depth_min: int = Field(3, ge=1, le=64, description="`tree-adaptive`: depth where the draft is least sure.")
    tree_depth_max: int = Field(8, ge=1, le=64, description="`tree-adaptive`: depth where it is surest.")
    tree_width_min: int = Field(
        2, ge=1, le=32, description="`tree-adaptive`: children of the root where the draft is surest."
    )
    tree_width_max: int = Field(
        10, ge=1, le=32, description="`tree-adaptive`: children of the root where it is least sure."
    )
    tree_entropy_top_k: int = Field(
        10, ge=2, le=32, description="`tree-adaptive`: tokens whose probabilities, renormalised, make the entropy."
    )
    tree_threshold: float = Field(
        0.1,
        ge=0.0,
        lt=1.0,
        description="`tree-adaptive`: a node at level l of a tree of depth D needs a path of more probability than "
        "this times l / D.",
    )
    tree_history: int = Field(
        10,
        ge=0,
        le=1024,
        description="`tree-adaptive`: steps whose mean acceptance moves the greatest depth; 0 keeps it fixed.",
    )
    tree_history_low: float = Field(
        2.0, ge=0.0, description="`tree-adaptive`: fewer accepted drafts per step than this make trees shallower."
    )
    tree_history_high: float = Field(
        3.0, ge=0.0, description="`tree-adaptive`: more than this make trees deeper, up to `tree_depth_max`."
    )
    tree_lookahead: bool = Field(
        True,
        description="`tree-adaptive`: the entropy of one step shapes the next step's tree, so that the host knows its "
        "depth in time. False uses the step's own entropy and always runs `tree_depth_max` draft forwards.",
    )
    tree_fill: bool | None = Field(
        None,
        description="`tree-adaptive`: fill every tree up to `num_speculative_tokens` with the next-best nodes, as "
        "leaves. Default: where vLLM schedules asynchronously and so verifies that many tokens anyway.",
    )
    scorer: ScorerName = Field(
        "strict",
        description="Which drafts stand. `strict`: exactly what vanilla vLLM would have emitted (lossless at every "
        "temperature). The others give up that guarantee for longer acceptance: `loose` (LVSpec) lets mismatches stand "
        "where the text has least to do with the video; `fly` where the target is unsure and the next `fly_window` "
        "drafts match, `fly-entropy` where it is unsure; `random` anywhere, as a baseline for measurements.",
    )
    request_scorers: tuple[ScorerName, ...] | None = Field(
        None,
        description="Scorers that a request may ask for with `vllm_xargs: {"
        f'"{REQUEST_SCORER}": ...}}`. Default: `strict` and the server\'s own.',
    )
    lambda_loose: float = Field(
        0.7,
        ge=0.0,
        le=1.0,
        description="`loose`, `random`: share of a step's drafts whose mismatches stand (LVSpec's lambda).",
    )
    lambda_max: float | None = Field(
        None,
        ge=0.0,
        le=1.0,
        description=f'The most that a request may ask for with `vllm_xargs: {{"{REQUEST_LAMBDA}": ...}}`. Default: '
        "`lambda_loose`, so that clients can only be stricter.",
    )
    top_n: int = Field(
        10, ge=1, le=128, description="`loose`: a draft's relevance is its mean cosine with so many video tokens."
    )
    position_shift: bool = Field(
        True,
        description="`loose`: a mismatch also stands where the target's token is among the step's drafts (LVSpec's "
        "position-shift tolerance).",
    )
    relevance_rows: Literal["token", "prediction"] = Field(
        "token",
        description="`loose`: whose hidden state a draft's relevance is measured on: its own (`token`, LVSpec eq. 7) "
        "or the one that predicts it, a position earlier (`prediction`).",
    )
    relevance_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="`loose`: how video tokens' hidden states are kept: in the model's dtype, or in one byte."
    )
    relevance_bytes: int | None = Field(
        None,
        ge=1,
        description="`loose`: memory per rank for these hidden states; it is taken out of the KV memory. Default: a "
        "twentieth of that. A request that does not fit is verified strictly.",
    )
    fly_entropy: float = Field(
        0.2,
        ge=0.0,
        le=1.0,
        description="`fly`, `fly-entropy`: entropy of the target's distribution, divided by the greatest possible, "
        "above which it counts as unsure.",
    )
    fly_window: int = Field(4, ge=1, le=64, description="`fly`: drafts after a mismatch that must match exactly.")
    fly_top_k: int = Field(
        0, ge=0, description="`fly`, `fly-entropy`: tokens that the entropy is taken over; 0: the whole vocabulary."
    )
    protected_tokens: tuple[str, ...] | None = Field(
        None,
        description="Words that no mismatch may put in or leave out: every token that is one of them, with or without "
        f'a space before it, in any case; `"{DIGITS}"` is every token with a digit. Default: English negations and '
        "digits. Special tokens, the end of the text and a request's stop tokens are always protected.",
    )
    draft_noise: Literal["shared", "independent", "greedy"] = Field(
        "shared",
        description="How the draft samples when temperature > 0. `shared`: with the target's own noise (highest "
        "acceptance); `independent`: with noise of its own; `greedy`: argmax. The output is the same with each.",
    )
    draft_positions: Literal["original", "compacted"] = Field(
        "original",
        description="Positions of the draft's tokens: `original` keeps each kept token's position in the full prompt; "
        "`compacted` numbers the kept tokens anew.",
    )
    draft_kv_fraction: float | None = Field(
        None,
        gt=0.0,
        lt=1.0,
        description="Share of the KV memory that the draft's pool takes. Default: as much as lets the draft hold its "
        "pruned copy of whatever fits in the target's cache.",
    )
    draft_kv_bytes: int | None = Field(
        None, ge=1, description="Size of the draft's KV pool in bytes per rank; excludes `draft_kv_fraction`."
    )
    draft_encoder_bytes: int | None = Field(
        None,
        ge=0,
        description="Memory per rank for the draft's vision embeddings of images and videos shown lately, so that `n` "
        "answers, later turns of a chat and repeated videos need no second look; it is taken out of the KV memory. "
        "Default: a fiftieth of that. 0 keeps none.",
    )
    max_draft_len: int | None = Field(
        None,
        ge=1,
        description="Longest pruned prompt, in tokens, that is drafted for; longer ones run without speculation.",
    )
    on_draft_error: Literal["skip", "raise"] = Field(
        "skip",
        description="What an exception on the draft's side does: `skip` logs it, counts it and goes on without "
        "speculation for those requests; `raise` stops the engine (for tests).",
    )

    @field_validator("pruner")
    @classmethod
    def _known_pruner(cls, name: str) -> str:
        name = _PRUNER_ALIASES.get(name, name)
        if name not in PRUNERS:
            raise ValueError(f"unknown pruner {name!r}{nearest(name, PRUNERS)}; known: {', '.join(PRUNERS)}")
        return name

    @field_validator("guidance_layers", mode="after")
    @classmethod
    def _distinct_layers(cls, layers: str | tuple[int, ...]) -> str | tuple[int, ...]:
        if isinstance(layers, str):
            return layers
        if not layers:
            raise ValueError('guidance_layers names no layer; give at least one, or "all"')
        return tuple(sorted(set(layers)))

    @model_validator(mode="after")
    def _one_pool_size(self) -> "VidSpecConfig":
        if self.draft_kv_bytes is not None and self.draft_kv_fraction is not None:
            raise ValueError("give draft_kv_fraction or draft_kv_bytes, not both")
        return self

    @model_validator(mode="after")
    def _reachable_scorers(self) -> "VidSpecConfig":
        if self.request_scorers is not None and self.scorer not in (*self.request_scorers, "strict"):
            raise ValueError(f"request_scorers leaves out the server's own scorer, {self.scorer!r}")
        return self

    @model_validator(mode="after")
    def _ordered_ranges(self) -> "VidSpecConfig":
        for name in ("tree_depth", "tree_width"):
            low, high = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if low > high:
                raise ValueError(f"{name}_min {low} is more than {name}_max {high}")
        if self.tree_history_low > self.tree_history_high:
            raise ValueError(
                f"tree_history_low {self.tree_history_low} is more than tree_history_high {self.tree_history_high}"
            )
        if "tree-adaptive" in self.shapes and self.num_speculative_tokens < self.tree_depth_min:
            raise ValueError(
                f"tree-adaptive needs num_speculative_tokens of at least tree_depth_min, {self.tree_depth_min}, got "
                f"{self.num_speculative_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _whole_table(self) -> "VidSpecConfig":
        if self.draft != "auto":
            return self
        if not self.draft_table:
            raise ValueError(
                "draft auto needs draft_table: measure one with `vidspec calibrate --costs` and give its file as "
                "calibration"
            )
        end = 0
        for first, last, _, num_tokens in self.draft_table:
            if first != end + 1 or last < first:
                raise ValueError(f"draft_table: batch sizes must follow each other from 1 on, got {first} to {last}")
            end = last
            if num_tokens > self.num_speculative_tokens:
                raise ValueError(
                    f"draft_table: {num_tokens} tokens a step, num_speculative_tokens is {self.num_speculative_tokens}"
                )
        if len(self.shapes - {"chain"}) > 1:
            raise ValueError("draft_table: chain and one tree shape, not two")
        return self

    @model_validator(mode="after")
    def _whole_tree(self) -> "VidSpecConfig":
        if "tree-static" not in self.shapes:
            return self
        num_nodes = len(self.static_paths)
        if self.draft == "tree-static":
            wrong = {self.num_speculative_tokens} - {num_nodes}
        else:
            wrong = {num for _, _, shape, num in self.draft_table or () if shape == "tree-static"} - {num_nodes}
        if wrong:
            raise ValueError(
                f"this static tree has {num_nodes} nodes: num_speculative_tokens must be {num_nodes}, not {min(wrong)}"
            )
        return self

    @property
    def shapes(self) -> frozenset[str]:
        """Every shape that this configuration can draft."""
        if self.draft != "auto":
            return frozenset({self.draft})
        return frozenset(shape for _, _, shape, _ in self.draft_table or ())

    @property
    def scorers(self) -> frozenset[str]:
        """Every scorer that a request of this server can have."""
        return frozenset({"strict", self.scorer, *(self.request_scorers or ())})

    @property
    def max_lambda(self) -> float:
        """The greatest lambda that a request may ask for."""
        return self.lambda_loose if self.lambda_max is None else self.lambda_max

    @property
    def static_paths(self) -> tuple[tuple[int, ...], ...]:
        """The static tree's rank paths.

        Raises:
            ValueError: `tree_paths` is no tree.
        """
        from vllm_vidspec.drafting.paths import SPECVLM_PATHS, parse_paths

        return SPECVLM_PATHS if self.tree_paths is None else parse_paths([list(path) for path in self.tree_paths])

    @property
    def max_path(self) -> int:
        """The most drafts that can follow each other in one step."""
        rows = self.draft_table or () if self.draft == "auto" else ((1, 1, self.draft, self.num_speculative_tokens),)
        return max(
            {
                "chain": lambda num_tokens: num_tokens,
                "tree-static": lambda num_tokens: max(map(len, self.static_paths)),
                "tree-adaptive": lambda num_tokens: min(num_tokens, self.tree_depth_max),
            }[shape](num_tokens)
            for _, _, shape, num_tokens in rows
        )

    def shape_for(self, num_reqs: int) -> str:
        """Return the shape that a batch of so many requests drafts; past the table's end its last row holds."""
        if self.draft != "auto":
            return self.draft
        assert self.draft_table
        return next((shape for _, last, shape, _ in self.draft_table if num_reqs <= last), self.draft_table[-1][2])

    @property
    def is_self_draft(self) -> bool:
        """Whether the target drafts for itself."""
        return self.model == SELF

    def ratio_for(self, modality: str) -> float:
        """Return the prune ratio of a modality ("video" or "image"); `pruner: none` keeps everything."""
        if self.pruner == "none":
            return 0.0
        if modality != "image":
            return self.prune_ratio
        if self.image_prune_ratio is not None:
            return self.image_prune_ratio
        return 1.0 if self.prune_ratio == 1.0 else min(self.prune_ratio, IMAGE_PRUNE_RATIO)

    def summary(self) -> str:
        """Return the active configuration as one line for the start-up log."""
        return " ".join(f"{key}={value}" for key, value in self.model_dump(exclude_none=True).items())


def parse_config(raw: dict[str, Any]) -> tuple[VidSpecConfig, dict[str, Any]]:
    """Split a `--speculative-config` dict into our configuration and the keys that vLLM itself understands.

    Args:
        raw: The dict as given; `method` is ignored, dashes in keys count as underscores.

    Returns:
        The validated configuration and the pass-through dict.

    Raises:
        VidSpecError: One line naming the wrong key or value, with the nearest known name.
    """
    given = {key.replace("-", "_"): value for key, value in raw.items()}
    given.pop("method", None)
    given = {_KEY_ALIASES.get(key, key): value for key, value in given.items()}
    passed = {key: given.pop(key) for key in list(given) if key in PASS_THROUGH_KEYS}
    known = (*VidSpecConfig.model_fields, *sorted(PASS_THROUGH_KEYS))
    unknown = [key for key in given if key not in VidSpecConfig.model_fields]
    if unknown:
        hints = "; ".join(f"{key!r}{nearest(key, known)}" for key in unknown)
        raise VidSpecError(f"speculative config: unknown key {hints}")
    if given.get("calibration") is not None:
        given = _read_calibration(given["calibration"]) | given
    try:
        return VidSpecConfig(**given), passed
    except ValidationError as error:
        raise VidSpecError(f"speculative config: {_one_line(error)}") from None


def _read_calibration(path: Any) -> dict[str, Any]:
    """Return the knobs of a calibration file.

    Raises:
        VidSpecError: The file is missing, is no JSON object or holds other keys than `vidspec calibrate` writes.
    """
    try:
        values = json.loads(Path(path).read_text())["config"]
        unknown = sorted(set(values) - CALIBRATED_KEYS)
    except OSError as error:
        raise VidSpecError(f"speculative config: calibration: {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise VidSpecError(f"speculative config: calibration: {path} is not a file of `vidspec calibrate`") from None
    if unknown:
        raise VidSpecError(f"speculative config: calibration: {path} sets {unknown[0]!r}, which is not calibrated")
    return values


def nearest(name: str, known: tuple[str, ...]) -> str:
    """Return a hint at the known name that a wrong one is closest to, "" where none is close."""
    match = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _one_line(error: ValidationError) -> str:
    parts = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        got = "" if item["type"] in ("missing", "value_error") else f", got {item['input']!r}"
        parts.append(f"{where}: {message}{got}" if where else message)
    return "; ".join(parts)
