"""Run the commands that docs/results/README.md shows, and write their tables there and into README.md.

    python scripts/make_results.py                 # what has no JSON file in docs/results yet
    python scripts/make_results.py --only R1,R6 --force

The commands stand in front of a result's marker, its tables between `<!-- NAME -->` and `<!-- /NAME -->`; the JSON
files hold every row with its provenance. What takes several commands is one file; R9 also stands for R9-sage, R12 for
R12-relevance. `<!-- figure -->` may stand on either page.
"""

import argparse
import json
import re
import shlex
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_vidspec.shapeworld.captions import GROUPS
from vllm_vidspec.tools import csv_files, plots
from vllm_vidspec.tools import quality_views as views
from vllm_vidspec.tools.bench.acceptance import AXES as SWEEP_AXES
from vllm_vidspec.tools.bench.acceptance import UNPRUNED, canonical, measured_itself
from vllm_vidspec.tools.tables import number, percent

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "results"
PAGE = FOLDER / "README.md"
FAMILIES = ("qwen2.5-vl", "llava-onevision")
# LVSpec's table 3 (VideoDetailCaption, Qwen2.5-VL 32B/7B): tokens per step without the target's own, and what is kept.
LVSPEC_TABLE_3: dict[str, tuple[float | None, float]] = {
    "strict": (3.41, 1.0),
    "loose 0.2": (4.12, 0.993),
    "loose 0.5": (5.83, 0.978),
    "loose 0.7": (7.27, 0.985),
    "loose 0.9": (8.97, 0.928),
    "loose 0.7 N1": (None, 0.946),
    "loose 0.7 N100": (None, 0.934),
}
# Results by shape of the draft: they also have a CSV file, and those named here a figure.
BY_SHAPE = {"R9": ("temperature",), "R9-sage": ("prune_ratio",)}
FIGURES = {"R9"}
# README.md's lines of R9: words, shape, the knobs that are not the defaults.
TREES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("tokens per verify step, draft at 10 %, a chain of 5 (the maximum is 6)", "chain", {}),
    ("the same, SpecVLM's static tree of 25 nodes", "tree-static", {}),
    (
        "the same, SAGE's adaptive tree, depth 5 and 25 nodes too",
        "tree-adaptive",
        {"tree_depth_min": 5, "tree_depth_max": 5, "tree_fill": True},
    ),
    ("the same, SAGE's adaptive tree by default (depth 3 to 8, 9 nodes)", "tree-adaptive", {}),
)
AXES = {
    "R1": (),
    "R2": ("pruner", "prune_ratio"),
    "R3": ("pruner", "prune_ratio"),
    "R4": ("temperature", "draft_noise"),
    "R5": ("temperature", "top_p", "presence_penalty"),
}


def main() -> int:
    """Run, render, write."""
    commands = commands_by_name()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(commands), help="comma-separated names")
    parser.add_argument("--force", action="store_true", help="run again what has a JSON file")
    options = parser.parse_args()
    for name in chosen(options.only, commands):
        path = FOLDER / f"{name}.json"
        if options.force or not path.exists():
            parts = []
            for command in commands[name]:
                print(f"{name}: {command}", flush=True)
                parts.append(run(command))
            write(path, merge(parts))
    results = {name: read(path) for name in commands if (path := FOLDER / f"{name}.json").exists()}
    for page in (PAGE, ROOT / "README.md"):
        page.write_text(filled(page.read_text(), results))
    return 0


def commands_by_name() -> dict[str, list[str]]:
    """Return the command lines of every result, as the page shows them: in front of its marker, behind the last one."""
    found = {}
    for part in re.split("<!-- /.* -->", re.sub(r"\s*\\\n\s+", " ", PAGE.read_text())):
        text, _, rest = part.partition("<!-- ")
        if lines := re.findall("^    (?:vidspec|python) (.*)$", text, re.MULTILINE):
            found[rest.split()[0]] = lines
    return found


