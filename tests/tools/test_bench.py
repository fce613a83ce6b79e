"""`vidspec bench acceptance` without an engine: what is run, its rows, their CSV file and the figures drawn from it."""

import csv
import dataclasses
import itertools
import json
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tools.common import FAMILIES, ROOT, SMALL_AXES, counters, redraw, redraw_errors, sweep
from vidspec_tools import plots
from vidspec_tools.bench import acceptance
from vidspec_tools.csv_files import flatten
from vllm_vidspec.config import PRUNERS as KNOWN_PRUNERS
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs, tables

PRUNERS = ("none", "random", "uniform", "specvlm", "attention", "uv", "window:front", "frame", "fastvid", "dycoke")
RATIOS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0)


@pytest.mark.slow
def test_an_engine_that_fails_is_one_line(tmp_path):
    pytest.importorskip("vllm")
    job = {"llm": {"model": str(tmp_path / "absent")}, "samplings": [{}], "prompts": {"family": "qwen2.5-vl"}}
    with pytest.raises(VidSpecError, match="the engine stopped: ") as caught:
        acceptance.run_job(job, lambda *_: None, acceptance.Running())
    assert "\n" not in str(caught.value)


def test_identical_frac_counts_lengths():
    assert acceptance.identical_frac([[1, 2], [3]], [[1, 2], [3]]) == 1.0
    assert acceptance.identical_frac([[1, 2], [3]], [[1, 2, 3], [3]]) == 0.5


def test_percent_never_rounds_up_to_all():
    assert [tables.percent(x) for x in (None, 1.0, 0.99999, 0.5)] == ["-", "100 %", "99.9 %", "50.0 %"]


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (("none", 0.9), ("none", 0.0)),
        (("none", 1.0), ("none", 0.0)),
        (("uv", 0.0), ("none", 0.0)),
        (("uv", 1.0), ("uniform", 1.0)),
        (("uv", 0.999), ("uv", 0.999)),
        (("window", 0.5), ("window:middle", 0.5)),
    ],
)
def test_canonical_names_what_the_draft_sees(given, seen):
    assert tuple(acceptance.canonical(*given).values()) == seen


def test_each_distinct_configuration_is_run_once():
    families = pairs.FAMILIES
    what = sweep(family=families, pruner=PRUNERS, prune_ratio=RATIOS)
    engines = list(what.engines().values())
    assert len(engines) == len(families) * (1 + 1 + 9 * 5 + 1), (
        "vanilla, unpruned, nine pruners at five ratios, text only"
    )
    assert [engine.family for engine in engines if engine.draft is None] == list(families)
    assert engines[0].draft is None
    assert len(list(sweep(pruner=("none",), num_speculative_tokens=(3, 5)).engines())) == 1 + 2
    assert len(list(sweep(prune_ratio=(1.0,), draft_positions=("original", "compacted")).engines())) == 1 + 2


@pytest.mark.parametrize("jobs", [1, 3])
def test_rows_are_all_combinations_in_order(engines, jobs):
    families = ("llava-onevision", "qwen2.5-vl")
    result = acceptance.run(sweep(family=families, pruner=PRUNERS, prune_ratio=RATIOS, jobs=jobs))
    rows = result["rows"]
    found = [(row["family"], row["pruner"], row["prune_ratio"]) for row in rows]
    assert found == list(itertools.product(families, PRUNERS, RATIOS))
    assert {row["jobs"] for row in rows} == {result["provenance"]["jobs"]} == {jobs}
    themselves = {key for row, key in zip(rows, found, strict=True) if acceptance.measured_itself(row)}
    assert len(themselves) == 2 * 47
    for row in rows:
        assert (row["family"], *row["measured_as"].values()) in themselves, "it names a row of this result"
        assert acceptance.canonical(**row["measured_as"]) == acceptance.canonical(row["pruner"], row["prune_ratio"])
    assert rows[0]["measured_as"] == {"pruner": "none", "prune_ratio": 0.0}
    assert rows[13]["measured_as"] == {"pruner": "random", "prune_ratio": 1.0}, "the first that was asked for"


