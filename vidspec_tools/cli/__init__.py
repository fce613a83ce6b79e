"""The commands of `vidspec` that only a clone has: `plan`, the picture, and what `bench` measures."""

import typer

from vidspec_tools.cli import bench, pictures, plan
from vllm_vidspec.cli.running import user_errors


def add_to(app: typer.Typer) -> None:
    """Add the commands to the application of `vidspec`."""
    for command in (plan.plan, pictures.show_pruning):
        app.command()(user_errors(command))
    group = typer.Typer(help="Measure on the bundled models.", no_args_is_help=True)
    for measured in (bench.acceptance, bench.quality, bench.paper, bench.speed):
        group.command()(user_errors(measured))
    app.add_typer(group, name="bench")
