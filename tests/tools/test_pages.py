"""The documentation: pages say what was recorded, which is as it should be; links lead somewhere, commands parse."""

import itertools
import json
import re
import shlex
from types import SimpleNamespace

import pytest
import typer.main
from null_gpu import report

from benchmarks import soak, soak_judge
from tests.engine import coexistence
from tests.serve import restarts
from tools.common import FAMILIES, ROOT, SMALL_AXES, printed, sweep
from vidspec_tools.bench import acceptance
from vidspec_tools.pages import __main__ as builder
from vidspec_tools.pages import measure, never_slower, reliability, results, tables
from vidspec_tools.views import acceptance as acceptance_view
from vllm_vidspec.cli import app


def test_pages_are_what_was_recorded():
    """Catches: a page that was edited by hand, or not made again after a figure, a knob or the model changed."""
    stale = [path.name for path, text in builder.pages() if path.read_text() != text]
    assert not stale, "run python -m vidspec_tools.pages"


def test_every_result_has_a_section():
    """Catches: a section without its result, a result that no page shows."""
    sections = {**results.sections(), **reliability.sections()}
    pages = "".join(path.read_text() for path, _ in builder.pages())
    assert {name for name in sections if f"<!-- {name} -->" not in pages} == set()
    assert measure.commands_by_name().keys() <= results.sections().keys()


def test_what_is_not_specvlm_as_published_is_named_at_its_table():
    """Catches: rows by the attention of one layer, without the second stage, that pass for SpecVLM's."""
    line = "of `llava-onevision` layers [3] alone, no second stage (`lambda_r` 1)"
    for name in (name for name in results.OF_RESULTS if tables.recorded(name)):
        rows = tables.read(name).get("rows", [])
        is_shown = any(
            row.get("family") == "llava-onevision" and row.get("pruner", "specvlm") == "specvlm" for row in rows
        )
        assert (line in results.sections()[name]()) is (is_shown or name == "R7"), name
    assert results.as_calibrated([{"family": "qwen2.5-vl"}, {"family": "qwen2.5-vl-plain"}]) == []
    assert results.as_calibrated([{"family": "llava-onevision", "pruner": "uv"}]) == []


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_templates():
    rows = [{"a": "x|y", "n": 1234, "s": 0.99999, "none": None, "of": {"b": 0.5}}]
    text = tables.table("a | n | s", "`{a}` | {n:,} | {s:p}, {of[b]:%}, {of[b]:+.0f%}, {s:n%}, {none:.2f}", rows)
    assert text.splitlines() == [
        "| a | n | s |",
        "| --- | ---: | ---: |",
        "| `x\\|y` | 1,234 | 99.9 %, 50.0 %, +50 %, 100.0, - |",
    ]
    assert tables.markdown(["a", "b"], [], words=(1,)).splitlines()[1] == "| ---: | --- |"


def test_what_is_between_other_markers_stays():
    page = "a\n<!-- x -->\n\nold\n\n<!-- /x -->\n<!-- y -->\nkept\n<!-- /y -->\n"
    assert tables.written(page, {"x": lambda: "new"}) == page.replace("old", "new")


def test_an_empty_section_is_filled():
    assert tables.written("<!-- x -->\n<!-- /x -->\n", {"x": lambda: "new"}) == "<!-- x -->\nnew\n<!-- /x -->\n"


# ---- results ---------------------------------------------------------------------------------------------------------


def test_commands_and_their_names():
    """Catches: a result without a command; one of a command that is not measured again; a name for others."""
    found = measure.commands_by_name()
    assert len(found["R12"]) == 3 and found["R7"] == ["demo --family llava-onevision"]
    assert all(line.startswith(("benchmarks/", "bench ", "demo")) for lines in found.values() for line in lines)
    assert measure.chosen("R9", found) == ["R9", "R9-sage"]
    assert measure.chosen("R9-sage,R1", found) == ["R1", "R9-sage"]
    assert measure.chosen("paper", found) == [name for name in found if name.startswith("paper-")]
    with pytest.raises(SystemExit, match="no result is called 'R99'"):
        measure.chosen("R99", found)


