"""VidSpecConfig: every knob of `--speculative-config '{"method": "vidspec", ...}'`; needs pydantic only."""

import difflib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vllm_vidspec.errors import VidSpecError

METHOD = "vidspec"
SELF = "self"

PRUNERS = ("none", "uniform", "random", "window:front", "window:middle", "window:end", "frame")
_PRUNER_ALIASES = {"window": "window:middle"}

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
        None, ge=0.0, le=1.0, description="The same for image tokens. Default: `prune_ratio`."
    )
    pruner: str = Field(
        "uniform",
        description="Which tokens stay: "
        + ", ".join(f"`{name}`" for name in PRUNERS)
        + ". `none` keeps everything and "
        "ignores the ratios; `window` is short for `window:middle`.",
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
        if modality == "image" and self.image_prune_ratio is not None:
            return self.image_prune_ratio
        return self.prune_ratio

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
    try:
        return VidSpecConfig(**given), passed
    except ValidationError as error:
        raise VidSpecError(f"speculative config: {_one_line(error)}") from None


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
