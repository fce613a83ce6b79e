"""How results show themselves: their tables, CSV files and figures, with engines that are not there."""

import csv
import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from tools.common import FAMILIES, SMALL_AXES, sweep
from vidspec_tools import inflation
from vidspec_tools.bench import acceptance, paper, parallel, quality, scaling, speed
from vidspec_tools.bench.methods import BASELINES, METHODS
from vidspec_tools.bench.paper import PaperBenchmark
from vidspec_tools.bench.quality import Quality, setting_name
from vidspec_tools.bench.scaling import ScalingBenchmark
from vidspec_tools.bench.speed import SpeedBenchmark
from vidspec_tools.bench.trials import Benchmark
from vidspec_tools.views import __main__ as redraw
from vidspec_tools.views import acceptance as acceptance_view
from vidspec_tools.views import csv_file, versus
from vidspec_tools.views import quality as quality_view
from vllm_vidspec.config import PRUNERS
from vllm_vidspec.errors import VidSpecError

SHAPES = ("chain", "tree-static", "tree-adaptive")
ROUNDS = {"families": FAMILIES, "requests": 1, "rounds": 2}


def by_shape(**axes):
    """Rows of all shapes, and of the adaptive tree with another depth."""
    what = sweep(family=FAMILIES, num_speculative_tokens=(None,), drafting=SHAPES, **axes)
    shallow = dataclasses.replace(what, axes=what.axes | {"drafting": ["tree-adaptive"]}, knobs={"tree_depth_max": 5})
    results = [acceptance.run(one) for one in (what, shallow)]
    return results[0] | {"rows": [row for result in results for row in result["rows"]]}


# Result -> its view, and what gives it.
RESULTS = {
    "acceptance": (acceptance_view, lambda: acceptance.run(sweep(family=FAMILIES, **SMALL_AXES, jobs=2))),
    "shapes": (acceptance_view, lambda: by_shape(temperature=(0.0, 1.0))),
    "shapes over ratios": (acceptance_view, lambda: by_shape(prune_ratio=(0.0, 0.9))),
    "quality": (quality_view, lambda: quality.run(Quality(requests=3, lambdas=(0.5, 0.7), top_ns=(1, 10)))),
    "parallel": (
        versus.PARALLEL_VIEW,
        lambda: parallel.run(Benchmark(inflate=(0.0, 5.0), modes=("sequential",), table=True, **ROUNDS)),
    ),
    "paper": (versus.PAPER_VIEW, lambda: paper.run(PaperBenchmark(**ROUNDS))),
    "speed": (versus.SPEED_VIEW, lambda: speed.run(SpeedBenchmark(**ROUNDS))),
    "scaling": (
        versus.SCALING_VIEW,
        lambda: scaling.run(ScalingBenchmark(families=FAMILIES, values=(1.0, 4.0), rounds=2)),
    ),
}


@pytest.fixture
def results(engines, request, monkeypatch):
    """`results(name)`: a view and the result that it shows."""

    def make(name):
        request.getfixturevalue("sessions" if name == "quality" else "clocks")
        view, run = RESULTS[name]
        return view, run()

    return make


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """`drawn(view, rows)` draws rows, and returns the figure's panels and the file."""
    matplotlib_figure = pytest.importorskip("matplotlib.figure")
    saved, save = [], matplotlib_figure.Figure.savefig

    def savefig(figure, *args, **options):
        saved.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(matplotlib_figure.Figure, "savefig", savefig)

    def draw(view, rows, name="figure.svg"):
        view.draw(rows, str(tmp_path / name))
        return saved[-1].axes, tmp_path / name

    return draw


@pytest.mark.parametrize("name", RESULTS)
def test_csv_and_figure_are_what_was_measured(results, drawn, tmp_path, name):
    """Catches: a column or a row that is lost, another figure from the same rows, a view that does not know its own."""
    view, result = results(name)
    csv_file.write(str(tmp_path / "rows.csv"), result)
    comment, *lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert json.loads(comment.removeprefix("# ")) == json.loads(json.dumps(result["provenance"]))
    rows = list(csv.DictReader(lines))
    assert [set(row) for row in rows] == [set(csv_file.flatten(result["rows"][0]))] * len(result["rows"])
    for row, written in zip(result["rows"], rows, strict=True):
        shown = {column: "" if value is None else str(value) for column, value in csv_file.flatten(row).items()}
        assert {column: written[column] for column in shown} == shown
    (tmp_path / "rows.json").write_text(json.dumps(result))
    _, direct = drawn(view, result["rows"])
    assert direct.stat().st_size > 5_000
    assert redraw.main([str(tmp_path / "rows.json"), str(tmp_path / "again.svg")]) == 0
    assert (tmp_path / "again.svg").read_bytes() == direct.read_bytes()


