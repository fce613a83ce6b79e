"""Sections of docs/results/README.md, docs/paper-tables.md and README.md: what the results say, and nothing else."""

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any

from vidspec_tools.pages.tables import RESULTS, Result, figure, fill, markdown, origin, read, recorded, shown, table
from vidspec_tools.views import acceptance as acceptance_view
from vidspec_tools.views import quality as quality_view
from vidspec_tools.views import versus
from vllm_vidspec.tools.pairs import calibration
from vllm_vidspec.tools.tables import demo_rows, number, percent

Row = dict[str, Any]
Section = Callable[[Result], list[str]]  # a result -> paragraphs and tables


# ---- bench acceptance ------------------------------------------------------------------------------------------------


def acceptance(result: Result) -> list[str]:
    rows = [row | {"drafting": acceptance_view.shape_of(row)} for row in result["rows"]]
    text = shown(acceptance_view.columns(rows), rows, words=len(acceptance_view.varying(rows)))
    notes = [f"`{family}`: {note(ours)}" for (family,), ours in versus.by(rows, "family").items()]
    return [text, *notes]


def pruners(result: Result) -> list[str]:
    """Return a table per family: acceptance length, pruners down, ratios across; each with a note."""
    found = []
    names, ratios = (list(dict.fromkeys(row[axis] for row in result["rows"])) for axis in ("pruner", "prune_ratio"))
    for (family,), ours in versus.by(result["rows"], "family").items():
        by_cell = {(row["pruner"], row["prune_ratio"]): row for row in ours}
        whole = next((row for row in ours if row["pruner"] == "none" or row["prune_ratio"] == 0), None)
        lines = []
        for pruner in names:
            cells = [f"`{pruner}`", *(_length(by_cell.get((pruner, ratio))) for ratio in ratios)]
            pruned = by_cell.get((pruner, 0.9))
            left = pruned["acceptance_length"] / whole["acceptance_length"] if pruned and whole else None
            lines.append([*cells, fill("{left:%}", {"left": left})])
        head = [f"`{family}`", *(f"{ratio:g}" for ratio in ratios), "share of unpruned at 0.9"]
        found += [markdown(head, lines), note(ours)]
    return found


def measured_itself(row: Row) -> bool:
    """Return whether a row's own configuration was run; in older results one that shows the draft the same may be."""
    return all(row[name] == value for name, value in row.get("measured_as", {}).items())


def _length(row: Row | None) -> str:
    """Return an acceptance length, in italics where the row shares another row's engine."""
    length = number(row["acceptance_length"] if row else None, 2)
    return length if row is None or measured_itself(row) else f"*{length}*"


def _identical(rows: Iterable[Row]) -> tuple[int, int]:
    """Return of how many requests the tokens are vanilla's, and how many were compared; an engine counts once."""
    own = [row for row in rows if measured_itself(row) and row["identical_frac"] is not None]
    return round(sum(row["identical_frac"] * row["requests"] for row in own)), sum(row["requests"] for row in own)


def note(rows: list[Row]) -> str:
    """Return one line about one family's rows: requests compared, requests identical, what went wrong."""
    own = [row for row in rows if measured_itself(row)]
    engines = sum(row["identical_frac"] is not None for row in own)
    same, requests = _identical(own)
    line = f"Compared with vanilla: {requests:,} requests of {engines} engines, {same:,} identical."
    shared = [row["measured_as"] for row in rows if not measured_itself(row)]
    if shared:
        names = dict.fromkeys(f"`{engine['pruner']}` at {engine['prune_ratio']:g}" for engine in shared)
        line += f" In italics: not run itself, the draft sees the same tokens as with {' or '.join(names)}."
    for what in ("skipped", "unguided"):
        for reason in own[0].get(what, {}):
            if count := sum(row[what][reason] for row in own):
                line += f" {what.capitalize()} ({reason}): {count:,}."
    return line


# ---- bench quality ---------------------------------------------------------------------------------------------------


def quality(result: Result) -> list[str]:
    panels, found = quality_view.panels(result["rows"]), []
    for panel, rows in panels.items():
        found += [f"{quality_view.panel_name(panel)}, in %:", shown(quality_view.COLUMNS, rows)]
        found.append(quality_view.longest_words(rows))
    return found


# ---- benchmarks interleaved with vanilla -----------------------------------------------------------------------------


