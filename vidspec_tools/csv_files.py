"""Results as CSV: flat rows under named columns, behind a first line that says where they come from; no engine."""

import csv
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools.user_files import writing

# Columns of text. The others hold numbers, or True and False.
_TEXTS = frozenset(
    {
        *("family", "draft", "pruner", "drafting", "scorer", "draft_noise", "draft_positions", "measured_as_pruner"),
        *("scheduling", "method", "relevance_rows"),
        *("label", "mode", "published_pair", "published_source", "axis"),
    }
)


def flatten(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with one value per column: `skipped_pool_full` for `skipped["pool_full"]`.

    `knobs` is JSON text, empty where there are none.
    """
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name == "knobs":
            flat[name] = value if isinstance(value, str) else json.dumps(value, sort_keys=True) if value else ""
        else:
            flat |= {f"{name}_{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def write_rows(path: str, result: Mapping[str, Any], columns: Sequence[str]) -> None:
    """Write a result's rows, flattened, under their columns; the first line is a comment with its provenance as JSON.

    Raises:
        VidSpecError: The file cannot be written.
    """
    with writing(path), open(path, "w", newline="") as file:
        file.write(f"# {json.dumps(result['provenance'])}\n")
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(flatten, result["rows"]))


def read_rows(
    path: str, columns: Sequence[str], command: str, later: frozenset[str] = frozenset()
) -> list[dict[str, Any]]:
    """Return the flat rows that `write_rows` wrote; numbers are floats, an empty cell but that of `knobs` is None.

    Args:
        path: The file.
        columns: Of the result, in order.
        command: Of `vidspec`, which writes such files.
        later: Columns that files of earlier versions lack; there each cell is empty.

    Raises:
        VidSpecError: The file cannot be read or is something else.
    """
    try:
        with open(path, newline="") as file:
            reader = csv.DictReader(line for line in file if not line.startswith("#"))
            found = reader.fieldnames or ()
            if tuple(found) != tuple(name for name in columns if name in found or name not in later):
                raise ValueError
            return [{name: _value(name, row.get(name, "")) for name in columns} for row in reader]
    except OSError as error:
        raise VidSpecError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, csv.Error):
        raise VidSpecError(f"{path} is not a file of `vidspec {command} --csv`") from None


def _value(name: str, text: str) -> Any:
    """Return what a cell holds."""
    if name == "knobs":
        return text
    if name in _TEXTS or not text:
        return text or None
    return text == "True" if text in ("True", "False") else float(text)


def redraw(module: str, read: Callable[[str], list], draw: Callable[[list, str], None]) -> int:
    """Redraw a figure from its CSV file, as the command line says; an error is one line and exit status 2.

    Args:
        module: Of this package, for the usage.
        read: File name -> rows.
        draw: Rows, file name of the figure.
    """
    if len(sys.argv) != 3 or sys.argv[1] in ("-h", "--help"):
        print(f"usage: python -m vllm_vidspec.tools.{module} ROWS.csv FIGURE.png", file=sys.stderr)
        return 2
    try:
        draw(read(sys.argv[1]), sys.argv[2])
    except VidSpecError as error:
        print(f"vidspec: {error}", file=sys.stderr)
        return 2
    return 0
