"""The results page: its commands, and what scripts/make_results.py makes of their results."""

import itertools
import json
import re
import sys
from types import SimpleNamespace

import pytest

from tools.common import FAMILIES, ROOT, SMALL_AXES, invoke, load, sweep
from vidspec_tools import plots
from vidspec_tools.bench import acceptance

COMMANDS = ["R1", "R2", "R3", "R4", "R5", "R6", "R7", "R8", "R9", "R9-sage", "R10", "R11", "R12", "R12-relevance"]
COMMANDS += ["R13", "R14-parallel", "R15", "R15-frames", "R16", "R16-qwen3-vl", "R16-loose", "R17", "R17-shapes", "R18"]
OF_PAPERS = [
    *("paper-qwen2.5-vl", "paper-qwen2.5-vl-inflated", "paper-qwen2.5-vl-inflated-race", "paper-stock"),
    *("speed-qwen2.5-vl", "scaling-video"),
]
COMMANDS += OF_PAPERS


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return load("scripts/make_results.py")


def test_page_is_what_the_results_say(script):
    """Catches: a page that was edited by hand, or is not that of the files beside it."""
    paths = [path for kind in ("R", *script.paper_tables.VIEWS) for path in script.FOLDER.glob(f"{kind}*.json")]
    results = {path.stem: script.read(path) for path in paths}
    not_run = re.findall(r"<!-- (\S+) -->\nNot run yet: ", script.PAPER_PAGE.read_text())
    assert set(results) == set(COMMANDS) - set(not_run) and set(not_run) <= set(OF_PAPERS), "what is not run says so"
    for page in (script.PAGE, script.PAPER_PAGE, script.ROOT / "README.md"):
        assert script.filled(page.read_text(), results) == page.read_text()


def test_commands_are_those_of_the_page(script):
    found = script.commands_by_name()
    assert list(found) == COMMANDS
    several = {name: len(lines) for name, lines in found.items() if len(lines) > 1}
    assert several == {
        "R9": 2,
        "R9-sage": 3,
        "R11": 2,
        "R12": 2,
        "R12-relevance": 2,
        "R15": 4,
        "R16": 5,
        "R16-qwen3-vl": 2,
        "R17-shapes": 2,
    }
    assert found["R7"] == ["demo --family llava-onevision"]
    assert found["R3"][0].endswith("--requests 64 --jobs 2 --csv docs/results/R3.csv --plot docs/results/R3.png")
    for line in (line for lines in found.values() for line in lines):
        assert line.startswith("benchmarks/") or line.split()[0] in ("bench", "calibrate", "demo", "show-relevance")


def test_results_by_name(script):
    assert script.chosen("R9", COMMANDS) == ["R9", "R9-sage"]
    assert script.chosen("R12", COMMANDS) == ["R12", "R12-relevance"]
    assert script.chosen("R9-sage,R1", COMMANDS) == ["R1", "R9-sage"]
    assert script.chosen(",".join(COMMANDS), COMMANDS) == COMMANDS
    assert script.chosen("paper", COMMANDS) == OF_PAPERS[:4]
    with pytest.raises(SystemExit, match="no result is called 'R99'"):
        script.chosen("R99", COMMANDS)


def test_notes_say_what_went_wrong_and_what_was_not_run(script, engines, tmp_path, monkeypatch):
    monkeypatch.setattr(script.tables, "FOLDER", tmp_path)
    result = acceptance.run(sweep(family=FAMILIES, **SMALL_AXES, jobs=2))
    text = script.tables.body_of("R3", result)
    assert "| `uv` | *5.00* | 3.20 | *3.00* | 64.0 % |" in text
    words = "8 requests of 4 engines, 8 identical. In italics: not run itself, the draft sees the same tokens as with "
    assert text.count(f"Compared with vanilla: {words}`none` at 0 or `random` at 1.\n") == 2
    assert "![" not in text, "a figure that is not there"
    row = result["rows"][1 + 3]
    row["unguided"]["memory"], row["identical_frac"] = 3, 0.5
    text = script.tables.body_of("R3", result)
    assert "8 requests of 4 engines, 7 identical." in text and "Unguided (memory): 3." in text
    assert len(script.tables.measurements(result["rows"])) == 2 * 4
    # Times of engines that ran at once are none.
    assert "vanilla s" not in script.tables.acceptance_table(result, ("pruner",))
    alone = {"rows": [row | {"jobs": 1} for row in result["rows"]]}
    assert "| 1.0 | 1.0 |" in script.tables.acceptance_table(alone, ("pruner",))


