"""`vidspec bench`: acceptance, quality, paper and speed."""

import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from vidspec_tools.cli import options
from vllm_vidspec.cli import options as shared
from vllm_vidspec.cli.running import console, with_bars, write_json
from vllm_vidspec.errors import VidSpecError


def measure(
    bench: Any, what: Any, given: Mapping[str, Any], tables: Callable[..., Any], draw: Callable[..., None] | None = None
) -> None:
    """Check and run a benchmark, write its rows where options say, and show them; exit status 1 if a part failed."""
    from vidspec_tools.views import figures
    from vllm_vidspec.tools import progress
    from vllm_vidspec.tools.user_files import check_output

    bench.check(what)
    plot_path, json_path = given.get("plot_path"), given["json_path"]
    if json_path not in (None, "-"):
        check_output(json_path)
    if plot_path is not None:
        figures.check_figure(plot_path, "--plot")
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
    seeded: Annotated[bool, typer.Option("--seeded/--unseeded", help="Whether requests carry a seed.")] = True,
    requests: Annotated[int, typer.Option(min=1, help="Held-out videos, one request each.")] = 8,
    max_tokens: shared.MaxTokens = 256,
    batch_size: options.BatchSize = 8,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Generate max-tokens tokens regardless.")] = False,
    target: shared.BenchTarget = None,
    knob: options.Knobs = None,
    sync_scheduling: Annotated[
        bool, typer.Option("--sync-scheduling", help="Adaptive trees keep their own size; async fills them up to K.")
    ] = False,
    plot_path: Annotated[str | None, options.plot("Draw acceptance length by prune ratio, or by shape")] = None,
    json_path: shared.Json = None,
) -> None:
    """Measure acceptance, identity with vanilla vLLM, and the draft's KV size on held-out videos.

    Every combination of the options is a row, and an engine of its own. A row's decode_s is the wall time of one
    LLM.generate call over all its requests, vision and prefill included, after a warm-up request. Exit status 1 if a
    configuration fails.
    """
    given = locals()
    from vidspec_tools.bench import acceptance as bench
    from vidspec_tools.views import acceptance as view

    texts = ("family", "draft", "pruner", "drafting", "scorer", "draft_noise", "draft_positions")
    kinds = dict.fromkeys(texts, str) | {"num_speculative_tokens": int, "top_k": int}
    axes = {
        name: [None]
        if given[name] is None
        else options.values("--" + name.replace("_", "-"), given[name], kinds.get(name, float))
        for name in bench.AXES
    }
    own_seed = seed if seeded else None
    what = shared.pick(bench.Sweep, given, axes=axes, seed=own_seed, knobs=options.knobs(knob))
    if plot_path is not None:
        view.check_room(plot_path, axes)
    measure(bench, what, given, view.tables, view.draw)


# Option -> the field of `Quality` that holds its values, and what they are.
_SWEPT = {
    "family": ("families", str),
    "temperature": ("temperatures", float),
    "draft_noise": ("draft_noises", str),
    "scorer": ("scorers", str),
    "lambda_loose": ("lambdas", float),
    "relevance_rows": ("relevance_rows", str),
    "fly_entropy": ("fly_entropies", float),
}


def quality(
    family: options.Families = "qwen2.5-vl",
    draft: Annotated[str, typer.Option(help="The pair's draft, or far: the one that is wrong more often.")] = "draft",
    scorer: Annotated[
        str, options.sweep("Beside strict: loose, fly, fly-entropy, random, oracle.")
    ] = "loose,fly,fly-entropy,random,oracle",
    lambda_loose: Annotated[
        str, options.sweep("Share of mismatches that loose and random accept.", "--lambda")
    ] = "0.2,0.5,0.7,0.9",
    position_shift: Annotated[str, options.sweep("loose: off, on.")] = "off,on",
    relevance_rows: Annotated[str, options.sweep("loose: token, prediction.")] = "token",
    fly_entropy: Annotated[str, options.sweep("Threshold of fly and fly-entropy.")] = "0.3",
    temperature: options.Values = "0",
    draft_noise: Annotated[
        str, options.sweep("shared, independent, greedy; at temperature 0 only the first.")
    ] = "shared",
    num_speculative_tokens: shared.NumTokens = 10,
    prune_ratio: shared.PruneRatio = 0.9,
    requests: Annotated[int, typer.Option(min=1, help="Held-out videos, one caption each.")] = 64,
    batch_size: options.BatchSize = 16,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest caption in tokens.")] = 256,
    seed: options.Seed = 0,
    knob: options.Knobs = None,
    plot_path: Annotated[str | None, options.plot("Draw what is kept by acceptance length")] = None,
    json_path: shared.Json = None,
) -> None:
    """Measure what lossy verification keeps of the captions' facts, and the acceptance length that it gains.

    What the held-out videos show is known: a caption's attributes (colours, shapes, motion, order) are right or wrong.
    "kept" is the share that is right, divided by that of the target alone at the same temperature with the same seeds.
    The target alone and the draft alone are measured too, each in an engine of its own; one engine per noise serves
    all scorers.

    loose has every combination of --lambda, --position-shift and --relevance-rows. A name says what differs
    from N 10, no shift and the token's own state: "loose 0.7 N1 shift pred". "not exact" is the share of accepted
    drafts that are not the target's choice, "same" the share of captions that are the target's to the last token.
    "AUC" is how well the measured relevance tells words about the video from fillers: 0.5 is not at all, 1 always.
    """
    given = locals()
    from vidspec_tools.bench import quality as bench
    from vidspec_tools.views import quality as view

    swept = {
        field: tuple(options.values("--" + name.removesuffix("_loose").replace("_", "-"), given[name], kind))
        for name, (field, kind) in _SWEPT.items()
    }
    shifts = options.values("--position-shift", position_shift, str)
    if wrong := [text for text in shifts if text not in ("on", "off")]:
        raise VidSpecError(f"--position-shift: {wrong[0]!r} is neither on nor off")
    swept["position_shifts"] = tuple(text == "on" for text in shifts)
    what = shared.pick(bench.Quality, given, **swept, knobs=options.knobs(knob))
    measure(bench, what, given, view.tables, view.draw)


