"""The `vidspec` command: a module for each command; what they need is imported when they run."""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

from vllm_vidspec import __version__
from vllm_vidspec.cli import calibrate, demo, doctor, status, studio
from vllm_vidspec.cli.running import add
from vllm_vidspec.errors import VidSpecError

_OF_A_CLONE = ("bench", "plan", "show-pruning")

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


def _has_tools() -> bool:
    """Return whether `vidspec_tools` is importable. It lies beside this package in a clone, and is in no wheel."""
    root = Path(__file__).resolve().parents[2]
    if importlib.util.find_spec("vidspec_tools") is None and (root / "vidspec_tools" / "cli").is_dir():
        sys.path.append(str(root))  # an editable install maps the wheel's packages only
    return importlib.util.find_spec("vidspec_tools") is not None


def _in_the_clone() -> None:
    """Measure, plan and draw: in a clone of the repository only."""
    raise VidSpecError(f"{', '.join(_OF_A_CLONE)} are not in the wheel: run `python -m vllm_vidspec.cli` in a clone")


if _has_tools():
    from vidspec_tools.cli import add_to

    add_to(app)
else:
    for _name in _OF_A_CLONE:
        add(app, _in_the_clone, name=_name, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
