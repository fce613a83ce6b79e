"""Plots, drawn from recorded results: words apart, axes from 0, no line between two points."""

import itertools

import pytest

from benchmarks.pages.results import read
from benchmarks.views import draw_quality
from vllm_vidspec.tools.bench.views import draw_acceptance

PLOTS = {"R3": draw_acceptance, "R9": draw_acceptance, "R12": draw_quality, "R16-loose": draw_quality}
FROM_ZERO = ("R3", "R9")  # the others show what is kept, between the draft's share and the target's


def drawn(name, tmp_path, monkeypatch):
    """Return the figure that a picture is written from, once it is laid out."""
    figure_module = pytest.importorskip("matplotlib.figure")
    kept, save = [], figure_module.Figure.savefig
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda self, *a, **k: (kept.append(self), save(self, *a, **k)))
    PLOTS[name](read(name)["rows"], str(tmp_path / "plot.png"))
    return kept[0]


@pytest.mark.parametrize("name", PLOTS)
def test_words_do_not_lie_on_words(name, tmp_path, monkeypatch):
    """Catches: tick labels over each other, an axis' words under a legend."""
    figure = drawn(name, tmp_path, monkeypatch)
    texts = [text for panel in figure.axes for text in (panel.title, panel.xaxis.label, panel.yaxis.label)]
    for axis in (axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)):
        low, high = axis.get_view_interval()
        texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    texts += [text for legend in figure.legends for text in legend.get_texts()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text() and text.get_visible()]
    over = [(one[0], other[0]) for one, other in itertools.combinations(boxes, 2) if one[1].overlaps(other[1])]
    assert over == []


@pytest.mark.parametrize("name", FROM_ZERO)
def test_axes_begin_at_nothing_and_two_points_are_no_line(name, tmp_path, monkeypatch):
    """Catches: a cut axis, which makes a tenth look like half; a course between two points that nobody measured."""
    for panel in drawn(name, tmp_path, monkeypatch).axes:
        assert panel.get_ylim()[0] == 0
        for line in panel.get_lines():
            is_joined = line.get_linestyle() not in ("None", "--") and len(line.get_xdata()) == 2
            assert not is_joined or len(panel.get_xticks()) > 2, line.get_label()
