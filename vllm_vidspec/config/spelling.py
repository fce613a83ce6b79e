"""The keys that a user may write, and errors in the user's own words; plain Python."""

from collections.abc import Sequence

from pydantic import ValidationError

from vllm_vidspec.config.fields import Fields, ParallelKnobs
from vllm_vidspec.errors import VidSpecError, nearest, quoted

# Keys of vLLM's own speculative config that pass through unchanged.
PASS_THROUGH_KEYS = frozenset({"quantization", "kv_cache_dtype", "revision", "code_revision", "draft_load_config"})
_NESTED = tuple(f"parallel.{name}" for name in ParallelKnobs.model_fields)
KNOWN_KEYS = (*Fields.model_fields, *sorted(PASS_THROUGH_KEYS))
# What a field's pattern asks for.
FORMS = {
    "parallel.device": "cpu or cuda:N, such as cuda:1",
    "parallel.cpu_cores": "numbers and ranges, such as 2-5,8",
}

MAX_MESSAGE = 500  # characters of one part of an error, a path included
_MAX_KEY, _MAX_VALUE, _MAX_PARTS = 60, 120, 6


def refusal(problems: Sequence[str]) -> VidSpecError:
    """Return what is wrong as one line; of very many problems the first."""
    more = [f"and {len(problems) - _MAX_PARTS} more"] if len(problems) > _MAX_PARTS else []
    return VidSpecError(f"speculative config: {'; '.join([*problems[:_MAX_PARTS], *more])}")


def explain(error: ValidationError) -> list[str]:
    """Return what a validation error says of each field, unknown ones first."""
    parts = []
    for item in sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden"):
        where, value = list(map(str, item["loc"])), item["input"]
        if where[:1] != ["parallel"]:  # whoever reads it need not know which of a union's types is meant
            where[1:] = filter(str.isalnum, where[1:])
        path = ".".join(where)
        message = item["msg"].removeprefix("Value error, ")[:MAX_MESSAGE]
        got = "" if item["type"] in ("missing", "value_error") else f", got {quoted(value, _MAX_VALUE)}"
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown key {quoted(path)}{nearest(path[:_MAX_KEY], _NESTED if where[1:] else KNOWN_KEYS)}")
            continue
        if item["type"] == "string_pattern_mismatch":
            message = f"expected {FORMS[path]}"
        elif path == "parallel":
            is_device = isinstance(value, str) and value.isprintable() and len(value) <= _MAX_KEY
            message = f'expected an object, such as {{"device": "{value if is_device else "cuda:1"}"}}'
        parts.append(f"{path}: {message}{got}" if path else message)
    return parts
