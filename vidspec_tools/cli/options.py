"""Options that several benchmarks have, and how the text of an option becomes its value."""

import json
from typing import Annotated, Any

import typer

from vllm_vidspec.errors import VidSpecError


def sweep(words: str, *names: str) -> Any:
    """Return an option that takes several values."""
    return typer.Option(*names, help=f"{words} Comma-separated values sweep.".strip())


Values = Annotated[str, sweep("")]
Families = Annotated[str, sweep("qwen2.5-vl, llava-onevision.")]
RoundRequests = Annotated[int, typer.Option(min=1, help="Held-out videos of a round, asked for one by one.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds; each has videos of its own.")]
Temperature = Annotated[float, typer.Option(help="Of all requests.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Requests that run at once (max_num_seqs).")]
Knobs = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=JSON", help="Any other knob of the speculative config, for all rows; repeat."),
]
Csv = Annotated[str | None, typer.Option("--csv", metavar="PATH", help="Write the rows as CSV; '#' starts a comment.")]

BenchDraft = Annotated[str, typer.Option(help="draft, target (itself), another role of the bundled pair, or a path.")]
DraftDevice = Annotated[str, typer.Option(help="Where the parallel drafter runs: cpu or cuda:N.")]
Drafting = Annotated[str, typer.Option(help="The draft's shape: chain, tree-static, tree-adaptive.")]
Parallel = Annotated[bool, typer.Option("--parallel", help="A drafter in a process of its own.")]
Pruner = Annotated[str, typer.Option(help="Which tokens the draft sees.")]
Scorer = Annotated[str, typer.Option(help="strict, loose, fly, fly-entropy.")]
ShapeTokens = Annotated[int | None, typer.Option(min=1, help="Default: 5 for chains, 25 and 64 for the two trees.")]
Window = Annotated[
    int | None,
    typer.Option(min=1, help="Default: 5; in parallel the greatest window, twice the ratio asked for, 5 at least."),
]
INFLATE = "Target time to draft time, reached by no-op layers appended to target or draft. 0: the pair as it is."
Inflate = Annotated[float, typer.Option(help=INFLATE)]
Ratios = Annotated[str, sweep(INFLATE)]


def plot(words: str) -> Any:
    """Return the option of a figure."""
    return typer.Option("--plot", metavar="PATH", help=f"{words}: a .png or .svg file.")


def switch(option: str, text: str) -> bool:
    """Parse on or off."""
    words = {"on": True, "off": False}
    if text.strip() not in words:
        raise VidSpecError(f"{option}: {text.strip()!r} is neither on nor off")
    return words[text.strip()]


def knobs(texts: list[str] | None) -> dict[str, Any]:
    """Parse every --knob, of the form NAME=JSON."""
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
