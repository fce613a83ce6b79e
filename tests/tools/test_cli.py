"""The `vidspec` command without an engine: its options, wrong values, and the shapes of tables and JSON."""

import dataclasses
import subprocess
import sys
import types
import typing
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import typer.main

from tools.common import counters, invoke, printed
from vllm_vidspec import doctor
from vllm_vidspec.cli import app
from vllm_vidspec.cli import doctor as doctor_command
from vllm_vidspec.tools import demo

# Command -> its options, as `shown` writes them.
_BLOCKS = Path(__file__).with_name("command_surface.txt").read_text().split("\n\n")[1:]
SURFACE = {name: options.split() for name, options in (block.split("\n", 1) for block in _BLOCKS)}


def commands(group, path=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def shown(parameter, hint):
    kind, info = typing.get_args(hint)
    kinds = [one for one in typing.get_args(kind) if one is not types.NoneType] or [kind]
    text = "|".join([*parameter.opts, *parameter.secondary_opts]) + f":{kinds[0].__name__}"
    text += "" if info.min is None else f">={info.min}"
    return text if parameter.default is None else f"{text}={parameter.default}".replace(" ", "_")


def test_commands_and_options_are_those_that_users_know():
    """Catches: an option that is gone, called otherwise, or has another type or default."""
    found = dict(commands(typer.main.get_command(app)))
    assert set(found) == set(SURFACE)
    for name, command in found.items():
        hints = typing.get_type_hints(command.callback, include_extras=True)
        assert [shown(one, hints[one.name]) for one in command.params] == SURFACE[name], name
        assert command.help, name
        assert invoke(*name.split(), "--help").exit_code == 0, name


def test_module_is_the_command():
    """It imports nothing heavy for its help; `python -m` is `vidspec` by name, in its help and in a result's argv."""
    code = (
        "import runpy, sys\nsys.argv = ['', '--help']\n"
        "try: runpy.run_module('vllm_vidspec.cli', run_name='__main__', alter_sys=False)\n"
        "except SystemExit as stop: assert not stop.code\n"
        "print(sys.argv[0], [m for m in ('torch', 'vllm', 'numpy', 'pydantic', 'openai', 'cv2') if m in sys.modules])\n"
    )
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "Usage: vidspec [OPTIONS]" in text
    assert text.splitlines()[-1] == "vidspec []"


@pytest.mark.parametrize("identical", [True, False])
def test_demo_table_and_status(monkeypatch, tmp_path, identical):
    spent = counters(0.1, visual_tokens_full=512, visual_tokens_kept=51, draft_kv_bytes_per_token=2048)

    def serve(what, name, draft, video, log_path, report):
        report("ready", {"seconds": 12.0})
        report("text", {"delta": "a red [bold]circle[/bold]"})
        report("answered", {"name": name})
        ids = [1, 2] if identical or draft is None else [1, 3]
        times = {"ttft_s": 0.5, "decode_s": 1.5, "server_start_s": 12.0, "output_tokens": 2}
        return {"text": "a red circle", "token_ids": ids, "command": [], "counters": spent, **times}

    monkeypatch.setattr(demo, "_serve_and_ask", serve)
    result = invoke("demo", "--log-dir", str(tmp_path))
    assert result.exit_code == (0 if identical else 1)
    for words in ("a red [bold]circle[/bold]", "3.20", "44.0 %", "1.0 MiB", "142 KiB", "yes" if identical else "NO"):
        assert words in result.stdout, words

    found = printed("demo", "--log-dir", str(tmp_path), status=0 if identical else 1)
    assert found["identical"] is identical
    assert found["acceptance_length"] == 3.2
    assert found["speculative_config"]["method"] == "vidspec"


def test_doctor_table_json_and_status(monkeypatch):
    checks = [doctor.Check("engine", "ok", "vllm 0.32"), doctor.Check("pair", "fail", "no [draft]", "name one")]
    monkeypatch.setattr(doctor, "run_checks", lambda target=None, draft=None: checks)
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "name one" in result.stdout
    assert "[draft]" in result.stdout, "brackets are text, not markup"
    assert [check["status"] for check in printed("doctor", status=1)["checks"]] == ["ok", "fail"]
    monkeypatch.setattr(doctor, "run_checks", lambda target=None, draft=None: checks[:1])
    assert invoke("doctor").exit_code == 0


def test_doctor_looks_anew_after_a_repair(monkeypatch):
    """A module that was broken stays so in this process. Catches: "fail" and status 1 after a repair that worked."""
    from vllm_vidspec.setup import fixups

    run = mock.Mock(return_value=SimpleNamespace(returncode=3))
    changed = fixups.FixupResult("torchvision", True, "repaired")
    monkeypatch.setattr(fixups, "apply_fixups", lambda: [changed])
    monkeypatch.setattr(doctor, "run_checks", lambda target=None, draft=None: pytest.fail("checked in this process"))
    monkeypatch.setattr(doctor_command.subprocess, "run", run)
    assert invoke("doctor", "--fix", "--target", "t", "--draft", "self").exit_code == 3
    run.assert_called_once_with(
        [sys.executable, "-m", "vllm_vidspec.cli", "doctor", "--target", "t", "--draft", "self"]
    )
    # Where nothing had to change this process sees what there is.
    monkeypatch.setattr(fixups, "apply_fixups", lambda: [dataclasses.replace(changed, changed=False)])
    monkeypatch.setattr(doctor, "run_checks", lambda target=None, draft=None: [doctor.Check("engine", "ok", "fine")])
    assert invoke("doctor", "--fix").exit_code == 0
    assert run.call_count == 1
