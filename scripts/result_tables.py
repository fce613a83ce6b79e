"""The tables of the results page and of README.md, as Markdown; what the JSON files hold, and nothing else."""

import json
import string
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_vidspec.shapeworld.captions import GROUPS
from vllm_vidspec.tools import plots, race_views
from vllm_vidspec.tools import quality_views as views
from vllm_vidspec.tools.bench.acceptance import AXES as SWEEP_AXES
from vllm_vidspec.tools.bench.acceptance import UNPRUNED, canonical, measured_itself
from vllm_vidspec.tools.tables import number, percent

Row = dict[str, Any]

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "results"
FAMILIES = {"qwen2.5-vl": "Qwen2.5-VL pair", "llava-onevision": "LLaVA-OneVision pair"}  # of the summary
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
# Results by shape of the draft: they also have a CSV file.
_SHAPES = ("num_speculative_tokens", "prune_ratio", "temperature", "seed")
BY_SHAPE = {
    "R9": ("temperature",),
    "R9-sage": ("prune_ratio",),
    "R16": _SHAPES,
    "R16-qwen3-vl": _SHAPES,
    "R17-shapes": _SHAPES,
}
# Results of `bench quality`: they have a CSV file and a figure.
QUALITY = ("R12", "R16-loose")
LENGTH, RATE = "{acceptance_length:.2f}", "{acceptance_rate:p}"
# The summary's lines: words, the row that they are about, and what is shown of it where that is no acceptance length.
LINES: tuple[tuple[str, ...], ...] = (
    ("tokens per verify step, draft sees the whole video", "R3 pruner=none prune_ratio=0.0"),
    (
        "the same, draft sees 10 % of it, chosen by the target's attention (`specvlm`)",
        "R3 pruner=specvlm prune_ratio=0.9",
    ),
    ("the same, chosen by the target's hidden states (`uv`)", "R3 pruner=uv prune_ratio=0.9"),
    ("the same, chosen at random", "R3 pruner=random prune_ratio=0.9"),
    ("the same, draft sees no video at all", "R3 pruner=specvlm prune_ratio=1.0"),
    ("what is left of the whole video's figure at 10 % (`specvlm`)", "R3", "{of_whole:p}"),
    ("tokens per verify step, target drafts for itself, whole video (the maximum is 6)", "R1"),
    ("requests whose tokens all equal vanilla vLLM's, R1 to R5", "R1", "{identical}"),
    ("draft KV of the video, of what it would take unpruned", "R3", "{visual_frac:p}"),
    ("acceptance rate at temperature 1, noise shared", "R4 temperature=1.0 draft_noise=shared", RATE),
    ("the same, noise of the draft's own", "R4 temperature=1.0 draft_noise=independent", RATE),
    ("tokens per verify step, draft at 10 %, a chain of 5 (the maximum is 6)", "R9 drafting=chain temperature=0.0"),
    ("the same, SpecVLM's static tree of 25 nodes", "R9 drafting=tree-static temperature=0.0"),
    ("the same, SAGE's adaptive tree, depth 5 and 25 nodes too", "R9 num_speculative_tokens=25 drafting=tree-adaptive"),
    ("the same, SAGE's adaptive tree by default (depth 3 to 8, 9 nodes)", "R9 num_speculative_tokens=64"),
    (
        "tokens per verify step, a chain of 10, temperature 1, noise of the draft's own, `strict`",
        "R12 temperature=1.0 method=strict",
    ),
    (
        "the same, mismatches accepted by `loose` with at least 98 % of the captions' facts kept",
        "R12 temperature=1.0 method=loose",
    ),
    ("the same, by FLy (`fly`)", "R12 temperature=1.0 method=fly"),
    ("the same, an oracle that knows which words matter", "R12 temperature=1.0 method=oracle"),
)
# Those of them that README.md opens with.
CLAIM = (0, 1, 4, 7, 8)
AXES = {
    "R1": (),
    "R2": ("pruner", "prune_ratio"),
    "R3": ("pruner", "prune_ratio"),
    "R4": ("temperature", "draft_noise"),
    "R5": ("temperature", "top_p", "presence_penalty"),
}


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
    elif name in QUALITY:
        body = quality_tables(result) + figure_link(f"{name}.png", "what is kept over acceptance length")
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
    """Formats a row's figures: None as a dash, `%` as a share that may be more than 100 (`n%`: its number alone),
    `p` as one that may not.
    """

    def format_field(self, value: Any, spec: str) -> str:
        if value is None:
            return "-"
        if spec == "n%":
            return share(value).removesuffix(" %")
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
        "{share_min:n%} to {share_max:%} | {inside_ms:.2f} | {inside_share:%}",
        result["rows"],
    )


