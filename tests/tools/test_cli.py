"""The `vidspec` command without an engine: its options, wrong values, and the shapes of tables and JSON."""

import dataclasses
import io
import itertools
import json
import subprocess
import sys
import types
import typing
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer.main
from rich.console import Console

from tools.common import counters, invoke, refuses
from vidspec_tools.bench import acceptance
from vidspec_tools.views.progress import EnginesView
from vllm_vidspec import doctor
from vllm_vidspec.cli import app
from vllm_vidspec.cli import doctor as doctor_command
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import demo, progress

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


@pytest.mark.parametrize("args", [[], ["bench"], *(name.split() for name in SURFACE)], ids=" ".join)
def test_help(args):
    result = invoke(*args, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_module_is_the_command():
    """It imports nothing heavy for its help; `python -m` is `vidspec` by name, in its help and in a result's argv."""
    code = (
        "import runpy, sys\nsys.argv = ['', '--help']\n"
        "try: runpy.run_module('vllm_vidspec.cli', run_name='__main__', alter_sys=False)\n"
        "except SystemExit as stop: assert not stop.code\n"
        "print(sys.argv[0], [m for m in ('torch', 'vllm', 'numpy', 'pydantic', 'openai', 'cv2') if m in sys.modules])\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "Usage: vidspec [OPTIONS]" in printed
    assert printed.splitlines()[-1] == "vidspec []"


def bench(*options):
    """Run the command on two videos; return what it printed as JSON."""
    result = invoke("bench", "acceptance", *options, "--requests", "2", "--json", "-")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_bench_json_has_one_row_per_combination(engines):
    engines.ours = [1, 3]
    axes = ("--draft", "draft,target", "--prune-ratio", "0.5,0.9", "--temperature", "0,1")
    printed = bench(*axes, "--top-p", "0.9")
    assert set(printed) == {"rows", "failures", "provenance"}
    assert len(printed["rows"]) == 2 * 2 * 2
    row = printed["rows"][0]
    assert set(acceptance.AXES) <= set(row)
    assert (row["acceptance_length"], row["acceptance_rate"], row["num_drafts"]) == (4.0, 0.6, 100)
    assert row["identical_frac"] == 0.5
    assert (row["draft_kv_bytes"], row["full_draft_kv_bytes"]) == ((20 + 500) * 8, (20 + 1000) * 8)
    assert row["decode_s"] == row["vanilla_decode_s"] == 1.0
    assert {"git_sha", "versions", "argv", "device", "cpu", "date"} <= set(printed["provenance"])

    vanilla, *ours = engines.jobs
    assert len(ours) == 4, "vanilla once for the family, then one engine per configuration"
    assert "speculative_config" not in vanilla["llm"]
    assert vanilla["samplings"] == ours[0]["samplings"]
    assert vanilla["samplings"][0] == {"max_tokens": 256, "ignore_eos": False, "temperature": 0.0, "top_p": 0.9}
    assert {job["llm"]["speculative_config"]["model"] == "self" for job in ours} == {True, False}
    # Unseeded sampling is not compared.
    assert [row["identical_frac"] for row in bench("--temperature", "0,1", "--unseeded")["rows"]] == [0.5, None]
    assert engines.jobs[-1]["seed"] is None


def test_each_shape_has_its_own_number_of_tokens(engines):
    shapes = [("chain", 5), ("tree-static", 25), ("tree-adaptive", 64)]
    rows = bench("--draft-shape", "chain,tree-static,tree-adaptive")["rows"]
    assert [(row["drafting"], row["num_speculative_tokens"]) for row in rows] == shapes
    given = [job["llm"]["speculative_config"] for job in engines.jobs[1:]]
    assert [(spec["draft"], spec["num_speculative_tokens"]) for spec in given] == shapes
    for name, value in (("nodes", 5.0), ("depth", 4.0), ("draft_forwards", 5.0)):
        assert {row[f"{name}_per_step"] for row in rows} == {value}
    assert {row["max_acceptance_length"] for row in rows} == {5.0}
    assert {row["scheduling"] for row in rows} == {"sync"}, "what the engine says"
    assert not any("async_scheduling" in job["llm"] for job in engines.jobs)

    result = invoke("bench", "acceptance", "--drafting", "chain,tree-adaptive", "--requests", "2")
    for words in ("tree-adaptive", "64", "sync scheduling", "nodes"):
        assert words in result.stdout, words


def test_knobs_and_scheduling_are_those_of_all_rows(engines):
    given = ("--knob", "tree_history=0", "--knob", "tree-lookahead=false", "--knob", 'quantization="fp8"')
    rows = bench("--drafting", "tree-adaptive", "--prune-ratio", "0.5,0.9", *given, "--sync-scheduling")["rows"]
    knobs = {"tree_history": 0, "tree_lookahead": False, "quantization": "fp8"}
    assert [row["knobs"] for row in rows] == [knobs] * 2
    assert all(job["llm"]["async_scheduling"] is False for job in engines.jobs), "vanilla too: its time stands beside"
    for job in engines.jobs[1:]:
        assert job["llm"]["speculative_config"].items() >= knobs.items()
    shown = " ".join(invoke("bench", "acceptance", "--knob", "tree_history=0", "--requests", "2").stdout.split())
    assert "tree_history 0" in shown


def test_a_failing_configuration_is_one_line_and_the_others_stay(engines):
    error = VidSpecError("the engine stopped: RuntimeError: no")
    engines.fails = lambda job: error if "'num_speculative_tokens': 7" in str(job) else None
    result = invoke("bench", "acceptance", "--num-speculative-tokens", "7,3", "--requests", "2", "--json", "-")
    assert result.exit_code == 1
    printed = json.loads(result.stdout)
    assert [row["num_speculative_tokens"] for row in printed["rows"]] == [3]
    assert printed["failures"][0]["reason"] == "the engine stopped: RuntimeError: no"
    assert result.stderr.count("RuntimeError: no") == 1


def test_bench_writes_a_table_and_a_file(engines, tmp_path):
    options = ("bench", "acceptance", "--prune-ratio", "0.5,0.9", "--requests", "2", "--json")
    result = invoke(*options, str(tmp_path / "rows.json"))
    assert result.exit_code == 0
    for words in ("60.0 %", "4.00", "K 5"):  # what does not vary stands in the caption
        assert words in result.stdout, words
    assert "nodes" not in result.stdout
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 2
    ran = len(engines.jobs)
    assert invoke(*options, str(tmp_path / "no" / "x")).exit_code == 2
    assert len(engines.jobs) == ran


def test_bench_plot_without_matplotlib_is_one_line(engines, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refuses("needs matplotlib: pip install matplotlib", "bench", "acceptance", "--plot", str(tmp_path / "f.png"))
    assert not engines.jobs


def test_bench_shares_engines_and_writes_csv_and_plot(engines, tmp_path):
    pytest.importorskip("matplotlib")
    files = {kind: tmp_path / f"rows.{kind}" for kind in ("csv", "svg", "json")}
    result = invoke(
        *("bench", "acceptance", "--pruner", "none,random,uniform", "--prune-ratio", "0,0.9,1", "--requests", "2"),
        *("--jobs", "2", "--csv", str(files["csv"]), "--plot", str(files["svg"]), "--json", str(files["json"])),
    )
    assert result.exit_code == 0, result.stderr
    assert len(engines.jobs) == 1 + 1 + 2 + 1, "vanilla, unpruned, two pruners at 0.9, text only"
    assert "vanilla" not in result.stdout, "no times"
    assert "2 engines ran at once" in " ".join(result.stdout.split())
    assert "5.00*" in result.stdout
    assert files["svg"].read_text().startswith("<?xml")
    written = json.loads(files["json"].read_text())
    assert written["provenance"]["jobs"] == 2
    assert files["csv"].read_text().count("\n") == 2 + 9
    assert [(row["pruner"], row["prune_ratio"]) for row in written["rows"]] == list(
        itertools.product(("none", "random", "uniform"), (0, 0.9, 1))
    )


def test_bench_view_shows_engines_that_run_at_once():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with progress.bars(console) as bars:
        view = EnginesView(bars)
        for engine in (0, 1):
            view("start", {"engine": engine, "label": f"engine {engine}", "total": 4, "engines": 3})
        view("ready", {"engine": 1})
        view("progress", {"engine": 1, "done": 1})
        view("result", {"engine": 1, "token_ids": [[1], [2]]})
        view("progress", {"engine": 1, "done": 1})
        shown = {task.description: task.fields["note"] for task in bars.tasks}
        assert shown == {"engines": "0/3", "engine 0": "loading", "engine 1": "3/4 requests"}
        view("done", {"engine": 1, "label": "engine 1"})
        view("failed", {"engine": 0, "label": "engine 0", "reason": "it [stopped]"})
        assert [(task.description, task.fields["note"]) for task in bars.tasks] == [("engines", "2/3")]
    assert "vidspec: engine 0: it [stopped]" in console.file.getvalue()


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

    result = invoke("demo", "--log-dir", str(tmp_path), "--json", "-")
    printed = json.loads(result.stdout)
    assert printed["identical"] is identical
    assert printed["acceptance_length"] == 3.2
    assert printed["speculative_config"]["method"] == "vidspec"


def test_doctor_table_json_and_status(monkeypatch):
    checks = [doctor.Check("engine", "ok", "vllm 0.32"), doctor.Check("pair", "fail", "no [draft]", "name one")]
    monkeypatch.setattr(doctor, "run_checks", lambda target=None, draft=None: checks)
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "name one" in result.stdout
    assert "[draft]" in result.stdout, "brackets are text, not markup"
    assert [check["status"] for check in json.loads(invoke("doctor", "--json", "-").stdout)["checks"]] == ["ok", "fail"]
    monkeypatch.setattr(doctor, "run_checks", lambda target=None, draft=None: checks[:1])
    assert invoke("doctor").exit_code == 0


def test_doctor_looks_anew_after_a_repair(monkeypatch):
    """A module that was broken stays so in this process. Catches: "fail" and status 1 after a repair that worked."""
    from vllm_vidspec.setup import fixups

    started = []

    def run(command):
        started.append(command)
        return SimpleNamespace(returncode=3)

    changed = fixups.FixupResult("torchvision", True, "repaired")
    monkeypatch.setattr(fixups, "apply_fixups", lambda: [changed])
    monkeypatch.setattr(doctor, "run_checks", lambda target=None, draft=None: pytest.fail("checked in this process"))
    monkeypatch.setattr(doctor_command.subprocess, "run", run)
    assert invoke("doctor", "--fix", "--target", "t", "--draft", "self").exit_code == 3
    assert started == [[sys.executable, "-m", "vllm_vidspec.cli", "doctor", "--target", "t", "--draft", "self"]]
    # Where nothing had to change this process sees what there is.
    monkeypatch.setattr(fixups, "apply_fixups", lambda: [dataclasses.replace(changed, changed=False)])
    monkeypatch.setattr(doctor, "run_checks", lambda target=None, draft=None: [doctor.Check("engine", "ok", "fine")])
    assert invoke("doctor", "--fix").exit_code == 0
    assert len(started) == 1
