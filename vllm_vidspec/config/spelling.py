"""How a field may be spelled (flat, in its group, by an alias), and errors in the user's own spelling; plain Python."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from vllm_vidspec.config.fields import Fields, Group, ParallelKnobs, PoolKnobs, PruneKnobs, ScoreKnobs, TreeKnobs
from vllm_vidspec.errors import VidSpecError, nearest, quoted

# Keys of vLLM's own speculative config that pass through unchanged.
PASS_THROUGH_KEYS = frozenset({"quantization", "kv_cache_dtype", "revision", "code_revision", "draft_load_config"})

GROUPS: dict[str, type[Group]] = {
    "prune": PruneKnobs,
    "tree": TreeKnobs,
    "score": ScoreKnobs,
    "pool": PoolKnobs,
    "parallel": ParallelKnobs,
}
_USUAL = {"prune": "pruner", "score": "scorer", "parallel": "device"}  # of a group, what one word most likely means
# What a field's pattern asks for.
FORMS = {
    "parallel_device": "cpu or cuda:N, such as cuda:1",
    "parallel_cpu_cores": "numbers and ranges, such as 2-5,8",
}
_ALIASES = {"draft": "draft_shape", "drafting": "draft_shape"}
# The group of each field that is in one, and its name there, by its flat name.
PLACES = {flat: (group, name) for group, knobs in GROUPS.items() for name, flat in knobs.flat_names().items()}

_FLAT_NAMES = (*(name for name in Fields.model_fields if name not in GROUPS), *PLACES)
KNOWN_KEYS = (*_FLAT_NAMES, *map(".".join, PLACES.values()), *GROUPS, *sorted(PASS_THROUGH_KEYS))

MAX_MESSAGE = 500  # characters of one part of an error, a path included
_MAX_KEY, _MAX_VALUE, _MAX_PARTS = 60, 120, 6


def flatten(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields by their flat names, however they are spelled; a VidSpecError for an unknown one, or twice one."""
    flat, problems = read(given)
    if problems:
        raise refusal(problems)
    return flat


def read(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields by their flat names, and what is wrong with how they are spelled, or with a value alone."""
    flat: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    unknown, problems = [], []
    for spelling, name, value in _spellings(given):
        if spelling in GROUPS:
            such = f', such as {{"{_USUAL[spelling]}": "{value}"}}' if _is_usual(spelling, value) else ""
            problems.append(f"{spelling}: expected an object of fields{such}, got {quoted(value)}")
        elif not name:
            unknown.append(f"{quoted(spelling)}{nearest(spelling[:_MAX_KEY], KNOWN_KEYS)}")
        elif name in flat:
            problems.append(f"{spelled[name]} and {spelling} are aliases; set only one")
        else:
            flat[name], spelled[name] = value, spelling
    return flat, [f"unknown key {_joined(unknown)}"] * bool(unknown) + problems


def _is_usual(group: str, value: Any) -> bool:
    return group in _USUAL and isinstance(value, str) and value.isprintable() and len(value) <= _MAX_KEY


def grouped(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same fields with each in its group."""
    groups: dict[str, Any] = {}
    for flat, value in flatten(given).items():
        _refuse_senseless(flat, value)
        group, name = PLACES.get(flat, ("", flat))
        (groups.setdefault(group, {}) if group else groups)[name] = value
    return groups


def refusal(problems: Sequence[str]) -> VidSpecError:
    """Return what is wrong as one line."""
    return VidSpecError(f"speculative config: {_joined(problems)}")


def explain(error: ValidationError, given: Mapping[str, Any]) -> list[str]:
    """Return what a validation error says, with the names that the user wrote."""
    spelled = {name: spelling for spelling, name, _ in _spellings(given)}
    parts = []
    for item in error.errors():
        where = [str(part) for part in item["loc"]]
        if where and where[0] in GROUPS:  # a rule between fields of a group names them itself
            where = [GROUPS[where[0]].flat_names()[where[1]], *where[2:]] if len(where) > 1 else []
        path = ".".join([spelled.get(where[0], where[0]), *where[1:]]) if where else ""
        message = item["msg"].removeprefix("Value error, ")[:MAX_MESSAGE]
        if item["type"] == "string_pattern_mismatch":
            message = f"expected {FORMS[where[0]]}"
        got = "" if item["type"] in ("missing", "value_error") else f", got {quoted(item['input'], _MAX_VALUE)}"
        parts.append(f"{path}: {message}{got}" if path else message)
    return parts


def _spellings(given: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield each field's spelling (`tree.depth_max` in a group, the group alone where its value is no object), its flat
    name ("" if it has none) and its value.
    """
    for key, value in given.items():
        if key not in GROUPS:
            name = _ALIASES.get(key, key)
            yield key, name if name in _FLAT_NAMES else "", value
            continue
        if isinstance(value, Group):
            value = value.model_dump(exclude_unset=True)
        if not isinstance(value, Mapping):
            yield key, "", value
            continue
        for own, inner in value.items():
            own = own.replace("-", "_")
            yield f"{key}.{own}", GROUPS[key].flat_names().get(own, ""), inner


def _refuse_senseless(name: str, value: Any) -> None:
    """Refuse NaN and integers beyond 64 bits, however deep in a value."""
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, list | tuple):
            left += found
        elif (isinstance(found, int) and abs(found) >= 1 << 63) or found != found:
            raise ValueError(f"{name}: expected a finite 64-bit number, got {quoted(found)}")


def _joined(parts: Sequence[str]) -> str:
    """Return the parts of an error in one line; of very many the first."""
    more = [f"and {len(parts) - _MAX_PARTS} more"] if len(parts) > _MAX_PARTS else []
    return "; ".join([*parts[:_MAX_PARTS], *more])
