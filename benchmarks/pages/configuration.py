"""The keys of docs/configuration.md, by who needs them, from VidSpecConfig."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel

from benchmarks.pages.results import table
from vllm_vidspec import SUPPORTED_VLLM
from vllm_vidspec.config import PASS_THROUGH_KEYS, VidSpecConfig

# A field's `shelf` (in its json_schema_extra; `experts` where it has none) -> the heading of those on it.
SHELVES = {
    "first": "What to set first",
    "sometimes": "What some servers need",
    "experts": "For measurements and experts",
}


def configuration(model: type[BaseModel] = VidSpecConfig) -> str:
    """Return a table of keys for each shelf that has some."""
    parts = []
    for shelf, heading in SHELVES.items():
        line = "`{key}` | {values} | {default} | {meaning}"
        if rows := [row for row in _keys(model) if row["shelf"] == shelf]:
            parts.append(f"## {heading}\n\n" + table("key | values | default | meaning", line, rows, words=4))
    return "\n\n".join(parts)


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[dict[str, str]]:
    """Yield each key of a model, and those of models in it."""
    properties = model.model_json_schema()["properties"]
    flat_names = model.flat_names() if hasattr(model, "flat_names") else {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if inspect.isclass(kind) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
            continue
        yield {
            "key": flat_names.get(name, prefix + name),
            "shelf": properties[name].get("shelf", "experts"),
            "values": _values(properties[name]),
            "default": "required" if field.is_required() else "" if field.default is None else f"`{field.default}`",
            "meaning": " ".join((field.description or "").split()),
        }


def _values(schema: dict[str, Any]) -> str:
    options = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    text = " or ".join(_option(part) for part in options)
    for value in schema.get("instruments", ()):
        text = text.replace(f"`{value}`", f"`{value}` (*instrument*)")
    return text


def _option(part: dict[str, Any]) -> str:
    if "prefixItems" in part:
        return f"[{'; '.join(_option(item) for item in part['prefixItems'])}]"
    if part.get("type") == "array":
        return f"list of {_option(part['items'])}"
    if "enum" in part or "const" in part:
        return ", ".join(f"`{value}`" for value in part.get("enum", [part.get("const")]))
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    return ", ".join([part["type"], *(f"{sign} {part[name]:g}" for name, sign in bounds.items() if name in part)])


SECTIONS: dict[str, Callable[[], str]] = {
    "configuration": configuration,
    "pass-through-keys": lambda: ", ".join(f"`{key}`" for key in sorted(PASS_THROUGH_KEYS)),
    "supported-vllm": lambda: " or ".join(SUPPORTED_VLLM),
}
