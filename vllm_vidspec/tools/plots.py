"""Line plots of results, by matplotlib, which is imported to draw only."""

import importlib.util
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_vidspec.errors import VidSpecError
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
_STYLES = list(zip(_COLORS, "os^DvP<X>*hd", strict=True))
Points = Sequence[tuple[float, float]]
Panels = Mapping[str, Mapping[str, Points]]  # title -> name of a line -> its points


def check_plot(path: str, option: str, suffixes: Sequence[str] = SUFFIXES) -> None:
    """Refuse a plot that cannot be drawn: a place or name that is none, or no matplotlib."""
    check_output(path, option, suffixes)
    if importlib.util.find_spec("matplotlib") is None:
        raise VidSpecError(f"{option}: a {Path(path).suffix} file needs matplotlib: pip install matplotlib")


def draw(
    path: str | Path,
    panels: Panels,
    x_name: str,
    y_name: str,
    across: int = 0,
    ticks: Sequence[float] = (),
    stars: Mapping[str, Points] | None = None,
    levels: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """Draw panels, `across` in a row (0: all), with one legend; the same ones give the same file.

    `ticks` are the values of the x axis, evenly spaced; then the y axis begins at 0, and fewer than `LEAST_LINE` values
    have dots, side by side, and no line. Without ticks both axes are as wide as the points, and a line through so few
    is dashed. `stars` are points, by panel, that are marked on top; `levels` are horizontal lines, by panel and name.
    """
    import matplotlib
    from matplotlib.figure import Figure

    across = across or len(panels)
    down = -(-len(panels) // across)
    names = dict.fromkeys(name for lines in panels.values() for name in lines)
    styles = dict(zip(names, itertools.cycle(_STYLES)))  # endless
    legend: dict[str, Any] = {}
    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "vidspec"}):
        figure = Figure(figsize=(1.8 + 3.8 * across, 0.6 + 3.4 * down), dpi=160, layout="constrained")
        grid = figure.subplots(down, across, sharey="row", squeeze=False)
        for place, (title, lines) in zip(grid.flat, panels.items(), strict=False):
            for (words, level), dashes in zip((levels or {}).get(title, {}).items(), ("--", ":", "-."), strict=False):
                legend[words] = place.axhline(level, color="#444444", linestyle=dashes, linewidth=1, zorder=1)
            legend |= _draw_lines(place, lines, styles, ticks)
            for x, y in (stars or {}).get(title, ()):
                place.plot(x, y, "k*", markersize=15, fillstyle="none", zorder=5)
            place.set_title(title, fontsize=9)
            _tidy(place, "y" if ticks else "both")
        for place in grid.flat[len(panels) :]:
            place.set_axis_off()
        for place in grid[-1]:
            place.set_xlabel(x_name)
        for place in grid[:, 0]:
            place.set_ylabel(y_name)
        # Long names go below, where they take no width from the panels.
        is_long = max(map(len, legend), default=0) > LONG_NAME
        where: dict[str, Any] = (
            {"loc": "outside lower center", "ncols": 2} if is_long else {"loc": "outside right center"}
        )
        figure.legend(list(legend.values()), list(legend), frameon=False, **where)
        with writing(path):
            figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)


def _draw_lines(place: Any, lines: Mapping[str, Points], styles: Mapping[str, Any], ticks: Sequence[float]) -> dict:
    """Draw a panel's lines; return what was drawn, by name."""
    are_dots = 0 < len(ticks) < LEAST_LINE
    found = {}
    for number, (name, points) in enumerate(lines.items()):
        aside = DODGE * (number - (len(lines) - 1) / 2) if are_dots else 0.0
        moved = [((ticks.index(x) + aside) if ticks else x, y) for x, y in points]
        xs, ys = zip(*moved, strict=True) if moved else ((), ())
        color, marker = styles[name]
        look: dict[str, Any] = {"markersize": 5, "linewidth": 1.4}
        if are_dots:
            look = {"linestyle": "none", "markersize": 7}
        elif len(points) < LEAST_LINE:
            look |= {"linestyle": "--", "alpha": 0.5}
        (found[name],) = place.plot(xs, ys, color=color, marker=marker, **look)
    if ticks:
        place.set_xticks(range(len(ticks)), [f"{value:,g}" for value in ticks])
        most = max((y for points in lines.values() for _, y in points), default=1.0)
        place.set_ylim(0, max(place.get_ylim()[1], 1.08 * most))
        place.margins(x=0.4 if are_dots else 0.05)
    return found


def _tidy(place: Any, grid: str) -> None:
    """Remove the frame's lines that carry no values; the grid lies behind what is drawn."""
    place.grid(axis=grid, color="#DDDDDD", linewidth=0.6)
    place.set_axisbelow(True)
    place.spines[["top", "right"]].set_visible(False)
