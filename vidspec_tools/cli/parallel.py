"""`vidspec bench parallel`."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from vidspec_tools.cli import running
from vllm_vidspec.cli import options
from vllm_vidspec.cli.options import sweep

Pruner = Annotated[str, typer.Option(help="Of the sequential and the parallel mode.")]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        min=1,
        help="Default: 5; in parallel the greatest window, twice the ratio asked for, 5 at least.",
    ),
]
DraftDevice = Annotated[str, typer.Option(help="Where the parallel drafter runs: cpu or cuda:N.")]
INFLATE = "Target time to draft time, reached by zero-output layers appended to target or draft. 0: the pair as it is."


def parallel(
    family: options.Families = "qwen2.5-vl",
    inflate: Annotated[str, sweep(INFLATE)] = "0",
    modes: Annotated[str, typer.Option(help="Of vanilla, sequential, parallel; vanilla always runs.")] = (
        "vanilla,sequential,parallel"
    ),
    pruner: Pruner = "uv",
    prune_ratio: options.PruneRatio = 0.9,
    num_speculative_tokens: Tokens = None,
    requests: options.RoundRequests = 4,
    max_tokens: options.MaxTokensOfTwo = 128,
    rounds: options.Rounds = 5,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    table: Annotated[
        bool, typer.Option("--table", help="Run the baselines of ParallelVLM's Table 1, too, published figures beside.")
    ] = False,
    draft_device: DraftDevice = "cpu",
    knob: options.Knobs = None,
    csv_path: options.Csv = None,
    plot_path: Annotated[
        str | None, typer.Option("--plot", metavar="PATH", help="Draw the speedups: a .png or .svg file.")
    ] = None,
    json_path: options.Json = None,
) -> None:
    """Compare parallel drafting with draft-then-verify and with vanilla vLLM, in turns on the same requests.

    The engines are alive at once, and one generates at a time, request by request; figures are medians over rounds,
    with their 20th and 80th percentiles. The target has one core in every mode, the parallel drafter another one.

    speedup is decode speed, from a request's first token to its last, divided by vanilla's in the same round. ratio is
    vanilla's median step divided by a draft forward, as measured; --inflate says what it is to be, and which layers
    that takes is measured once and kept in ~/.cache/vidspec/inflated. late_frac is the share of decode steps whose
    stream was too short, stream_length the tokens from one rejection to the next. Exit status 1 if a mode fails.
    """
    _run(locals())


def _run(given: Mapping[str, Any]) -> None:
    """Do what the options say."""
    from vidspec_tools import race_views
    from vidspec_tools.bench import parallel as bench

    what = options.pick(
        bench.Race,
        given,
        families=tuple(options.values("--family", given["family"], str)),
        inflate=tuple(options.values("--inflate", given["inflate"], float)),
        modes=tuple(options.values("--modes", given["modes"], str)),
        knobs=options.knobs(given["knob"]),
    )
    running.measure_all(bench, race_views, what, given)
