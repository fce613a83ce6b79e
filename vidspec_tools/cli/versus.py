"""The benchmarks interleaved with vanilla: `vidspec bench parallel`, `timeline`, `paper`, `speed` and `scaling`."""

from typing import Annotated

import typer

from vidspec_tools.cli import options, running
from vllm_vidspec.cli import options as shared
from vllm_vidspec.cli.running import with_bars, write_json


def parallel(
    family: options.Families = "qwen2.5-vl",
    inflate: options.Ratios = "0",
    modes: Annotated[str, typer.Option(help="Of vanilla, sequential, parallel; vanilla always runs.")] = (
        "vanilla,sequential,parallel"
    ),
    pruner: options.Pruner = "uv",
    prune_ratio: shared.PruneRatio = 0.9,
    num_speculative_tokens: options.Window = None,
    requests: options.RoundRequests = 4,
    max_tokens: shared.MaxTokensOfTwo = 128,
    rounds: options.Rounds = 5,
    temperature: options.Temperature = 0.0,
    seed: shared.Seed = 0,
    table: Annotated[
        bool, typer.Option("--table", help="Run the baselines of ParallelVLM's Table 1, too, published figures beside.")
    ] = False,
    draft_device: options.DraftDevice = "cpu",
    knob: options.Knobs = None,
    csv_path: options.Csv = None,
    plot_path: Annotated[str | None, options.plot("Draw the speedups")] = None,
    json_path: shared.Json = None,
) -> None:
    """Compare parallel drafting with sequential drafting and with vanilla vLLM, interleaved on the same requests.

    The engines are alive at once, and one generates at a time, request by request; figures are medians over rounds,
    with their 20th and 80th percentiles. The target has one core in every mode, the parallel drafter another one.

    speedup is decode speed, from a request's first token to its last, divided by vanilla's in the same round. ratio is
    vanilla's median step divided by a draft forward, as measured; --inflate says what it is to be, and which layers
    that takes is measured once and kept in ~/.cache/vidspec/inflated. late_frac is the share of decode steps whose
    stream was too short, stream_length the tokens from one rejection to the next. Exit status 1 if a mode fails.
    """
    given = locals()
    from vidspec_tools.bench import parallel as bench
    from vidspec_tools.views import versus

    what = shared.pick(
        bench.Benchmark,
        given,
        families=tuple(shared.values("--family", family, str)),
        inflate=tuple(shared.values("--inflate", inflate, float)),
        modes=tuple(shared.values("--modes", modes, str)),
        knobs=options.knobs(knob),
    )
    running.measure(bench, versus.PARALLEL_VIEW, what, given)


def timeline(
    family: shared.Family = "qwen2.5-vl",
    inflate: options.Inflate = 0.0,
    modes: Annotated[str, typer.Option(help="Of sequential, parallel: which to draw, from above.")] = (
        "sequential,parallel"
    ),
    pruner: options.Pruner = "uv",
    prune_ratio: shared.PruneRatio = 0.9,
    num_speculative_tokens: options.Window = None,
    requests: Annotated[int, typer.Option(min=1, help="Held-out videos, asked for one by one.")] = 2,
    max_tokens: shared.MaxTokensOfTwo = 32,
    temperature: options.Temperature = 0.0,
    seed: shared.Seed = 0,
    draft_device: options.DraftDevice = "cpu",
    knob: options.Knobs = None,
    out: Annotated[str, typer.Option(metavar="PATH", help="The picture: a .png or .svg file.")] = "timeline.png",
    trace_path: Annotated[
        str | None, typer.Option("--trace", metavar="PATH", help="Write a Chrome trace (JSON), too.")
    ] = None,
    json_path: shared.Json = None,
) -> None:
    """Draw what target and drafter do over time, drafting sequentially and in parallel, on the same requests.

    The engines, the cores and the layers that --inflate appends are those of `vidspec bench parallel`. A Chrome trace
    opens in chrome://tracing or ui.perfetto.dev.
    """
    given = locals()
    from rich.console import Console

    from vidspec_tools.bench import timeline as bench
    from vidspec_tools.views import timeline as view
    from vidspec_tools.views.progress import EnginesView

    what = shared.pick(
        bench.TimelineBenchmark,
        given,
        families=(family,),
        inflate=(inflate,),
        modes=tuple(shared.values("--modes", modes, str)),
        rounds=1,
        knobs=options.knobs(knob),
    )
    bench.check(what)
    view.check_outputs(out, trace_path, json_path)
    result = with_bars(bench.run, what, EnginesView)
    write_json(json_path, result)
    view.draw(result, out)
    if trace_path is not None:
        view.write_trace(trace_path, result)
    if json_path != "-":
        Console().print(view.table(result))
        Console().print(f"wrote {given['out']}", highlight=False)


