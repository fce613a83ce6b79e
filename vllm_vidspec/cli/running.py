"""What happens around a command: its examples, its errors, its progress bars, where it prints, its JSON."""

import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vllm_vidspec.errors import VidSpecError

if TYPE_CHECKING:
    from rich.console import Console


def add(app: typer.Typer, command: Callable[..., None], *examples: str) -> None:
    """Add a command to `app`; its help ends with the examples, each a line to paste."""
    lines = "\n".join(f"  {example}" for example in examples)
    epilog = f"\b\nExample{'s' * (len(examples) > 1)}:\n{lines}"
    app.command(epilog=epilog)(user_errors(command))


def user_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a VidSpecError into one line on standard error and exit status 2; Ctrl-C and SIGTERM into 130."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        # SIGTERM unwinds the stack as Ctrl-C does, so that engine processes are ended.
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            command(*args, **kwargs)
        except VidSpecError as error:
            print(f"vidspec: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            print("vidspec: stopped", file=sys.stderr)
            raise typer.Exit(130) from None

    return wrapped


def _interrupt(_signal: int, _frame: Any) -> None:
    raise KeyboardInterrupt


def with_bars(run: Callable[..., dict[str, Any]], what: Any, view: Callable[..., Any]) -> dict[str, Any]:
    """Run what a command describes, `view(bars)` showing its events on standard error."""
    from vllm_vidspec.tools import progress

    with progress.bars(console(stderr=True)) as bars:
        return run(what, view(bars))


def console(stderr: bool = False) -> "Console":
    """Return where a command prints: as wide as the terminal; in a pipe or a file no line is folded or cut."""
    from rich.console import Console

    found = Console(stderr=stderr)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = 1000
    return found


def write_json(path: str | None, result: dict[str, Any]) -> None:
    """Write a result to a file; "-" is standard output, None nowhere."""
    if path is None:
        return
    text = json.dumps(result, indent=2)
    if path == "-":
        print(text)
        return
    from vllm_vidspec.tools.user_files import writing

    with writing(path):
        Path(path).write_text(text + "\n")
