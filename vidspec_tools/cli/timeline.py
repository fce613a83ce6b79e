"""`vidspec bench timeline`."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from vidspec_tools.cli.parallel import INFLATE, DraftDevice, Pruner, Tokens
from vllm_vidspec.cli import options, running


def timeline(
    family: options.Family = "qwen2.5-vl",
    inflate: Annotated[float, typer.Option(help=INFLATE)] = 0.0,
    modes: Annotated[str, typer.Option(help="Of sequential, parallel: which to draw, from above.")] = (
        "sequential,parallel"
    ),
    pruner: Pruner = "uv",
    prune_ratio: options.PruneRatio = 0.9,
    num_speculative_tokens: Tokens = None,
    requests: Annotated[int, typer.Option(min=1, help="Held-out videos, asked for one by one.")] = 2,
    max_tokens: options.MaxTokensOfTwo = 32,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    draft_device: DraftDevice = "cpu",
    knob: options.Knobs = None,
    out: Annotated[str, typer.Option(metavar="PATH", help="The picture: a .png or .svg file.")] = "timeline.png",
    trace_path: Annotated[
        str | None, typer.Option("--trace", metavar="PATH", help="Write a Chrome trace (JSON), too.")
    ] = None,
    json_path: options.Json = None,
) -> None:
    """Draw what target and drafter do over time, drafting sequentially and in parallel, on the same requests.

    The engines, the cores and the layers that --inflate appends are those of `vidspec bench parallel`. A Chrome trace
    opens in chrome://tracing or ui.perfetto.dev.
    """
    _run(locals())


def _run(given: Mapping[str, Any]) -> None:
    """Do what the options say."""
    from rich.console import Console

    from vidspec_tools import timeline_views
    from vidspec_tools.bench import timeline as bench
    from vllm_vidspec.tools import progress

    race = options.pick(
        bench.WatchedRace,
        given,
        families=(given["family"],),
        inflate=(given["inflate"],),
        modes=tuple(options.values("--modes", given["modes"], str)),
        rounds=1,
        knobs=options.knobs(given["knob"]),
    )
    bench.check(race)
    timeline_views.check_outputs(given["out"], given["trace_path"], given["json_path"])
    result = running.with_bars(bench.run, race, progress.View)
    running.write_json(given["json_path"], result)
    timeline_views.draw(result, given["out"])
    if given["trace_path"] is not None:
        timeline_views.write_trace(given["trace_path"], result)
    if given["json_path"] != "-":
        Console().print(timeline_views.table(result))
        Console().print(f"wrote {given['out']}", highlight=False)
