"""`vidspec doctor`."""

import subprocess
import sys
from typing import Annotated

import typer

from vllm_vidspec.cli import options, running
from vllm_vidspec.errors import VidSpecError


def doctor(
    target: Annotated[str | None, typer.Option(help="A target model to check the pair of.")] = None,
    draft: Annotated[str | None, typer.Option(help="Its draft model.")] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Repair the environment first (CPU engine only).")] = False,
    json_path: options.Json = None,
) -> None:
    """Check the engine, the device, the plugin and a pair; say what to do about each problem.

    Exit status 1 if a check fails.
    """
    from dataclasses import asdict

    from vllm_vidspec.doctor import run_checks
    from vllm_vidspec.tools import views

    console, progress = running.console(stderr=json_path == "-"), running.console(stderr=True)
    if fix:
        from vllm_vidspec.setup.fixups import FixupError, apply_fixups

        try:
            with progress.status("repairing the environment"):
                done = apply_fixups()
        except FixupError as error:
            raise VidSpecError(str(error)) from None
        for item in done:
            console.print(f"{item.name}: {item.detail}" + (" (changed)" if item.changed else ""))
        if any(item.changed for item in done):
            raise typer.Exit(_doctor_anew(target, draft, json_path))
    with progress.status("checking"):
        checks = run_checks(target=target, draft=draft)
    running.write_json(json_path, {"checks": [asdict(check) for check in checks]})
    if json_path != "-":
        console.print(views.checks_table(checks))
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def _doctor_anew(target: str | None, draft: str | None, json_path: str | None) -> int:
    """Check in a new process, which imports what has been repaired; return its exit status."""
    given = {"--target": target, "--draft": draft, "--json": json_path}
    words = [text for name, value in given.items() if value is not None for text in (name, value)]
    sys.stdout.flush()
    return subprocess.run([sys.executable, "-m", "vllm_vidspec.cli", "doctor", *words]).returncode
