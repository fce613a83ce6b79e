"""Sections of docs/long-videos.md: what long pairs accept, how fast they decode, and what that costs."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.quality import setting_name
from vidspec_tools.pages.pruners import KEPT, NAME, mean_length, today, with_interval
from vidspec_tools.pages.tables import Row, markdown, origin, read, recorded, table

SEEN = {"whole": "whole video", "pruned": "10 %", "sized": "10 %, pool sized for it", "specvlm": "10 %, `specvlm`"}
SEEN |= {"vanilla": "(vanilla)", "blind": "no video", "uniform": "10 %, `uniform`"}
PARTS = ("target attention", "target", "draft attention", "draft", "vidspec", "vLLM")


def by_share(found: dict[str, Any]) -> str:
    """Return tokens per verify step by share dropped, of the longest videos that were measured at several shares."""
    tokens, points = _most_shares(found)
    shares = sorted({float(name.split()[1]) for name in points if " " in name})
    names = {name.split()[0] for name in points if " " in name}
    pruners = [one for one in sorted(names) if all(f"{one} {share:g}" in points for share in shares)]
    rows = [[f"{100 * share:g} %", *(with_interval(points[f"{one} {share:g}"]) for one in pruners)] for share in shares]
    return markdown([f"dropped, of {int(tokens):,} tokens", *(f"`{one}`" for one in pruners)], rows, words=0)


def by_question(found: dict[str, Any]) -> str:
    """Return tokens per verify step by kind of question, over all lengths."""
    kinds = sorted({one["kind"] for points in found.values() for one in points["whole"]})
    names, rows = _settings(found), []
    for kind in kinds:
        requests = {name: [one for points in found.values() for one in points.get(name, ())] for name in names}
        rows.append([f"`{kind}`", *(f"{mean_length(requests[name], kind):.2f}" for name in names)])
    return markdown(["question", *map(_words, names)], rows)


def speed(found: dict[str, Any]) -> str:
    """Return decode speed over vanilla by length and padding."""
    return table(
        "video tokens | target padded to | draft sees | decode over vanilla | tokens per step | step, vanilla's (ms) | "
        "draft forward (ms) | time to first token over vanilla | identical",
        "{tokens:,} | {padded} | {seen} | {decode_over_vanilla:.2f} ({spread[0]:.2f} to {spread[1]:.2f}) | "
        "{tokens_per_step:.2f} | {step_ms:.1f} / {vanilla_step_ms:.1f} | {draft_forward_ms:.2f} | "
        "{ttft_over_vanilla:.2f} | {identical:.0f%}",
        _timed(found),
        words={1, 2},
    )


def first_tokens(found: dict[str, Any]) -> str:
    """Return, of the longest videos, the time to the first token over vanilla's, and the parts of it that are ours."""
    longest = max(int(key.split()[0]) for key in found)
    chosen = [row for row in _timed(found) if row["tokens"] == longest and "in parallel" not in row["seen"]]
    for row in chosen:
        row |= {part: row[f"{part}_s"] / row["vanilla_ttft_s"] for part in ("guidance", "draft_prefill")}
    return table(
        "video tokens | target padded to | draft sees | vanilla (s) | over vanilla | guidance | draft's prefill",
        "{tokens:,} | {padded} | {seen} | {vanilla_ttft_s:.2f} | {ttft_over_vanilla:.2f} | {guidance:%} | "
        "{draft_prefill:%}",
        chosen,
        words={1, 2},
    )


def in_short(found: dict[str, Any], timed: dict[str, Any]) -> str:
    """Return what README.md shows: tokens per step by length, and decode speed over vanilla where it was measured."""
    lengths = list(found)

    def accepted(name: str) -> list[str]:
        return [with_interval(found[tokens][name]) for tokens in lengths]

    def decoded(pads: int, name: str) -> list[str]:
        rows = [timed.get(f"{tokens} {pads}", {"engines": {}})["engines"].get(name) for tokens in lengths]
        return ["-" if row is None else f"{row['decode_over_vanilla']:.2f}x" for row in rows]

    pruned = "draft sees 10 %, chosen by the target's attention (`specvlm`)"
    lines = [
        ["tokens per verify step, draft sees the whole video", *accepted("whole")],
        [f"the same, {pruned}", *accepted(f"specvlm {KEPT:g}")],
        ["the same, draft sees 10 %, evenly spread (`uniform`)", *accepted(f"uniform {KEPT:g}")],
        ["the same, draft sees no video", *accepted("blind")],
        ["decode speed over vanilla, target padded to nine drafts, draft sees the whole video", *decoded(9, "whole")],
        ["the same, draft sees 10 %", *decoded(9, "specvlm")],
        ["the same, the pair as it is, draft sees 10 %", *decoded(0, "specvlm")],
        ["answers identical to vanilla vLLM's", *(_identical(found[tokens]) for tokens in lengths)],
    ]
    return markdown(["video tokens", *(f"{int(tokens):,}" for tokens in lengths)], lines)