def paper(
    family: options.Families = "qwen2.5-vl",
    draft: Annotated[
        str, typer.Option(help="draft, target (itself), another role of the bundled pair, or a path. Not of self-SD.")
    ] = "draft",
    methods: Annotated[str, options.sweep("Rows of the table; autoregressive always runs. Default: all.")] = "all",
    inflate: options.Ratios = "0",
    quick: Annotated[
        bool, typer.Option("--quick", help="3 rounds of 2 requests of 64 tokens, where nothing else is given.")
    ] = False,
    requests: Annotated[int | None, typer.Option(min=1, help="Held-out videos of a round. Default: 4.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Longest answer in tokens. Default: 128.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds; each has its own videos. Default: 5.")] = None,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    draft_device: options.DraftDevice = "cpu",
    knob: options.Knobs = None,
    json_path: shared.Json = None,
) -> None:
    """Run the methods of the papers interleaved with vanilla vLLM, what they publish beside.

    The rows: autoregressive, SD-chain, SD-tree, SD-Rand, SpecVLM, SAGE, ParallelVLM, LVSpec, FLy, OnSD, self-SD, and
    stock draft_model, which is vLLM's own way to draft without us. Two methods and vanilla are alive at once and answer
    the same requests alternately, one request at a time; figures are medians over rounds, with their 20th and 80th
    percentiles. The target has one core, the parallel drafter another one.

    speedup is decode speed, from a request's first token to its last, divided by vanilla's in the same round; forwards
    are the target's after the prefill, per answer; acceptance lengths hold the target's own token, published ones too.
    --inflate says what vanilla's step is to be over a draft forward; which layers that takes is measured once and kept
    in ~/.cache/vidspec/inflated. Exit status 1 if a method fails.
    """
    given = locals()
    from vidspec_tools.bench import paper as bench
    from vidspec_tools.views import versus

    usual = bench.QUICK if quick else bench.USUAL
    chosen = {name: default if given[name] is None else given[name] for name, default in usual.items()}
    chosen["methods"] = bench.ALL if methods == "all" else tuple(options.values("--methods", methods, str))
    measure(bench, _beside_vanilla(bench.PaperBenchmark, given, **chosen), given, versus.paper_tables)


def _beside_vanilla(kind: type, given: Mapping[str, Any], **chosen: Any) -> Any:
    """Return the benchmark interleaved with vanilla that the options ask for."""
    return shared.pick(
        kind,
        given,
        families=tuple(options.values("--family", given["family"], str)),
        inflate=tuple(options.values("--inflate", given["inflate"], float)),
        knobs=options.knobs(given["knob"]),
        **chosen,
    )


def speed(
    family: options.Families = "qwen2.5-vl",
    draft: options.BenchDraft = "draft",
    inflate: options.Ratios = "0",
    pruner: Annotated[str, typer.Option(help="Which tokens the draft sees.")] = "specvlm",
    prune_ratio: shared.PruneRatio = 0.9,
    drafting: Annotated[str, typer.Option(help="The draft's shape: chain, tree-static, tree-adaptive.")] = "chain",
    scorer: Annotated[str, typer.Option(help="strict, loose, fly, fly-entropy.")] = "strict",
    parallel: Annotated[bool, typer.Option("--parallel", help="A drafter in a process of its own.")] = False,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=1, help="Default: 5 for chains, 25 and 64 for the two trees.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Held-out videos of a round, asked for one by one.")] = 4,
    max_tokens: shared.MaxTokensOfTwo = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each has videos of its own.")] = 5,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    draft_device: options.DraftDevice = "cpu",
    knob: options.Knobs = None,
    json_path: shared.Json = None,
) -> None:
    """Measure one setting's speed interleaved with vanilla vLLM, and what of it drafting takes.

    tokens_per_s and inter_token_ms are of a request's decode, ttft_s from handing it in; medians over rounds, with
    their 20th and 80th percentiles. A step emits several tokens at once: t_step_ms is the median time between such
    bursts, t_step_ms_p99 its 99th percentile. Of a parallel drafter, late_frac is the share of decode steps whose
    stream was too short, stream_length the tokens from one rejection to the next. What drafting takes of a request is a
    mean, from the engine's counters; the rest is the target's and the host's.
    """
    given = locals()
    from vidspec_tools.bench import interleaved as bench
    from vidspec_tools.views import versus

    measure(bench, _beside_vanilla(bench.Benchmark, given), given, versus.speed_tables)
