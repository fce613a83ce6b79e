"""What figures have in common; matplotlib is imported to draw only."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm_vidspec.tools.user_files import check_output, writing

SUFFIXES = (".png", ".svg")
LONG_NAME = 24  # characters of a legend's entry
DODGE = 0.12  # between dots of one value, of the distance of two values
LEAST_LINE = 3  # points that a line may join: two say nothing of what is between them
# Paul Tol's "muted" palette, safe for the colour-blind, with grey and black, and a marker each.
_COLORS = (
    *("#882255", "#CC6677", "#AA4499", "#332288", "#88CCEE", "#999933"),
    *("#777777", "#000000", "#117733", "#44AA99", "#DDCC77", "#555555"),
)
Style = tuple[str, str]  # colour and marker


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def check_figure(path: str, option: str = "cannot draw") -> None:
    """Refuse a figure that cannot be drawn: a place or name that is none, or no matplotlib."""
    check_output(path, option, SUFFIXES, SUFFIXES)


@contextlib.contextmanager
def panels(path: str, size: tuple[float, float], down: int, across: int) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Make a figure of panels, and write it once they are drawn; the same drawing gives the same file.

    Yields the figure, its panels `[down, across]`, of which those in a row share their y axis, and what the legend is
    to name: words -> what was drawn.
    """
    check_figure(path)
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "vidspec"}):
        figure = Figure(figsize=size, dpi=160, layout="constrained")
        lines: dict[str, Any] = {}
        yield figure, figure.subplots(down, across, sharey="row", squeeze=False), lines
        if lines:  # long names go below, where they take no width from the panels
            is_long = max(map(len, lines)) > LONG_NAME
            place = {"loc": "outside lower center", "ncols": 2} if is_long else {"loc": "outside right center"}
            figure.legend(list(lines.values()), list(lines), frameon=False, **place)
        with writing(path):
            figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def styles(names: Iterable[str]) -> dict[str, Style]:
    """Return a colour and a marker for each name, in their order."""
    return dict(zip(dict.fromkeys(names), itertools.cycle(zip(_COLORS, "os^DvP<X>*hd", strict=True)), strict=False))


def draw_line(panel: Any, points: Sequence[tuple[float, float]], style: Style, **more: Any) -> Any:
    """Draw a line through points, in a colour and with a marker; return it."""
    xs, ys = zip(*points, strict=True) if points else ((), ())
    look = {"color": style[0], "marker": style[1], "markersize": 5, "linewidth": 1.4, **more}
    return panel.plot(xs, ys, **look)[0]


def lines(
    panel: Any,
    values: Sequence[float],
    series: Mapping[str, tuple[Style, Mapping[float, float]]],
    place: Callable[[float], float] | None = None,
) -> dict[str, Any]:
    """Draw each series (name -> style, and y by value), y from 0 on; return what was drawn.

    `place` says where on the x axis a value is; by default values are evenly spaced. Fewer than `LEAST_LINE` are dots,
    side by side.
    """
    place = place or values.index
    are_dots = len(values) < LEAST_LINE
    look = {"linestyle": "none", "markersize": 7} if are_dots else {}
    found: dict[str, Any] = {}
    for number, (name, (style, points)) in enumerate(series.items()):
        aside = DODGE * (number - (len(series) - 1) / 2) if are_dots else 0.0
        found[name] = draw_line(panel, sorted((place(x) + aside, y) for x, y in points.items()), style, **look)
    panel.set_xticks([place(value) for value in values], [f"{value:,g}" for value in values])
    most = max((y for _, points in series.values() for y in points.values()), default=1.0)
    panel.set_ylim(0, max(panel.get_ylim()[1], 1.08 * most))
    panel.margins(x=0.4 if are_dots else 0.05)
    tidy(panel, "y")
    return found


def tidy(panel: Any, grid: str = "both") -> None:
    """Take off a panel what says nothing; its grid lies behind what is drawn."""
    panel.grid(axis=grid, color="#DDDDDD", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
