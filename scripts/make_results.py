"""Run the commands of docs/results/README.md and write their tables there and into README.md.

    python scripts/make_results.py                 # what has no JSON file in docs/results yet
    python scripts/make_results.py --only R1,R6 --force

The tables stand between `<!-- NAME -->` and `<!-- /NAME -->`; the JSON files hold every row with its provenance. What
takes several commands is one file; R9 also stands for R9-sage, R12 for R12-relevance.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_vidspec.shapeworld.captions import GROUPS
from vllm_vidspec.tools import plots, quality_views
from vllm_vidspec.tools.bench.acceptance import AXES as SWEEP_AXES
from vllm_vidspec.tools.bench.acceptance import UNPRUNED, canonical, measured_itself
from vllm_vidspec.tools.tables import number, percent

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "results"
PAGE = FOLDER / "README.md"
FAMILIES = ("qwen2.5-vl", "llava-onevision")
BOTH = "--family qwen2.5-vl,llava-onevision"
PRUNERS = "none,random,uniform,specvlm,attention,uv,window:front,frame,fastvid,dycoke"
OVERHEAD = "benchmarks/bench_guidance_overhead.py"
RELEVANCE_OVERHEAD = "benchmarks/bench_relevance_overhead.py"
HOST_TIME = "benchmarks/bench_host_time.py --batch 16 --steps 25"
ADAPTIVE = f"bench acceptance {BOTH} --drafting tree-adaptive"
QUALITY = f"bench quality {BOTH} --temperature 0,1 --draft-noise independent --requests 32"
# What follows `vidspec`, or a script of this repository; of several commands the rows are one result.
COMMANDS: dict[str, str | tuple[str, ...]] = {
    "R1": f"bench acceptance {BOTH} --draft target --pruner none",
    "R2": f"bench acceptance {BOTH} --draft target --pruner {PRUNERS} --prune-ratio 0,0.9 --jobs 2",
    "R3": f"bench acceptance {BOTH} --pruner {PRUNERS} --prune-ratio 0,0.5,0.8,0.9,0.95,0.99,1.0 --requests 64 "
    "--jobs 2 --csv docs/results/R3.csv --plot docs/results/R3.png",
    "R4": f"bench acceptance {BOTH} --temperature 0.7,1 --draft-noise shared,independent,greedy",
    "R5": f"bench acceptance {BOTH} --temperature 0.7,1 --top-p 0.9,1 --presence-penalty 0,0.5",
    "R6": "demo",
    "R7": "demo --family llava-onevision",
    "R8": OVERHEAD,
    "R9": (
        f"bench acceptance {BOTH} --drafting chain,tree-static,tree-adaptive --temperature 0,1 --requests 64 --jobs 2",
        f"{ADAPTIVE} --num-speculative-tokens 25 --knob tree_depth_min=5 --knob tree_depth_max=5 "
        "--knob tree_fill=true --temperature 0,1 --requests 64 --jobs 2",
    ),
    "R9-sage": (
        f"{ADAPTIVE} --prune-ratio 0,0.3,0.6,0.8,0.9,0.95 --requests 16 --jobs 2",
        f"{ADAPTIVE} --knob tree_history=0 --requests 16 --jobs 2",
        f"{ADAPTIVE} --knob tree_lookahead=false --requests 16 --jobs 2",
    ),
    "R10": HOST_TIME,
    "R11": tuple(f"calibrate --costs --rounds 1 --max-tokens 64 --family {family}" for family in FAMILIES),
    "R12": (
        f"{QUALITY} --scorer loose,fly,fly-entropy,random --top-n 1,10,100 --relevance-rows token,prediction "
        "--fly-entropy 0.05,0.1,0.2",
        f"{QUALITY} --scorer oracle",
    ),
    "R12-relevance": tuple(
        f"show-relevance --family {family} --temperature 1 --out docs/relevance-{family}.png" for family in FAMILIES
    ),
    "R13": RELEVANCE_OVERHEAD,
}
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
AXES = {
    "R1": (),
    "R2": ("pruner", "prune_ratio"),
    "R3": ("pruner", "prune_ratio"),
    "R4": ("temperature", "draft_noise"),
    "R5": ("temperature", "top_p", "presence_penalty"),
}


def main() -> int:
    """Run, render, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(COMMANDS), help="comma-separated names")
    parser.add_argument("--force", action="store_true", help="run again what has a JSON file")
    options = parser.parse_args()
    for name in chosen(options.only):
        path = FOLDER / f"{name}.json"
        if path.exists() and not options.force:
            continue
        parts = []
        for command in commands_of(name):
            print(f"{name}: {command}", flush=True)
            part = run(command)
            if part is None:
                print(f"{name} failed", file=sys.stderr)
                return 1
            parts.append(part)
        result = merge(parts)
        path.write_text(json.dumps(result, indent=1) + "\n")
        if name in BY_SHAPE:
            plots.write_csv(str(path.with_suffix(".csv")), result)
        if name == "R12":
            quality_views.write_csv(str(path.with_suffix(".csv")), result)
            quality_views.draw(result["rows"], str(path.with_suffix(".png")))
        if name in FIGURES:
            plots.draw([plots.flatten(row) for row in result["rows"]], str(path.with_suffix(".png")))
    results = {name: read(p) for name in COMMANDS if (p := FOLDER / f"{name}.json").exists()}
    page = PAGE.read_text()
    for name, result in results.items():
        page = replace(page, name, body_of(name, result))
    PAGE.write_text(page)
    if set(results) >= set(AXES):
        front = ROOT / "README.md"
        front.write_text(replace(front.read_text(), "figure", figure(results)))
    return 0


