"""`vidspec bench speed`."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from vidspec_tools.cli import running
from vidspec_tools.cli.parallel import INFLATE, DraftDevice
from vllm_vidspec.cli import options
from vllm_vidspec.cli.options import sweep

BenchDraft = Annotated[str, typer.Option(help="draft, target (itself), another role of the bundled pair, or a path.")]
Drafting = Annotated[str, typer.Option(help="The draft's shape: chain, tree-static, tree-adaptive.")]
Scorer = Annotated[str, typer.Option(help="strict, loose, fly, fly-entropy.")]
Pruner = Annotated[str, typer.Option(help="Which tokens the draft sees.")]
Tokens = Annotated[int | None, typer.Option(min=1, help="Default: 5 for chains, 25 and 64 for the two trees.")]


def speed(
    family: options.Families = "qwen2.5-vl",
    draft: BenchDraft = "draft",
    inflate: Annotated[str, sweep(INFLATE)] = "0",
    pruner: Pruner = "specvlm",
    prune_ratio: options.PruneRatio = 0.9,
    drafting: Drafting = "chain",
    scorer: Scorer = "strict",
    parallel: Annotated[bool, typer.Option("--parallel", help="A drafter in a process of its own.")] = False,
    num_speculative_tokens: Tokens = None,
    requests: options.RoundRequests = 4,
    max_tokens: options.MaxTokensOfTwo = 128,
    rounds: options.Rounds = 5,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    draft_device: DraftDevice = "cpu",
    knob: options.Knobs = None,
    csv_path: options.Csv = None,
    plot_path: Annotated[
        str | None, typer.Option("--plot", metavar="PATH", help="Draw what a request's time is made of: .png or .svg.")
    ] = None,
    json_path: options.Json = None,
) -> None:
    """Measure one setting's speed in turns with vanilla vLLM, and what a request's time is made of.

    tokens_per_s and inter_token_ms are of a request's decode, ttft_s from handing it in; medians over rounds, with
    their 20th and 80th percentiles. A step emits several tokens at once: t_step_ms is the median time between such
    bursts, t_step_ms_p99 its 99th percentile. Phases are means of a request, from the counters and the steps that the
    engine notes; rest is what none of them covers: preprocessing, scheduling, the host.
    """
    _run(locals())


def _run(given: Mapping[str, Any]) -> None:
    """Do what the options say."""
    from vidspec_tools import speed_views
    from vidspec_tools.bench import speed as bench

    what = options.pick(
        bench.SpeedRace,
        given,
        families=tuple(options.values("--family", given["family"], str)),
        inflate=tuple(options.values("--inflate", given["inflate"], float)),
        knobs=options.knobs(given["knob"]),
    )
    running.measure_all(bench, speed_views, what, given)