def test_notes_say_what_went_wrong_and_what_was_not_run(engines):
    """`measured_as` is of results before each row had an engine of its own."""
    result = acceptance.run(sweep(family=FAMILIES, **SMALL_AXES))
    rows = result["rows"]
    text = "\n".join(results.pruners(result))
    assert "| `uv` | 5.00 | 3.20 | 3.00 | 64.0 % |" in text
    assert text.count("Compared with vanilla: 18 requests of 9 engines, 18 identical.") == 2
    rows[4]["unguided"]["memory"], rows[4]["identical_frac"] = 3, 0.5
    rows[5]["measured_as"] = {"pruner": "none", "prune_ratio": 1.0}
    text = "\n".join(results.pruners(result))
    assert "16 requests of 8 engines, 15 identical." in text and "Unguided (memory): 3." in text
    assert "| *3.00* |" in text and "In italics: not run itself, the draft sees the same tokens as with" in text
    assert not tables.figure("not-there.png", "a figure")
    assert "| 1.0 | 1.0 |" in results.acceptance(result)[0]
    paper = json.loads((tables.RESULTS / "paper-qwen2.5-vl.json").read_text())
    failed = {"method": "SAGE", "family": "qwen2.5-vl", "reason": "it stopped"}
    assert "Did not run: SAGE (qwen2.5-vl): it stopped." in results.body("paper-x", paper | {"failures": [failed]})


@pytest.fixture
def merged(monkeypatch, tmp_path):
    """`merged(name, options)` runs a result's own command lines, writes it with all its files, and returns it."""
    pytest.importorskip("matplotlib")

    def run(name, *options):
        parts = [printed(*command.split(), *options) for command in measure.commands_by_name()[name]]
        measure.write(tmp_path / f"{name}.json", measure.merge(parts))
        assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".png"}
        return json.loads((tmp_path / f"{name}.json").read_text())

    return run


def test_results_of_several_commands_are_one(engines, merged):
    found = merged("R9")
    shapes = ["chain", "tree-static", "tree-adaptive"]
    assert [(row["family"], acceptance_view.shape_of(row), row["temperature"]) for row in found["rows"]] == list(
        itertools.product(FAMILIES, shapes, (0.0, 1.0))
    )
    assert {row["requests"] for row in found["rows"]} == {64}
    text = results.body("R9", found)
    assert "`qwen2.5-vl`: Compared with vanilla: 384 requests of 6 engines, 384 identical." in text
    assert "](R9.png)" in text


def test_captions_of_several_commands_are_one(sessions, merged):
    found = merged("R12", "--requests", "2")
    assert [row["method"] for row in found["rows"]].count("strict") == 4, "once a panel"
    assert sum(row["method"] == "oracle" for row in found["rows"]) == 4
    text = results.body("R12", found)
    assert text.count("| strict | 4.00 | 1.00 | 100 |") == 4
    assert text.count("At least 98 % kept: loose nowhere; fly 0.05 with 5.00 tokens per step (1.25 of strict's") == 4


