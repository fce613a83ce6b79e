"""`vidspec bench scaling`."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from vidspec_tools.cli import running
from vidspec_tools.cli.parallel import INFLATE, DraftDevice
from vidspec_tools.cli.speed import BenchDraft, Drafting, Pruner, Scorer, Tokens
from vllm_vidspec.cli import options


def scaling(
    family: options.Families = "qwen2.5-vl",
    axis: Annotated[
        str, typer.Option(help="What is varied: video_tokens, batch_size, num_speculative_tokens or prune_ratio.")
    ] = "batch_size",
    values: Annotated[str | None, typer.Option(help="Its values, comma-separated. Default: the axis' own.")] = None,
    draft: BenchDraft = "draft",
    inflate: Annotated[float, typer.Option(help=INFLATE)] = 0.0,
    pruner: Pruner = "specvlm",
    prune_ratio: options.PruneRatio = 0.9,
    drafting: Drafting = "chain",
    scorer: Scorer = "strict",
    parallel: Annotated[bool, typer.Option("--parallel", help="A drafter in a process of its own.")] = False,
    num_speculative_tokens: Tokens = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that are handed in at once.")] = 1,
    video_tokens: Annotated[int, typer.Option(min=1, help="Of a request: 64, 128 or a multiple of 256.")] = 256,
    max_tokens: options.MaxTokensOfTwo = 64,
    rounds: options.Rounds = 5,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    draft_device: DraftDevice = "cpu",
    resume: Annotated[
        str | None, typer.Option(metavar="PATH", help="A JSONL file of finished points, which are not measured again.")
    ] = None,
    knob: options.Knobs = None,
    csv_path: options.Csv = None,
    plot_path: Annotated[
        str | None, typer.Option("--plot", metavar="PATH", help="Draw speedup and length over the axis: .png or .svg.")
    ] = None,
    json_path: options.Json = None,
) -> None:
    """Measure speed and acceptance over one axis, in turns with vanilla vLLM, a pair of engines a value.

    Longer videos are several held-out videos one after another, which the bundled models were not trained on: what they
    cost is meant, not how well they are described. tokens_per_s is of a round's decode, from its first token to its
    last. With --resume a stopped run goes on where it was; points of other code or another machine are measured anew.
    Exit status 1 if a value fails, as one that memory does not hold.
    """
    _run(locals())


def _run(given: Mapping[str, Any]) -> None:
    """Do what the options say."""
    from vidspec_tools import scaling_views
    from vidspec_tools.bench import scaling as bench

    chosen = bench.AXES.get(given["axis"], ())
    what = options.pick(
        bench.ScalingRace,
        given,
        families=tuple(options.values("--family", given["family"], str)),
        inflate=(given["inflate"],),
        values=chosen if given["values"] is None else tuple(options.values("--values", given["values"], float)),
        knobs=options.knobs(given["knob"]),
    )
    running.measure_all(bench, scaling_views, what, given)
