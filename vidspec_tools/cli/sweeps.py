"""`vidspec bench acceptance` and `vidspec bench quality`: sweeps, an engine for each configuration."""

from typing import Annotated

import typer

from vidspec_tools.cli import options, running
from vllm_vidspec.cli import options as shared


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
    seed: shared.Seed = 0,
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
    jobs: Annotated[int, typer.Option(min=1, help="Engines that run at once; times are comparable at 1 only.")] = 1,
    csv_path: options.Csv = None,
    plot_path: Annotated[str | None, options.plot("Draw acceptance length by prune ratio, or by shape")] = None,
    json_path: shared.Json = None,
) -> None:
    """Measure acceptance, identity with vanilla vLLM, and the draft's KV size on held-out videos.

    Every combination of the options is a row. Configurations that show the draft the same tokens (every pruner at 0,
    every pruner at 1, `none` at any ratio) share one engine, which `measured_as` names.

    A row's decode_s is the wall time of one LLM.generate call over all its requests, vision and prefill included,
    after a warm-up request. Exit status 1 if a configuration fails.
    """
    given = locals()
    from vidspec_tools.bench import acceptance as bench
    from vidspec_tools.views import acceptance as view

    texts = ("family", "draft", "pruner", "drafting", "scorer", "draft_noise", "draft_positions")
    kinds = dict.fromkeys(texts, str) | {"num_speculative_tokens": int, "top_k": int}
    axes = {
        name: [None]
        if given[name] is None
        else shared.values("--" + name.replace("_", "-"), given[name], kinds.get(name, float))
        for name in bench.AXES
    }
    own_seed = seed if seeded else None
    what = shared.pick(bench.Sweep, given, axes=axes, seed=own_seed, knobs=options.knobs(knob))
    if plot_path is not None:
        view.check_room(plot_path, axes)
    running.measure(bench, view, what, given)


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


def quality(
    family: options.Families = "qwen2.5-vl",
    draft: Annotated[str, typer.Option(help="The pair's draft, or far: the one that is wrong more often.")] = "draft",
    scorer: Annotated[
        str, options.sweep("Beside strict: loose, fly, fly-entropy, random, oracle.")
    ] = "loose,fly,fly-entropy,random,oracle",
    lambda_loose: Annotated[
        str, options.sweep("Share of mismatches that loose and random accept.", "--lambda")
    ] = "0.2,0.5,0.7,0.9",
    top_n: Annotated[str, options.sweep("loose: video tokens that make a relevance (N).")] = "10",
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
    seed: shared.Seed = 0,
    knob: options.Knobs = None,
    csv_path: options.Csv = None,
    plot_path: Annotated[str | None, options.plot("Draw what is kept by acceptance length")] = None,
    json_path: shared.Json = None,
) -> None:
    """Measure what lossy verification keeps of the captions' facts, and the acceptance length that it gains.

    What the held-out videos show is known: a caption's attributes (colours, shapes, motion, order) are right or wrong.
    "kept" is the share that is right, divided by that of the target alone at the same temperature with the same seeds.
    The target alone and the draft alone are measured too, each in an engine of its own; one engine per noise serves
    all scorers.

    loose has every lambda at the N closest to 10, with the first of --position-shift and --relevance-rows and with each
    other one of these; and the other N at the lambda closest to 0.7. A name says what differs from N 10, no shift and
    the token's own state: "loose 0.7 N1 shift pred". "not exact" is the share of the accepted drafts without being
    the target's choice, "same" the share of captions that are the target's to the last token. "AUC" is how well the
    measured relevance tells words about the video from fillers: 0.5 is not at all, 1 always.
    """
    given = locals()
    from vidspec_tools.bench import quality as bench
    from vidspec_tools.views import quality as view

    swept = {
        field: tuple(shared.values("--" + name.removesuffix("_loose").replace("_", "-"), given[name], kind))
        for name, (field, kind) in _SWEPT.items()
    }
    shifts = tuple(options.switch("--position-shift", text) for text in position_shift.split(","))
    what = shared.pick(bench.Quality, given, **swept, position_shifts=shifts, knobs=options.knobs(knob))
    running.measure(bench, view, what, given)
