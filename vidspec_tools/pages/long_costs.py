"""Further sections of docs/long-videos.md: memory, steps, the relevance score, real footage."""

from collections.abc import Callable
from functools import partial

from vidspec_tools.bench.quality import setting_name
from vidspec_tools.pages.tables import Row, origin, read, recorded, table

SEEN = {"whole": "whole video", "pruned": "10 %", "sized": "10 %, pool sized for it", "specvlm": "10 %, `specvlm`"}
SEEN |= {"vanilla": "(vanilla)", "blind": "no video", "uniform": "10 %, `uniform`"}
PARTS = ("target attention", "target", "draft attention", "draft", "vidspec", "vLLM")


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
    found = [row | dict.fromkeys(PARTS) | row["step"] | {"seen": SEEN[row["setting"]]} for row in rows if "step" in row]
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
            row | dict.fromkeys(names, 0) | row["prefill"] | {"seen": SEEN[row["setting"]]}
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


def sections() -> dict[str, Callable[[], str]]:
    """Return what writes each section that has a result."""
    return {section: partial(_written, *what) for section, what in _OF_ROWS.items() if recorded(what[0])}


def _written(name: str, write: Callable[[list[Row]], str]) -> str:
    result = read(name)
    return f"{write(result['rows'])}\n\n{origin(result)}"
