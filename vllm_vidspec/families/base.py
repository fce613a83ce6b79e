"""FamilyAdapter: what the engine must know about a model family. Reads config attributes only, no vLLM, no weights."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm_vidspec.pruning import TokenGrid

_MAX_SHOWN_CHARS = 60


class Field(NamedTuple):
    """One property that a target and its draft must share; one that neither config has is equal."""

    label: str
    paths: tuple[str, ...]  # dotted attributes, of which the first that is present counts: versions name differently
    default: Any = None


def token_ids(*names: str) -> tuple[Field, ...]:
    """Return the ids of special tokens, such as "image" or "vision_start", which older configs call indices."""
    return tuple(
        Field(f"{name.replace('_', ' ')} token id", (f"{name}_token_id", f"{name}_token_index")) for name in names
    )


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
    """What the engine must know about one model family, which users call `name`.

    A family is a module of this package with its adapters in `ADAPTERS`: nothing else names it. An entry of
    `config.architectures` says whose a config is; `model_type` decides only where it names no architecture. `shared` is
    what a target and its draft must have in common; the rest a family says only where it differs. Which tokens of a
    prompt are an item's, and where they are, vLLM tells of every model.
    """

    name: str
    architectures: frozenset[str]
    model_types: frozenset[str]
    shared: tuple[Field, ...]
    # Whether embeddings go into a prompt by vLLM's own way, which waits for the device; else we put them there.
    embeds_by_itself = False
    # Where a config has the heads of the vision tower, and the decoder layers that it feeds (deepstack).
    vision_heads = Field("vision heads", ("vision_config.num_heads", "vision_config.num_attention_heads"))
    deepstack = Field("deepstack layers", ("vision_config.deepstack_visual_indexes",), default=())

    def num_media_levels(self, hf_config: Any) -> int:
        """Return how many embeddings the tower makes of a visual token: its input's, and those of decoder layers."""
        return 1 + len(read_field(hf_config, self.deepstack))

    @abstractmethod
    def item_grid(self, modality: str, data: Mapping[str, Any], num_tokens: int, hf_config: Any) -> TokenGrid:
        """Return how the embedding tokens of one multimodal item ("video" or "image") are laid out; never raise.

        `data` are the item's processor outputs, e.g. `video_grid_thw` [3], and may lack any key, `num_tokens` its
        tokens as counted in the prompt, `hf_config` is the draft's, whose vision geometry `check_pair` holds equal to
        the target's. Where there is no grid of exactly so many tokens, it is one row of them (`flat_grid`).
        """

    def frames(self, modality: str, data: Mapping[str, Any], hf_config: Any) -> TokenGrid | None:
        """Return the grid of a video, before any `--video-pruning-rate`, if the tower can encode it a few frames at a
        time, as its attention stays within a frame, and pixels are laid out by the grid; None for any other item.
        """
        return None

    def some_frames(self, data: Mapping[str, Any], frames: range) -> dict[str, Any]:
        """Return the processor outputs of a video that differ for some of its frames: the tower makes the embeddings of
        these, in order, and the grid's trailing tokens again.
        """
        raise NotImplementedError

    def whole_video(self, data: Mapping[str, Any], hf_config: Any) -> tuple[TokenGrid, float] | None:
        """Return the grid of a video before `--video-pruning-rate`, and the rope positions from a frame to the next;
        None where the draft cannot follow a target that prunes it, or the data do not say.
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