def test_engines_run_at_once_but_no_more_than_jobs(monkeypatch, engines):
    barrier, lock, counts = threading.Barrier(2, timeout=20), threading.Lock(), [0, 0]

    def run_job(job, report, running):
        with lock:
            counts[0] += 1
            counts[1] = max(counts)
        barrier.wait()  # nobody passes alone
        with lock:
            counts[0] -= 1
        return engines(job, report, running)

    monkeypatch.setattr(acceptance, "run_job", run_job)
    busy = []
    report = lambda event, fields: (busy.append(event), fields["engine"])  # noqa: E731
    rows = acceptance.run(sweep(prune_ratio=(0.2, 0.3, 0.4), jobs=2), report)["rows"]
    assert len(rows) == 3
    assert counts[1] == 2
    assert busy.count("start") == busy.count("done") == 4


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_family_without_vanilla_has_no_rows(engines, jobs):
    is_broken = lambda job: job["prompts"]["family"] == "qwen2.5-vl" and "speculative_config" not in job["llm"]  # noqa: E731
    engines.fails = lambda job: VidSpecError("no") if is_broken(job) else None
    what = sweep(family=FAMILIES, prune_ratio=(0.2, 0.3, 0.4, 0.5), jobs=jobs)
    result = acceptance.run(what)
    assert result["failures"] == [{"family": "qwen2.5-vl", "draft": None, "reason": "no"}]
    assert {row["family"] for row in result["rows"]} == {"llava-onevision"}
    if jobs == 1:
        assert len(engines.jobs) == 1 + 5, "nothing of that family after vanilla"


def test_a_failed_engine_is_missing_from_all_its_rows(engines):
    engines.fails = lambda job: VidSpecError("no") if "'prune_ratio': 1.0" in str(job) else None
    result = acceptance.run(sweep(pruner=("random", "uniform"), prune_ratio=(0.9, 1.0)))
    found = {name: [(row["pruner"], row["prune_ratio"]) for row in result[name]] for name in ("rows", "failures")}
    assert found["rows"] == [("random", 0.9), ("uniform", 0.9)]
    assert found["failures"] == [("random", 1.0), ("uniform", 1.0)]


def test_an_interrupt_ends_the_engines(monkeypatch):
    """What is no VidSpecError, here out of one engine's thread, ends what the other threads wait for."""
    processes_run = []

    def run_job(job, report, running):
        process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        processes_run.append(process)
        with running.holding(process):
            if len(processes_run) == 2:
                raise KeyboardInterrupt
            process.wait()
        raise VidSpecError("the engine stopped")

    monkeypatch.setattr(acceptance, "run_job", run_job)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        acceptance.run(sweep(prune_ratio=(0.2, 0.3, 0.4, 0.5), jobs=2))
    assert time.monotonic() - start < 20
    assert len(processes_run) <= 3, "the queue is dropped"
    assert all(process.poll() is not None for process in processes_run)


@pytest.fixture
def result(engines):
    """What a small sweep over both families returns."""
    return acceptance.run(sweep(family=FAMILIES, **SMALL_AXES, jobs=2))


def test_csv_round_trip(result, tmp_path):
    path = tmp_path / "rows.csv"
    plots.write_csv(str(path), result)
    comment, header, *lines = path.read_text().splitlines()
    assert json.loads(comment.removeprefix("# ")) == result["provenance"]
    assert tuple(header.split(",")) == plots.COLUMNS
    assert len(lines) == len(result["rows"]) == 18
    (row, *_) = csv.DictReader([header, *lines])
    assert (row["measured_as_pruner"], row["skipped_pool_full"], row["unguided_cached"]) == ("none", "0", "0")
    assert (row["acceptance_length"], row["jobs"], row["seed"]) == ("5.0", "2", "0")
    assert plots.read_csv(str(path)) == [flatten(row) for row in result["rows"]]
    plots.write_csv(str(path), result | {"rows": []})
    assert path.read_text().splitlines()[1] == header, "the header is there without rows, too"
    assert plots.read_csv(str(path)) == []


def test_csv_of_before_there_were_trees_is_read():
    rows = plots.read_csv(str(ROOT / "docs" / "results" / "R3.csv"))
    assert len(rows) == 2 * len(PRUNERS) * len(RATIOS)
    assert (rows[0]["knobs"], rows[0]["nodes_per_step"]) == ("", None)


SHAPES = ("chain", "tree-static", "tree-adaptive")


def _rows_by_shape(**given) -> list[dict]:
    """Flat rows of all shapes, and of the adaptive tree with another depth."""
    what = sweep(family=FAMILIES, num_speculative_tokens=(None,), drafting=SHAPES, **given)
    shallow = dataclasses.replace(what, axes=what.axes | {"drafting": ["tree-adaptive"]}, knobs={"tree_depth_max": 5})
    return [flatten(row) for one in (what, shallow) for row in acceptance.run(one)["rows"]]


