"""Measure what docs/reliability.md says, keep it as JSON in docs/results/, and write the page's sections from it.

    python scripts/make_reliability.py                          # every section; an hour
    python scripts/make_reliability.py --only soak --minutes 15
    python scripts/make_reliability.py --only restarts          # needs root for full file systems
    python scripts/make_reliability.py --only faults,auto       # ten minutes
    python scripts/make_reliability.py --only properties,fuzz   # as many scenarios and inputs as are worth it: --times
    python scripts/make_reliability.py --render                 # the page again, from what was recorded

What is not as it should be is written as seen, and the command fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"


# ---- soak -----------------------------------------------------------------------------------------------------------


def run_soak(record: Path, options: argparse.Namespace) -> bool:
    """Soak for so many minutes; return whether it passed."""
    command = [sys.executable, "benchmarks/soak.py", "--minutes", f"{options.minutes:g}", "--json", str(record)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def quarters(readings: list[int]) -> str:
    """Return what a list says at its begin, its quarters and its end."""
    last = len(readings) - 1
    return ", ".join(str(readings[round(part * last / 4)]) for part in range(5)) if readings else "-"


def soak_text(result: dict[str, Any]) -> str:
    """Return the soak's tables."""
    made, kinds, traits = result["provenance"], result["kinds"], result["traits"]
    sampled = traits.get("sampled", 0)
    lines = [
        f'`make soak SOAK_ARGS="--minutes {result["minutes"]:g}"` on {made["date"][:10]}, commit '
        f"`{made['git_sha'][:12]}`, vLLM {made['versions']['vllm']}, {made['cpu']}, {made['num_cpus']} cores; "
        f"{result['family']}, fp32, {result['concurrency']} clients at a time (measured).",
        "",
        f"{result['requests']} requests, {result['compared']} of them compared token by token with vanilla's "
        f"({sampled} sampled with a seed, the others greedy). By kind: "
        + ", ".join(f"{name} {count}" for name, count in kinds.items())
        + ". With: "
        + ", ".join(f"{name} {count}" for name, count in traits.items() if name != "sampled")
        + ".",
        "",
        "| | |",
        "| --- | ---: |",
        f"| wrong answers | {result['wrong_answers']} |",
        f"| errors that were not expected | {result['errors_unexpected']} |",
        f"| draft KV blocks held when idle | {result['leaked_blocks']} |",
        f"| stored states held when idle | {result['leaked_states']} |",
        "",
        "| configuration | requests | memory over its time, MB | slope, MB a minute | preempted | accepted / drafts |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["configs"]:
        counted = row["counters"]
        stood = f"{counted['accepted_tokens'] / max(1, counted['drafts']):.2f}"
        slope = row["rss_slope_mb_per_min"]
        memory = quarters(row["rss_mb_over_time"])
        lines.append(f"| {row['config']} | {row['requests']} | {memory} | {slope} | {row['preemptions']} | {stood} |")
    lines += [
        f"| vanilla, all the time | {result['requests']} | {quarters(result['vanilla_rss_mb_over_time'])} "
        f"| {result['vanilla_rss_slope_mb_per_min']} | {result['vanilla_preemptions']} | none |",
        "",
        "| latency, s | answered | p50 | p95 | vanilla p50 | vanilla p95 |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    times = ("p50_s", "p95_s", "vanilla_p50_s", "vanilla_p95_s")
    rows = {**result["by_kind"], "all": result | {"answered": sum(r["answered"] for r in result["by_kind"].values())}}
    for name, row in rows.items():
        lines.append(f"| {name} | {row['answered']} | " + " | ".join(f"{row[time]:.2f}" for time in times) + " |")
    return "\n".join(lines)


# ---- restarts -------------------------------------------------------------------------------------------------------


def run_restarts(record: Path, options: argparse.Namespace) -> bool:
    """Run every case; return whether all were as they should be."""
    from tests.serve import restarts
    from vllm_vidspec.tools.provenance import provenance

    recorded = json.loads(record.read_text())["rows"] if record.exists() else []
    rows = {row["case"]: row for row in recorded}
    good = True
    for case in restarts.CASES:
        if not case.name.startswith(tuple(options.cases.split(","))):
            continue
        print(f"{case.name} ...", flush=True)
        with tempfile.TemporaryDirectory(prefix="vs") as folder:  # short: sockets lie in it
            try:
                seen, is_right = case.run(Path(folder)), True
            except Exception as error:
                traceback.print_exc()
                seen, is_right = f"{type(error).__name__}: {error}".splitlines()[0].replace(folder, "…")[:600], False
        print(f"  {'' if is_right else 'NOT AS EXPECTED: '}{seen}", flush=True)
        good &= is_right
        rows[case.name] = {"case": case.name, "seen": seen, "is_right": is_right}
        kept = [rows[case.name] for case in restarts.CASES if case.name in rows]
        record.write_text(json.dumps({"rows": kept, "provenance": provenance()}, indent=1) + "\n")
    return good


def restarts_text(result: dict[str, Any]) -> str:
    """Return the table of cases."""
    lines = ["| what happens | what was seen (measured) |", "| --- | --- |"]
    for row in result["rows"]:
        wrong = "" if row["is_right"] else "**not as it should be:** "
        lines.append(f"| {row['case']} | {wrong}{row['seen'].replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


# ---- faults ---------------------------------------------------------------------------------------------------------


def run_faults(record: Path, options: argparse.Namespace) -> bool:
    """Let everything on the draft's side fail once; return whether all answers were right and all was counted."""
    from vllm_vidspec.tools.provenance import provenance

    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.faults"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    rows = json.loads(line.removeprefix("RESULT "))
    record.write_text(json.dumps({"rows": rows, "provenance": provenance()}, indent=1) + "\n")
    return all(row["fine"] for row in rows)


def faults_text(result: dict[str, Any]) -> str:
    """Return the table of faults."""
    lines = [
        "| fault | answers as vanilla's | counted (measured) | requests after it |",
        "| --- | ---: | --- | --- |",
    ]
    for row in result["rows"]:
        counted = ", ".join(f"`{name}` {count}" for name, count in row["counted"].items())
        after = f"{row['right_after']} of 2 right, {'drafted for' if row['drafted_after'] else '**not drafted for**'}"
        lines.append(f"| {row['what']} | {row['right']} of {row['requests']} | {counted} | {after} |")
    return "\n".join(lines)


# ---- pruner auto ----------------------------------------------------------------------------------------------------


def run_auto(record: Path, options: argparse.Namespace) -> bool:
    """Let pruner auto learn on every bundled pair; return whether it came to 97 % of the best."""
    command = [sys.executable, "benchmarks/bench_auto_pruner.py", "--json", str(record)]
    is_same = subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    return is_same and all(row["share_of_best"] >= 0.97 for row in json.loads(record.read_text())["rows"])


def auto_text(result: dict[str, Any]) -> str:
    """Return the table of acceptance lengths."""
    pruners = list(result["rows"][0]["requests_by_pruner"])
    lines = [
        f"| pair | guidance | auto | {' | '.join(pruners)} | auto over the best | given while it learned and after |",
        f"| --- | --- | ---: | {'---: | ' * len(pruners)}---: | --- |",
    ]
    for row in result["rows"]:
        fixed = " | ".join(f"{row[pruner]:.2f}" for pruner in pruners)
        given = ", ".join(f"{pruner} {count}" for pruner, count in row["requests_by_pruner"].items())
        share = f"{100 * row['share_of_best']:.1f} %"
        lines.append(f"| {row['family']} | {row['guidance']} | {row['auto']:.2f} | {fixed} | {share} | {given} |")
    return "\n".join(lines)


# ---- what hypothesis draws ------------------------------------------------------------------------------------------


def run_properties(record: Path, options: argparse.Namespace) -> bool:
    """Let requests live, without an engine, several times as many as in the tests."""
    return _count("properties", 5, record, options)


def run_fuzz(record: Path, options: argparse.Namespace) -> bool:
    """Try inputs, many times as many as the tests do."""
    return _count("fuzz", 20, record, options)


def _count(part: str, usual: int, record: Path, options: argparse.Namespace) -> bool:
    """Count; what fails is raised, as hypothesis shows it."""
    from scripts import reliability_counts
    from tests.fuzz.running import TIMES
    from vllm_vidspec.tools.provenance import provenance

    times = options.times or usual
    os.environ[TIMES] = str(times)
    rows = getattr(reliability_counts, part)()
    record.write_text(json.dumps({"rows": rows, "times": times, "provenance": provenance()}, indent=1) + "\n")
    return True


def properties_text(result: dict[str, Any]) -> str:
    """Return the table of scenarios."""
    lines = ["| machine | scenarios | steps of the target |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {row['scenarios']:,} | {row['steps']:,} |" for name, row in result["rows"].items()]
    return f"{result['times']} times the scenarios of the tests (measured):\n\n" + "\n".join(lines)


def fuzz_text(result: dict[str, Any]) -> str:
    """Return the table of inputs."""
    lines = ["| target | inputs | accepted | refused |", "| --- | ---: | ---: | ---: |"]
    for name, row in result["rows"].items():
        lines.append(f"| {name} | {row['inputs']:,} | {row['accepted']:,} | {row['refused']:,} |")
    return f"{result['times']} times the inputs of the tests (measured):\n\n" + "\n".join(lines)


# ---- the page -------------------------------------------------------------------------------------------------------


class Section(NamedTuple):
    """A part of the page between its markers: where it is recorded, what measures it, what writes it."""

    record: Path
    run: Callable[[Path, argparse.Namespace], bool]
    text: Callable[[dict[str, Any]], str]


RESULTS = ROOT / "docs" / "results"
SECTIONS = {
    "soak": Section(RESULTS / "reliability-soak.json", run_soak, soak_text),
    "restarts": Section(RESULTS / "reliability-restarts.json", run_restarts, restarts_text),
    "faults": Section(RESULTS / "reliability-faults.json", run_faults, faults_text),
    "auto": Section(RESULTS / "auto-pruner.json", run_auto, auto_text),
    "properties": Section(RESULTS / "reliability-properties.json", run_properties, properties_text),
    "fuzz": Section(RESULTS / "reliability-fuzz.json", run_fuzz, fuzz_text),
}


def filled(page: str) -> str:
    """Return the page with every recorded section made anew."""
    for name, section in SECTIONS.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if start in page and section.record.exists():
            before, rest = page.split(start)
            text = section.text(json.loads(section.record.read_text()))
            page = f"{before}{start}\n\n{text}\n\n{end}{rest.split(end)[1]}"
    return page


def measured(section: Section, options: argparse.Namespace) -> bool:
    """Run what a section measures; return whether it passed. Its record names no folder of this machine."""
    passed, record = section.run(section.record, options), section.record
    if record.exists():
        record.write_text(record.read_text().replace(f"{ROOT}/", ""))
    return passed


def main() -> int:
    """Run, record, render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="comma-separated sections")
    parser.add_argument("--minutes", type=float, default=15.0, help="of the soak")
    parser.add_argument("--times", type=int, help="of properties and fuzz: the tests' own number of examples")
    parser.add_argument("--cases", default="", help="comma-separated beginnings of restart cases")
    parser.add_argument("--render", action="store_true", help="run nothing")
    options = parser.parse_args()
    names = [] if options.render else options.only.split(",")
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    if names:
        import conftest  # noqa: F401  # the environment of engines
    results = [measured(SECTIONS[name], options) for name in names]
    PAGE.write_text(filled(PAGE.read_text()))
    return int(not all(results))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
