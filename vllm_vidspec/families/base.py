"""FamilyAdapter, its registry and the comparison of two configs. Reads config attributes only, no vLLM, no weights."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.pruning import TokenGrid

_MAX_SHOWN_CHARS = 60


class Field(NamedTuple):
    """One property that a target and its draft must share.

    `paths` are dotted attribute paths; the first that is present counts (families and transformers versions differ in
    naming). A property that neither config has is equal.
    """

    label: str
    paths: tuple[str, ...]
    default: Any = None


def read_field(hf_config: Any, field: Field) -> Any:
    """Return a property of a config, lists for tuples, or the field's default where the config has none."""
    for path in field.paths:
        value = hf_config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
        if value is not None:
            return _as_lists(value)
    return field.default


class FamilyAdapter(ABC):
    """What the engine must know about one model family.

    Attributes:
        name: The name that users see, e.g. `qwen2.5-vl`.
        architectures: The entries of `config.architectures` that this adapter handles.
        model_types: The `config.model_type`s handled; decides only where a config names no architecture.
        shared: What a target and its draft must have in common.
    """

    name: str
    architectures: frozenset[str]
    model_types: frozenset[str]
    shared: tuple[Field, ...]

    def num_media_levels(self, hf_config: Any) -> int:
        """Return how many embeddings the vision tower makes of a visual token, side by side.

        The first is its input embedding; where there are more, each goes to the output of another decoder layer. Those
        are of one forward: what is embedded must be run before anything else is.
        """
        return 1

    @abstractmethod
    def item_grid(self, modality: str, data: Mapping[str, Any], num_tokens: int, hf_config: Any) -> TokenGrid:
        """Return how the embedding tokens of one multimodal item are laid out.

        Args:
            modality: "video" or "image".
            data: The item's processor outputs, e.g. `video_grid_thw` [3]; may lack any key.
            num_tokens: Embedding tokens of the item, as counted in the prompt.
            hf_config: The draft's config, whose vision geometry `check_pair` holds equal to the target's.

        Returns:
            A grid of exactly `num_tokens` tokens; one row of them where the geometry is unknown or does not multiply
            out to `num_tokens`. Never raises for odd data: pruning a flat row is still correct.
        """

    def frames(self, modality: str, data: Mapping[str, Any], hf_config: Any) -> TokenGrid | None:
        """Return the grid of a video that the tower can encode a few of its frames at a time, before any
        `--video-pruning-rate`; None for what it must see whole.

        That takes a tower whose attention stays within a frame of the grid, and pixels that are where the grid says.
        """
        return None

    def some_frames(self, data: Mapping[str, Any], frames: range) -> dict[str, Any]:
        """Return those of a video's processor outputs that are others for these frames of its grid alone.

        The tower makes their embeddings of them, in order, and what trails the grid once more.
        """
        raise NotImplementedError

    def whole_video(self, data: Mapping[str, Any], hf_config: Any) -> tuple[TokenGrid, float] | None:
        """Return the grid of a video before `--video-pruning-rate`, and the rope positions from a frame to the next;
        None where the draft cannot follow a target that prunes it, or the data do not tell.
        """
        return None

    def follows_pruned_videos(self, hf_config: Any) -> bool:
        """Return whether the draft can tell which tokens a target has kept that prunes videos itself."""
        return False

    def check_pair(self, target_hf: Any, draft_hf: Any) -> list[str]:
        """Return a short sentence naming both values for each shared property in which the two configs differ."""
        problems = []
        for field in self.shared:
            target, draft = read_field(target_hf, field), read_field(draft_hf, field)
            if target != draft:
                problems.append(f"{field.label} is {_show(target)} in the target but {_show(draft)} in the draft")
        return problems


def flat_grid(num_tokens: int) -> TokenGrid:
    """Return the grid of an item whose geometry is unknown: one row of tokens."""
    return TokenGrid(1, 1, num_tokens)


def _as_lists(value: Any) -> Any:
    return [_as_lists(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _show(value: Any) -> str:
    if value is None:
        return "missing"
    text = repr(value)
    if len(text) <= _MAX_SHOWN_CHARS:
        return text
    entries = f" ({len(value)} entries)" if isinstance(value, list) else ""
    return f"{text[:_MAX_SHOWN_CHARS]}...{entries}"


_FAMILIES: dict[str, FamilyAdapter] = {}


def register_family(adapter: FamilyAdapter) -> None:
    """Add an adapter under its name.

    Raises:
        ValueError: The name is taken.
    """
    if adapter.name in _FAMILIES:
        raise ValueError(f"family {adapter.name!r} is registered twice")
    _FAMILIES[adapter.name] = adapter


def families() -> tuple[FamilyAdapter, ...]:
    """Return the registered adapters."""
    return tuple(_FAMILIES.values())


def adapter_for(hf_config: Any) -> FamilyAdapter:
    """Return the adapter of a Hugging Face config.

    Args:
        hf_config: Anything with `architectures` or `model_type`.

    Raises:
        VidSpecError: No family handles it; the line names the supported ones.
    """
    architectures = tuple(getattr(hf_config, "architectures", None) or ())
    model_type = getattr(hf_config, "model_type", None)
    for adapter in _FAMILIES.values():
        if adapter.architectures.intersection(architectures):
            return adapter
        if not architectures and model_type in adapter.model_types:
            return adapter
    got = ", ".join(architectures) or f"model_type {model_type!r}"
    raise VidSpecError(f"unsupported model family: {got}; supported: {', '.join(_FAMILIES)}")


def check_pair(target_hf: Any, draft_hf: Any) -> FamilyAdapter:
    """Return the common adapter of a pair, or refuse a draft that cannot draft for the target.

    Raises:
        VidSpecError: One line: an unsupported family, two different ones, or every property in which the two differ.
    """
    target, draft = adapter_for(target_hf), adapter_for(draft_hf)
    if target.name != draft.name:
        raise VidSpecError(
            f"draft and target are of different families: the target is {target.name}, the draft {draft.name}; "
            f"use a smaller {target.name} model as the draft"
        )
    problems = target.check_pair(target_hf, draft_hf)
    if problems:
        raise VidSpecError(f"the draft does not fit the target ({target.name}): " + "; ".join(problems))
    return target


def check_ranks(draft_hf: Any, num_ranks: int) -> None:
    """Refuse a draft whose heads the tensor-parallel ranks cannot share. It runs on as many ranks as the target.

    Raises:
        VidSpecError: One line naming the sizes that would do.
    """
    text, vision = draft_hf.get_text_config(), draft_hf.vision_config
    heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
    vision_heads = getattr(vision, "num_heads", None) or vision.num_attention_heads

    def is_even(size: int) -> bool:
        # vLLM gives several ranks a copy of one KV head where there are fewer heads than ranks.
        return not (heads % size or vision_heads % size or max(kv_heads, size) % min(kv_heads, size))

    if is_even(num_ranks):
        return
    whose, count = ("vision tower", vision_heads) if vision_heads % num_ranks else ("language model", heads)
    if whose == "language model" and heads % num_ranks == 0:
        whose, count = "language model (keys and values)", kv_heads
    sizes = ", ".join(str(size) for size in range(1, heads + 1) if is_even(size))
    raise VidSpecError(
        f"the draft's {whose} has {count} heads, which {num_ranks} tensor-parallel ranks cannot share evenly; "
        f"--tensor-parallel-size {sizes} would do"
    )
