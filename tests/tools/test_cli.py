"""The `vidspec` command without an engine: help, wrong options, and the shapes of tables and JSON."""

import dataclasses
import io
import itertools
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vllm_vidspec import cli, doctor
from vllm_vidspec.cli import app
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import NAMES
from vllm_vidspec.tools import demo, plots, progress
from vllm_vidspec.tools.bench import acceptance

COUNTERS = dict.fromkeys(NAMES, 0) | {
    "drafts": 10,
    "draft_tokens": 50,
    "accepted_tokens": 40,
    "text_tokens": 20,
    "visual_tokens_full": 512,
    "visual_tokens_kept": 51,
    "draft_kv_bytes_per_token": 2048,
    "draft_depth": 40,
    "draft_forwards": 20,
    "draft_steps": 4,
}


def invoke(*args: str):
    return CliRunner().invoke(app, list(args))


@pytest.fixture
def engine(monkeypatch):
    """Replace the engine subprocess; return the list of jobs it was given."""
    jobs = []

    def run_job(job, report, running):
        jobs.append(job)
        ours = "speculative_config" in job["llm"]
        if ours and job["llm"]["speculative_config"]["num_speculative_tokens"] == 7:
            raise VidSpecError("the engine stopped: RuntimeError: no")
        answers = [[1, 2, 3], [4, 5]] if not ours else [[1, 2, 3], [4, 6]]
        fields = {"seconds": 2.0, "metrics": COUNTERS if ours else None, "token_ids": answers, "scheduling": "sync"}
        report("ready", {"seconds": 1.0})
        for index in range(len(job["samplings"])):
            report("progress", {"index": index, "done": 2})
            report("result", fields)
        return [fields for _ in job["samplings"]]

    monkeypatch.setattr(acceptance, "run_job", run_job)
    return jobs


