"""VidSpecConfig: every knob of `--speculative-config '{"method": "vidspec", ...}'`; needs pydantic only."""

import difflib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

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

# What `vidspec calibrate` finds out for a pair.
CALIBRATED_KEYS = frozenset({"lambda_r", "guidance_layers", "uv_layer"})

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
    draft: Literal["chain"] = Field(
        "chain", description="Shape of the draft: `chain` proposes K tokens one after another."
    )
    scorer: Literal["strict"] = Field(
        "strict",
        description="Which drafts stand: `strict` accepts exactly what vanilla vLLM would have emitted (lossless at "
        "every temperature).",
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
            raise ValueError(f"unknown pruner {name!r}{_nearest(name, PRUNERS)}; known: {', '.join(PRUNERS)}")
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
    passed = {key: given.pop(key) for key in list(given) if key in PASS_THROUGH_KEYS}
    known = (*VidSpecConfig.model_fields, *sorted(PASS_THROUGH_KEYS))
    unknown = [key for key in given if key not in VidSpecConfig.model_fields]
    if unknown:
        hints = "; ".join(f"{key!r}{_nearest(key, known)}" for key in unknown)
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


def _nearest(name: str, known: tuple[str, ...]) -> str:
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
