"""The `vidspec` command: options, examples of every help that work as pasted, tables, JSON, progress, Ctrl-C, pipes."""

import contextlib
import dataclasses
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
import types
import typing
import urllib.request
import uuid
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import typer.main

from tools.common import ROOT, counters, invoke, printed
from tools.test_status import server, serving, sound  # noqa: F401 - fixtures
from vllm_vidspec import doctor
from vllm_vidspec.cli import app
from vllm_vidspec.cli import doctor as doctor_command
from vllm_vidspec.tools import demo, pairs, studio
from vllm_vidspec.tools.demo import data_url

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


# ---- what somebody meets first ---------------------------------------------------------------------------------------

COMMANDS = dict(commands(typer.main.get_command(app)))
EXAMPLES = [
    line.strip() for one in COMMANDS.values() for line in (one.epilog or "").splitlines() if "  vidspec " in line
]
CHEAP = ("plan", "status", "doctor")
PAGE = "studio"  # which serves until Ctrl-C; see test_studio.py
ENGINES = [example for example in EXAMPLES if example.split()[1] not in (*CHEAP, PAGE)]
SILENCE_S = 3.0
MARK = "VIDSPEC_FIRST_CONTACT"


def test_every_command_has_an_example_and_json():
    for name, command in COMMANDS.items():
        assert re.search(rf"^  vidspec {name}( |$)", command.epilog or "", re.MULTILINE), name
        assert "--json" in [option for one in command.params for option in one.opts], name


@pytest.mark.parametrize("example", [example for example in EXAMPLES if example.split()[1] in CHEAP])
def test_cheap_examples_run(example, sound, serving, monkeypatch):  # noqa: F811
    """Catches: an example that has fallen behind; colours or folded lines in a pipe; JSON with more in it."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)
    serving.texts = [sound.text()]
    args = shlex.split(example.replace("http://127.0.0.1:8000", serving.url))[1:]
    result = invoke(*args)
    assert result.exit_code in ((0, 1) if args[0] == "status" else (0,)), result.output
    assert "\x1b" not in result.stdout and max(map(len, result.stdout.splitlines())) > 80
    if args[0] != "doctor":  # which takes seconds; see above
        assert json.loads(invoke(*args, "--json", "-").stdout)


@pytest.fixture
def started(tmp_path):
    """Return what starts an example as pasted in a fresh clone, its output in a pipe, its progress on a terminal.

    It returns the process, the terminal's other end, and what marks it and all that it starts.
    """
    mark = uuid.uuid4().hex

    def start(example):
        (tmp_path / "vllm_vidspec").symlink_to(ROOT / "vllm_vidspec")
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "vllm_vidspec.cli", *shlex.split(example)[1:]]
        if "--json" not in command:
            command += ["--json", "result.json"]
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/kernels", "TERM": "xterm", MARK: mark}
        options = {"cwd": tmp_path, "env": env, "stderr": theirs, "start_new_session": True}
        with (tmp_path / "stdout").open("wb") as out:
            # A shell ignores Ctrl-C for what it runs in the background, and tests may be that.
            heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
            process = subprocess.Popen(command, stdout=out, preexec_fn=heed, **options)
        os.close(theirs)
        return process, ours, mark

    yield start
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def marked(mark):
    return [one.pid for one in psutil.process_iter(["environ"]) if (one.info["environ"] or {}).get(MARK) == mark]


def listen(process, terminal, until=lambda: False):
    """Read a terminal to the process's end, or `until`; return the text and the longest silence in seconds."""
    text, longest, last = b"", 0.0, time.monotonic()
    while not until():
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                piece = os.read(terminal, 65536)
            except OSError:  # the other end is closed
                break
            text += piece
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        elif process.poll() is not None:
            break
    return text.decode(errors="replace"), max(longest, time.monotonic() - last)