def test_columns_of_nested_figures():
    row = {"skipped": {"pool_full": 2}, "knobs": {"b": 1, "a": [2]}, "x": None}
    assert csv_file.flatten(row) == {"skipped_pool_full": 2, "knobs": '{"a": [2], "b": 1}', "x": None}
    assert csv_file.flatten({"knobs": {}}) == {"knobs": ""}


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("acceptance", {"acceptance_length": None}, "no row has an acceptance length"),
        ("quality", {"draft_noise": None}, "no row has drafts"),
        ("parallel", {"mode": "vanilla"}, "no row has a speedup over vanilla"),
        ("paper", {"mode": "vanilla"}, "no row has a speedup over vanilla"),
        ("scaling", {"mode": "vanilla"}, "no row has a speedup over vanilla"),
        ("speed", {"verify_ms": None}, "no row has phases"),
    ],
)
def test_redrawing_errors_are_one_line(results, tmp_path, capsys, name, changed, words):
    pytest.importorskip("matplotlib")
    _, result = results(name)
    files = {
        "good": result["rows"],
        "nothing": [row | changed for row in result["rows"]],
        "empty": [],
        "other": [{"a": 1}],
    }
    paths = {file: str(tmp_path / f"{file}.json") for file in files}
    for file, rows in files.items():
        Path(paths[file]).write_text(json.dumps({"rows": rows}))
    (tmp_path / "text.json").write_text("[")
    capsys.readouterr()
    for args, said in (
        ([paths["nothing"], "f.png"], words),
        ([paths["empty"], "f.png"], "it has no rows"),
        ([paths["other"], "f.png"], "is not a file of `vidspec bench --json`"),
        ([str(tmp_path / "text.json"), "f.png"], "is not a file of `vidspec bench --json`"),
        ([str(tmp_path / "absent.json"), "f.png"], "cannot read"),
        ([paths["good"], "f.gif"], ".png or .svg"),
        ([paths["good"], str(tmp_path / "no" / "f.png")], "cannot write"),
        ([], "usage: "),
    ):
        assert redraw.main(args) == 2
        shown = capsys.readouterr().err
        assert said in shown and len(shown.splitlines()) == 1


# ---- bench acceptance ------------------------------------------------------------------------------------------------


def test_shapes_are_bars_over_temperatures_and_lines_over_ratios(results, drawn):
    names = [*SHAPES, "tree-adaptive, tree_depth_max 5"]
    view, result = results("shapes")
    (panel, _), _ = drawn(view, result["rows"])
    assert [[bar.get_height() for bar in bars] for bars in panel.containers if len(bars) == 2] == [
        [pytest.approx(3.2)] * 2
    ] * len(names)
    places = [bar.get_x() for bars in panel.containers for bar in bars]
    assert len(set(places)) == len(places), "none hides another"
    assert [label.get_text() for label in panel.get_xticklabels()] == ["temperature 0", "temperature 1"]
    view, result = results("shapes over ratios")
    (panel, _), _ = drawn(view, result["rows"])
    assert [line.get_xydata().tolist() for line in panel.lines] == [[[0, 5.0], [1, pytest.approx(3.2)]]] * len(names)
    assert len({line.get_color() for line in panel.lines}) == len(names)


def test_pruners_are_lines_and_what_they_share_is_dashed(results, drawn):
    view, result = results("acceptance")
    (panel, _), _ = drawn(view, result["rows"])
    lines = [line for line in panel.lines if len(line.get_xydata()) == 3]
    assert [line.get_xydata().tolist() for line in lines] == [[[0, 5.0], [1, pytest.approx(3.2)], [2, 3.0]]] * 2
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 2, "random and uv; none is dashed"
    texts = [text.get_text() for text in panel.texts]
    assert texts == ["draft sees the whole video: 5.00", "draft sees no video: 3.00"]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["0", "0.9", "1"]


def test_every_pruner_has_a_colour_and_a_marker_of_its_own():
    assert set(acceptance_view._STYLES) == set(PRUNERS) - {"none"}
    for styles in zip(*acceptance_view._STYLES.values(), strict=True):
        assert len(set(styles)) == len(styles)


def test_a_figure_has_no_room_for_another_axis(engines, tmp_path):
    rows = acceptance.run(sweep(num_speculative_tokens=(3, 5)))["rows"]
    with pytest.raises(VidSpecError, match="a figure shows one num_speculative_tokens, there are 2"):
        acceptance_view.draw(rows, str(tmp_path / "f.png"))


# ---- bench quality ---------------------------------------------------------------------------------------------------


