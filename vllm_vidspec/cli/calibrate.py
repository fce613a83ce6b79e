"""`vidspec calibrate`."""

from typing import Annotated, Any

import typer

from vllm_vidspec.cli import options, running


def calibrate(
    family: options.Family = "qwen2.5-vl",
    target: options.OwnTarget = None,
    draft: options.OwnDraft = None,
    pruner: Annotated[str, typer.Option(help="specvlm (lambda_r, guidance_layers) or uv (uv_layer).")] = "specvlm",
    video: Annotated[
        list[str] | None, typer.Option(help="A video of yours; repeat for more. Default: synthetic.")
    ] = None,
    question: Annotated[str, typer.Option(help="What to ask about each video.")] = "describe the video",
    prompts: Annotated[
        int | None, typer.Option(min=1, help="How many synthetic videos, without --video: 4, --eyes: 64.")
    ] = None,
    prune_ratio: options.PruneRatio = 0.9,
    num_speculative_tokens: options.NumTokens = 5,
    max_tokens: options.MaxTokensOfTwo = 256,
    engine_args: options.EngineArgs = "{}",
    eyes: Annotated[
        bool,
        typer.Option("--eyes", help="Fit a map from the target's vision embeddings to the draft's instead; 64 videos."),
    ] = False,
    out: Annotated[str, typer.Option(metavar="PATH", help="The calibration file to write.")] = "calibration.json",
    json_path: options.Json = None,
) -> None:
    """Choose a pair's pruning knobs by measured acceptance length; write them for the key `calibration`."""
    given = {name: value for name, value in locals().items() if value is not None}
    from vllm_vidspec.tools import calibrate as calibration
    from vllm_vidspec.tools import calibrate_eyes, progress, views

    own = {"videos": tuple(video or ()), "engine_args": options.engine_args(engine_args)}
    if eyes:
        fit = options.pick(calibrate_eyes.Eyes, given, **own)
        calibrate_eyes.check(fit)
        result = running.with_bars(calibrate_eyes.run, fit, progress.View)
        shown: list[Any] = [views.eyes_words(result)]
    else:
        what = options.pick(calibration.Calibration, given, **own)
        calibration.check(what, out)
        result = calibrate_eyes.with_map(running.with_bars(calibration.run, what, progress.View), out)
        shown = [views.calibration_table(result), views.calibration_words(result)]
    running.write_json(out, result)
    running.write_json(json_path, result)
    console = running.console(stderr=json_path == "-")
    for part in shown:
        console.print(part, highlight=False)
    console.print(f'Use it with "calibration": "{out}" in the speculative config.', highlight=False, soft_wrap=True)