def paper(result: Result) -> list[str]:
    """Return a table for each family and ratio of `bench paper`, and the sources of what is published."""
    found = []
    for (family, ratio), rows in versus.by(result["rows"], "family", "inflate").items():
        reached = [f"{row['ratio']:.1f} ({row['method']})" for row in rows if row["ratio"]][:1]
        asked = f"T_t / T_d asked for: {ratio:g}, measured: {reached[0]}; " if ratio and reached else ""
        sources: dict[str, list[str]] = {}
        for row in rows:
            if row["published_source"]:
                sources.setdefault(row["published_source"], []).append(row["method"])
        words = "; ".join(f"{', '.join(names)}: {source}" for source, names in sources.items())
        found += [f"`{family}`, {asked}{versus.paper_caption(rows[0])}.", shown(versus.PAPER, rows)]
        found.append(f"Published: {words}.")
    failed = [f"{one['method']} ({one['family']}): {one['reason']}" for one in result["failures"]]
    return [*found, *([f"Did not run: {'; '.join(failed)}."] if failed else [])]


def speed(result: Result) -> list[str]:
    found = []
    for (family, _), rows in versus.by(result["rows"], "family", "inflate").items():
        found.append(f"`{family}`, {versus.setting(rows)}; {rows[0]['label'] or versus.AS_IT_IS}.")
        found += [shown(versus.SPEED, rows), shown(versus.PHASE_TIMES, rows)]
    return found


def wall_clock() -> str:
    """Return what README.md says of decode speed: two lossless methods, and a loose one."""
    rows = {row["method"]: row for row in read("paper-qwen2.5-vl-inflated-race")["rows"]}
    named = {
        "SD-chain": "5-token chain, sequential",
        "ParallelVLM": "in parallel (`parallel`)",
        "LVSpec": "10-token chain, `loose`",
    }
    return table(
        f"target {rows['SD-chain']['inflate']:g} times the draft | decode speed over vanilla | identical outputs",
        "{words} | {speedup:.2f}x ({speedup_p20:.2f} to {speedup_p80:.2f}) | {identical_frac:%}",
        [rows[method] | {"words": words} for method, words in named.items()],
    )


# ---- others ----------------------------------------------------------------------------------------------------------


def demo(result: Result) -> list[str]:
    text = markdown([result["family"], "vanilla vLLM", "vLLM + vidspec"], demo_rows(result))
    return [text, f"> {result['vidspec']['text'].strip()}"]


def parts(result: Result) -> list[str]:
    names, lines = list(result["rows"][0]["verify_parts"]), []
    for row in result["rows"]:
        for kind in ("prompt", "verify"):
            whole, found = row[f"{kind}_ms"], row[f"{kind}_parts"]
            cells = [f"{ms:.2f} ({percent(ms / whole)})" if ms else "-" for ms in (found[name] for name in names)]
            lines.append([row["setting"], kind, f"{whole:.1f}", *cells])
    first = result["rows"][0]
    asked = f"T_t / T_d asked for: {first['inflate']:g} ({first['label']})" if first["inflate"] else versus.AS_IT_IS
    words = f"{asked}; {first['requests']} requests, one at a time."
    return [words, markdown(["setting", "step", "ms", *(f"{name}, ms" for name in names)], lines, words=2)]


# ---- the summary -----------------------------------------------------------------------------------------------------

FAMILIES = {"qwen2.5-vl": "Qwen2.5-VL pair", "llava-onevision": "LLaVA-OneVision pair"}
SUMMED = ("R1", "R2", "R3", "R4", "R5")  # whose requests are counted together
RATE = "{acceptance_rate:p}"
# The summary's lines: words, the row that they are about, and what is shown of it where that is no acceptance length.
LINES: tuple[tuple[str, ...], ...] = (
    ("tokens per verify step, draft sees the whole video", "R3 pruner=none prune_ratio=0.0"),
    ("the same, draft sees 10 %, chosen by the target's attention (`specvlm`)", "R3 pruner=specvlm prune_ratio=0.9"),
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
    (
        "the same, SAGE's adaptive tree as it grows (depth 3 to 8; 9 nodes; asynchronous servers fill it to 64)",
        "R9 num_speculative_tokens=64",
    ),
    ("the same, chain of 10, temperature 1, the draft's own noise, `strict`", "R12 temperature=1.0 method=strict"),
    ("the same, `loose` as far as 98 % of the captions' facts stay right", "R12 temperature=1.0 method=loose"),
    ("the same, by FLy (`fly`)", "R12 temperature=1.0 method=fly"),
    ("the same, an oracle that knows which words matter", "R12 temperature=1.0 method=oracle"),
)