def chosen(names: str, known: Iterable[str]) -> list[str]:
    """Return the results that comma-separated names stand for: R9 is R9-sage, too."""
    wanted = names.split(",")
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"no result is called {unknown[0]!r}; there are {', '.join(known)}")
    return [name for name in known if name in wanted or name.split("-")[0] in wanted]


def run(command: str) -> dict[str, Any]:
    """Run what follows `vidspec`, or a script of this repository, and return its result."""
    program = [] if command.startswith("benchmarks/") else ["-m", "vllm_vidspec.cli"]
    with tempfile.TemporaryDirectory(prefix="vidspec-results-") as folder:
        path = Path(folder, "result.json")
        # A calibration's result is the file that it writes.
        words = [*shlex.split(command), "--out" if command.startswith("calibrate") else "--json", str(path)]
        if subprocess.run([sys.executable, *program, *words], cwd=ROOT).returncode != 0:
            raise SystemExit(f"failed: {command}")
        result = json.loads(path.read_text().replace(f"{ROOT}/", "").replace(f"{folder}/", ""))
    result.pop("log_dir", None)  # of this machine only
    return result


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one result of several: their rows or, of calibrations, these by target; the command lines of all."""
    first = parts[0]
    if len(parts) == 1:
        return first
    origin = first["provenance"] | {"argv": [part["provenance"]["argv"] for part in parts]}
    if "costs" in first:
        return {"calibrations": {part["target"].split("/")[0]: part for part in parts}, "provenance": origin}
    lists = {name: [row for part in parts for row in part.get(name, [])] for name in ("rows", "failures")}
    families = list(dict.fromkeys(row["family"] for row in lists["rows"]))
    if "method" in lists["rows"][0]:
        # Every command measures the target, the draft and strict for itself: once is enough.
        by_setting = {views.setting_key(row): row for row in reversed(lists["rows"])}
        lists["rows"] = [row for row in lists["rows"] if by_setting[views.setting_key(row)] is row]
    lists["rows"].sort(key=lambda row: families.index(row["family"]))
    return {**lists, "provenance": origin}


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON, and beside it what else there is of it: its rows as CSV, its figure."""
    path.write_text(json.dumps(result, indent=1) + "\n")
    csv_path, figure_path = (str(path.with_suffix(suffix)) for suffix in (".csv", ".png"))
    if path.stem == "R12":
        views.write_csv(csv_path, result)
        views.draw(result["rows"], figure_path)
    if path.stem in BY_SHAPE:
        plots.write_csv(csv_path, result)
    if path.stem in FIGURES:
        plots.draw([csv_files.flatten(row) for row in result["rows"]], figure_path)


def read(path: Path) -> dict[str, Any]:
    """Return a result; rows of a file from before `measured_as` had an engine each."""
    result = json.loads(path.read_text())
    for row in result.get("rows", []):
        if row.keys() >= set(UNPRUNED):
            row.setdefault("measured_as", {name: row[name] for name in UNPRUNED})
    return result


def filled(page: str, results: dict[str, dict[str, Any]]) -> str:
    """Return a page with what there are results for between its markers."""

    def body(match: re.Match[str]) -> str:
        opening, name, old, closing = match.groups()
        if name == "figure":
            return opening + (figure(results) if results.keys() >= AXES.keys() else old) + closing
        return opening + (body_of(name, results[name]) if name in results else old) + closing

    return re.sub(r"(<!-- (\S+) -->\n)(.*?)(<!-- /\2 -->)", body, page, flags=re.DOTALL)


def body_of(name: str, result: dict[str, Any]) -> str:
    """Return what stands between the markers of a name: tables, notes, a figure, and where the result comes from."""
    if name in AXES and AXES[name] == ("pruner", "prune_ratio"):
        body = pruner_tables(result) + figure_link(f"{name}.png", "acceptance length over prune ratio, by pruner")
    elif name in AXES:
        body = acceptance_table(result, AXES[name])
    elif name in BY_SHAPE:
        body = shape_table(result, BY_SHAPE[name]) + figure_link(
            f"{name}.png", "acceptance length by shape of the draft"
        )
    else:
        body = BODIES[name](result)
    return body + origin(result) + "\n"


