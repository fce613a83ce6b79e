"""The keys of docs/configuration.md, a table for each shelf, from VidSpecConfig."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel

from benchmarks.pages.results import table
from vllm_vidspec import SUPPORTED_VLLM
from vllm_vidspec.config import PASS_THROUGH_KEYS, VidSpecConfig

# Who needs a key: `shelf` in its json_schema_extra, the last where it has none.
SHELVES = ("first", "sometimes", "experts")


def keys(shelf: str, model: type[BaseModel] = VidSpecConfig) -> str:
    """Return the table of a shelf's keys."""
    rows = [row for row in _keys(model) if row["shelf"] == shelf]
    return table("key | values | default | meaning", "`{key}` | {values} | {default} | {meaning}", rows, words=4)


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[dict[str, str]]:
    """Yield each key of a model, its own before inherited ones, and those of models in it."""
    properties = model.model_json_schema()["properties"]
    owners = {
        name: -depth for depth, one in enumerate(model.__mro__[::-1]) for name in vars(one).get("__annotations__", ())
    }
    for name, field in sorted(model.model_fields.items(), key=lambda item: owners[item[0]]):
        kind = field.annotation
        if inspect.isclass(kind) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
            continue
        yield {
            "key": prefix + name,
            "shelf": properties[name].get("shelf", SHELVES[-1]),
            "values": _values(properties[name]),
            "default": "required" if field.is_required() else "" if field.default is None else f"`{field.default}`",
            "meaning": " ".join((field.description or "").split()),
        }


def _values(schema: dict[str, Any]) -> str:
    return " or ".join(_option(part) for part in schema.get("anyOf", [schema]) if part.get("type") != "null")


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
    **{f"keys-{shelf}": functools.partial(keys, shelf) for shelf in SHELVES},
    "pass-through-keys": lambda: ", ".join(f"`{key}`" for key in sorted(PASS_THROUGH_KEYS)),
    "supported-vllm": lambda: " or ".join(SUPPORTED_VLLM),
}
