"""`vidspec calibrate`, and `vidspec calibrate --costs`."""

from typing import TYPE_CHECKING, Annotated

import typer

from vllm_vidspec.cli import options, running
from vllm_vidspec.errors import VidSpecError

if TYPE_CHECKING:
    from vllm_vidspec.tools.calibrate import Calibration


def calibrate(
    family: options.Family = "qwen2.5-vl",
    target: options.OwnTarget = None,
    draft: options.OwnDraft = None,
    pruner: Annotated[str, typer.Option(help="specvlm (lambda_r, guidance_layers) or uv (uv_layer).")] = "specvlm",
    video: Annotated[
        list[str] | None, typer.Option(help="A video of yours; repeat for more. Default: synthetic.")
    ] = None,
    question: Annotated[str, typer.Option(help="What to ask about each video.")] = "describe the video",
    prompts: Annotated[int, typer.Option(min=1, help="How many synthetic videos, without --video.")] = 4,
    prune_ratio: options.PruneRatio = 0.9,
    num_speculative_tokens: options.NumTokens = 5,
    max_tokens: options.MaxTokensOfTwo = 256,
    grid: Annotated[bool, typer.Option("--grid", help="Measure every layer set at every lambda_r.")] = False,
    dtype: options.Dtype = None,
    engine_args: options.EngineArgs = "{}",
    out: Annotated[str, typer.Option(metavar="PATH", help="The calibration file to write.")] = "calibration.json",
    plot: Annotated[str | None, typer.Option(metavar="PATH", help="Plot the measurements to a file.")] = None,
    costs: Annotated[
        bool, typer.Option("--costs", help="Measure which drafts pay on this machine, by batch size, instead.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="With --costs: engines of each draft, in turn.")] = 3,
) -> None:
    """Choose a pair's pruning knobs by measured acceptance length; write them for the key `calibration`.

    With --costs: measure the knob draft_table instead, and add it to the file where there is one.
    """
    given = locals()
    from rich.console import Console

    from vllm_vidspec.tools import calibrate as calibration
    from vllm_vidspec.tools import calibration_views as views
    from vllm_vidspec.tools import progress

    own = {"videos": tuple(video or ()), "engine_args": options.engine_args(engine_args, dtype), "whole_grid": grid}
    what = options.pick(calibration.Calibration, given, **own)
    if costs:
        _calibrate_costs(what, rounds, out, plot)
        return
    calibration.check(what, out, plot)
    result = running.with_bars(calibration.run, what, progress.View)
    running.write_json(out, result)
    if plot is not None:
        views.plot(result, plot)
    console = Console()
    console.print(views.table(result))
    console.print(views.summary(result), highlight=False)
    console.print(f'Use it with "calibration": "{out}" in the speculative config.', highlight=False, soft_wrap=True)


def _calibrate_costs(what: "Calibration", rounds: int, out: str, plot: str | None) -> None:
    """Measure `draft_table`, show it and write it; what the file holds already stays and is in force."""
    from rich.console import Console

    from vllm_vidspec.tools import calibration_views as views
    from vllm_vidspec.tools import costs, progress

    if plot is not None:
        raise VidSpecError("--plot: --costs has nothing to plot")
    held = costs.read_file(out, what)
    measure = costs.Costs(what, rounds, out if held.get("config", {}).keys() - {"draft_table"} else None)
    costs.check(measure, out)
    result = running.with_bars(costs.run, measure, progress.View)
    written = result
    if held:
        table = {"config": held["config"] | result["config"], "costs": result["costs"]}
        written = held | table | {"costs_provenance": result["provenance"]}
    running.write_json(out, written)
    console = Console()
    console.print(views.costs_table(result))
    console.print(views.costs_summary(result), highlight=False)
    words = f'Use it with "draft": "auto" and "calibration": "{out}" in the speculative config.'
    console.print(words, highlight=False, soft_wrap=True)