def summary() -> str:
    """Return a row for each of LINES, a column for each family, links to the rows on the page."""
    lines = []
    for words, source, *templates in LINES:
        name, *where = source.split()
        rows = [_summary_row(name, family, [pair.split("=") for pair in where]) for family in FAMILIES]
        template = templates[0] if templates else "{acceptance_length:.2f}"
        cells = ["-" if row is None else fill(template, row) for row in rows]
        lines.append([words, *cells, f"[{name}](#{name.lower()})"])
    head = ["bundled models, 5 draft tokens per step", *FAMILIES.values(), "row"]
    return markdown(head, lines, words=(0, len(head) - 1))


def _summary_row(name: str, family: str, where: list[list[str]]) -> Row | None:
    """Return a family's first row with these values; of a lossy scorer the longest that keeps enough, None for none.

    With it goes what is said about several rows: `identical`, and how much `of_whole` and `visual_frac` are.
    """
    rows = [row for row in _ours(name, family) if all(str(row[key]) == value for key, value in where)]
    method = dict(where).get("method")
    found = quality_view.longest_kept(rows)[method] if method in quality_view.LOSSY else rows[0]
    if found is None:
        return None
    at = {row["prune_ratio"]: row for row in _ours("R3", family) if row["pruner"] == "specvlm"}
    same, requests = _identical(row for one in SUMMED for row in _ours(one, family))
    return found | {
        "identical": f"{same} of {requests}",
        "of_whole": at[0.9]["acceptance_length"] / at[0.0]["acceptance_length"],
        "visual_frac": at[0.9]["visual_tokens_kept"] / at[0.9]["visual_tokens_full"],
    }


@functools.cache
def _ours(name: str, family: str) -> list[Row]:
    return [row for row in read(name)["rows"] if row["family"] == family]


# ---- sections by name ------------------------------------------------------------------------------------------------

OF_RESULTS: dict[str, Section] = {
    **dict.fromkeys(("R1", "R4", "R5", "R9", "R9-sage", "R15", "R16", "R16-qwen3-vl", "R17-shapes"), acceptance),
    **dict.fromkeys(("R2", "R3", "R17"), pruners),
    **dict.fromkeys(("R6", "R7"), demo),
    **dict.fromkeys(("R12", "R16-loose"), quality),
    "R18": parts,
}
PICTURES: dict[Section, str] = {  # what the picture beside a result shows
    acceptance: "acceptance length by shape of the draft",
    pruners: "acceptance length over prune ratio, by pruner",
    quality: "what is kept over acceptance length",
}


def as_calibrated(rows: Iterable[Row]) -> list[str]:
    """Return a line that says where `specvlm` in these rows is not what SpecVLM publishes (eq. 5 to 7), or nothing.

    Bundled pairs are calibrated: some by the attention of one layer alone, or to `lambda_r` 1, without a second stage.
    """
    words = []
    for family in dict.fromkeys(row["family"] for row in rows if row.get("pruner", "specvlm") == "specvlm"):
        path = calibration(family)  # a pair without one has the defaults: all layers, both stages
        config = json.loads(path.read_text())["config"] if path.is_file() else {}
        parts = [] if config.get("guidance_layers", "all") == "all" else [f"layers {config['guidance_layers']} alone"]
        parts += ["no second stage (`lambda_r` 1)"] if config.get("lambda_r") == 1 else []
        words += [f"of `{family}` {', '.join(parts)}"] if parts else []
    return [f"`specvlm` as calibrated: {'; '.join(words)}. SpecVLM has all layers and both stages."] if words else []


def body(name: str, result: Result) -> str:
    """Return the section of a result: what shows it, its picture where there is one, and where it comes from."""
    show = OF_RESULTS.get(name) or (paper if name.startswith("paper-") else speed)
    picture = figure(f"{name}.png", PICTURES.get(show, ""))
    return "\n\n".join([*show(result), *as_calibrated(_rows_of(result)), *picture, origin(result)])


def _rows_of(result: Result) -> list[Row]:
    """Return the rows of a result that name a family; a demo is one row."""
    return [row for row in result.get("rows", [result]) if row.get("family")]


def sections() -> dict[str, Callable[[], str]]:
    """Return what writes the section of each result that is there, the summary and its parts in README.md."""
    names = [name for name in OF_RESULTS if recorded(name)]
    names += [path.stem for kind in ("paper", "speed") for path in RESULTS.glob(f"{kind}-*.json")]
    return {
        **{name: lambda name=name: body(name, read(name)) for name in names},  # type: ignore[misc]
        "summary": summary,
        "wall-clock": wall_clock,
    }
