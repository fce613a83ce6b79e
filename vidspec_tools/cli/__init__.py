"""The commands of `vidspec` that only a clone has: `plan`, the pictures, and what `bench` measures."""

import typer

from vidspec_tools.cli import pictures, plan, sweeps, versus
from vllm_vidspec.cli.running import user_errors


def add_to(app: typer.Typer) -> None:
    """Add the commands to the application of `vidspec`."""
    for shown in (plan.plan, pictures.show_pruning, pictures.show_relevance):
        app.command()(user_errors(shown))
    bench = typer.Typer(help="Measure on the bundled models.", no_args_is_help=True)
    for command in (
        sweeps.acceptance,
        sweeps.quality,
        versus.parallel,
        versus.timeline,
        versus.paper,
        versus.speed,
        versus.scaling,
    ):
        bench.command()(user_errors(command))
    app.add_typer(bench, name="bench")
