"""`vidspec bench quality`."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from vidspec_tools.cli import running
from vllm_vidspec.cli import options
from vllm_vidspec.cli.options import Values, sweep


def quality(
    family: options.Families = "qwen2.5-vl",
    draft: Annotated[str, typer.Option(help="The pair's draft, or far: the one that is wrong more often.")] = "draft",
    scorer: Annotated[
        str, sweep("Beside strict: loose, fly, fly-entropy, random, oracle.")
    ] = "loose,fly,fly-entropy,random,oracle",
    lambda_loose: Annotated[str, sweep("Share that loose and random let stand.", "--lambda")] = "0.2,0.5,0.7,0.9",
    top_n: Annotated[str, sweep("loose: video tokens that make a relevance (N).")] = "10",
    position_shift: Annotated[str, sweep("loose: off, on.")] = "off,on",
    relevance_rows: Annotated[str, sweep("loose: token, prediction.")] = "token",
    fly_entropy: Annotated[str, sweep("Threshold of fly and fly-entropy.")] = "0.3",
    temperature: Values = "0",
    draft_noise: Annotated[str, sweep("shared, independent, greedy; at temperature 0 only the first.")] = "shared",
    num_speculative_tokens: options.NumTokens = 10,
    prune_ratio: options.PruneRatio = 0.9,
    requests: Annotated[int, typer.Option(min=1, help="Held-out videos, one caption each.")] = 64,
    batch_size: options.BatchSize = 16,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest caption in tokens.")] = 256,
    seed: options.Seed = 0,
    knob: options.Knobs = None,
    csv_path: options.Csv = None,
    plot_path: Annotated[
        str | None,
        typer.Option("--plot", metavar="PATH", help="Draw what is kept by acceptance length: a .png or .svg file."),
    ] = None,
    json_path: options.Json = None,
) -> None:
    """Measure what lossy verification keeps of the captions' facts, and the acceptance length that it gains.

    What the held-out videos show is known: a caption's attributes (colours, shapes, motion, order) are right or wrong.
    "kept" is the share that is right, divided by that of the target alone at the same temperature with the same seeds.
    Beside the scorers stand the target and the draft alone, each in an engine of its own; one engine per noise serves
    all scorers.

    loose has every lambda at the N closest to 10, with the first of --position-shift and --relevance-rows and with each
    other one of these; and the other N at the lambda closest to 0.7. A name says what differs from N 10, no shift and
    the token's own state: "loose 0.7 N1 shift pred". "not exact" is the share of the drafts that stood without being
    the target's choice, "same" the share of captions that are the target's to the last token. "AUC" is how well the
    measured relevance tells words about the video from fillers: 0.5 is not at all, 1 always.
    """
    _run(locals())


# Option -> the field of `Quality` that holds its values, and what they are.
_SWEPT = {
    "family": ("families", str),
    "temperature": ("temperatures", float),
    "draft_noise": ("draft_noises", str),
    "scorer": ("scorers", str),
    "lambda_loose": ("lambdas", float),
    "top_n": ("top_ns", int),
    "relevance_rows": ("relevance_rows", str),
    "fly_entropy": ("fly_entropies", float),
}


def _run(given: Mapping[str, Any]) -> None:
    """Do what the options say."""
    from vidspec_tools import quality_views
    from vidspec_tools.bench import quality as bench

    swept = {
        field: tuple(options.values("--" + name.removesuffix("_loose").replace("_", "-"), given[name], kind))
        for name, (field, kind) in _SWEPT.items()
    }
    shifts = tuple(options.switch("--position-shift", text) for text in given["position_shift"].split(","))
    knobs = options.knobs(given["knob"])
    what = options.pick(bench.Quality, given, **swept, position_shifts=shifts, knobs=knobs)
    running.measure(bench, quality_views, what, given)