# ---- memory, steps, the relevance score, real footage ----------------------------------------------------------------


def memory(rows: list[Row]) -> str:
    """Return how many requests fit at once, and how many more than with the whole video."""
    whole = {row["pair"]: row for row in rows if row["setting"] == "whole"}
    found = [
        {
            **row,
            "seen": SEEN[row["setting"]],
            "pool": row["pool_mib"] / row["budget_mib"],
            "measured": f"{row['running']} ({row['drafting']})" if "running" in row else "-",
            "more": row["modelled"] / whole[row["pair"]]["modelled"],
            "measured_more": row["running"] / whole[row["pair"]]["running"] if "running" in row else None,
        }
        for row in rows
    ]
    return table(
        "pair | KV budget (MiB) | draft sees | draft's pool | requests (drafting), measured | modelled | over whole, "
        "measured | modelled",
        "{pair} | {budget_mib:,} | {seen} | {pool:.1f%} | {measured} | {modelled:.1f} | {measured_more:.2f} | "
        "{more:.2f}",
        found,
        words={0, 2},
    )


def steps(rows: list[Row]) -> str:
    """Return where a decode step goes, in ms."""
    core = next(row["core"] for row in rows if "core" in row)
    found = [
        {**row, **dict.fromkeys(PARTS), **row["step"], "seen": SEEN[row["setting"]]} for row in rows if "step" in row
    ]
    text = table(
        f"video tokens | draft sees | step | {' | '.join(PARTS)} | attention, a layer | GB/s | GFlop/s",
        "{tokens:,} | {seen} | {step:.1f} | "
        + " | ".join(f"{{{part}:.2f}}" for part in PARTS)
        + " | {attention_ms_per_layer:.3f} | {gbs:.0f} | {gflops:.0f}",
        found,
        words={1},
    )
    return f"{text}\n\nThe core alone: {core['gbs']:.0f} GB/s read, {core['gflops']:.0f} GFlop/s (float32 product)."


def prefills(rows: list[Row]) -> str:
    """Return where a prefill goes, in ms."""
    names = ("all", "target", "target attention", "guidance", "draft_prefill", "draft", "draft attention")
    return table(
        "video tokens | draft sees | all | target's layers | their attention | guidance | draft's prefill | "
        "its layers | their attention",
        "{tokens:,} | {seen} | " + " | ".join(f"{{{name}:,.0f}}" for name in names),
        [
            {**row, **dict.fromkeys(names, 0), **row["prefill"], "seen": SEEN[row["setting"]]}
            for row in rows
            if "prefill" in row
        ],
        words={1},
    )


def curve(rows: list[Row]) -> str:
    """Return facts kept over tokens per step, by scorer."""
    found = [{**row, "name": setting_name(dict(row))} for row in rows]
    return table(
        "verification | temperature | tokens per step | over strict | facts right | of the target's | relevance AUC",
        "`{name}` | {temperature:g} | {acceptance_length:.2f} | {ratio_to_strict:.2f} | {accuracy:.1f%} | "
        "{retention:.1f%} | {relevance_auc:.2f}",
        found,
    )


def relevance(rows: list[Row]) -> str:
    """Return how well the score tells facts from fillers, by what it is computed from, with N 10."""
    chosen = [row for row in rows if row["top_n"] == 10]
    others = {_way(row): row["auc"] for row in chosen if row["video"] == "another"}
    found = [
        {**row, "other": others[_way(row)], "how": "less their mean" if row["centred"] else "as they are"}
        for row in chosen
        if row["video"] == "own"
    ]
    return table(
        "states | whose row | | AUC | with another video's states | facts among the loosened | of the N in the scene "
        "meant | by chance",
        "{states} | {rows} | {how} | {auc:.2f} | {other:.2f} | {facts_among_loosened:.0f%} | {in_scene:.0f%} | "
        "{scene_share:.0f%}",
        found,
        words=3,
    )


def _way(row: Row) -> tuple[str, str, bool]:
    return row["states"], row["rows"], row["centred"]


def auto(rows: list[Row]) -> str:
    """Return what `pruner: auto` reaches beside each fixed pruner."""
    names = [name for name in rows[0]["requests_by_pruner"] if name in rows[0]]
    head = ["learned from", "measured on", "`auto`", *(f"`{name}`" for name in names), "of the best", "identical"]
    line = "{learned_from} | {measured_on} | {auto:.2f} | " + " | ".join(f"{{{name}:.2f}}" for name in names)
    return table(" | ".join(head), line + " | {share_of_best:.1f%} | {identical}", rows, words=0)