@pytest.mark.parametrize(
    "args", [[], ["demo"], ["doctor"], ["bench"], ["bench", "acceptance"], ["bench", "quality"], ["show-relevance"]]
)
def test_help(args):
    result = invoke(*args, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_help_imports_nothing_heavy():
    code = (
        "import sys, vllm_vidspec.cli\n"
        "print([m for m in ('torch', 'vllm', 'numpy', 'pydantic', 'openai', 'cv2') if m in sys.modules])\n"
    )
    start = time.perf_counter()
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pruner", "unifrom"], "did you mean 'uniform'?"),
        (["--prune-ratio", "0.5,1.5"], "prune_ratio"),
        (["--prune-ratio", "much"], "--prune-ratio"),
        (["--num-speculative-tokens", "0"], "num_speculative_tokens"),
        (["--num-speculative-tokens", "2.5"], "--num-speculative-tokens"),
        (["--scorer", "lenient"], "scorer"),
        (["--drafting", "tree"], "draft"),
        (["--family", "llava"], "unknown family 'llava'"),
        (["--draft", ","], "--draft"),
        (["--csv", "/no/such/folder/rows.csv"], "cannot write /no/such/folder/rows.csv"),
        (["--csv", "/tmp"], "cannot write /tmp"),
        (["--plot", "/no/such/folder/f.png"], "cannot write /no/such/folder/f.png"),
        (["--plot", "figure.jpeg"], ".png or .svg"),
        (["--plot", "figure.png", "--temperature", "0,1"], "shows one temperature"),
        (
            *(
                [
                    "--plot",
                    "f.png",
                    "--drafting",
                    "chain,tree-static",
                    "--temperature",
                    "0,1",
                    "--prune-ratio",
                    "0,0.9",
                ],
            ),
            "shows one temperature",
        ),
        (["--drafting", "chain,tree-static", "--num-speculative-tokens", "5"], "must be 25"),
        (["--drafting", "auto"], "draft_table"),
        (["--knob", "tree_depth=5"], "did you mean 'tree_depth_min'?"),
        (["--knob", "tree_depth_max=9", "--knob", "tree_depth_max=5"], "given twice"),
        (["--knob", "tree_depth_max=100"], "tree_depth_max"),
        (["--knob", "tree_depth_max"], "'tree_depth_max' is not of the form NAME=JSON"),
        (["--knob", "tree_lookahead=False"], "'False' is no JSON value"),
        (["--knob", "prune_ratio=0.5"], "an option of its own, --prune-ratio"),
        (["--knob", 'draft="tree-static"'], "an option of its own, --drafting"),
    ],
)
def test_wrong_bench_options_are_one_line_and_exit_2(engine, options, words):
    result = invoke("bench", "acceptance", *options, "--json", "-")
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.startswith("vidspec: ")
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""
    assert not engine, "nothing runs before every value is checked"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prune-ratio", "1.5"], "prune_ratio"),
        (["--video", "/no/such.mp4"], "no such video"),
        (["--family", "qwen"], "unknown family 'qwen'"),
    ],
)
def test_wrong_demo_options_are_one_line_and_exit_2(options, words):
    result = invoke("demo", *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_bench_json_has_one_row_per_combination(engine):
    result = invoke(
        *("bench", "acceptance", "--draft", "draft,target", "--prune-ratio", "0.5,0.9", "--temperature", "0,1"),
        *("--requests", "2", "--top-p", "0.9", "--json", "-"),
    )
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    assert set(printed) == {"rows", "failures", "provenance"}
    assert len(printed["rows"]) == 2 * 2 * 2
    row = printed["rows"][0]
    assert set(acceptance.AXES) <= set(row)
    assert row["acceptance_length"] == 5.0
    assert row["acceptance_rate"] == 0.8
    assert row["identical_frac"] == 0.5
    assert row["draft_kv_bytes"] == (20 + 51) * 2048
    assert row["full_draft_kv_bytes"] == (20 + 512) * 2048
    assert row["num_drafts"] == 10
    assert row["decode_s"] == row["vanilla_decode_s"] == 2.0
    assert {"git_sha", "versions", "argv", "device", "cpu", "date"} <= set(printed["provenance"])

    assert len(engine) == 1 + 4, "vanilla once for the family, then one engine per configuration"
    assert "speculative_config" not in engine[0]["llm"]
    assert engine[0]["samplings"] == engine[1]["samplings"]
    assert engine[0]["samplings"][0] == {"max_tokens": 256, "ignore_eos": False, "temperature": 0.0, "top_p": 0.9}
    assert {job["llm"]["speculative_config"]["model"] == "self" for job in engine[1:]} == {True, False}


def test_each_shape_has_its_own_number_of_tokens(engine):
    shapes = ["chain", "tree-static", "tree-adaptive"]
    result = invoke("bench", "acceptance", "--drafting", ",".join(shapes), "--requests", "2", "--json", "-")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [(row["drafting"], row["num_speculative_tokens"]) for row in rows] == list(
        zip(shapes, [5, 25, 64], strict=True)
    )
    given = [job["llm"]["speculative_config"] for job in engine[1:]]
    assert [(spec["draft"], spec["num_speculative_tokens"]) for spec in given] == list(
        zip(shapes, [5, 25, 64], strict=True)
    )
    for name, value in (("nodes", 5.0), ("depth", 4.0), ("draft_forwards", 5.0)):
        assert {row[f"{name}_per_step"] for row in rows} == {value}
    assert {row["max_acceptance_length"] for row in rows} == {5.0}
    assert {row["scheduling"] for row in rows} == {"sync"}, "what the engine says"
    assert not any("async_scheduling" in job["llm"] for job in engine)

    result = invoke("bench", "acceptance", "--drafting", "chain,tree-adaptive", "--requests", "2")
    for words in ("tree-adaptive", "64", "sync scheduling", "nodes"):
        assert words in result.stdout, words
    assert "nodes" not in invoke("bench", "acceptance", "--requests", "2").stdout


def test_knobs_and_scheduling_are_those_of_all_rows(engine):
    result = invoke(
        *("bench", "acceptance", "--drafting", "tree-adaptive", "--prune-ratio", "0.5,0.9", "--requests", "2"),
        *("--knob", "tree_history=0", "--knob", "tree-lookahead=false", "--knob", 'quantization="fp8"'),
        *("--sync-scheduling", "--json", "-"),
    )
    assert result.exit_code == 0, result.stderr
    knobs = {"tree_history": 0, "tree_lookahead": False, "quantization": "fp8"}
    assert [row["knobs"] for row in json.loads(result.stdout)["rows"]] == [knobs] * 2
    assert all(job["llm"]["async_scheduling"] is False for job in engine), "vanilla too: its time stands beside ours"
    for job in engine[1:]:
        assert job["llm"]["speculative_config"].items() >= knobs.items()
    shown = " ".join(invoke("bench", "acceptance", "--knob", "tree_history=0", "--requests", "2").stdout.split())
    assert "tree_history 0" in shown


def test_unseeded_sampling_is_not_compared(engine):
    result = invoke("bench", "acceptance", "--temperature", "0,1", "--unseeded", "--requests", "2", "--json", "-")
    assert [row["identical_frac"] for row in json.loads(result.stdout)["rows"]] == [0.5, None]
    assert engine[0]["seed"] is None


def test_a_failing_configuration_is_one_line_and_the_others_stay(engine):
    result = invoke("bench", "acceptance", "--num-speculative-tokens", "7,3", "--requests", "2", "--json", "-")
    assert result.exit_code == 1
    printed = json.loads(result.stdout)
    assert [row["num_speculative_tokens"] for row in printed["rows"]] == [3]
    assert printed["failures"][0]["reason"] == "the engine stopped: RuntimeError: no"
    assert result.stderr.count("RuntimeError: no") == 1


def test_bench_table(engine):
    result = invoke("bench", "acceptance", "--prune-ratio", "0.5,0.9", "--requests", "2")
    assert result.exit_code == 0
    assert "80.0 %" in result.stdout
    assert "5.00" in result.stdout
    assert "K 5" in result.stdout, "what does not vary stands in the caption"


def test_bench_writes_a_file(engine, tmp_path):
    result = invoke("bench", "acceptance", "--requests", "2", "--json", str(tmp_path / "rows.json"))
    assert result.exit_code == 0
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 1
    ran = len(engine)
    assert invoke("bench", "acceptance", "--requests", "2", "--json", str(tmp_path / "no" / "x")).exit_code == 2
    assert len(engine) == ran


def test_bench_plot_without_matplotlib_is_one_line(engine, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("bench", "acceptance", "--plot", str(tmp_path / "f.png"))
    assert (result.exit_code, engine) == (2, [])
    assert result.stderr == "vidspec: drawing needs matplotlib: pip install matplotlib\n"


def test_bench_shares_engines_and_writes_csv_and_plot(engine, tmp_path):
    pytest.importorskip("matplotlib")
    files = {kind: tmp_path / f"rows.{kind}" for kind in ("csv", "svg", "json")}
    result = invoke(
        *("bench", "acceptance", "--pruner", "none,random,uniform", "--prune-ratio", "0,0.9,1", "--requests", "2"),
        *("--jobs", "2", "--csv", str(files["csv"]), "--plot", str(files["svg"]), "--json", str(files["json"])),
    )
    assert result.exit_code == 0, result.stderr
    assert len(engine) == 1 + 1 + 2 + 1, "vanilla, unpruned, two pruners at 0.9, text only"
    assert "vanilla" not in result.stdout, "no times"
    assert "2 engines ran at once" in " ".join(result.stdout.split())
    assert "5.00*" in result.stdout
    assert files["svg"].read_text().startswith("<?xml")
    written = json.loads(files["json"].read_text())
    assert written["provenance"]["jobs"] == 2
    rows = plots.read_csv(str(files["csv"]))
    assert len(rows) == len(written["rows"]) == 9
    assert [(row["pruner"], row["prune_ratio"]) for row in rows] == list(
        itertools.product(("none", "random", "uniform"), (0, 0.9, 1))
    )


def test_bench_view_shows_engines_that_run_at_once():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with progress.bars(console) as bars:
        view = progress.View(bars)
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
    def serve(what, name, draft, video, log_path, report):
        report("starting", {"elapsed_s": 1.0})
        report("ready", {"seconds": 12.0})
        report("text", {"delta": "a red [bold]circle[/bold]"})
        report("answered", {"name": name})
        ids = [1, 2] if identical or draft is None else [1, 3]
        times = {"ttft_s": 0.5, "decode_s": 1.5, "server_start_s": 12.0, "output_tokens": 2}
        return {"text": "a red circle", "token_ids": ids, "command": [], "counters": COUNTERS, **times}

    monkeypatch.setattr(demo, "_serve_and_ask", serve)
    result = invoke("demo", "--log-dir", str(tmp_path))
    assert result.exit_code == (0 if identical else 1)
    for words in ("a red [bold]circle[/bold]", "5.00", "80.0 %", "1.0 MiB", "142 KiB", "yes" if identical else "NO"):
        assert words in result.stdout, words

    result = invoke("demo", "--log-dir", str(tmp_path), "--json", "-")
    printed = json.loads(result.stdout)
    assert printed["identical"] is identical
    assert printed["acceptance_length"] == 5.0
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
    monkeypatch.setattr(cli.subprocess, "run", run)
    assert invoke("doctor", "--fix", "--target", "t", "--draft", "self").exit_code == 3
    assert started == [[sys.executable, "-m", "vllm_vidspec.cli", "doctor", "--target", "t", "--draft", "self"]]
    # Where nothing had to change this process sees what there is.
    monkeypatch.setattr(fixups, "apply_fixups", lambda: [dataclasses.replace(changed, changed=False)])
    monkeypatch.setattr(doctor, "run_checks", lambda target=None, draft=None: [doctor.Check("engine", "ok", "fine")])
    assert invoke("doctor", "--fix").exit_code == 0
    assert len(started) == 1
