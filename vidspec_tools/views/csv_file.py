"""Results as CSV: flat rows behind a first line that says where they come from."""

import csv
import json
from collections.abc import Mapping
from typing import Any

from vllm_vidspec.tools.user_files import writing


def flatten(row: Mapping[str, Any]) -> dict[str, Any]:
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


def write(path: str, result: Mapping[str, Any]) -> None:
    """Write a result's rows, flattened; the first line is a comment with its provenance as JSON."""
    rows = [flatten(row) for row in result["rows"]]
    columns = dict.fromkeys(name for row in rows for name in row)
    with writing(path), open(path, "w", newline="") as file:
        file.write(f"# {json.dumps(result['provenance'])}\n")
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
