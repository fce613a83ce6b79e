"""Draw a figure from a result: `python -m vidspec_tools.views docs/results/R3.json R3.png`."""

import json
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from vidspec_tools.views import acceptance, quality, versus
from vllm_vidspec.errors import VidSpecError


def view_of(row: Mapping[str, Any]) -> ModuleType | versus.View:
    """Return the view of a result's rows, by a column that only they have."""
    for column, view in (
        ("retention", quality),
        ("axis", versus.SCALING_VIEW),
        ("request_ms", versus.SPEED_VIEW),
        ("published_tau", versus.PAPER_VIEW),
        ("mode", versus.PARALLEL_VIEW),
    ):
        if column in row:
            return view
    return acceptance


def read(path: str) -> list[dict[str, Any]]:
    """Return the rows of a result."""
    try:
        with open(path) as file:
            rows: Sequence[Any] = json.load(file)["rows"]
    except OSError as error:
        raise VidSpecError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        rows = [None]
    if not rows:
        raise VidSpecError(f"cannot draw {path}: it has no rows")
    if not all(isinstance(row, dict) and "family" in row for row in rows):
        raise VidSpecError(f"{path} is not a file of `vidspec bench --json`")
    return list(rows)


def main(args: Sequence[str]) -> int:
    """Draw; an error is one line and exit status 2."""
    if len(args) != 2 or args[0].startswith("-"):
        print("usage: python -m vidspec_tools.views RESULT.json FIGURE.png", file=sys.stderr)
        return 2
    try:
        rows = read(args[0])
        view_of(rows[0]).draw(rows, args[1])
    except VidSpecError as error:
        print(f"vidspec: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