def chosen(names: str) -> list[str]:
    """Return the results that comma-separated names stand for: R9 is R9-sage, too."""
    wanted = names.split(",")
    if unknown := [name for name in wanted if name not in COMMANDS]:
        raise SystemExit(f"no result is called {unknown[0]!r}; there are {', '.join(COMMANDS)}")
    return [name for name in COMMANDS if name in wanted or name.split("-")[0] in wanted]


def commands_of(name: str) -> tuple[str, ...]:
    """Return the command lines of a result."""
    found = COMMANDS[name]
    return (found,) if isinstance(found, str) else found


def run(command: str) -> dict[str, Any] | None:
    """Run one command and return its result, None if it failed."""
    program = [] if command.startswith("benchmarks/") else ["-m", "vllm_vidspec.cli"]
    with tempfile.TemporaryDirectory(prefix="vidspec-results-") as folder:
        path = Path(folder, "result.json")
        # A calibration's result is the file that it writes.
        words = [*shlex.split(command), "--out" if command.startswith("calibrate") else "--json", str(path)]
        if subprocess.run([sys.executable, *program, *words], cwd=ROOT).returncode != 0:
            return None
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
    if (
        "method" in lists["rows"][0]
    ):  # every command measures the target, the draft and strict for itself: once is enough
        by_setting = {quality_views.setting_key(row): row for row in reversed(lists["rows"])}
        lists["rows"] = [row for row in lists["rows"] if by_setting[quality_views.setting_key(row)] is row]
    lists["rows"].sort(key=lambda row: families.index(row["family"]))
    return {**lists, "provenance": origin}


def read(path: Path) -> dict[str, Any]:
    """Return a result; rows of a file from before `measured_as` had an engine each."""
    result = json.loads(path.read_text())
    for row in result.get("rows", []):
        if row.keys() >= set(UNPRUNED):
            row.setdefault("measured_as", {name: row[name] for name in UNPRUNED})
    return result


