"""Options that several commands have, and how the text of an option becomes its value."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import typer

from vllm_vidspec.assets import FAMILIES
from vllm_vidspec.errors import VidSpecError

T = TypeVar("T")


def sweep(words: str, *names: str) -> Any:
    """Return an option that takes several values."""
    return typer.Option(*names, help=f"{words} Comma-separated values sweep.".strip())


def plot(words: str) -> Any:
    return typer.Option("--plot", metavar="PATH", help=f"{words}: a .png or .svg file.")


def values(option: str, text: str, kind: type) -> list[Any]:
    try:
        found = [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        raise VidSpecError(f"{option}: {text!r} is not a list of {kind.__name__} values") from None
    if not found:
        raise VidSpecError(f"{option}: no value given")
    return found


Family = Annotated[str, typer.Option(help=f"Bundled pair: {', '.join(FAMILIES)}.")]
OwnTarget = Annotated[str | None, typer.Option(help="A target of your own in place of the bundled pair.")]
OwnDraft = Annotated[str | None, typer.Option(help="Its draft: a checkpoint, or 'self'.")]
BenchTarget = Annotated[str | None, typer.Option(help="A checkpoint in place of the bundled target.")]
Question = Annotated[str, typer.Option(help="What to ask about the video.")]
PruneRatio = Annotated[float, typer.Option(help="Share of the video tokens that the draft does not see.")]
NumTokens = Annotated[int, typer.Option(help="Draft tokens per verify step.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")]
MaxTokensOfTwo = Annotated[int, typer.Option(min=2, help="Longest answer in tokens.")]
EngineArgs = Annotated[
    str, typer.Option(metavar="JSON", help="More arguments of vllm.LLM, as an object; bundled pairs' dtype is float32.")
]
Json = Annotated[
    str | None,
    typer.Option("--json", metavar="PATH", help="Write the result as JSON to a file, or '-' for standard output."),
]
Video = Annotated[str | None, typer.Argument(help="A video file. Default: the bundled one.")]
Seed = Annotated[int, typer.Option(help="Request i samples with seed + i.")]
Values = Annotated[str, sweep("")]
Families = Annotated[str, sweep(f"{', '.join(FAMILIES)}.")]
Temperature = Annotated[float, typer.Option(help="Of all requests.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Requests that run at once (max_num_seqs).")]
Knobs = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=JSON", help="Any other knob of the speculative config, for all rows; repeat."),
]
BenchDraft = Annotated[str, typer.Option(help="draft, target (itself), another role of the bundled pair, or a path.")]
DraftDevice = Annotated[str, typer.Option(help="Where the parallel drafter runs: cpu or cuda:N.")]


def pick(kind: type[T], given: Mapping[str, Any], **more: Any) -> T:
    """Return a dataclass whose fields are the options of the same name, and `more`."""
    names = [field.name for field in dataclasses.fields(kind) if field.name in given]  # type: ignore[arg-type]
    return kind(**{name: given[name] for name in names} | more)


def engine_args(text: str) -> dict[str, Any]:
    """Parse --engine-args, a JSON object."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise VidSpecError(f"--engine-args: {text!r} is not a JSON object")
    return found


def knobs(texts: list[str] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts or []:
        name, _, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not name or not value:
            raise VidSpecError(f"--knob: {text!r} is not of the form NAME=JSON")
        if name in found:
            raise VidSpecError(f"--knob {name}: given twice")
        try:
            found[name] = json.loads(value)
        except ValueError:
            raise VidSpecError(f"--knob {name}: {value!r} is no JSON value (a text needs quotes)") from None
    return found