def figure_link(path: str, words: str) -> str:
    """Return a picture of the results page, nothing where its file is not there."""
    return f"![{words}]({path})\n\n" if (FOLDER / path).exists() else ""


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], num_words: int = 1, end: str = "\n") -> str:
    """Return a Markdown table and an empty line; the first `num_words` columns hold words, the others numbers."""
    rules = ["---"] * num_words + ["---:"] * (len(head) - num_words)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rules, *rows)) + end


class _Formatter(string.Formatter):
    """Formats a row's figures: None as a dash, `%` as a share that may be more than 100, `p` as one that may not."""

    def format_field(self, value: Any, spec: str) -> str:
        if value is None:
            return "-"
        return {"%": share, "p": percent}[spec](value) if spec in ("%", "p") else format(value, spec)


def table(head: str, line: str, rows: Iterable[Row], num_words: int = 1) -> str:
    """Return the Markdown table of `rows`; `line` is the template of a row, and " | " parts columns."""
    return markdown_table(
        head.split(" | "), [_Formatter().vformat(line, (), row).split(" | ") for row in rows], num_words
    )


def share(value: float | None) -> str:
    """Return a share as a percentage, which may be more than 100."""
    return "-" if value is None else f"{100 * value:.1f} %"


def overhead_table(result: dict[str, Any]) -> str:
    """Return the Markdown table of the guidance's share of prefills."""
    return table(
        "pruner | video tokens | prefill (ms) | with guidance (ms) | share | min to max | own clock (ms) | "
        "share by own clock",
        "`{pruner}` | {video_tokens:,} | {prefill_ms:.1f} | {guided_prefill_ms:.1f} | {share:%} | "
        "{percent_min:.1f} to {share_max:%} | {inside_ms:.2f} | {inside_share:%}",
        [row | {"percent_min": 100 * row["share_min"]} for row in result["rows"]],
    )


def relevance_overhead_table(result: dict[str, Any]) -> str:
    """Return the Markdown table of relevance's share of decode steps."""
    return table(
        "video tokens | step (ms) | with relevance (ms) | share | min to max | inside (ms) | share of it | "
        "kept states (bytes)",
        "{video_tokens:,} | {step_ms:.1f} | {loose_step_ms:.1f} | {share:%} | {percent_min:.1f} to {share_max:%} | "
        "{inside_ms:.2f} | {inside_share:%} | {store_bytes:,}",
        [row | {"percent_min": 100 * row["share_min"]} for row in result["rows"]],
        num_words=0,
    )


def relevance_table(result: dict[str, Any]) -> str:
    """Return the pictures of `show-relevance`, and a Markdown table of what they show."""
    links = [
        figure_link(f"../relevance-{row['family']}.png", f"visual relevance of each token, {row['family']}")
        for row in result["rows"]
    ]
    return "".join(links) + table(
        "family | tokens | acceptance length | loosened | shifted | AUC",
        "`{family}` | {tokens} | {acceptance_length:.2f} | {loosened_frac:%} | {shifted_frac:%} | {relevance_auc:.2f}",
        [row | {"tokens": len(row["words"])} for row in result["rows"]],
    )


def quality_tables(result: dict[str, Any]) -> str:
    """Return the Markdown of `bench quality`: per family every setting and its details, then LVSpec's table 3."""
    panels = views.panels(result["rows"])
    text = ""
    for family in dict.fromkeys(panel[0] for panel in panels):
        ours = {panel: rows for panel, rows in panels.items() if panel[0] == family}
        panel, rows = next(iter(ours.items()))
        text += quality_overview(ours)
        text += table(
            f"`{family}`, {views.panel_name(panel, family=False)} | {' | '.join(f'{name} right' for name in GROUPS)} | "
            "loosened | shifted | same caption | AUC | tokens per caption | delivered per step | s",
            f"`{{setting}}` | {' | '.join(f'{{group[{name}]:%}}' for name in GROUPS)} | {{loosened_frac:%}} | "
            "{shifted_frac:%} | {identical_frac:%} | {relevance_auc:.2f} | {tokens_per_caption:.1f} | "
            "{delivered_length:.2f} | {decode_s:.1f}",
            [row | {"setting": views.setting_name(row)} for row in rows],
        )
        for panel, rows in ours.items():
            text += f"{views.panel_name(panel)}. {views.longest_words(rows)}\n\n"
    return text + quality_table_3(panels) + figure_link("R12.png", "what is kept over acceptance length")


