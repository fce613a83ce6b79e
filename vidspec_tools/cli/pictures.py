"""`vidspec show-pruning` and `vidspec show-relevance`."""

from typing import Annotated

import typer

from vllm_vidspec.cli import options, running


def show_pruning(
    video: options.Video = None,
    pruner: Annotated[
        str, typer.Option(help="Comma-separated; one row each.")
    ] = "uniform,random,specvlm,attention,uv,dycoke",
    prune_ratio: Annotated[float, typer.Option(help="Share of the video tokens that is dropped.")] = 0.9,
    family: options.Family = "qwen2.5-vl",
    target: options.OwnTarget = None,
    draft: options.OwnDraft = None,
    question: options.Question = "describe the video",
    columns: Annotated[int, typer.Option(min=1, help="Most frames in a row.")] = 16,
    calibration: Annotated[
        str | None, typer.Option(help="A file of `vidspec calibrate`. Default: the bundled pair's.")
    ] = None,
    dtype: options.Dtype = None,
    engine_args: options.EngineArgs = "{}",
    out: Annotated[str, typer.Option(metavar="PATH", help="The picture to write.")] = "pruning.png",
) -> None:
    """Draw which tokens of a video each pruner keeps for the draft."""
    given = locals()
    from rich.console import Console

    from vidspec_tools.pictures import contact_sheet
    from vidspec_tools.pictures import show_pruning as pruning
    from vllm_vidspec.tools import progress

    pruners = tuple(options.values("--pruner", pruner, str))
    what = options.pick(pruning.Show, given, pruners=pruners, engine_args=options.engine_args(engine_args, dtype))
    result = running.with_bars(pruning.run, what, progress.View)
    console = Console()
    console.print(contact_sheet.table(result))
    console.print(f"Wrote {out}", highlight=False, soft_wrap=True)


def show_relevance(
    video: options.Video = None,
    family: options.Family = "qwen2.5-vl",
    target: options.OwnTarget = None,
    draft: options.OwnDraft = None,
    question: options.Question = "describe the video",
    lambda_loose: Annotated[
        float,
        typer.Option(
            "--lambda", help="Share of a step's draft tokens whose mismatches are accepted; 0 loosens nothing."
        ),
    ] = 0.7,
    top_n: Annotated[int, typer.Option(help="Video tokens that make a relevance (N).")] = 10,
    position_shift: Annotated[
        bool, typer.Option("--position-shift/--no-position-shift", help="Accept shifted tokens, too.")
    ] = True,
    relevance_rows: Annotated[str, typer.Option(help="Whose state is compared: token or prediction.")] = "token",
    num_speculative_tokens: options.NumTokens = 10,
    prune_ratio: options.PruneRatio = 0.9,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the request, where the temperature is not 0.")] = 0,
    max_tokens: options.MaxTokensOfTwo = 256,
    dtype: options.Dtype = None,
    engine_args: options.EngineArgs = "{}",
    out: Annotated[str, typer.Option(metavar="PATH", help="The picture to write.")] = "relevance.png",
    json_path: options.Json = None,
) -> None:
    """Show a caption with every token in the colour of its visual relevance, and mark what was loosened."""
    given = locals()
    from rich.console import Console

    from vidspec_tools.pictures import relevance_views
    from vidspec_tools.pictures import show_relevance as relevance
    from vllm_vidspec.tools import progress

    what = options.pick(relevance.Show, given, engine_args=options.engine_args(engine_args, dtype))
    relevance.check(what)
    result = running.with_bars(relevance.run, what, progress.View)
    running.write_json(json_path, result)
    console = Console(stderr=json_path == "-")
    console.print(relevance_views.table(result["rows"][0]))
    console.print(f"Wrote {out}", highlight=False, soft_wrap=True)
