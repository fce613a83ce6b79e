"""What happens around a command: its errors, its progress bars, its JSON."""

import functools
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from vllm_vidspec.errors import VidSpecError


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
    from rich.console import Console

    from vllm_vidspec.tools import progress

    with progress.bars(Console(stderr=True)) as bars:
        return run(what, view(bars))


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
