"""The `vidspec` command: a module for each command; what they need is imported when they run."""

from typing import Annotated

import typer

from vllm_vidspec import __version__
from vllm_vidspec.cli import bench, calibrate, demo, doctor, plan, show_pruning, status, studio
from vllm_vidspec.cli.running import add

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help, to read in a pipe and to copy from
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"vidspec {__version__}")
        raise typer.Exit


@app.callback(epilog="In a clone: `make setup`, then `. .venv/bin/activate`.")
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Speculative decoding for video language models in vLLM."""


_BUNDLED = "vllm_vidspec/assets/qwen2.5-vl"
add(app, demo.demo, "vidspec demo", "vidspec demo --prune-ratio 0.5 --max-tokens 32 --json -")
add(app, doctor.doctor, "vidspec doctor", f"vidspec doctor --target {_BUNDLED}/target --draft {_BUNDLED}/draft")
add(app, status.status, "vidspec status --server http://127.0.0.1:8000")
add(app, calibrate.calibrate, "vidspec calibrate --prompts 1 --max-tokens 32 --out calibration.json")
add(app, studio.studio, "vidspec studio", "vidspec studio --server http://127.0.0.1:8000 --port 8010")
add(app, plan.plan, "vidspec plan --target Qwen/Qwen3-VL-8B-Instruct --draft 2B --gpu h100 --minutes 10 --fps 1")
add(app, show_pruning.show_pruning, "vidspec show-pruning --pruner uniform,specvlm --out pruning.png")
_bench = typer.Typer(help="Measure acceptance and speed of a pair.", no_args_is_help=True, rich_markup_mode=None)
add(_bench, bench.acceptance, "vidspec bench acceptance --prune-ratio 0,0.9 --requests 2 --max-tokens 32")
add(_bench, bench.speed, "vidspec bench speed --rounds 1 --requests 1 --max-tokens 32")
app.add_typer(_bench, name="bench")