def relevance_overhead_table(result: dict[str, Any]) -> str:
    """Return the Markdown table of relevance's share of decode steps."""
    return table(
        "video tokens | step (ms) | with relevance (ms) | share | min to max | inside (ms) | share of it | "
        "kept states (bytes)",
        "{video_tokens:,} | {step_ms:.1f} | {loose_step_ms:.1f} | {share:%} | {share_min:n%} to {share_max:%} | "
        "{inside_ms:.2f} | {inside_share:%} | {store_bytes:,}",
        result["rows"],
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
    return text + quality_table_3(panels)


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
    rows = [row | {"drafting": plots.shape_of(row)} for row in result["rows"]]
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
    """Return a Markdown table per family: tokens per second by batch size and plan, and what follows for `auto`."""
    text = ""
    for family, found in result["calibrations"].items():
        # By shape, in the order measured; chains by their length, some of which stand between two that were measured.
        shapes = list(dict.fromkeys(row["shape"] for row in found["costs"]))
        rows = sorted(found["costs"], key=lambda row: (shapes.index(row["shape"]), row["num_speculative_tokens"]))
        lines: dict[int, list[str]] = {}
        for row in rows:
            cell = f"{row['tokens_per_s']:.0f} ({row['acceptance_length']:.2f}; {row['step_ms']:.1f} ms)"
            lines.setdefault(row["batch_size"], [str(row["batch_size"])]).append(cell)
        plans = ((row["shape"], row["num_speculative_tokens"]) for row in rows)
        head = [f"{shape} {count}" if shape == "chain" else shape for shape, count in dict.fromkeys(plans)]
        text += markdown_table([f"`{family}`, requests", *head], lines.values(), num_words=0)
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


def asked_ratio(ratio: float, label: str) -> str:
    """Return how a pair was inflated; `label` as in `Course.label`."""
    asked = f"T_t / T_d asked for: {ratio:g}" if ratio else "the pair as it is"
    return asked + (f" ({label})" if label else "")


def race_tables(result: dict[str, Any]) -> str:
    """Return a Markdown table per family and ratio of `bench parallel`, and a list of what did not run."""
    text = ""
    for (family, ratio), rows in race_views.groups(result["rows"]).items():
        first = rows[0]
        text += f"`{family}`, {asked_ratio(ratio, first['label'])}"
        text += f"; {first['rounds']} rounds of {first['requests']} requests, one at a time."
        text += f" Published: {first['published_pair']}.\n\n" if "published_pair" in first else "\n\n"
        columns = race_views.columns(rows)
        heads = [" ".join(head.split()) for head in columns]
        text += markdown_table(heads, [[show(row) for show in columns.values()] for row in rows]) + "\n"
    failed = [f"{one['method']} ({one['family']}, {one['inflate']:g}): {one['reason']}" for one in result["failures"]]
    text += f"Did not run: {'; '.join(failed)}.\n\n" if failed else ""
    return text + figure_link("R14-parallel.png", "decode speed over vanilla's, by ratio and method")


def pair_table(result: dict[str, Any]) -> str:
    """Return the Markdown table of one pair in every respect."""
    return acceptance_table(result, ("draft", "drafting", "pruner", "prune_ratio", "temperature"))


def frames_table(result: dict[str, Any]) -> str:
    """Return the Markdown table of frames sent as a video and as images."""
    rows = [row | {"draft_kv_kib": row["draft_kv_bytes"] / 1024} for row in result["rows"]]
    return table(
        "family | frames as | the target's visual tokens | the draft's | draft KV, KiB a prompt | acceptance length | "
        "identical",
        "`{family}` | {way} | {target_visual_tokens:.0f} | {draft_visual_tokens:.0f} | {draft_kv_kib:.0f} | "
        "{acceptance_length:.2f} | {identical_frac:p}",
        rows,
        num_words=2,
    )


def parts_table(result: dict[str, Any]) -> str:
    """Return the Markdown table of what parts of a step take beside an inflated target."""
    rows = result["rows"]
    parts = list(rows[0]["verify_parts"])
    lines = []
    for row in rows:
        for kind in ("prompt", "verify"):
            whole, found = row[f"{kind}_ms"], row[f"{kind}_parts"]
            cells = [f"{ms:.2f} ({percent(ms / whole)})" if ms else "-" for ms in (found[part] for part in parts)]
            lines.append([row["setting"], kind, f"{whole:.1f}", *cells])
    first = rows[0]
    text = f"{asked_ratio(first['inflate'], first['label'])}; {first['requests']} requests, one at a time.\n\n"
    return text + markdown_table(["setting", "step", "ms", *(f"{part}, ms" for part in parts)], lines, num_words=2)


# What has a table of its own.
BODIES: dict[str, Callable[[dict[str, Any]], str]] = {
    "R6": demo_table,
    "R7": demo_table,
    "R8": overhead_table,
    "R10": host_time_table,
    "R11": costs_tables,
    "R12-relevance": relevance_table,
    "R13": relevance_overhead_table,
    "R14-parallel": race_tables,
    "R15": pair_table,
    "R15-frames": frames_table,
    "R17": pruner_tables,
    "R18": parts_table,
}


def origin(result: dict[str, Any]) -> str:
    """Return one line that says where a result comes from."""
    found = result["provenance"]
    commit = (found["git_sha"] or "no commit")[:10] + (" with local changes" if found["git_dirty"] else "")
    where = found["device"] if found["device"] != "cpu" else f"{found['cpu']}, {found['num_cpus']} cores"
    return f"{found['date'][:10]}, commit {commit}, vLLM {found['versions'].get('vllm')}, {where}."


def figure(results: dict[str, dict[str, Any]], chosen: Iterable[int] = range(len(LINES)), page: str = "") -> str:
    """Return the summary: a row for each of the chosen LINES, a column for each family, links to the rows on a page."""
    lines = []
    for words, source, *shown in (LINES[i] for i in chosen):
        name, *where = source.split()
        if name in results:
            template = shown[0] if shown else LENGTH
            rows = [row_of(results, name, family, [pair.split("=") for pair in where]) for family in FAMILIES]
            cells = ["-" if row is None else _Formatter().vformat(template, (), row) for row in rows]
            lines.append([words, *cells, f"[{name}]({page}#{name.lower()})"])
    head = ["bundled models, 5 draft tokens per step", *FAMILIES.values(), "row"]
    return markdown_table(head, lines, end="").replace("---: |\n", "--- |\n", 1)  # names of results are words


def row_of(results: dict[str, dict[str, Any]], name: str, family: str, where: list[list[str]]) -> Row | None:
    """Return a family's first row with these values; of a lossy scorer the longest that keeps enough, None for none.

    With it goes what is said about several rows: `identical`, and how much `of_whole` and `visual_frac` are.
    """
    ours = {
        name: [row for row in results[name]["rows"] if row["family"] == family]
        for name in {*AXES, "R9", "R12"} & results.keys()
    }
    rows = [row for row in ours[name] if all(str(row[key]) == value for key, value in where)]
    method = dict(where).get("method")
    found = views.longest_kept(rows)[method] if method in views.LOSSY else rows[0]
    if found is None:
        return None
    at = {row["prune_ratio"]: row for row in ours["R3"] if row["pruner"] == "specvlm"}
    compared = [row for name in AXES for row in measurements(ours[name])]
    same = round(sum(row["identical_frac"] * row["requests"] for row in compared))
    return found | {
        "identical": f"{same} of {sum(row['requests'] for row in compared)}",
        "of_whole": at[0.9]["acceptance_length"] / at[0.0]["acceptance_length"],
        "visual_frac": at[0.9]["visual_tokens_kept"] / at[0.9]["visual_tokens_full"],
    }