def quality_overview(panels: dict[views.Panel, list[Row]]) -> str:
    """Return one family's table: settings down; length, its ratio to strict's and what is kept across."""
    head = [f"`{next(iter(panels))[0]}`"]
    for panel in panels:
        head += [f"{views.panel_name(panel, family=False)}: length", "of strict's", "kept"]
    by_name = [{views.setting_name(row): row for row in rows} for rows in panels.values()]
    lines = []
    for name in by_name[0]:
        cells = [f"`{name}`"]
        for row in (found[name] for found in by_name):
            cells += [number(row["acceptance_length"], 2), number(row["ratio_to_strict"], 2), share(row["retention"])]
        lines.append(cells)
    return markdown_table(head, lines)


def quality_table_3(panels: dict[views.Panel, list[Row]]) -> str:
    """Return LVSpec's table 3 beside ours: greedy, without position shift, relevance of the own token."""
    greedy = {panel[0]: rows for panel, rows in panels.items() if panel[1] == 0}
    ours = {family: {views.setting_name(row): row for row in rows} for family, rows in greedy.items()}
    families = [f"`{name}`" for name in ours]
    head = ["LVSpec's table 3", "length of strict's: paper", *families, "kept: paper", *families]
    lines = []
    for name, (length, kept) in LVSPEC_TABLE_3.items():
        rows = [found.get(name) for found in ours.values()]
        if not any(rows):
            continue
        # The paper's lengths are without the target's own token.
        ratio = None if length is None else (1 + length) / (1 + LVSPEC_TABLE_3["strict"][0])
        cells = [f"`{name}`", number(ratio, 2), *(number(row and row["ratio_to_strict"], 2) for row in rows)]
        lines.append([*cells, share(kept), *(share(row and row["retention"]) for row in rows)])
    return markdown_table(head, lines)


def pruner_tables(result: dict[str, Any]) -> str:
    """Return a Markdown table per family: acceptance length, pruners down, ratios across; each with a note."""
    rows = result["rows"]
    pruners, ratios = (list(dict.fromkeys(row[name] for row in rows)) for name in ("pruner", "prune_ratio"))
    text = ""
    for family in dict.fromkeys(row["family"] for row in rows):
        ours = [row for row in rows if row["family"] == family]
        by_cell = {(row["pruner"], row["prune_ratio"]): row for row in ours}
        unpruned = next((row for row in ours if canonical(row["pruner"], row["prune_ratio"]) == UNPRUNED), None)
        head = [f"`{family}`", *(f"{ratio:g}" for ratio in ratios), "share of unpruned at 0.9"]
        lines = []
        for pruner in pruners:
            cells = [f"`{pruner}`", *(length_cell(by_cell.get((pruner, ratio))) for ratio in ratios)]
            lengths = [row["acceptance_length"] if row else None for row in (by_cell.get((pruner, 0.9)), unpruned)]
            lines.append([*cells, share(lengths[0] / lengths[1] if all(lengths) else None)])
        text += markdown_table(head, lines) + f"{note(ours)}\n\n"
    return text


def length_cell(row: Row | None) -> str:
    """Return an acceptance length, in italics where the row shares another row's engine."""
    length = number(row["acceptance_length"] if row else None, 2)
    return length if row is None or measured_itself(row) else f"*{length}*"


def measurements(rows: list[Row]) -> list[Row]:
    """Return one row per measurement: of the rows that share an engine and a sampling, the first."""
    axes = [name for name in SWEEP_AXES if name not in UNPRUNED]
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        found.setdefault((*(row[name] for name in axes), *row["measured_as"].values()), row)
    return list(found.values())