def test_figure_by_shape_has_a_bar_or_a_line_for_each(engines):
    matplotlib_figure = pytest.importorskip("matplotlib.figure")
    names = [*SHAPES, "tree-adaptive, tree_depth_max 5"]
    rows = [row | {"drafting": plots.shape_of(row)} for row in _rows_by_shape(temperature=(0.0, 1.0))]
    panel = matplotlib_figure.Figure().subplots()
    bars = plots._draw_bars(panel, rows[:6] + rows[12:14], names)
    assert list(bars) == names
    assert all([bar.get_height() for bar in bars[name]] == [pytest.approx(3.2)] * 2 for name in names)
    places = [bar.get_x() for name in names for bar in bars[name]]
    assert len(set(places)) == len(places), "none hides another"
    assert [label.get_text() for label in panel.get_xticklabels()] == ["temperature 0", "temperature 1"]

    rows = [row | {"drafting": plots.shape_of(row)} for row in _rows_by_shape(prune_ratio=(0.0, 0.9))]
    panel = matplotlib_figure.Figure().subplots()
    lines = plots._draw_panel(panel, rows[:6] + rows[12:14], [0.0, 0.9])
    assert list(lines) == names
    assert all(line.get_xydata().tolist() == [[0, 5.0], [1, pytest.approx(3.2)]] for line in lines.values())
    assert len({line.get_color() for line in lines.values()}) == len(names)


def test_figures_per_step():
    assert set(acceptance.shape_figures(counters() | {"drafts": 0, "draft_steps": 0}).values()) == {None}
    spent = counters(drafts=4, draft_tokens=100, draft_depth=20, draft_steps=2, draft_forwards=10)
    assert acceptance.shape_figures(spent) == {
        "nodes_per_step": 25.0,
        "depth_per_step": 5.0,
        "draft_forwards_per_step": 5.0,
        "max_acceptance_length": 6.0,
    }


@pytest.mark.parametrize("given", [SMALL_AXES, {"temperature": (0.0, 1.0)}, {"prune_ratio": (0.0, 0.9)}, {}])
def test_figure_is_the_same_from_csv(engines, tmp_path, monkeypatch, given):
    """By pruner, and by shape over temperatures, over ratios, and at one of each."""
    pytest.importorskip("matplotlib")
    rows, suffix = _rows_by_shape(**given), "svg"
    if given is SMALL_AXES:
        rows, suffix = acceptance.run(sweep(family=FAMILIES, **given))["rows"], "png"
    source, direct, redrawn = (str(tmp_path / name) for name in ("rows.csv", f"a.{suffix}", f"b.{suffix}"))
    plots.write_csv(source, {"rows": rows, "provenance": {}})
    plots.draw(rows, direct)
    assert redraw(plots, monkeypatch, source, redrawn) == 0
    assert Path(direct).stat().st_size > 5_000
    assert Path(direct).read_bytes() == Path(redrawn).read_bytes()


def test_figure_has_a_line_per_pruner_and_two_dashed_ones(result):
    matplotlib_figure = pytest.importorskip("matplotlib.figure")
    panel = matplotlib_figure.Figure().subplots()
    rows = [flatten(row) for row in result["rows"][:9]]
    lines = plots._draw_panel(panel, rows, [0.0, 0.9, 1.0])
    assert list(lines) == ["random", "uv"], "none is a dashed line"
    for line in lines.values():
        assert line.get_xydata().tolist() == [[0, 5.0], [1, pytest.approx(3.2)], [2, 3.0]]
    assert [text.get_text() for text in panel.texts] == [
        "draft sees the whole video: 5.00",
        "draft sees no video: 3.00",
    ]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["0", "0.9", "1"]
    assert len({(line.get_color(), line.get_marker()) for line in lines.values()}) == 2


def test_every_pruner_has_a_colour_and_a_marker_of_its_own():
    assert set(plots._STYLES) == set(KNOWN_PRUNERS) - {"none"}
    for styles in zip(*plots._STYLES.values(), strict=True):
        assert len(set(styles)) == len(styles)


def test_plots_errors_are_one_line(result, tmp_path, capsys, monkeypatch):
    redraw_errors(plots, result, "bench acceptance", "no row has an acceptance length", tmp_path, capsys, monkeypatch)


def test_figure_has_no_room_for_another_axis(engines, tmp_path):
    rows = acceptance.run(sweep(num_speculative_tokens=(3, 5)))["rows"]
    with pytest.raises(VidSpecError, match="a figure shows one num_speculative_tokens, there are 2"):
        plots.draw(rows, str(tmp_path / "f.png"))
