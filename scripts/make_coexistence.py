"""Run every row of docs/coexistence.md and write the page and docs/results/coexistence.json.

    python scripts/make_coexistence.py                    # all rows; several minutes, root for the row of two nodes
    python scripts/make_coexistence.py --only LoRA,Ray    # these rows; the others stay as they were last seen
    python scripts/make_coexistence.py --render           # the page again, from what was recorded

A row that is not what it is expected to be is written as seen, and the command fails.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, RECORD = ROOT / "docs" / "coexistence.md", ROOT / "docs" / "results" / "coexistence.json"
START, END = "<!-- coexistence -->", "<!-- /coexistence -->"


def table(rows: list[dict[str, str]]) -> str:
    """Return the page's table of recorded rows."""
    lines = ["| feature | setting | what happens | seen |", "| --- | --- | --- | --- |"]
    for row in rows:
        cells = (row["feature"], row["setting"], row["verdict"], row["detail"])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def filled(text: str, rows: list[dict[str, str]]) -> str:
    """Return the page with its table made anew."""
    before, rest = text.split(START)
    return f"{before}{START}\n\n{table(rows)}\n\n{END}{rest.split(END)[1]}"


def main() -> int:
    """Run, record, render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated beginnings of rows, as `feature: setting`")
    parser.add_argument("--render", action="store_true", help="run nothing")
    options = parser.parse_args()
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {"rows": []}
    wrong = 0 if options.render else run(recorded, tuple(options.only.split(",")))
    PAGE.write_text(filled(PAGE.read_text(), recorded["rows"]))
    return 1 if wrong else 0


def run(recorded: dict[str, Any], only: tuple[str, ...]) -> int:
    """Run rows whose names begin so, and record each as it is seen; return how many were not as expected."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import conftest  # noqa: F401  # the environment of engines

    from tests.engine import coexistence
    from vllm_vidspec.tools.provenance import provenance

    found = {(row["feature"], row["setting"]): row for row in recorded["rows"]}
    wrong = 0
    for row in coexistence.ROWS:
        key = (row.feature, row.setting)
        if key in found and not row.name.startswith(only):
            continue
        print(f"{row.name} ...", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            try:
                seen = row.run(Path(folder))
            except Exception as error:
                seen = coexistence.Seen("broken", f"{type(error).__name__}: {error}".splitlines()[0][:200])
        is_expected = seen.verdict == row.expected and re.search(row.says, seen.detail) is not None
        wrong += not is_expected
        print(f"  {'' if is_expected else 'NOT AS EXPECTED: '}{seen.verdict}: {seen.detail}", flush=True)
        found[key] = {"feature": row.feature, "setting": row.setting, **seen._asdict()}
        recorded["rows"] = [found[r.feature, r.setting] for r in coexistence.ROWS if (r.feature, r.setting) in found]
        recorded["provenance"] = provenance()
        RECORD.write_text(json.dumps(recorded, indent=1) + "\n")
    return wrong


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # engines of this process may leave threads behind
