"""The documentation: pages say what was recorded, which is as it should be; links lead somewhere, commands parse."""

import json
import re
import shlex
from types import SimpleNamespace
from typing import Literal

import pytest
import typer.main
from null_gpu import report
from pydantic import BaseModel, Field

from benchmarks import soak
from benchmarks.pages import __main__ as builder
from benchmarks.pages import configuration, measure, results
from tests.engine import coexistence
from tests.serve import restarts
from tools.common import ROOT
from vllm_vidspec.cli import app
from vllm_vidspec.tools import tables


def test_pages_are_what_was_recorded():
    """Catches: a page that was edited by hand, or not made again after a figure, a key or the model changed."""
    stale = [path.name for path, text in builder.pages() if path.read_text() != text]
    assert not stale, "run python -m benchmarks.pages"


def test_every_section_is_on_one_page():
    """Catches: a section that no page shows, or two; a marker without its end, which nothing fills."""
    text = "".join(path.read_text() for path, _ in builder.pages())
    for name in builder.SECTIONS:
        assert (text.count(f"<!-- {name} -->"), text.count(f"<!-- /{name} -->")) == (1, 1), name


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_templates():
    rows = [{"a": "x|y", "n": 1234, "s": 0.99999, "none": None, "of": {"b": 0.5}}]
    line = "`{a}` | {n:,} | {s:p}, {of[b]:%}, {of[b]:+.0f%}, {s:n%}, {none:.2f}, {none:p}, {n:x}, {of[b]:ms}, {n:KiB}"
    assert results.table("a | n | s", line, rows).splitlines() == [
        "| a | n | s |",
        "| --- | ---: | ---: |",
        "| `x\\|y` | 1,234 | 99.9 %, 50.0 %, +50 %, 100, -, -, 1234.00x, 500.0 ms, 1 KiB |",
    ]
    assert tables.markdown(["a", "b"], [], words=(1,)).splitlines()[1] == "| ---: | --- |"


def test_what_is_between_other_markers_stays():
    page = "a\n<!-- x -->\n\nold\n\n<!-- /x -->\n<!-- y -->\nkept\n<!-- /y -->\nin <!-- x -->old<!-- /x --> line\n"
    assert builder.written(page, {"x": lambda: "new"}) == page.replace("old", "new")
    assert builder.written("<!-- x -->\n<!-- /x -->\n", {"x": lambda: "new"}) == "<!-- x -->\nnew\n<!-- /x -->\n"


def test_a_difference_is_bold_where_its_interval_has_no_zero():
    """Catches: an interval of one setting for that of the difference; requests that are not drawn in pairs."""
    same = [{"accepted": n, "drafts": 10} for n in range(20)]
    more = [row | {"accepted": row["accepted"] + 2} for row in same]
    assert results.difference(more, same) == "**+0.20 to +0.20**"
    assert results.difference(same, same) == "+0.00 to +0.00"
    low, high = results.interval(same)
    assert low < results.mean_length(same) == 1.95 < high
    assert results.with_interval(same) == f"1.95 ± {(high - low) / 2:.2f}"
    assert results.difference(None, same) == results.with_interval(None) == "-"


def test_keys_stand_by_who_needs_them():
    """Catches: a key that is left out, one of a model in the model, a range or a default that is not shown."""

    class Inner(BaseModel):
        size: int = Field(default=1, ge=1, lt=9, json_schema_extra={"shelf": "sometimes"}, description="How\nmany.")

    class Base(BaseModel):
        inherited: list[str] = Field(default=["x"], json_schema_extra={"shelf": "first"})

    class Outer(Base):
        name: str = Field(json_schema_extra={"shelf": "first"})
        inner: Inner = Inner()
        way: Literal["a", "b"] | None = None

    lines = {shelf: configuration.keys(shelf, Outer).splitlines()[2:] for shelf in configuration.SHELVES}
    assert lines == {
        "first": ["| `name` | string | required |  |", "| `inherited` | list of string | `['x']` |  |"],
        "sometimes": ["| `inner.size` | integer, >= 1, < 9 | `1` | How many. |"],
        "experts": ["| `way` | `a`, `b` |  |  |"],
    }


# ---- the notebook's rows ---------------------------------------------------------------------------------------------


def test_commands_and_their_names():
    """Catches: a row without a command; one of a command that is not measured again; a name for others."""
    found = measure.commands()
    assert len(found["R9-sage"]) == 3 and found["R7"] == ["vidspec demo --family llava-onevision"]
    assert {f"R{number}" for number in (1, 2, 3, 4, 5, 6, 7, 9, 12, 15, 16, 17)} <= found.keys()
    assert measure.chosen("R9", found) == ["R9", "R9-sage"]
    assert set(measure.chosen("R9-sage,R1", found)) == {"R1", "R9-sage"}
    with pytest.raises(SystemExit, match="no result is called 'R99'"):
        measure.chosen("R99", found)


