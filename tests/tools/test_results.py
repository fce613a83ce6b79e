"""The results page: its commands, and what scripts/make_results.py makes of their results."""

import itertools
import json
import sys
from types import SimpleNamespace

import pytest

from tools.common import ORIGIN, ROOT, invoke, load
from vllm_vidspec.tools import pairs, plots, quality_views
from vllm_vidspec.tools.bench import acceptance

COMMANDS = (
    "R1",
    "R2",
    "R3",
    "R4",
    "R5",
    "R6",
    "R7",
    "R8",
    "R9",
    "R9-sage",
    "R10",
    "R11",
    "R12",
    "R12-relevance",
    "R13",
)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return load("scripts/make_results.py")


def test_page_is_what_the_results_say(script):
    """Catches: a page that was edited by hand, or is not that of the files beside it."""
    results = {path.stem: script.read(path) for path in script.FOLDER.glob("R*.json")}
    assert set(results) == set(COMMANDS)
    for page in (script.PAGE, script.ROOT / "README.md"):
        assert script.filled(page.read_text(), results) == page.read_text()


def test_commands_are_those_of_the_page(script):
    found = script.commands_by_name()
    assert tuple(found) == COMMANDS
    assert {name: len(lines) for name, lines in found.items() if len(lines) > 1} == {
        "R9": 2,
        "R9-sage": 3,
        "R11": 2,
        "R12": 2,
        "R12-relevance": 2,
    }
    assert found["R7"] == ["demo --family llava-onevision"]
    assert found["R3"][0].endswith("--requests 64 --jobs 2 --csv docs/results/R3.csv --plot docs/results/R3.png")
    for lines in found.values():
        for line in lines:
            assert line.startswith("benchmarks/") or line.split()[0] in ("bench", "calibrate", "demo", "show-relevance")


@pytest.fixture
def result(engines):
    """A sweep over both families."""
    axes = {name: [off] for name, off in acceptance.SAMPLING_AXES.items()} | {"temperature": [0.0]}
    axes |= {
        "family": pairs.FAMILIES,
        "draft": ["draft"],
        "pruner": ["none", "random", "uv"],
        "prune_ratio": [0, 0.9, 1],
    }
    axes |= {"drafting": ["chain"], "num_speculative_tokens": [5], "scorer": ["strict"], "draft_noise": ["shared"]}
    return acceptance.run(acceptance.Sweep(axes | {"draft_positions": ["original"]}, requests=2, jobs=2))


def test_results_page_has_a_table_per_family(script, result, tmp_path, monkeypatch):
    monkeypatch.setattr(script.tables, "FOLDER", tmp_path)
    text = script.tables.body_of("R3", result)
    assert "| `qwen2.5-vl` | 0 | 0.9 | 1 | share of unpruned at 0.9 |" in text
    assert "| `none` | 5.00 | *5.00* | *5.00* | 100.0 % |" in text
    assert "| `random` | *5.00* | 3.20 | 3.00 | 64.0 % |" in text
    assert "| `uv` | *5.00* | 3.20 | *3.00* | 64.0 % |" in text
    line = (
        "Compared with vanilla: 8 requests of 4 engines, 8 identical. In italics: not run itself, the draft sees the "
    )
    assert text.count(line + "same tokens as with `none` at 0 or `random` at 1.\n") == 2
    assert "![" not in text
    (tmp_path / "R3.png").touch()
    assert "](R3.png)" in script.tables.body_of("R3", result)

    result["rows"][1 + 3]["unguided"]["memory"] = 3
    result["rows"][1 + 3]["identical_frac"] = 0.5
    assert "8 requests of 4 engines, 7 identical." in script.tables.body_of("R3", result)
    assert "Unguided (memory): 3." in script.tables.body_of("R3", result)
    assert len(script.tables.measurements(result["rows"])) == 2 * 4


