"""GenericAdapter: any other model that vLLM shows videos to, pruned by the order of tokens. Reads configs only.

What a config does not tell, vLLM does: `engine/preflight.py` refuses models whose drafts could not be what they are.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_vidspec.families.base import FamilyAdapter, Field, flat_grid
from vllm_vidspec.pruning import TokenGrid

_TOWER = re.compile(r"^(vision|vit|visual|thinker)(_|$)")  # parts of a config that are a vision tower's, or have one
# What decides how pixels become tokens; sizes of the networks do not.
_GEOMETRY = re.compile(
    r"patch_size|patch_merge|merge_size|image_size|num_channels|in_chan|downsample|pool|stride|pinpoints|aspect"
    r"|select_strategy|tokens_per|seq_length|video_length|max_frames"
)
_MARKER = re.compile(r"(?<!bos)(?<!eos)(?<!pad)_token_(id|index)$")


class GenericAdapter(FamilyAdapter):
    """One architecture without an adapter of its own, known by its name. See `FamilyAdapter`.

    No grid is known, so that pruning goes by the order of an item's tokens, and a step encodes a video whole.
    """

    embeds_by_itself = True

    def __init__(self, architecture: str):
        self.name, self.architectures, self.model_types = architecture, frozenset({architecture}), frozenset()

    def item_grid(self, modality: str, data: Mapping[str, Any], num_tokens: int, hf_config: Any) -> TokenGrid:
        """Return one row of tokens. See `FamilyAdapter`."""
        return flat_grid(num_tokens)

    def check_pair(self, target_hf: Any, draft_hf: Any) -> list[str]:
        """Compare markers, and whatever in either config is named as geometry is. See `FamilyAdapter`."""
        paths = dict.fromkeys([*_shared_paths(target_hf), *_shared_paths(draft_hf)])
        self.shared = tuple(Field(path, (path,)) for path in paths)
        return super().check_pair(target_hf, draft_hf)


def has_tower(hf_config: Any) -> bool:
    """Return whether a config has a vision tower."""
    return any(_TOWER.match(name) for name, _ in _parts(hf_config))


def _shared_paths(hf_config: Any) -> Iterator[str]:
    """Yield the dotted paths of what a pair must share."""
    for name, value in _entries(hf_config).items():
        if _MARKER.search(name) or (_GEOMETRY.search(name) and not _entries(value)):
            yield name
    for part, config in _parts(hf_config):
        if _TOWER.match(part):
            yield from (f"{part}.{name}" for name in _entries(config) if _GEOMETRY.search(name))


def _parts(hf_config: Any) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in _entries(hf_config).items() if _entries(value))


def _entries(config: Any) -> Mapping[str, Any]:
    return config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