def paper(
    family: options.Families = "qwen2.5-vl",
    draft: Annotated[
        str, typer.Option(help="draft, target (itself), another role of the bundled pair, or a path. Not of self-SD.")
    ] = "draft",
    methods: Annotated[str, options.sweep("Rows of the table; autoregressive always runs. Default: all.")] = "all",
    inflate: options.Inflate = 0.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="3 rounds of 2 requests of 64 tokens, where nothing else is given.")
    ] = False,
    requests: Annotated[int | None, typer.Option(min=1, help="Held-out videos of a round. Default: 4.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Longest answer in tokens. Default: 128.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds; each has its own videos. Default: 5.")] = None,
    temperature: options.Temperature = 0.0,
    seed: shared.Seed = 0,
    draft_device: options.DraftDevice = "cpu",
    knob: options.Knobs = None,
    csv_path: options.Csv = None,
    plot_path: Annotated[str | None, options.plot("Draw lengths and speedups, published beside")] = None,
    json_path: shared.Json = None,
) -> None:
    """Run the methods of the papers interleaved with vanilla vLLM, what they publish beside.

    The rows: autoregressive, SD-chain, SD-tree, SD-Rand, SpecVLM, SAGE, ParallelVLM, LVSpec, FLy, OnSD, self-SD, and
    stock draft_model, which is vLLM's own way to draft without us. Two methods and vanilla are alive at once and answer
    the same requests alternately, one request at a time; figures are medians over rounds, with their 20th and 80th
    percentiles.

    speedup is decode speed, from a request's first token to its last, divided by vanilla's in the same round; forwards
    are the target's after the prefill, per answer; acceptance lengths hold the target's own token, published ones too.
    Exit status 1 if a method fails.
    """
    given = locals()
    from vidspec_tools.bench import paper as bench
    from vidspec_tools.views import versus

    usual = bench.QUICK if quick else bench.USUAL
    what = shared.pick(
        bench.PaperBenchmark,
        given,
        families=tuple(shared.values("--family", family, str)),
        inflate=(inflate,),
        methods=bench.ALL if methods == "all" else tuple(shared.values("--methods", methods, str)),
        knobs=options.knobs(knob),
        **{name: default if given[name] is None else given[name] for name, default in usual.items()},
    )
    running.measure(bench, versus.PAPER_VIEW, what, given)


def speed(
    family: options.Families = "qwen2.5-vl",
    draft: options.BenchDraft = "draft",
    inflate: options.Ratios = "0",
    pruner: options.Pruner = "specvlm",
    prune_ratio: shared.PruneRatio = 0.9,
    drafting: options.Drafting = "chain",
    scorer: options.Scorer = "strict",
    parallel: options.Parallel = False,
    num_speculative_tokens: options.ShapeTokens = None,
    requests: options.RoundRequests = 4,
    max_tokens: shared.MaxTokensOfTwo = 128,
    rounds: options.Rounds = 5,
    temperature: options.Temperature = 0.0,
    seed: shared.Seed = 0,
    draft_device: options.DraftDevice = "cpu",
    knob: options.Knobs = None,
    csv_path: options.Csv = None,
    plot_path: Annotated[str | None, options.plot("Draw what a request's time is made of")] = None,
    json_path: shared.Json = None,
) -> None:
    """Measure one setting's speed interleaved with vanilla vLLM, and what a request's time is made of.

    tokens_per_s and inter_token_ms are of a request's decode, ttft_s from handing it in; medians over rounds, with
    their 20th and 80th percentiles. A step emits several tokens at once: t_step_ms is the median time between such
    bursts, t_step_ms_p99 its 99th percentile. Phases are means of a request, from the counters and the steps that the
    engine notes; rest is what none of them covers: preprocessing, scheduling, the host.
    """
    given = locals()
    from vidspec_tools.bench import speed as bench
    from vidspec_tools.views import versus

    what = shared.pick(
        bench.SpeedBenchmark,
        given,
        families=tuple(shared.values("--family", family, str)),
        inflate=tuple(shared.values("--inflate", inflate, float)),
        knobs=options.knobs(knob),
    )
    running.measure(bench, versus.SPEED_VIEW, what, given)


def scaling(
    family: options.Families = "qwen2.5-vl",
    axis: Annotated[
        str, typer.Option(help="What is varied: video_tokens, batch_size, num_speculative_tokens or prune_ratio.")
    ] = "batch_size",
    values: Annotated[str | None, typer.Option(help="Its values, comma-separated. Default: the axis' own.")] = None,
    draft: options.BenchDraft = "draft",
    inflate: options.Inflate = 0.0,
    pruner: options.Pruner = "specvlm",
    prune_ratio: shared.PruneRatio = 0.9,
    drafting: options.Drafting = "chain",
    scorer: options.Scorer = "strict",
    parallel: options.Parallel = False,
    num_speculative_tokens: options.ShapeTokens = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that are handed in at once.")] = 1,
    video_tokens: Annotated[int, typer.Option(min=1, help="Of a request: 64, 128 or a multiple of 256.")] = 256,
    max_tokens: shared.MaxTokensOfTwo = 64,
    rounds: options.Rounds = 5,
    temperature: options.Temperature = 0.0,
    seed: shared.Seed = 0,
    draft_device: options.DraftDevice = "cpu",
    resume: Annotated[
        str | None, typer.Option(metavar="PATH", help="A JSONL file of finished points, which are not measured again.")
    ] = None,
    knob: options.Knobs = None,
    csv_path: options.Csv = None,
    plot_path: Annotated[str | None, options.plot("Draw speedup and length over the axis")] = None,
    json_path: shared.Json = None,
) -> None:
    """Measure speed and acceptance over one axis, interleaved with vanilla vLLM, a pair of engines a value.

    Longer videos are several held-out videos one after another, which the bundled models were not trained on: what they
    cost is meant, not how well they are described. tokens_per_s is of a round's decode, from its first token to its
    last. With --resume a stopped run goes on where it was; points of other code or another machine are measured anew.
    Exit status 1 if a value fails, as one that memory does not hold.
    """
    given = locals()
    from vidspec_tools.bench import scaling as bench
    from vidspec_tools.views import versus

    chosen = bench.AXES.get(axis, ())
    what = shared.pick(
        bench.ScalingBenchmark,
        given,
        families=tuple(shared.values("--family", family, str)),
        inflate=(inflate,),
        values=chosen if values is None else tuple(shared.values("--values", values, float)),
        knobs=options.knobs(knob),
    )
    running.measure(bench, versus.SCALING_VIEW, what, given)
