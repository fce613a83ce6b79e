"""Options that several benchmarks have, and how the text of an option becomes its value."""

import json
from typing import Annotated, Any

import typer

from vllm_vidspec.assets import FAMILIES
from vllm_vidspec.errors import VidSpecError


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
Ratios = Annotated[
    str, sweep("Target time to draft time, reached by no-op layers appended to target or draft. 0: the pair as it is.")
]


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
