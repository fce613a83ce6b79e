"""The commands of `vidspec` that only a clone has: `plan`, the picture, and what `bench` measures."""

import typer

from vidspec_tools.cli import bench, pictures, plan
from vllm_vidspec.cli.running import add


def add_to(app: typer.Typer) -> None:
    """Add the commands to the application of `vidspec`."""
    add(app, plan.plan, "vidspec plan --target Qwen/Qwen2.5-VL-32B-Instruct --draft 7B --gpu h100 --tp 2")
    add(app, pictures.show_pruning, "vidspec show-pruning --pruner uniform,specvlm --out pruning.png")
    group = typer.Typer(help="Measure on the bundled models.", no_args_is_help=True, rich_markup_mode=None)
    add(group, bench.acceptance, "vidspec bench acceptance --prune-ratio 0,0.9 --requests 2 --max-tokens 32")
    add(group, bench.quality, "vidspec bench quality --scorer loose --lambda 0.5 --requests 4 --max-tokens 32")
    add(group, bench.paper, "vidspec bench paper --quick --rounds 1 --methods SD-chain,SpecVLM")
    add(group, bench.speed, "vidspec bench speed --rounds 1 --requests 1 --max-tokens 32")
    app.add_typer(group, name="bench")
