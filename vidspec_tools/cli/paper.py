"""`vidspec bench paper`."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from vidspec_tools.cli import running
from vidspec_tools.cli.parallel import INFLATE, DraftDevice
from vllm_vidspec.cli import options
from vllm_vidspec.cli.options import sweep


def paper(
    family: options.Families = "qwen2.5-vl",
    draft: Annotated[
        str, typer.Option(help="draft, target (itself), another role of the bundled pair, or a path. Not of self-SD.")
    ] = "draft",
    methods: Annotated[str, sweep("Rows of the table; autoregressive always runs. Default: all.")] = "all",
    inflate: Annotated[float, typer.Option(help=INFLATE)] = 0.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="3 rounds of 2 requests of 64 tokens, where nothing else is given.")
    ] = False,
    requests: Annotated[int | None, typer.Option(min=1, help="Held-out videos of a round. Default: 4.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Longest answer in tokens. Default: 128.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds; each has its own videos. Default: 5.")] = None,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    draft_device: DraftDevice = "cpu",
    knob: options.Knobs = None,
    csv_path: options.Csv = None,
    plot_path: Annotated[
        str | None,
        typer.Option("--plot", metavar="PATH", help="Draw lengths and speedups, published beside: .png or .svg."),
    ] = None,
    json_path: options.Json = None,
) -> None:
    """Run the methods of the papers in turns with vanilla vLLM, what they publish beside.

    The rows: autoregressive, SD-chain, SD-tree, SD-Rand, SpecVLM, SAGE, ParallelVLM, LVSpec, FLy, OnSD, self-SD, and
    stock draft_model, which is vLLM's own way to draft without us. Two methods and vanilla are alive at once and answer
    the same requests in turns, one request at a time; figures are medians over rounds, with their 20th and 80th
    percentiles.

    speedup is decode speed, from a request's first token to its last, divided by vanilla's in the same round; forwards
    are the target's after the prefill, per answer; acceptance lengths hold the target's own token, published ones too.
    Exit status 1 if a method fails.
    """
    _run(locals())


def _run(given: Mapping[str, Any]) -> None:
    """Do what the options say."""
    from vidspec_tools import paper_views
    from vidspec_tools.bench import paper as bench

    usual = bench.QUICK if given["quick"] else bench.USUAL
    what = options.pick(
        bench.PaperRace,
        given,
        families=tuple(options.values("--family", given["family"], str)),
        inflate=(given["inflate"],),
        methods=bench.ALL if given["methods"] == "all" else tuple(options.values("--methods", given["methods"], str)),
        knobs=options.knobs(given["knob"]),
        **{name: default if given[name] is None else given[name] for name, default in usual.items()},
    )
    running.measure_all(bench, paper_views, what, given)