def footage(rows: list[Row]) -> str:
    """Return what each family made of real footage."""
    found = [{**row, "shape": " x ".join(map(str, row["grid"][:3]))} for row in rows]
    return table(
        "family | frames | grid | video tokens | kept | guided | drafted | accepted | as vanilla",
        "`{family}` | {frames} | {shape} | {visual_tokens:,} | {kept} | {guided} | {drafted} | {accepted} | "
        "{identical}",
        found,
    )


# section -> its result, and what writes it of the rows
_OF_ROWS: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
    "long-memory": ("long-memory", memory),
    "long-steps": ("long-steps", steps),
    "long-prefills": ("long-steps", prefills),
    "long-curve": ("long-quality", curve),
    "long-relevance": ("long-relevance", relevance),
    "long-auto": ("long-auto", auto),
    "real-video": ("real-video", footage),
}


def _written(name: str, write: Callable[[list[Row]], str]) -> str:
    result = read(name)
    return f"{write(result['rows'])}\n\n{origin(result)}"


# ---- all of them -----------------------------------------------------------------------------------------------------


def sections() -> dict[str, Callable[[], str]]:
    """Return what writes each section, where there is a result."""
    if not recorded(NAME):
        return {}
    result = read(NAME)
    found, timed = today(result["acceptance"]), result["speed"]
    return {
        "figure": lambda: in_short(found, timed),
        "long-shares": lambda: by_share(found),
        "long-questions": lambda: by_question(found),
        "long-speed": lambda: speed(timed),
        "long-first-token": lambda: first_tokens(timed),
        **{section: partial(_written, *what) for section, what in _OF_ROWS.items() if recorded(what[0])},
    }


def draw(path: str) -> None:
    """Draw tokens per verify step by length and by share dropped."""
    from vidspec_tools.views import figures

    found = today(read(NAME)["acceptance"])
    lengths, (tokens, longest) = sorted(map(int, found)), _most_shares(found)
    styles = {"whole": ("#000000", "o"), "blind": ("#777777", "P"), "specvlm": ("#882255", "o"), "uv": ("#AA4499", "^")}
    styles |= {"uniform": ("#332288", "D"), "random": ("#88CCEE", "v")}
    styles |= {"specvlm:stride": ("#CC6677", "x"), "uniform:stride": ("#117733", "+")}
    with figures.panels(path, (11, 3.6), 1, 2) as (_, panels, lines):
        of_length: dict[str, Any] = {}
        for name in _settings(found):
            points = {int(t): mean_length(points[name]) for t, points in found.items() if name in points}
            kind = name.split()[0]
            of_length[{"whole": "whole video", "blind": "no video"}.get(kind, kind)] = (styles[kind], points)
        lines |= figures.lines(panels[0, 0], lengths, of_length, math.log2)
        panels[0, 0].set(xlabel="video tokens; 90 % dropped where pruned", ylabel="tokens per verify step")
        shares = sorted({float(name.split()[1]) for name in longest if " " in name})
        by_pruner: dict[str, dict[float, float]] = {}
        for name, requests in longest.items():
            if name.count(" ") == 1:
                by_pruner.setdefault(name.split()[0], {})[float(name.split()[1])] = mean_length(requests)
        figures.lines(panels[0, 1], shares, {name: (styles[name], points) for name, points in by_pruner.items()})
        panels[0, 1].set(xlabel=f"share dropped, of {int(tokens):,} tokens")


def _most_shares(found: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the length, and its points, at which most settings were measured; of several the longest."""
    return max(found.items(), key=lambda point: (len(point[1]), int(point[0])))


def _settings(found: dict[str, Any]) -> list[str]:
    """Return the settings of the tables by length: whole video, KEPT dropped by each pruner, no video."""
    names = dict.fromkeys(name for points in found.values() for name in points)
    return ["whole", *(name for name in names if name.endswith(f" {KEPT:g}")), "blind"]


def _identical(points: dict[str, list[Row]]) -> str:
    same = [one["is_identical"] for requests in points.values() for one in requests]
    return f"{sum(same)} of {len(same)}"


def _timed(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield, by padding and length, the row of each engine with its video's tokens, padding and what its draft sees."""
    for key, point in sorted(found.items(), key=lambda one: [float(part) for part in reversed(one[0].split())]):
        tokens, pads = key.split()
        for name, row in point["engines"].items():
            seen = name if name in ("whole", "blind", "default", "parallel whole") else f"{name} {KEPT:g}"
            padded = "as it is" if pads == "0" else f"{pads} drafts"
            yield row | {"tokens": int(tokens), "padded": padded, "seen": _words(seen)}


def _words(name: str) -> str:
    if name.startswith("parallel "):
        return f"{_words(name.removeprefix('parallel '))}, in parallel"
    known = {"whole": "whole video", "blind": "no video", "default": "as by default"}
    return known.get(name) or f"{round(100 * (1 - float(name.split()[-1])))} %, `{name.split()[0]}`"
