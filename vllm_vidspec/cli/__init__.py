"""The `vidspec` command: a module for each command; what they need is imported when they run."""

import importlib.util
import sys
from pathlib import Path

import typer

from vllm_vidspec.cli import calibrate, demo, doctor, status, studio
from vllm_vidspec.cli.running import user_errors
from vllm_vidspec.errors import VidSpecError

_OF_A_CLONE = ("bench", "plan", "show-pruning")

app = typer.Typer(
    help="Speculative decoding for video language models in vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _command in (demo.demo, doctor.doctor, status.status, calibrate.calibrate, studio.studio):
    app.command()(user_errors(_command))


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
        app.command(_name, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
            user_errors(_in_the_clone)
        )
