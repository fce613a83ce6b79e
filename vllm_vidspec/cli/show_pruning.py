"""`vidspec show-pruning`."""

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
    engine_args: options.EngineArgs = "{}",
    out: Annotated[str, typer.Option(metavar="PATH", help="The picture to write.")] = "pruning.png",
    json_path: options.Json = None,
) -> None:
    """Draw which tokens of a video each pruner keeps for the draft."""
    given = locals()
    from vllm_vidspec.tools import contact_sheet, progress
    from vllm_vidspec.tools import show_pruning as pruning

    pruners = tuple(options.values("--pruner", pruner, str))
    what = options.pick(pruning.Show, given, pruners=pruners, engine_args=options.engine_args(engine_args))
    result = running.with_bars(pruning.run, what, progress.View)
    running.write_json(json_path, result)
    console = running.console(stderr=json_path == "-")
    console.print(contact_sheet.table(result))
    console.print(f"Wrote {out}", highlight=False, soft_wrap=True)
