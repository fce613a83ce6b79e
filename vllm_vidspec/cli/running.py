"""What happens around a command: its options' names, its errors, its progress bars, where it prints, its JSON."""

import difflib
import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from vllm_vidspec.errors import VidSpecError

if TYPE_CHECKING:
    from rich.console import Console

# What other tools call an option of ours: its name here -> theirs.
_ELSEWHERE = {
    "--server": ("--url", "--host", "--address", "--endpoint", "--base-url"),
    "--watch": ("--interval", "--every"),
    "--json": ("--output", "--out", "--format"),
    "--out": ("--output",),
    "--target": ("--model", "--target-model"),
    "--draft": ("--speculative-model", "--draft-model", "--assistant-model"),
    "--num-speculative-tokens": ("--num-draft-tokens", "-k"),
    "--max-tokens": ("--max-new-tokens", "--output-len"),
    "--prune-ratio": ("--ratio", "--pruning-rate"),
    "--requests": ("--num-prompts",),
    "--tp": ("--tensor-parallel-size",),
    "--batch": ("--max-num-seqs", "--concurrency"),
}


class Command(TyperCommand):
    """A command that tells a wrong option's right name, in one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; exit with status 2 where there is no such option."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # Click's class, or that of the copy of click which newer versions of typer bring.
            if type(error).__name__ != "NoSuchOption":
                raise
            wrong = getattr(error, "option_name", "")
        names = [name for parameter in self.params for name in parameter.opts if name.startswith("--")]
        right = [name for name in names if wrong in _ELSEWHERE.get(name, ())]
        right = right or difflib.get_close_matches(wrong, names, cutoff=0.7)
        hint = f"did you mean {' or '.join(right)}?" if right else f"see `{ctx.command_path} --help`"
        print(f"vidspec: `{ctx.command_path}` has no option {wrong}; {hint}", file=sys.stderr)
        raise typer.Exit(2)


def add(
    app: typer.Typer, command: Callable[..., None], *examples: str, name: str | None = None, **options: Any
) -> None:
    """Add a command to `app`; its help ends with the examples, each a line to paste."""
    lines = "\n".join(f"  {example}" for example in examples)
    epilog = f"\b\nExample{'s' * (len(examples) > 1)}:\n{lines}" if examples else None
    app.command(name, cls=Command, epilog=epilog, **options)(user_errors(command))


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