def note(rows: list[Row]) -> str:
    """Return one line about one family's rows: requests compared, requests identical, what went wrong."""
    found = measurements(rows)
    compared = [row for row in found if row["identical_frac"] is not None]
    same = round(sum(row["identical_frac"] * row["requests"] for row in compared))
    line = f"Compared with vanilla: {sum(row['requests'] for row in compared):,} requests of {len(compared)} engines, "
    line += f"{same:,} identical."
    engines = [row["measured_as"] for row in rows if not measured_itself(row)]
    if engines:
        names = dict.fromkeys(f"`{engine['pruner']}` at {engine['prune_ratio']:g}" for engine in engines)
        line += f" In italics: not run itself, the draft sees the same tokens as with {' or '.join(names)}."
    loads = [row["draft_load_bytes"] / 2**20 for row in found if "draft_load_bytes" in row]
    if any(loads):
        line += f" Loading the draft took {min(loads):.1f} to {max(loads):.1f} MiB."
    for what in ("skipped", "unguided"):
        for reason in found[0].get(what, {}):
            if count := sum(row[what][reason] for row in found):
                line += f" {what.capitalize()} ({reason}): {count:,}."
    return line


def acceptance_table(result: dict[str, Any], axes: tuple[str, ...]) -> str:
    """Return the Markdown table of one sweep; times only where one engine ran at a time."""
    timed = all(row.get("jobs", 1) == 1 for row in result["rows"])
    head = " | ".join(["family", *(name.replace("_", " ") for name in axes)])
    line = " | ".join(["`{family}`", *(axis_template(name, result["rows"]) for name in axes)])
    return table(
        f"{head} | acceptance length | acceptance rate | identical | draft KV of full | drafts"
        + " | s | vanilla s" * timed,
        f"{line} | {{acceptance_length:.2f}} | {{acceptance_rate:p}} | {{identical_frac:p}} | {{kv_frac:p}} | "
        "{num_drafts}" + " | {decode_s:.1f} | {vanilla_decode_s:.1f}" * timed,
        [row | {"kv_frac": row["draft_kv_bytes"] / row["full_draft_kv_bytes"]} for row in result["rows"]],
        num_words=1 + len(axes),
    )


def axis_template(name: str, rows: list[Row]) -> str:
    """Return how a value of an axis is shown: words as code, numbers without zeros."""
    return f"`{{{name}}}`" if isinstance(rows[0][name], str) else f"{{{name}:g}}"


def shape_table(result: dict[str, Any], axes: tuple[str, ...]) -> str:
    """Return the Markdown table of draft shapes, with what they cost per verify step, and a note per family."""
    rows = [row | {"drafting": plots.shape_of(csv_files.flatten(row))} for row in result["rows"]]
    text = table(
        f"family | draft's shape | {' | '.join(name.replace('_', ' ') for name in axes)} | acceptance length | "
        "at most | nodes | depth | draft forwards | identical",
        f"`{{family}}` | {{drafting}} | {' | '.join(axis_template(name, rows) for name in axes)} | "
        "{acceptance_length:.2f} | {max_acceptance_length:.2f} | {nodes_per_step:.1f} | {depth_per_step:.1f} | "
        "{draft_forwards_per_step:.1f} | {identical_frac:p}",
        rows,
        num_words=2 + len(axes),
    )
    for family in dict.fromkeys(row["family"] for row in rows):
        ours = [row for row in rows if row["family"] == family]
        scheduling = ", ".join(sorted({row["scheduling"] for row in ours}))
        text += f"`{family}`, {scheduling} scheduling. {note(ours)}\n\n"
    return text