@pytest.fixture
def merged(script, monkeypatch, tmp_path):
    """`merged(name, options)` runs a result's own command lines, writes it with all its files, and returns it."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(script.tables, "FOLDER", tmp_path)

    def run(name, *options):
        parts = []
        for command in script.commands_by_name()[name]:
            out = invoke(*command.replace("--jobs 2", "").split(), *options, "--json", "-")
            assert out.exit_code == 0, out.stderr
            parts.append(json.loads(out.stdout))
        script.write(tmp_path / f"{name}.json", script.merge(parts))
        assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".csv", ".png"}
        return script.read(tmp_path / f"{name}.json")

    return run


def test_results_of_several_commands_are_one(script, engines, merged, tmp_path):
    """R9, with engines that are not there."""
    found = merged("R9")
    shapes = ["chain", "tree-static", "tree-adaptive"]
    shapes.append("tree-adaptive, tree_depth_max 5, tree_depth_min 5, tree_fill true")
    assert [(row["family"], plots.shape_of(row), row["temperature"]) for row in found["rows"]] == list(
        itertools.product(FAMILIES, shapes, (0.0, 1.0))
    )
    assert {row["requests"] for row in found["rows"]} == {64}
    assert len(plots.read_csv(str(tmp_path / "R9.csv"))) == len(found["rows"])
    text = script.tables.body_of("R9", found)
    assert "`qwen2.5-vl`, sync scheduling. Compared with vanilla: 512 requests of 8 engines, 512 identical." in text
    assert "](R9.png)" in text


def test_captions_of_several_commands_are_one(script, sessions, merged):
    """R12, with engines that are not there."""
    found = merged("R12", "--requests", "2")
    assert [row["method"] for row in found["rows"]].count("strict") == 4, "once a panel"
    assert sum(row["method"] == "oracle" for row in found["rows"]) == 4
    text = script.tables.body_of("R12", found)
    assert "| `strict` | 4.00 | 1.00 | 100.0 % | 4.00 | 1.00 | 100.0 % |" in text
    assert text.count("At least 98 % kept: loose nowhere; fly 0.05 with 5.00 tokens per step (1.25 of strict's") == 4
    kept = script.tables.share(next(row["retention"] for row in found["rows"] if row["method"] == "loose"))
    assert f"| `loose 0.7` | 1.88 | 1.50 | 1.50 | 98.5 % | {kept} | {kept} |" in text
    assert "](R12.png)" in text


def test_calibrations_of_several_commands_are_one(script):
    """R11 as each family's file becomes a table; the page shows the result."""
    found = script.read(script.FOLDER / "R11.json")
    again = script.merge(list(found["calibrations"].values()))
    assert again == found
    assert tuple(again["calibrations"]) == FAMILIES


@pytest.mark.parametrize("is_fine", [False, True])
def test_host_time_is_what_is_not_inside_other_calls(monkeypatch, is_fine):
    """Ours calls a part of ours, which calls what is not ours; each spends a millisecond before and after."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # else the script sets it for good
    monkeypatch.setattr(sys, "path", list(sys.path))
    bench = load("benchmarks/bench_host_time.py")
    clock = [0.0]
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    calls = SimpleNamespace()

    def spend(inner=None):
        clock[0] += 1e-3
        if inner is not None:
            inner()
        clock[0] += 1e-3

    calls.foreign = spend
    calls.part = lambda: spend(lambda: calls.foreign())
    calls.entry = lambda: spend(lambda: calls.part())
    watch = bench.Stopwatch()
    watch.is_fine = is_fine
    watch.wrap(calls, "entry", "entry")
    watch.wrap(calls, "part", "part", fine=True)
    watch.wrap(calls, "foreign", bench.FOREIGN)
    calls.entry()
    parts = watch.take()
    assert sum(parts.values()) == pytest.approx(4e-3)
    assert set(parts) == ({"entry", "part"} if is_fine else {"entry"})
    assert watch.take() == {}
    watch.unwrap()
    assert calls.foreign is spend