def test_results_of_several_commands_are_one(script, engines, monkeypatch, tmp_path):
    """R9 from its own command lines, with engines that are not there: rows, table, CSV, figure."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(script.tables, "FOLDER", tmp_path)
    parts = []
    for command in script.commands_by_name()["R9"]:
        out = invoke(*command.replace("--jobs 2", "").split(), "--json", "-")
        assert out.exit_code == 0, out.stderr
        parts.append(json.loads(out.stdout))
    merged = script.merge(parts)
    shapes = [
        "chain",
        "tree-static",
        "tree-adaptive",
        "tree-adaptive, tree_depth_max 5, tree_depth_min 5, tree_fill true",
    ]
    assert [(row["family"], plots.shape_of(row), row["temperature"]) for row in merged["rows"]] == list(
        itertools.product(pairs.FAMILIES, shapes, (0.0, 1.0))
    )
    assert {row["requests"] for row in merged["rows"]} == {64}
    text = script.tables.body_of("R9", merged)
    assert "| `qwen2.5-vl` | tree-adaptive, tree_depth_max 5, tree_depth_min 5, tree_fill true | 1 |" in text
    assert "`qwen2.5-vl`, sync scheduling. Compared with vanilla: 512 requests of 8 engines, 512 identical." in text
    plots.write_csv(str(tmp_path / "R9.csv"), merged)
    plots.draw(plots.read_csv(str(tmp_path / "R9.csv")), str(tmp_path / "R9.png"))
    assert "](R9.png)" in script.tables.body_of("R9", merged)


def test_results_by_name(script):
    assert script.chosen("R9", COMMANDS) == ["R9", "R9-sage"]
    assert script.chosen("R12", COMMANDS) == ["R12", "R12-relevance"]
    assert script.chosen("R9-sage,R1", COMMANDS) == ["R1", "R9-sage"]
    assert script.chosen(",".join(COMMANDS), COMMANDS) == list(COMMANDS)
    with pytest.raises(SystemExit, match="no result is called 'R99'"):
        script.chosen("R99", COMMANDS)


def test_results_page_shows_host_time_and_costs(script):
    row = {"drafting": "chain", "scheduling": "sync", "own_ms": 0.5, "p20_ms": 0.4, "p80_ms": 0.6, "kernels_ms": 0.1}
    row |= {"steps": 9, "parts": {"verify": 0.25}}
    rows = [row | {"batch_size": size, "budget_ms": 1 + 0.02 * size} for size in (1, 16)]
    text = script.tables.body_of("R10", {"rows": rows, "provenance": ORIGIN})
    assert "| chain | sync | 16 | 0.50 | 0.40 to 0.60 | 1.32 | 0.10 | 9 |" in text
    assert "| part, 16 requests (ms) | chain |" in text
    assert "| verify | 0.250 |" in text
    cost = {"shape": "vanilla", "batch_size": 1, "tokens_per_s": 40.0, "acceptance_length": 1.0, "step_ms": 25.0}
    parts = [
        {"target": f"{family}/target", "config": {"draft_table": [[1, 1, "chain", 5]]}, "costs": [cost]}
        | {"provenance": ORIGIN}
        for family in script.tables.FAMILIES
    ]
    text = script.tables.body_of("R11", script.merge(parts))
    assert "| `llava-onevision`, requests | vanilla |" in text
    assert text.count("| 1 | 40 (1.00; 25.0 ms) |") == text.count('`draft_table`: `[[1, 1, "chain", 5]]`') == 2


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


def test_results_page_shows_no_times_of_engines_that_ran_at_once(script, result):
    assert "vanilla s" not in script.tables.acceptance_table(result, ("pruner",))
    for row in result["rows"]:
        row["jobs"] = 1
    assert "| 1.0 | 1.0 |" in script.tables.acceptance_table(result, ("pruner",))


def test_results_page_has_tables_and_what_keeps_enough(script, sessions, tmp_path, monkeypatch):
    """R12 from its own command line, with engines that are not there."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(script.tables, "FOLDER", tmp_path)
    parts = []
    for command in script.commands_by_name()["R12"]:
        result = invoke(*command.split(), "--requests", "2", "--json", "-")
        assert result.exit_code == 0, result.stderr
        parts.append(json.loads(result.stdout))
    found = script.merge(parts)
    assert [row["method"] for row in found["rows"]].count("strict") == 4, "once a panel"
    assert sum(row["method"] == "oracle" for row in found["rows"]) == 4
    quality_views.draw(found["rows"], str(tmp_path / "R12.png"))
    text = script.tables.body_of("R12", found)
    panels = ("temperature 0: length", "temperature 1, independent noise: length")
    assert f"| `qwen2.5-vl` | {' | '.join(f'{panel} | of strict' + chr(39) + 's | kept' for panel in panels)} |" in text
    assert "| `strict` | 4.00 | 1.00 | 100.0 % | 4.00 | 1.00 | 100.0 % |" in text
    assert text.count("At least 98 % kept: loose nowhere; fly 0.05 with 5.00 tokens per step (1.25 of strict's") == 4
    assert "| LVSpec's table 3 | length of strict's: paper | `qwen2.5-vl` | `llava-onevision` | kept: paper |" in text
    kept = script.tables.share(next(row["retention"] for row in found["rows"] if row["method"] == "loose"))
    assert f"| `loose 0.7` | 1.88 | 1.50 | 1.50 | 98.5 % | {kept} | {kept} |" in text
    assert f"| `loose 0.7 N100` | - | 1.50 | 1.50 | 93.4 % | {kept} | {kept} |" in text
    assert "](R12.png)" in text
    columns = {line.count("|") for line in text.splitlines() if line.startswith("| `strict` | 4.00")}
    assert columns == {8}


def test_results_page_shows_relevance(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script.tables, "FOLDER", tmp_path / "results")
    row = {"words": ["a"] * 9, "acceptance_length": 5.0, "loosened_frac": 0.25, "shifted_frac": 0.0}
    parts = [
        {"rows": [row | {"family": family, "relevance_auc": 0.75}], "provenance": ORIGIN}
        for family in script.tables.FAMILIES
    ]
    (tmp_path / "results").mkdir()
    (tmp_path / "relevance-qwen2.5-vl.png").touch()
    text = script.tables.body_of("R12-relevance", script.merge(parts))
    assert text.count("![") == text.count("](../relevance-qwen2.5-vl.png)") == 1
    assert "| `llava-onevision` | 9 | 5.00 | 25.0 % | 0.0 % | 0.75 |" in text
