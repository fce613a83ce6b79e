"""The commands of `vidspec` that only a clone has: `plan`, and what `bench` measures."""

import typer

from vidspec_tools.cli import bench, plan
from vllm_vidspec.cli.running import user_errors


def add_to(app: typer.Typer) -> None:
    """Add the commands to the application of `vidspec`."""
    app.command()(user_errors(plan.plan))
    group = typer.Typer(help="Measure on the bundled models.", no_args_is_help=True)
    for command in (bench.acceptance, bench.quality, bench.paper, bench.speed):
        group.command()(user_errors(command))
    app.add_typer(group, name="bench")