def test_rounds_of_a_cell_are_compared_one_by_one():
    """Catches: a start's first round, a start that is left out, rounds of other questions compared, one of two vanilla
    engines alone, a chain that was asked once, an answer of one start that is not vanilla's."""

    def start(identical: float = 1.0, **ms: list[float]) -> dict:
        names = ("vanilla", "controller", "chain of 5", "chain of 2", never_slower.AGAIN)
        each = zip(names, ms.values(), strict=True)
        rest = {"ttft_ms": 0.0, "verify_steps_last": 0, "identical_frac": identical}
        rows = [{"engine": name, "tpot_ms": tpot_ms, **rest} for name, tpot_ms in each]
        return {"tokens": 256, "draft": "far", "batch": 1, "pads": 0.0, "max_tokens": 9, "rows": rows}

    starts = [
        start(vanilla=[9, 4, 8], ours=[1, 3, 5], five=[9, 6, 5], two=[40], again=[9, 8, 12]),
        start(vanilla=[9, 2], ours=[9, 2], five=[1, 1], two=[40], again=[9, 4], identical=0.5),
    ]
    (cell,) = never_slower.pooled(starts)
    assert never_slower.over_vanilla(cell) == [2.0, 2.0, 1.5]
    assert never_slower.best_fixed(cell) == "chain of 5" and never_slower.over_best(cell) == [2.0, 1.0, 0.5]
    assert never_slower.over_vanilla(cell, "chain of 2") == [9 / 40, 9 / 40]
    assert never_slower.second_vanilla(cell) == [0.5, 8 / 12, 0.5]
    told = never_slower.summary([cell])
    assert "1 of them with several starts" in told and "identical to vanilla's: 50 %" in told


# ---- reliability and coexistence -------------------------------------------------------------------------------------


def test_the_soak_was_long_whole_and_clean():
    result = tables.read("reliability-soak")
    assert soak_judge.is_bad(result, soak.MOST_MB_PER_MIN) == []
    assert all(row["preemptions"] > 0 for row in result["configs"])
    assert result["minutes"] >= 15 and result["requests"] > 1000
    assert [row["config"] for row in result["configs"]] == ["chain", "tree-static", "tree-adaptive", "parallel"]


def test_every_case_was_run_and_is_right():
    rows = tables.read("reliability-restarts")["rows"]
    assert [row["case"] for row in rows] == [case.name for case in restarts.CASES]
    for row in rows:
        assert row["is_right"] and re.search(r"\w{2}", row["seen"]), row["case"]


def test_every_row_beside_a_feature_was_run_and_is_as_expected():
    """Catches: a row without a run, a run without a row, a verdict that changed, a cell that says nothing."""
    found = {(row["feature"], row["setting"]): row for row in tables.read("coexistence")["rows"]}
    assert list(found) == [(row.feature, row.setting) for row in coexistence.ROWS]
    for row in coexistence.ROWS:
        seen = found[row.feature, row.setting]
        assert seen["verdict"] == row.expected and seen["verdict"] in coexistence.VERDICTS, row.name
        assert re.search(row.says, seen["detail"]), row.name
        assert all(re.search(r"\w{2}", cell) for cell in seen.values()), row.name


def test_rows_are_recorded_as_they_are_seen(tmp_path):
    """Catches: rows of earlier runs that are lost or run again, a wrong one that is not written, another order."""
    path, ran = tmp_path / "rows.json", []
    cases = [SimpleNamespace(name=name) for name in ("kill core", "kill server", "full disk")]
    key = lambda case: case["case"] if isinstance(case, dict) else case.name  # noqa: E731

    def run(case, folder):
        ran.append(case.name)
        return {"case": case.name, "seen": f"{len(ran)} in {tables.ROOT}/x"}, case.name != "kill server"

    assert not measure.run_rows(path, cases, "kill", key, run)
    assert ran == ["kill core", "kill server", "full disk"], "what was never run is run, too"
    assert measure.run_rows(path, cases, "full,kill core", key, run)
    found = json.loads(path.read_text())
    assert [row["case"] for row in found["rows"]] == ["kill core", "kill server", "full disk"]
    assert [row["seen"] for row in found["rows"]] == ["4 in x", "2 in x", "5 in x"], "no folder of this machine"
    assert found["provenance"]["git_sha"] == measure.provenance()["git_sha"]


# ---- every page ------------------------------------------------------------------------------------------------------

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("name,whole", [("null-gpu", False), ("null-gpu-whole", True)])
def test_null_gpu_table_is_what_was_measured(name, whole):
    assert report.section(tables.read(name), whole) in (ROOT / "docs" / "gpu.md").read_text()


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