def test_lossy_scorers_are_lines_beside_levels(results, drawn):
    view, result = results("quality")
    (panel,), _ = drawn(view, result["rows"])
    row = next(row for row in result["rows"] if setting_name(row) == "loose 0.5")
    dots = [line.get_xydata().tolist() for line in panel.lines if line.get_linestyle() != "None"]
    assert [[row["acceptance_length"], 100 * row["retention"]]] * 2 in dots
    assert [text.get_text() for text in panel.texts] == ["N 1"]
    names = [text.get_text() for text in panel.figure.legends[0].get_texts()]
    assert names == [
        *("the target alone", "98 % of it", "the draft alone", "strict"),
        *("loose", "loose shift", "fly", "fly-entropy", "random", "oracle"),
    ]
    handles = panel.figure.legends[0].legend_handles[4:]
    assert len({handle.get_color() for handle in handles}) == len(handles)


# ---- benchmarks interleaved with vanilla -----------------------------------------------------------------------------


def test_speedups_are_bars_by_ratio_and_method(results, drawn):
    view, result = results("parallel")
    (panel, _), _ = drawn(view, result["rows"])
    rows = [row for row in result["rows"] if row["family"] == FAMILIES[0] and row["mode"] != "vanilla"]
    methods = ["sequential", *BASELINES]
    bars = [bars for bars in panel.containers if len(bars) == 2 and hasattr(bars, "patches")]
    assert len(bars) == len(methods)
    for method, drawn_bars in zip(methods, bars, strict=True):
        expected = [row["speedup"] for row in rows if row["method"] == method]
        assert [bar.get_height() for bar in drawn_bars] == pytest.approx(expected)
    as_is, inflated = (label.get_text() for label in panel.get_xticklabels())
    assert "as it is" in as_is and inflated.startswith("T_t / T_d 5.0") and "8 to the draft" in inflated
    tables = view.tables(result["rows"])
    assert len(tables) == 4
    assert "the pair as it is" in tables[0].caption and inflation.WORDS in tables[1].caption
    assert "published: Qwen2.5-VL 7B & 32B" in tables[0].caption


def test_published_figures_are_marks_beside_bars(results, drawn):
    view, result = results("paper")
    panels, _ = drawn(view, result["rows"])
    panel, rows = panels[1], result["rows"][1 : len(paper.ALL)]
    (bars,) = [one for one in panel.containers if hasattr(one, "patches")]
    assert [bar.get_width() for bar in bars] == pytest.approx([row["speedup"] or 0 for row in rows])
    marks = panel.collections[-1].get_offsets().tolist()
    assert marks == [[row["published_speedup"], place] for place, row in enumerate(rows[:-1])]
    assert rows[-1]["published_speedup"] is None
    assert [label.get_text() for label in panels[0].get_yticklabels()] == list(METHODS)
    first, second = view.tables(result["rows"])
    assert first.title.startswith(FAMILIES[0]) and second.title.startswith(FAMILIES[1])
    assert "the pair as it is" in first.caption and "own token" in first.caption
    assert first.row_count == len(paper.ALL)


def test_phases_are_stacked(results, drawn):
    view, result = results("speed")
    (panel,), _ = drawn(view, result["rows"])
    bars = [one.patches[0] for one in panel.containers][: len(speed.PHASES)]
    values = [result["rows"][1][f"{name}_ms"] for name in speed.PHASES]
    assert [bar.get_x() for bar in bars] == pytest.approx([sum(values[:place]) for place in range(len(values))])
    tables = view.tables(result["rows"])
    assert len(tables) == 4 and "chain of 5, specvlm 0.9, strict" in tables[0].title
    heads = [column.header.split("\n")[0] for column in tables[1].columns][2:]
    assert heads == [name.replace("_", " ") for name in speed.PHASES]


def test_an_axis_has_a_line_for_each_family(results, drawn):
    view, result = results("scaling")
    (panel, _), _ = drawn(view, result["rows"])
    for line, family in zip(panel.lines, FAMILIES, strict=True):
        rows = [row for row in result["rows"] if row["family"] == family and row["mode"] != "vanilla"]
        assert line.get_xydata().tolist() == [[place, row["speedup"]] for place, row in enumerate(rows)]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["1", "4"]
    first, second = view.tables(result["rows"])
    assert [one.title for one in (first, second)] == [f"{name}: chain of 5, specvlm 0.9, strict" for name in FAMILIES]
    assert first.columns[0].header == "batch size" and list(first.columns[0].cells) == ["1", "1", "4", "4"]


def test_the_same_rows_in_another_order_are_the_same_groups():
    rows = [{"a": a, "b": b} for a, b in itertools.product((1, 2), (3, 4))]
    assert versus.by(rows, "a") == {(1,): rows[:2], (2,): rows[2:]}
    assert list(versus.by(rows, "a", "b")) == [(1, 3), (1, 4), (2, 3), (2, 4)]
