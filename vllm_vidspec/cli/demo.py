"""`vidspec demo`."""

from typing import Annotated

import typer

from vllm_vidspec.cli import options, running


def demo(
    family: options.Family = "qwen2.5-vl",
    prune_ratio: options.PruneRatio = 0.9,
    num_speculative_tokens: options.NumTokens = 5,
    pruner: Annotated[str, typer.Option(help="Which video tokens the draft keeps.")] = "specvlm",
    target: options.BenchTarget = None,
    draft: Annotated[str, typer.Option(help="'draft', 'target' (self-speculation) or a checkpoint.")] = "draft",
    video: Annotated[str | None, typer.Option(help="An mp4 file in place of the bundled one.")] = None,
    question: options.Question = "describe the video",
    max_tokens: options.MaxTokens = 256,
    port: Annotated[int | None, typer.Option(help="Port of the servers. Default: a free one.")] = None,
    log_dir: Annotated[str | None, typer.Option(help="Folder for the servers' logs.")] = None,
    json_path: options.Json = None,
) -> None:
    """Serve the bundled pair twice, vanilla and with vidspec; ask about a video; compare.

    Exit status 1 if the two answers differ.
    """
    given = locals()
    from vllm_vidspec.tools import demo, views

    spec = {"prune_ratio": prune_ratio, "num_speculative_tokens": num_speculative_tokens, "pruner": pruner}
    to_stdout = json_path == "-"
    out = running.console(stderr=to_stdout)
    what = options.pick(demo.Demo, given, spec=spec)
    result = running.with_bars(demo.run, what, lambda bars: views.DemoView(bars, out))
    running.write_json(json_path, result)
    if not to_stdout:
        out.print(views.demo_table(result))
        out.print(f"Each server answered one warm-up request first. Logs: {result['log_dir']}")
    if not result["identical"]:
        raise typer.Exit(1)
