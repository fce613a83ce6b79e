"""`vidspec bench`: acceptance and speed."""

import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from vllm_vidspec.cli import options
from vllm_vidspec.cli.running import console, with_bars, write_json


def measure(
    bench: Any, what: Any, given: Mapping[str, Any], tables: Callable[..., Any], draw: Callable[..., None] | None = None
) -> None:
    """Check and run a benchmark, write its rows where options say, and show them; exit status 1 if a part failed."""
    from vllm_vidspec.tools import progress
    from vllm_vidspec.tools.user_files import check_output

    bench.check(what)
    plot_path, json_path = given.get("plot_path"), given["json_path"]
    if json_path not in (None, "-"):
        check_output(json_path)
    if plot_path is not None:
        from vllm_vidspec.tools.plots import check_plot

        check_plot(plot_path, "--plot")
    result = with_bars(bench.run, what, progress.View)
    write_json(json_path, result)
    rows, failures = result["rows"], result.get("failures", [])
    if plot_path is not None and rows and draw is not None:
        draw(rows, plot_path)
    if json_path != "-" and rows:
        for table in tables(rows):
            console().print(table)
    for failure in failures:
        words = " ".join(str(value) for name, value in failure.items() if name != "reason" and value is not None)
        print(f"vidspec: {words}: {failure['reason']}", file=sys.stderr)
    if failures:
        raise typer.Exit(1)


def acceptance(
    family: options.Families = "qwen2.5-vl",
    draft: Annotated[
        str, options.sweep("draft, far (wrong more often), target (self-speculation) or a path.")
    ] = "draft",
    pruner: options.Values = "specvlm",
    prune_ratio: options.Values = "0.9",
    drafting: Annotated[
        str, options.sweep("Shape of the draft: chain, tree-static, tree-adaptive.", "--drafting", "--draft-shape")
    ] = "chain",
    num_speculative_tokens: Annotated[
        str | None, options.sweep("Default: 5 for chains, 25 and 64 for the two trees.")
    ] = None,
    scorer: Annotated[str, options.sweep("strict.")] = "strict",
    draft_noise: Annotated[str, options.sweep("shared, independent, greedy.")] = "shared",
    draft_positions: Annotated[str, options.sweep("original, compacted.")] = "original",
    temperature: options.Values = "0",
    top_p: options.Values = "1",
    top_k: options.Values = "0",
    min_p: options.Values = "0",
    presence_penalty: options.Values = "0",
    frequency_penalty: options.Values = "0",
    repetition_penalty: options.Values = "1",
    seed: options.Seed = 0,
    requests: Annotated[int, typer.Option(min=1, help="Held-out videos, one request each.")] = 8,
    max_tokens: options.MaxTokens = 256,
    batch_size: options.BatchSize = 8,
    target: options.BenchTarget = None,
    knob: options.Knobs = None,
    plot_path: Annotated[str | None, options.plot("Draw acceptance length by prune ratio, or by shape")] = None,
    json_path: options.Json = None,
) -> None:
    """Measure acceptance, identity with vanilla vLLM, and the draft's KV size on held-out videos.

    Every combination of the options is a row, and an engine of its own. A row's decode_s is the wall time of one
    LLM.generate call over all its requests, vision and prefill included, after a warm-up request. Exit status 1 if a
    configuration fails.
    """
    given = locals()
    from vllm_vidspec.tools.bench import acceptance as bench
    from vllm_vidspec.tools.bench import views

    texts = ("family", "draft", "pruner", "drafting", "scorer", "draft_noise", "draft_positions")
    kinds = dict.fromkeys(texts, str) | {"num_speculative_tokens": int, "top_k": int}
    axes = {
        name: [None]
        if given[name] is None
        else options.values("--" + name.replace("_", "-"), given[name], kinds.get(name, float))
        for name in bench.AXES
    }
    what = options.pick(bench.Sweep, given, axes=axes, knobs=options.knobs(knob))
    if plot_path is not None:
        views.check_axes(plot_path, axes)
    measure(bench, what, given, views.acceptance_tables, views.draw_acceptance)


def speed(
    family: options.Families = "qwen2.5-vl",
    target: options.BenchTarget = None,
    draft: options.BenchDraft = "draft",
    pruner: Annotated[str, typer.Option(help="Which tokens the draft sees.")] = "specvlm",
    prune_ratio: options.PruneRatio = 0.9,
    drafting: Annotated[str, typer.Option(help="The draft's shape: chain, tree-static, tree-adaptive.")] = "chain",
    scorer: Annotated[str, typer.Option(help="strict, loose, fly, fly-entropy.")] = "strict",
    parallel: Annotated[bool, typer.Option("--parallel", help="A drafter in a process of its own.")] = False,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=1, help="Default: 5 for chains, 25 and 64 for the two trees.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Held-out videos of a round, asked for one by one.")] = 4,
    max_tokens: options.MaxTokensOfTwo = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each has videos of its own.")] = 5,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    draft_device: options.DraftDevice = "cpu",
    knob: options.Knobs = None,
    json_path: options.Json = None,
) -> None:
    """Measure one setting's speed interleaved with vanilla vLLM, and what of it drafting takes.

    tokens_per_s and inter_token_ms are of a request's decode, ttft_s from handing it in; medians over rounds, with
    their 20th and 80th percentiles. A step emits several tokens at once: t_step_ms is the median time between such
    bursts, t_step_ms_p99 its 99th percentile. Of a parallel drafter, late_frac is the share of decode steps whose
    stream was too short, stream_length the tokens from one rejection to the next. What drafting takes of a request is a
    mean, from the engine's counters; the rest is the target's and the host's.
    """
    given = locals()
    from vllm_vidspec.tools.bench import speed as bench
    from vllm_vidspec.tools.bench import views

    families = tuple(options.values("--family", family, str))
    what = options.pick(bench.Benchmark, given, families=families, knobs=options.knobs(knob))
    measure(bench, what, given, views.speed_tables)
