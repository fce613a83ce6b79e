"""What happens around a benchmark: its files are checked, it runs, its rows are written and shown."""

from collections.abc import Mapping
from typing import Any

import typer

from vllm_vidspec.cli.running import with_bars, write_json


def measure(bench: Any, views: Any, what: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Run a benchmark, write its rows to the files that the options name, and show them.

    Args:
        bench: The module that measures: `check` and `run`.
        views: The module that shows: `write_csv`, `draw` and `shown_tables`.
        what: What to measure.
        given: The options; `csv_path`, `plot_path` and `json_path` are the files.
    """
    from rich.console import Console

    from vidspec_tools import figures
    from vllm_vidspec.tools import progress

    bench.check(what)
    csv_path, plot_path, json_path = (given[f"{kind}_path"] for kind in ("csv", "plot", "json"))
    figures.check_outputs(csv_path, plot_path, json_path)
    result = with_bars(bench.run, what, progress.View)
    write_json(json_path, result)
    if csv_path is not None:
        views.write_csv(csv_path, result)
    if plot_path is not None and result["rows"]:
        views.draw(result["rows"], plot_path)
    if json_path != "-" and result["rows"]:
        for table in views.shown_tables(result["rows"]):
            Console().print(table)
    return result


def measure_all(bench: Any, views: Any, what: Any, given: Mapping[str, Any]) -> None:
    """Do as `measure`, and exit with status 1 if something of it failed."""
    if measure(bench, views, what, given)["failures"]:
        raise typer.Exit(1)
