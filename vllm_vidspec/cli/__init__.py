"""The `vidspec` command: a module for each command; what they need is imported when they run."""

from collections.abc import Callable

import typer

from vllm_vidspec.cli import (
    acceptance,
    calibrate,
    demo,
    doctor,
    paper,
    parallel,
    plan,
    quality,
    scaling,
    show_pruning,
    show_relevance,
    speed,
    status,
    timeline,
)
from vllm_vidspec.cli.running import user_errors

app = typer.Typer(
    help="Speculative decoding for video language models in vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Measure on the bundled models.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
_commands: tuple[Callable[..., None], ...] = (
    demo.demo,
    doctor.doctor,
    status.status,
    calibrate.calibrate,
    plan.plan,
    show_pruning.show_pruning,
    show_relevance.show_relevance,
)
for _command in _commands:
    app.command()(user_errors(_command))
bench_app.command()(user_errors(acceptance.acceptance))
bench_app.command()(user_errors(quality.quality))
bench_app.command()(user_errors(parallel.parallel))
bench_app.command()(user_errors(timeline.timeline))
bench_app.command()(user_errors(paper.paper))
bench_app.command()(user_errors(speed.speed))
bench_app.command()(user_errors(scaling.scaling))