@pytest.mark.slow
@pytest.mark.parametrize("example", ENGINES)
def test_engine_examples_run_and_are_never_silent(example, started, tmp_path):
    """Catches: an example that fails; seconds without a sign of life; colours in a pipe; a command without JSON."""
    process, terminal, mark = started(example)
    text, silence = listen(process, terminal)
    assert process.wait(10) == 0, text[-2000:]
    print(f"longest silence of `{example}`: {silence:.1f} s")
    assert silence < SILENCE_S
    stdout = (tmp_path / "stdout").read_text()
    assert "\x1b" not in stdout
    assert json.loads(stdout if "--json -" in example else (tmp_path / "result.json").read_text())
    assert not marked(mark)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("example", [*(one for one in ENGINES if "--json" not in one), "vidspec studio"])
def test_ctrl_c_leaves_no_process(example, times, started):
    """Catches: an engine that goes on behind a command that was stopped, once or by somebody impatient."""
    process, terminal, mark = started(example)
    text, _ = listen(process, terminal, until=lambda: len(marked(mark)) > 1)
    listen(process, terminal, until=lambda end=time.monotonic() + 3: time.monotonic() > end)
    for _ in range(times):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.5)
    text += listen(process, terminal)[0]
    assert process.wait(20) in (130, -signal.SIGINT), text[-2000:]  # a second one may meet the end
    assert "vidspec: stopped" in text and "Traceback" not in text
    time.sleep(1)
    assert not marked(mark)


@pytest.mark.slow
def test_the_page_answers_until_ctrl_c(started, tmp_path):
    """`vidspec studio` with its own server. Catches: a server that outlives its page, or is silent while it starts; a
    shape that changes in words.
    """
    process, terminal, mark = started("vidspec studio --port 0 --draft-shape auto")
    stdout, result = tmp_path / "stdout", tmp_path / "result.json"
    _, silence = listen(process, terminal, until=lambda: "Ctrl-C" in stdout.read_text() and result.exists())
    assert silence < SILENCE_S and "\x1b" not in stdout.read_text()
    url, token = json.loads(result.read_text())["url"].split("/?token=")

    def said(path, **body):
        request = urllib.request.Request(url + path, json.dumps(body).encode() if body else None, {studio.GUARD: token})
        return urllib.request.urlopen(request).read().decode()

    setup, drafted, texts = json.loads(said("/api/setup")), {}, set()
    asked = {"model": setup["model"], "question": setup["question"], "video": data_url(pairs.sample_video())}
    for shape in ("", "auto", "chain", "tree-static"):
        if shape:
            assert json.loads(said("/api/knobs", draft_shape=shape))["draft_shape"] == shape
        lines = said(f"/api/ask?side={'drafts' if shape else 'vanilla'}", **asked).splitlines()
        steps = [step for line in lines if "record" in line for step in json.loads(line[6:])["vidspec_record"]]
        assert any(any(step["kinds"]) for step in steps) == bool(shape), "drafts were accepted"
        drafted[shape] = {step["drafted"] for step in steps} - {0}
        texts.add("".join(text for step in steps for text in step["text"]))
    assert not drafted[""] and max(drafted["chain"]) <= 8 and drafted["tree-static"] == {25} and len(texts) == 1
    num_processes = len(marked(mark))
    os.kill(process.pid, signal.SIGINT)
    text, _ = listen(process, terminal)
    print(f"{num_processes} processes before Ctrl-C, {stdout.read_text()!r}, drafted: {drafted}")
    assert process.wait(20) == 130 and "Traceback" not in text and num_processes > 1
    time.sleep(1)
    assert not marked(mark)


@pytest.mark.parametrize("command", [name for name, options in SURFACE.items() if "--family:" in " ".join(options)])
def test_the_help_names_every_family(command):
    """Catches: a family that the error lists and the help does not."""
    words = " ".join(invoke(*command.split(), "--help").stdout.split())
    assert all(family in words for family in pairs.FAMILIES)