def test_a_rows_commands_run_and_keep_their_results(monkeypatch, tmp_path):
    """Catches: a command that is left out after one that fails, a result over another's."""
    ran = []
    run = lambda command, cwd: ran.append(command[1:]) or SimpleNamespace(returncode=int("bad" in command))  # noqa: E731
    monkeypatch.setattr(measure.subprocess, "run", run)
    measure.run_commands("R1", ["vidspec demo", "python -m benchmarks.x --y 'a b'"], tmp_path)
    assert ran == [
        ["-m", "vllm_vidspec.cli", "demo", "--json", str(tmp_path / "R1-1.json")],
        ["-m", "benchmarks.x", "--y", "a b", "--json", str(tmp_path / "R1-2.json")],
    ]
    with pytest.raises(SystemExit, match="failed: vidspec bad"):
        measure.run_commands("R1", ["vidspec bad", "vidspec demo"], tmp_path)


# ---- reliability and coexistence -------------------------------------------------------------------------------------


def test_the_soak_was_long_whole_and_clean():
    result = results.read("reliability-soak")
    assert soak.is_bad(result, soak.MOST_MB_PER_MIN) == []
    assert all(row["preemptions"] > 0 for row in result["configs"])
    assert result["minutes"] >= 15 and result["requests"] > 1000
    assert [row["config"] for row in result["configs"]] == ["chain", "tree-static", "tree-adaptive", "parallel"]


def test_every_case_was_run_and_is_right():
    rows = results.read("reliability-restarts")["rows"]
    assert [row["case"] for row in rows] == [case.name for case in restarts.CASES]
    for row in rows:
        assert row["is_right"] and re.search(r"\w{2}", row["seen"]), row["case"]


def test_every_row_beside_a_feature_was_run_and_is_as_expected():
    """Catches: a row without a run, a run without a row, a verdict that changed, a cell that says nothing."""
    found = {(row["feature"], row["setting"]): row for row in results.read("coexistence")["rows"]}
    assert list(found) == [(row.feature, row.setting) for row in coexistence.ROWS]
    for row in coexistence.ROWS:
        seen = found[row.feature, row.setting]
        assert seen["verdict"] == row.expected and seen["verdict"] in coexistence.VERDICTS, row.name
        assert re.search(row.says, seen["detail"]), row.name
        assert all(re.search(r"\w{2}", cell) for cell in seen.values()), row.name


def test_rows_are_recorded_as_they_are_seen(tmp_path):
    """Catches: rows of earlier runs that are lost or run again, a wrong one that is not written, another order."""
    path, ran = tmp_path / "rows.json", []

    def case(name):
        def run(folder):
            ran.append(name)
            if name == "kill server":
                raise ValueError(f"{folder}/y\nmore")
            return f"{len(ran)} in {ROOT}/x"

        return SimpleNamespace(name=name, run=run)

    cases = [case(name) for name in ("kill core", "kill server", "full disk")]
    judge = lambda case, seen, reason: ({"seen": reason or seen}, not reason)  # noqa: E731
    record = lambda wanted: measure.run_rows(path, cases, wanted, lambda one: {"case": one.name}, judge)  # noqa: E731
    assert not record("kill")
    assert ran == ["kill core", "kill server", "full disk"], "what was never run is run, too"
    assert record("full,kill core")
    found = json.loads(path.read_text())
    assert [row["case"] for row in found["rows"]] == ["kill core", "kill server", "full disk"]
    seen = [row["seen"] for row in found["rows"]]
    assert seen == ["4 in x", "ValueError: …/y", "5 in x"], "no folder of this machine"
    assert found["provenance"]["git_sha"] == measure.provenance()["git_sha"]


# ---- every page ------------------------------------------------------------------------------------------------------

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("name,whole", [("null-gpu", False), ("null-gpu-whole", True)])
def test_null_gpu_table_is_what_was_measured(name, whole):
    section = report.section(results.read(name), whole)
    assert sum(section in page.read_text() for page in PAGES) == 1


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_to_files_and_no_figure_is_left_open(page):
    text = page.read_text()
    assert "@@" not in text
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert "://" in target or (page.parent / target).exists(), target


def command_lines(page):
    """Every `vidspec …` command line of a page, in code blocks or between backticks; continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", page.read_text())
    command = r"vidspec (?:demo|doctor|status|studio|bench|calibrate|plan|show-pruning)\b"
    lines = re.findall(rf"^\s*(?:\$ )?({command}.*)$", text, re.MULTILINE)
    lines += re.findall(rf"`({command}[^`]*)`", text)
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_parse(page):
    group = typer.main.get_command(app)
    for args in command_lines(page):
        command, rest = group, list(args)
        while hasattr(command, "commands") and rest and rest[0] in command.commands:
            command = command.commands[rest.pop(0)]
        if rest:
            assert not hasattr(command, "commands"), args
            command.make_context(args[0], rest)