def host_time_table(result: dict[str, Any]) -> str:
    """Return the Markdown table of our own host time per step, and of its parts in the largest batch."""
    rows = result["rows"]
    largest = max(row["batch_size"] for row in rows)
    shown = [row for row in rows if row["batch_size"] == largest]
    parts = dict.fromkeys(part for row in shown for part in row["parts"])
    lines = [
        [part, *(number(row["parts"].get(part), 3) for row in shown)]
        for part in sorted(parts, key=lambda part: -max(row["parts"].get(part, 0.0) for row in shown))
    ]
    head = [f"part, {largest} requests (ms)", *(row["drafting"] for row in shown)]
    times = table(
        "draft's shape | scheduling | requests | own time (ms) | 20 % to 80 % | budget (ms) | kernels of it (ms) | "
        "steps",
        "{drafting} | {scheduling} | {batch_size} | {own_ms:.2f} | {p20_ms:.2f} to {p80_ms:.2f} | {budget_ms:.2f} | "
        "{kernels_ms:.2f} | {steps}",
        rows,
        num_words=2,
    )
    return times + markdown_table(head, lines)


def costs_tables(result: dict[str, Any]) -> str:
    """Return a Markdown table per family: tokens per second by batch size and shape, and what follows for `auto`."""
    text = ""
    for family, found in result["calibrations"].items():
        lines: dict[int, list[str]] = {}
        for row in found["costs"]:
            cell = f"{row['tokens_per_s']:.0f} ({row['acceptance_length']:.2f}; {row['step_ms']:.1f} ms)"
            lines.setdefault(row["batch_size"], [str(row["batch_size"])]).append(cell)
        head = [f"`{family}`, requests", *dict.fromkeys(row["shape"] for row in found["costs"])]
        text += markdown_table(head, lines.values(), num_words=0)
        text += f"`draft_table`: `{json.dumps(found['config']['draft_table'])}`\n\n"
    return text


def demo_table(result: dict[str, Any]) -> str:
    """Return the Markdown table of one demo, and what was answered."""
    vanilla, ours = result["vanilla"], result["vidspec"]
    times = (("ttft_s", "time to first token"), ("decode_s", "decode"), ("server_start_s", "server start"))
    kept, full = result["draft_kv_bytes"], result["full_draft_kv_bytes"]
    rows = [
        ("acceptance length", "1", number(result["acceptance_length"], 2)),
        ("acceptance rate", "", percent(result["acceptance_rate"])),
        ("identical answers", "", "yes" if result["identical"] else "NO"),
        ("draft KV, kept / full video (bytes)", "", f"{kept:,} / {full:,}"),
        ("output tokens", str(vanilla["output_tokens"]), str(ours["output_tokens"])),
        *((f"{label} (s)", number(vanilla[key], 2), number(ours[key], 2)) for key, label in times),
    ]
    return markdown_table([result["family"], "vanilla vLLM", "vLLM + vidspec"], rows) + f"> {ours['text'].strip()}\n\n"


# What has a table of its own.
BODIES: dict[str, Callable[[dict[str, Any]], str]] = {
    "R6": demo_table,
    "R7": demo_table,
    "R8": overhead_table,
    "R10": host_time_table,
    "R11": costs_tables,
    "R12": quality_tables,
    "R12-relevance": relevance_table,
    "R13": relevance_overhead_table,
}


def origin(result: dict[str, Any]) -> str:
    """Return one line that says where a result comes from."""
    found = result["provenance"]
    commit = (found["git_sha"] or "no commit")[:10] + (" with local changes" if found["git_dirty"] else "")
    where = found["device"] if found["device"] != "cpu" else f"{found['cpu']}, {found['num_cpus']} cores"
    return f"{found['date'][:10]}, commit {commit}, vLLM {found['versions'].get('vllm')}, {where}."