def replace(page: str, name: str, body: str) -> str:
    """Return the page with what stands between the two markers of a name replaced."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(page):
        raise SystemExit(f"no markers for {name}")
    return pattern.sub(lambda match: match.group(1) + body + match.group(2), page)


def body_of(name: str, result: dict[str, Any]) -> str:
    """Return what stands between the markers of a name."""
    if COMMANDS[name] == OVERHEAD:
        return overhead_table(result)
    if COMMANDS[name] == RELEVANCE_OVERHEAD:
        return relevance_overhead_table(result)
    if COMMANDS[name] == HOST_TIME:
        return host_time_table(result)
    if "calibrations" in result:
        return costs_tables(result)
    if name == "R12":
        return (
            quality_tables(result)
            + figure_link(f"{name}.png", "what is kept over acceptance length")
            + origin_of(result)
        )
    if name == "R12-relevance":
        links = [
            figure_link(f"../relevance-{row['family']}.png", f"visual relevance of each token, {row['family']}")
            for row in result["rows"]
        ]
        return "".join(links) + relevance_table(result) + origin_of(result)
    if name in BY_SHAPE:
        plot = figure_link(f"{name}.png", "acceptance length by shape of the draft")
        return shape_table(result, BY_SHAPE[name]) + plot + origin_of(result)
    if name not in AXES:
        return demo_table(result)
    if AXES[name] != ("pruner", "prune_ratio"):
        return acceptance_table(result, AXES[name])
    plot = figure_link(f"{name}.png", "acceptance length over prune ratio, by pruner")
    return pruner_tables(result) + plot + origin_of(result)


def figure_link(path: str, words: str) -> str:
    """Return a picture of the results page, nothing where its file is not there."""
    return f"![{words}]({path})\n\n" if (FOLDER / path).exists() else ""


def origin_of(result: dict[str, Any]) -> str:
    """Return `origin` as the last line between the markers."""
    return origin(result) + "\n"


def quality_tables(result: dict[str, Any]) -> str:
    """Return the Markdown of `bench quality`: per family every setting and its details, then LVSpec's table 3."""
    panels = quality_views.panels(result["rows"])
    text = ""
    for family in dict.fromkeys(panel[0] for panel in panels):
        ours = {panel: rows for panel, rows in panels.items() if panel[0] == family}
        text += "\n".join([*quality_overview(ours), "", *quality_details(ours), "", ""])
        for panel, rows in ours.items():
            text += f"{quality_views.panel_name(panel)}. {quality_views.longest_words(rows)}\n\n"
    return text + "\n".join([*quality_table_3(panels), "", ""])


