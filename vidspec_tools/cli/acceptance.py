"""`vidspec bench acceptance`."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from vidspec_tools.cli import running
from vllm_vidspec.cli import options
from vllm_vidspec.cli.options import Values, sweep

PlotPath = Annotated[
    str | None,
    typer.Option(
        "--plot", metavar="PATH", help="Draw acceptance length by prune ratio, or by shape: a .png or .svg file."
    ),
]


def acceptance(
    family: options.Families = "qwen2.5-vl",
    draft: Annotated[str, sweep("draft, far (wrong more often), target (self-speculation) or a path.")] = "draft",
    pruner: Values = "specvlm",
    prune_ratio: Values = "0.9",
    drafting: Annotated[
        str, sweep("Shape of the draft: chain, tree-static, tree-adaptive.", "--drafting", "--draft-shape")
    ] = "chain",
    num_speculative_tokens: Annotated[str | None, sweep("Default: 5 for chains, 25 and 64 for the two trees.")] = None,
    scorer: Annotated[str, sweep("strict.")] = "strict",
    draft_noise: Annotated[str, sweep("shared, independent, greedy.")] = "shared",
    draft_positions: Annotated[str, sweep("original, compacted.")] = "original",
    temperature: Values = "0",
    top_p: Values = "1",
    top_k: Values = "0",
    min_p: Values = "0",
    presence_penalty: Values = "0",
    frequency_penalty: Values = "0",
    repetition_penalty: Values = "1",
    seed: options.Seed = 0,
    seeded: Annotated[bool, typer.Option("--seeded/--unseeded", help="Whether requests carry a seed.")] = True,
    requests: Annotated[int, typer.Option(min=1, help="Held-out videos, one request each.")] = 8,
    max_tokens: options.MaxTokens = 256,
    batch_size: options.BatchSize = 8,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Generate max-tokens tokens regardless.")] = False,
    target: options.BenchTarget = None,
    knob: options.Knobs = None,
    sync_scheduling: Annotated[
        bool, typer.Option("--sync-scheduling", help="Adaptive trees keep their own size; async fills them up to K.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Engines that run at once; times are comparable at 1 only.")] = 1,
    csv_path: options.Csv = None,
    plot_path: PlotPath = None,
    json_path: options.Json = None,
) -> None:
    """Measure acceptance, identity with vanilla vLLM, and the draft's KV size on held-out videos.

    Every combination of the options is a row. Configurations that show the draft the same tokens (every pruner at 0,
    every pruner at 1, `none` at any ratio) share one engine, which `measured_as` names.

    A row's decode_s is the wall time of one LLM.generate call over all its requests, vision and prefill included,
    after a warm-up request. Exit status 1 if a configuration fails.
    """
    _run(locals())


def _run(given: Mapping[str, Any]) -> None:
    """Do what the options say."""
    from vidspec_tools import plots
    from vidspec_tools.bench import acceptance as bench

    texts = ("family", "draft", "pruner", "drafting", "scorer", "draft_noise", "draft_positions")
    kinds = dict.fromkeys(texts, str) | {"num_speculative_tokens": int, "top_k": int}
    axes = {
        name: [None]
        if given[name] is None
        else options.values("--" + name.replace("_", "-"), given[name], kinds.get(name, float))
        for name in bench.AXES
    }
    seed = given["seed"] if given["seeded"] else None
    what = options.pick(bench.Sweep, given, axes=axes, seed=seed, knobs=options.knobs(given["knob"]))
    if given["plot_path"] is not None:
        plots.check_room(given["plot_path"], axes)
    result = running.measure(bench, plots, what, given)
    if result["failures"]:
        raise typer.Exit(1)