def figure(results: dict[str, dict[str, Any]]) -> str:
    """Return the table of README.md: one line a figure, a column a family."""

    def row_of(name: str, family: str, **where: Any) -> Row:
        rows = [row for row in results[name]["rows"] if row["family"] == family]
        return next(row for row in rows if all(row[key] == value for key, value in where.items()))

    def lengths(name: str, **where: Any) -> list[str]:
        return [number(row_of(name, family, **where)["acceptance_length"], 2) for family in FAMILIES]

    def at_a_tenth(pruner: str) -> list[str]:
        return lengths("R3", pruner=pruner, prune_ratio=0.9)

    def visual_share(family: str) -> str:
        row = row_of("R3", family, pruner="specvlm", prune_ratio=0.9)
        return percent(row["visual_tokens_kept"] / row["visual_tokens_full"])

    def identical(family: str) -> str:
        rows = [row for name in AXES for row in measurements(results[name]["rows"]) if row["family"] == family]
        return f"{round(sum(r['identical_frac'] * r['requests'] for r in rows))} of {sum(r['requests'] for r in rows)}"

    def rates(noise: str) -> list[str]:
        rows = [row_of("R4", family, temperature=1.0, draft_noise=noise) for family in FAMILIES]
        return [percent(row["acceptance_rate"]) for row in rows]

    def share_kept(family: str) -> str:
        whole, tenth = (row_of("R3", family, pruner="specvlm", prune_ratio=ratio) for ratio in (0.0, 0.9))
        return percent(tenth["acceptance_length"] / whole["acceptance_length"])

    lines = [
        ("tokens per verify step, draft sees the whole video", *lengths("R3", pruner="none", prune_ratio=0.0), "R3"),
        ("the same, draft sees 10 % of it, chosen by the target's attention (`specvlm`)", *at_a_tenth("specvlm"), "R3"),
        ("the same, chosen by the target's hidden states (`uv`)", *at_a_tenth("uv"), "R3"),
        ("the same, chosen at random", *at_a_tenth("random"), "R3"),
        ("the same, draft sees no video at all", *lengths("R3", pruner="specvlm", prune_ratio=1.0), "R3"),
        ("what is left of the whole video's figure at 10 % (`specvlm`)", *map(share_kept, FAMILIES), "R3"),
        ("tokens per verify step, target drafts for itself, whole video (the maximum is 6)", *lengths("R1"), "R1"),
        ("requests whose tokens all equal vanilla vLLM's, R1 to R5", *map(identical, FAMILIES), "R1"),
        ("draft KV of the video, of what it would take unpruned", *map(visual_share, FAMILIES), "R3"),
        ("acceptance rate at temperature 1, noise shared", *rates("shared"), "R4"),
        ("the same, noise of the draft's own", *rates("independent"), "R4"),
    ]
    if "R9" in results:
        for words, shape, knobs in TREES:
            lines.append((words, *lengths("R9", drafting=shape, knobs=knobs, temperature=0.0), "R9"))
    if "R12" in results:
        lines += loose_lines(results["R12"]["rows"])
    head = ["bundled models, 5 draft tokens per step", "Qwen2.5-VL pair", "LLaVA-OneVision pair", "row"]
    rows = [(*cells, f"[{name}](docs/results/README.md#{name.lower()})") for *cells, name in lines]
    return markdown_table(head, rows, end="").replace("---: |\n", "--- |\n", 1)  # names of results are words


def loose_lines(rows: list[Row]) -> list[tuple[str, ...]]:
    """Return README.md's lines about lossy verification, at temperature 1."""
    by_family = [[row for row in rows if row["family"] == family and row["temperature"] == 1] for family in FAMILIES]

    def longest(method: str) -> list[str]:
        found = [views.longest_kept(ours).get(method) for ours in by_family]
        return [number(row and row["acceptance_length"], 2) for row in found]

    strict = [next(row for row in ours if row["method"] == "strict") for ours in by_family]
    words = "the same, mismatches let stand by `loose` as long as 98 % of the captions' facts stay right"
    return [
        (
            "tokens per verify step, a chain of 10, temperature 1, noise of the draft's own, `strict`",
            *(number(row["acceptance_length"], 2) for row in strict),
            "R12",
        ),
        (words, *longest("loose"), "R12"),
        ("the same, by FLy (`fly`)", *longest("fly"), "R12"),
        ("the same, an oracle that knows which words matter", *longest("oracle"), "R12"),
    ]


if __name__ == "__main__":
    sys.exit(main())