def quality_overview(panels: dict[quality_views.Panel, list[dict[str, Any]]]) -> list[str]:
    """Return the lines of one family's table: settings down; length, its ratio to strict's and what is kept across."""
    head = [f"`{next(iter(panels))[0]}`"]
    for panel in panels:
        head += [f"{quality_views.panel_name(panel, family=False)}: length", "of strict's", "kept"]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    by_name = [{quality_views.setting_name(row): row for row in rows} for rows in panels.values()]
    for name in by_name[0]:
        cells = [f"`{name}`"]
        for found in by_name:
            row = found[name]
            cells += [number(row[key], 2) for key in ("acceptance_length", "ratio_to_strict")]
            cells.append(share(row["retention"]))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def quality_details(panels: dict[quality_views.Panel, list[dict[str, Any]]]) -> list[str]:
    """Return the lines of one family's table of everything else, in the first panel."""
    panel, rows = next(iter(panels.items()))
    head = [f"`{panel[0]}`, {quality_views.panel_name(panel, family=False)}", *(f"{name} right" for name in GROUPS)]
    head += ["loosened", "shifted", "same caption", "AUC", "tokens per caption", "delivered per step", "s"]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    for row in rows:
        cells = [f"`{quality_views.setting_name(row)}`", *(share(row["group"][name]) for name in GROUPS)]
        cells += [share(row[name]) for name in ("loosened_frac", "shifted_frac", "identical_frac")]
        cells += [number(row["relevance_auc"], 2), number(row["tokens_per_caption"], 1)]
        cells += [number(row["delivered_length"], 2), number(row["decode_s"], 1)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def quality_table_3(panels: dict[quality_views.Panel, list[dict[str, Any]]]) -> list[str]:
    """Return the lines of LVSpec's table 3 beside ours: greedy, without position shift, relevance of the own token."""
    greedy = {panel[0]: rows for panel, rows in panels.items() if panel[1] == 0}
    ours = {family: {quality_views.setting_name(row): row for row in rows} for family, rows in greedy.items()}
    head = ["LVSpec's table 3", "length of strict's: paper", *(f"`{name}`" for name in ours)]
    head += ["kept: paper", *(f"`{name}`" for name in ours)]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    for name, (length, kept) in LVSPEC_TABLE_3.items():
        rows = [found.get(name) for found in ours.values()]
        if not any(rows):
            continue
        # The paper's lengths are without the target's own token.
        ratio = None if length is None else (1 + length) / (1 + LVSPEC_TABLE_3["strict"][0])
        cells = [f"`{name}`", number(ratio, 2), *(number(row and row["ratio_to_strict"], 2) for row in rows)]
        cells += [share(kept), *(share(row and row["retention"]) for row in rows)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def share(value: float | None) -> str:
    """Return a share as a percentage, which may be more than 100."""
    return "-" if value is None else f"{100 * value:.1f} %"


def relevance_table(result: dict[str, Any]) -> str:
    """Return a Markdown table of what `show-relevance` showed."""
    head = ["family", "tokens", "acceptance length", "loosened", "shifted", "AUC"]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    for row in result["rows"]:
        cells = [f"`{row['family']}`", str(len(row["words"])), number(row["acceptance_length"], 2)]
        cells += [share(row[name]) for name in ("loosened_frac", "shifted_frac")]
        lines.append(f"| {' | '.join([*cells, number(row['relevance_auc'], 2)])} |")
    return "\n".join([*lines, "", ""])


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
        text += f"| {' | '.join(head)} |\n|{' --- |' + ' ---: |' * (len(head) - 1)}\n"
        for pruner in pruners:
            cells = [f"`{pruner}`", *(length_cell(by_cell.get((pruner, ratio))) for ratio in ratios)]
            text += f"| {' | '.join([*cells, share_cell(by_cell.get((pruner, 0.9)), unpruned)])} |\n"
        text += f"\n{note(ours)}\n\n"
    return text


def length_cell(row: dict[str, Any] | None) -> str:
    """Return an acceptance length, in italics where the row shares another row's engine."""
    length = number(row["acceptance_length"] if row else None, 2)
    return length if row is None or measured_itself(row) else f"*{length}*"


def share_cell(row: dict[str, Any] | None, unpruned: dict[str, Any] | None) -> str:
    """Return the acceptance length as a percentage of the unpruned one; it may exceed 100 %."""
    lengths = [row["acceptance_length"] if row else None for row in (row, unpruned)]
    return f"{100 * lengths[0] / lengths[1]:.1f} %" if all(lengths) else "-"


def measurements(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per measurement: of the rows that share an engine and a sampling, the first."""
    axes = [name for name in SWEEP_AXES if name not in UNPRUNED]
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        found.setdefault((*(row[name] for name in axes), *row["measured_as"].values()), row)
    return list(found.values())


def note(rows: list[dict[str, Any]]) -> str:
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
    names = ("family", *axes)
    head = [*(name.replace("_", " ") for name in names), "acceptance length", "acceptance rate", "identical"]
    head += ["draft KV of full", "drafts", *["s", "vanilla s"] * timed]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(names) + " ---: |" * (len(head) - len(names))]
    for row in result["rows"]:
        cells = [f"`{row[name]}`" if isinstance(row[name], str) else f"{row[name]:g}" for name in names]
        cells += [number(row["acceptance_length"], 2), percent(row["acceptance_rate"]), percent(row["identical_frac"])]
        cells += [percent(row["draft_kv_bytes"] / row["full_draft_kv_bytes"]), str(row["num_drafts"])]
        cells += [number(row[name], 1) for name in ("decode_s", "vanilla_decode_s") if timed]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", origin(result), ""])


def shape_table(result: dict[str, Any], axes: tuple[str, ...]) -> str:
    """Return the Markdown table of draft shapes, with what they cost per verify step, and a note per family."""
    names = ("family", "draft's shape", *axes)
    head = [*(name.replace("_", " ") for name in names), "acceptance length", "at most", "nodes", "depth"]
    head += ["draft forwards", "identical"]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(names) + " ---: |" * (len(head) - len(names))]
    for row in result["rows"]:
        cells = [f"`{row['family']}`", plots.shape_of(plots.flatten(row)), *(f"{row[name]:g}" for name in axes)]
        cells += [number(row[name], 2) for name in ("acceptance_length", "max_acceptance_length")]
        cells += [number(row[f"{name}_per_step"], 1) for name in ("nodes", "depth", "draft_forwards")]
        lines.append(f"| {' | '.join([*cells, percent(row['identical_frac'])])} |")
    notes = [
        f"`{family}`, {', '.join(sorted({row['scheduling'] for row in ours}))} scheduling. {shape_note(ours)}"
        for family in dict.fromkeys(row["family"] for row in result["rows"])
        if (ours := [row for row in result["rows"] if row["family"] == family])
    ]
    return "\n\n".join(["\n".join(lines), *notes]) + "\n\n"


def shape_note(rows: list[dict[str, Any]]) -> str:
    """Return what `note` does for rows of several knobs, each of which is a measurement."""
    return note([row | {"drafting": plots.shape_of(plots.flatten(row))} for row in rows])


def host_time_table(result: dict[str, Any]) -> str:
    """Return the Markdown table of our own host time per step, and of its parts in the largest batch."""
    rows = result["rows"]
    head = ["draft's shape", "scheduling", "requests", "own time (ms)", "20 % to 80 %", "budget (ms)"]
    head += ["kernels of it (ms)", "steps"]
    lines = [f"| {' | '.join(head)} |", "| --- | --- |" + " ---: |" * (len(head) - 2)]
    for row in rows:
        cells = [row["drafting"], row["scheduling"], f"{row['batch_size']}", f"{row['own_ms']:.2f}"]
        cells += [f"{row['p20_ms']:.2f} to {row['p80_ms']:.2f}", f"{row['budget_ms']:.2f}", f"{row['kernels_ms']:.2f}"]
        lines.append(f"| {' | '.join([*cells, str(row['steps'])])} |")
    largest = max(row["batch_size"] for row in rows)
    shown = [row for row in rows if row["batch_size"] == largest]
    lines += ["", f"| part, {largest} requests (ms) | {' | '.join(row['drafting'] for row in shown)} |"]
    lines.append("| --- |" + " ---: |" * len(shown))
    parts = dict.fromkeys(part for row in shown for part in row["parts"])
    for part in sorted(parts, key=lambda part: -max(row["parts"].get(part, 0.0) for row in shown)):
        lines.append(f"| {part} | {' | '.join(number(row['parts'].get(part), 3) for row in shown)} |")
    return "\n".join([*lines, "", origin(result), ""])


def costs_tables(result: dict[str, Any]) -> str:
    """Return a Markdown table per family: tokens per second by batch size and shape, and what follows for `auto`."""
    text = ""
    for family, found in result["calibrations"].items():
        rows = found["costs"]
        shapes = list(dict.fromkeys(row["shape"] for row in rows))
        text += f"| `{family}`, requests | {' | '.join(shapes)} |\n| ---: |{' ---: |' * len(shapes)}\n"
        for size in dict.fromkeys(row["batch_size"] for row in rows):
            cells = [
                f"{row['tokens_per_s']:.0f} ({row['acceptance_length']:.2f}; {row['step_ms']:.1f} ms)"
                for row in rows
                if row["batch_size"] == size
            ]
            text += f"| {size} | {' | '.join(cells)} |\n"
        text += f"\n`draft_table`: `{json.dumps(found['config']['draft_table'])}`\n\n"
    return text + origin(result) + "\n"


def overhead_table(result: dict[str, Any]) -> str:
    """Return the Markdown table of the guidance's share of prefills."""
    head = ["pruner", "video tokens", "prefill (ms)", "with guidance (ms)", "share", "min to max", "own clock (ms)"]
    head += ["share by own clock"]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    for row in result["rows"]:
        cells = [f"`{row['pruner']}`", f"{row['video_tokens']:,}"]
        cells += [f"{row[name]:.1f}" for name in ("prefill_ms", "guided_prefill_ms")]
        cells += [f"{100 * row['share']:.1f} %", f"{100 * row['share_min']:.1f} to {100 * row['share_max']:.1f} %"]
        cells += [f"{row['inside_ms']:.2f}", f"{100 * row['inside_share']:.1f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", origin(result), ""])


def relevance_overhead_table(result: dict[str, Any]) -> str:
    """Return the Markdown table of relevance's share of decode steps."""
    head = ["video tokens", "step (ms)", "with relevance (ms)", "share", "min to max", "inside (ms)", "share of it"]
    head += ["kept states (bytes)"]
    lines = [f"| {' | '.join(head)} |", "|" + " ---: |" * len(head)]
    for row in result["rows"]:
        cells = [f"{row['video_tokens']:,}", *(f"{row[name]:.1f}" for name in ("step_ms", "loose_step_ms"))]
        cells += [f"{100 * row['share']:.1f} %", f"{100 * row['share_min']:.1f} to {100 * row['share_max']:.1f} %"]
        cells += [f"{row['inside_ms']:.2f}", f"{100 * row['inside_share']:.1f} %", f"{row['store_bytes']:,}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", origin(result), ""])


def demo_table(result: dict[str, Any]) -> str:
    """Return the Markdown table of one demo."""
    vanilla, ours = result["vanilla"], result["vidspec"]
    rows = [
        ("acceptance length", "1", number(result["acceptance_length"], 2)),
        ("acceptance rate", "", percent(result["acceptance_rate"])),
        ("identical answers", "", "yes" if result["identical"] else "NO"),
        (
            "draft KV, kept / full video (bytes)",
            "",
            f"{result['draft_kv_bytes']:,} / {result['full_draft_kv_bytes']:,}",
        ),
        ("output tokens", str(vanilla["output_tokens"]), str(ours["output_tokens"])),
    ]
    for key, label in (("ttft_s", "time to first token"), ("decode_s", "decode"), ("server_start_s", "server start")):
        rows.append((f"{label} (s)", number(vanilla[key], 2), number(ours[key], 2)))
    lines = [f"| {result['family']} | vanilla vLLM | vLLM + vidspec |", "| --- | ---: | ---: |"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", f"> {ours['text'].strip()}", "", origin(result), ""])


def origin(result: dict[str, Any]) -> str:
    """Return one line that says where a result comes from."""
    found = result["provenance"]
    commit = (found["git_sha"] or "no commit")[:10] + (" with local changes" if found["git_dirty"] else "")
    where = found["device"] if found["device"] != "cpu" else f"{found['cpu']}, {found['num_cpus']} cores"
    return f"{found['date'][:10]}, commit {commit}, vLLM {found['versions'].get('vllm')}, {where}."


def loose_lines(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return README.md's lines about lossy verification, at temperature 1."""
    by_family = [[row for row in rows if row["family"] == family and row["temperature"] == 1] for family in FAMILIES]
    strict = [next(row for row in ours if row["method"] == "strict") for ours in by_family]

    def longest(method: str) -> list[str]:
        found = [quality_views.longest_kept(ours).get(method) for ours in by_family]
        return ["-" if row is None else f"{row['acceptance_length']:.2f}" for row in found]

    lengths = [number(row["acceptance_length"], 2) for row in strict]
    return [
        ("tokens per verify step, a chain of 10, temperature 1, noise of the draft's own, `strict`", *lengths, "R12"),
        (
            "the same, mismatches let stand by `loose` as long as 98 % of the captions' facts stay right",
            *longest("loose"),
            "R12",
        ),
        ("the same, by FLy (`fly`)", *longest("fly"), "R12"),
        ("the same, an oracle that knows which words matter", *longest("oracle"), "R12"),
    ]


def figure(results: dict[str, dict[str, Any]]) -> str:
    """Return the table of README.md."""

    def row_of(name: str, family: str, **where: Any) -> dict[str, Any]:
        rows = [row for row in results[name]["rows"] if row["family"] == family]
        return next(row for row in rows if all(row[key] == value for key, value in where.items()))

    def lengths(name: str, **where: Any) -> list[str]:
        return [number(row_of(name, family, **where)["acceptance_length"], 2) for family in FAMILIES]

    def visual_share(family: str) -> str:
        row = row_of("R3", family, pruner="specvlm", prune_ratio=0.9)
        return percent(row["visual_tokens_kept"] / row["visual_tokens_full"])

    def identical(family: str) -> str:
        rows = [row for name in AXES for row in measurements(results[name]["rows"]) if row["family"] == family]
        return f"{round(sum(r['identical_frac'] * r['requests'] for r in rows))} of {sum(r['requests'] for r in rows)}"

    def rate(family: str, noise: str) -> str:
        return percent(row_of("R4", family, temperature=1.0, draft_noise=noise)["acceptance_rate"])

    def share_kept(family: str) -> str:
        whole, tenth = (
            row_of("R3", family, pruner="specvlm", prune_ratio=ratio)["acceptance_length"] for ratio in (0.0, 0.9)
        )
        return percent(tenth / whole)

    def at_a_tenth(pruner: str) -> list[str]:
        return lengths("R3", pruner=pruner, prune_ratio=0.9)

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
        ("acceptance rate at temperature 1, noise shared", *(rate(f, "shared") for f in FAMILIES), "R4"),
        ("the same, noise of the draft's own", *(rate(f, "independent") for f in FAMILIES), "R4"),
    ]
    if "R9" in results:
        equal = {"tree_depth_min": 5, "tree_depth_max": 5, "tree_fill": True}
        trees: tuple[tuple[str, str, dict[str, Any]], ...] = (
            ("draft at 10 %, a chain of 5 (the maximum is 6)", "chain", {}),
            ("the same, SpecVLM's static tree of 25 nodes", "tree-static", {}),
            ("the same, SAGE's adaptive tree, depth 5 and 25 nodes too", "tree-adaptive", equal),
            ("the same, SAGE's adaptive tree by default (depth 3 to 8, 9 nodes)", "tree-adaptive", {}),
        )
        for text, shape, knobs in trees:
            where = {"drafting": shape, "knobs": knobs, "temperature": 0.0}
            lines.append(
                (f"tokens per verify step, {text}" if shape == "chain" else text, *lengths("R9", **where), "R9")
            )
    if "R12" in results:
        lines += loose_lines(results["R12"]["rows"])
    head = "| bundled models, 5 draft tokens per step | Qwen2.5-VL pair | LLaVA-OneVision pair | row |\n"
    rows = "".join(f"| {a} | {b} | {c} | [{d}](docs/results/README.md#{d.lower()}) |\n" for a, b, c, d in lines)
    return head + "| --- | ---: | ---: | --- |\n" + rows


if __name__ == "__main__":
    sys.exit(main())
