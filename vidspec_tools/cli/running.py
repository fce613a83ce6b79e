"""What happens around a benchmark: its files are checked, it runs, its rows are written and shown."""

from collections.abc import Mapping
from typing import Any

import typer

from vllm_vidspec.cli.running import with_bars, write_json


def measure(bench: Any, view: Any, what: Any, given: Mapping[str, Any]) -> None:
    """Run a benchmark, write its rows to the files that the options name, and show them.

    Args:
        bench: The module that measures: `check` and `run`.
        view: What shows its rows: `tables` and `draw`.
        what: What to measure.
        given: The options; `csv_path`, `plot_path` and `json_path` are the files.

    Raises:
        typer.Exit: With status 1, if a part of it failed.
    """
    from rich.console import Console

    from vidspec_tools.views import csv_file, figures
    from vidspec_tools.views.progress import EnginesView

    bench.check(what)
    csv_path, plot_path, json_path = (given[f"{kind}_path"] for kind in ("csv", "plot", "json"))
    figures.check_outputs(csv_path, plot_path, json_path)
    result = with_bars(bench.run, what, EnginesView)
    write_json(json_path, result)
    if csv_path is not None:
        csv_file.write(csv_path, result)
    if plot_path is not None and result["rows"]:
        view.draw(result["rows"], plot_path)
    if json_path != "-" and result["rows"]:
        for table in view.tables(result["rows"]):
            Console().print(table)
    if result.get("failures"):
        raise typer.Exit(1)
