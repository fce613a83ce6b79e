"""How results show themselves: their tables and figures, with engines that are not there."""

import pytest

from tools.common import FAMILIES, SMALL_AXES, sweep
from vidspec_tools.bench import acceptance, interleaved, paper, quality
from vidspec_tools.bench.paper import PaperBenchmark
from vidspec_tools.bench.quality import Quality, setting_name
from vidspec_tools.bench.trials import Benchmark
from vidspec_tools.views import acceptance as acceptance_view
from vidspec_tools.views import quality as quality_view
from vidspec_tools.views import versus
from vllm_vidspec.errors import VidSpecError

SHAPES = ("chain", "tree-static", "tree-adaptive")
ROUNDS = {"families": FAMILIES, "requests": 1, "rounds": 2}


def by_shape(**axes):
    """Rows of all shapes, and of the adaptive tree with another depth."""
    shared = {"family": FAMILIES, "num_speculative_tokens": (None,), **axes}
    results = [sweep(drafting=SHAPES, **shared), sweep(drafting=SHAPES[2:], knobs={"tree_depth_max": 5}, **shared)]
    return [row for one in results for row in acceptance.run(one)["rows"]]


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """`drawn(draw, rows)` draws rows, and returns the figure's panels; the same rows must give the same file."""
    matplotlib_figure = pytest.importorskip("matplotlib.figure")
    saved, save = [], matplotlib_figure.Figure.savefig

    def savefig(figure, *args, **options):
        saved.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(matplotlib_figure.Figure, "savefig", savefig)

    def draw(view, rows):
        paths = [tmp_path / f"figure{i}.svg" for i in range(2)]
        for path in paths:
            view(rows, str(path))
        assert paths[0].read_bytes() == paths[1].read_bytes() and paths[0].stat().st_size > 5_000
        return saved[-1].axes

    return draw


def texts(labels):
    return [label.get_text() for label in labels]


# ---- bench acceptance ------------------------------------------------------------------------------------------------


def test_shapes_are_lines_over_temperatures_or_ratios(engines, drawn):
    names = [*SHAPES, "tree-adaptive, tree_depth_max 5"]
    for axes, points, labels in (
        ({"temperature": (0.0, 1.0)}, [[0, pytest.approx(3.2)], [1, pytest.approx(3.2)]], ["0", "1"]),
        ({"prune_ratio": (0.0, 0.9)}, [[0, 5.0], [1, pytest.approx(3.2)]], ["0", "0.9"]),
    ):
        panel, _ = drawn(acceptance_view.draw, by_shape(**axes))
        assert [line.get_xydata().tolist() for line in panel.lines] == [points] * len(names)
        assert len({line.get_color() for line in panel.lines}) == len(names)
        assert texts(panel.get_xticklabels()) == labels and texts(panel.figure.legends[0].get_texts()) == names


def test_pruners_are_lines(engines, drawn):
    panel, _ = drawn(acceptance_view.draw, acceptance.run(sweep(family=FAMILIES, **SMALL_AXES))["rows"])
    whole, *pruned = (line.get_xydata().tolist() for line in panel.lines)
    assert whole == [[0, 5.0], [1, 5.0], [2, 5.0]]
    assert pruned == [[[0, 5.0], [1, pytest.approx(3.2)], [2, 3.0]]] * 2
    assert len({(line.get_color(), line.get_marker()) for line in panel.lines}) == 3
    assert texts(panel.get_xticklabels()) == ["0", "0.9", "1"]


def test_what_cannot_be_drawn_is_one_line(engines, clocks, tmp_path):
    path = str(tmp_path / "f.png")
    rows = [{"acceptance_length": None, "mode": "vanilla", "draft_noise": None, "family": "x", "temperature": 0}]
    for draw, words in (
        (acceptance_view.draw, "no row has an acceptance length"),
        (quality_view.draw, "no row has drafts"),
    ):
        with pytest.raises(VidSpecError, match=words):
            draw(rows, path)


# ---- bench quality ---------------------------------------------------------------------------------------------------


def test_lossy_scorers_are_lines_beside_levels(sessions, drawn):
    rows = quality.run(Quality(requests=3, lambdas=(0.5, 0.7), top_ns=(10, 1)))["rows"]
    (panel,) = drawn(quality_view.draw, rows)
    row = next(row for row in rows if setting_name(row) == "loose 0.5")
    dots = [line.get_xydata().tolist() for line in panel.lines if line.get_linestyle() != "None"]
    assert [[row["acceptance_length"], 100 * row["retention"]]] * 2 in dots, "two lambdas"
    assert texts(panel.figure.legends[0].get_texts()) == [
        *("the target alone", "98 % of it", "the draft alone", "strict"),
        *("loose", "loose N1", "loose shift", "loose N1 shift", "fly", "fly-entropy", "random", "oracle"),
    ]


# ---- benchmarks interleaved with vanilla -----------------------------------------------------------------------------


def test_paper_has_a_table_for_each_family(clocks):
    first, second = versus.paper_tables(paper.run(PaperBenchmark(**ROUNDS))["rows"])
    assert first.title.startswith(FAMILIES[0]) and second.title.startswith(FAMILIES[1])
    assert "the pair as it is" in first.caption and "own token" in first.caption
    assert first.row_count == len(paper.ALL)


def test_speed_has_a_table_of_phases(clocks):
    rows = interleaved.run(Benchmark(**ROUNDS))["rows"]
    tables = versus.speed_tables(rows)
    assert len(tables) == 4 and "chain of 5, specvlm 0.9, strict" in tables[0].title
    heads = [column.header.split("\n")[0] for column in tables[1].columns][2:]
    assert heads == ["guidance", "draft prefill", "draft decode", "relevance"]
    beside = versus.speed_tables(interleaved.run(Benchmark(parallel=True, requests=1, rounds=1))["rows"])
    assert [column.header for column in beside[0].columns][-3:] == ["stream\nlength", "late", "T_t /\nT_d"]
