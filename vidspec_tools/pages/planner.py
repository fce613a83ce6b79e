"""Sections of docs/planning.md and docs/gpu-budget.md: what the planner assumes, some plans, what fits on a card."""

from collections.abc import Callable
from typing import Any

from vidspec_tools import planning
from vidspec_tools.pages.tables import Row, fill, table
from vidspec_tools.planning import planner
from vidspec_tools.planning.fit import fit

# ---- what the planner assumes, and some plans ------------------------------------------------------------------------


def assumed() -> str:
    """Return what a plan assumes of cards beside their data sheets."""
    one = planning.ASSUMED
    latencies = " or ".join(f"{1e6 * s:.0f}" for s in sorted({gpu.link_latency_s for gpu in planning.GPUS.values()}))
    peaks = "{memory_frac:.0f%} of the memory's, {flops_frac:.0f%} of the tensor cores', {link_frac:.0f%} of the link's"
    usable = fill("{usable_frac:.0f%}", vars(one))
    rows = {
        "of a card's peaks": fill(peaks, vars(one)),
        "kernels": f"{1e6 * one.launch_s:g} µs each, {one.layer_launches} a layer and {one.forward_launches} more a "
        "forward",
        "an all-reduce": f"{latencies} µs (NVLink, PCIe) and its bytes",
        "host time that no kernel hides": f"{1e3 * one.step_s:g} ms a step, {1e3 * one.speculation_s:g} ms more with "
        "drafts",
        "FlashAttention 2 over a request's keys, where they are not split": f"{1e9 * one.walk_s:.0f} ns a key of 128 "
        "dimensions and layer (published, of an RTX 3090)",
        "memory for weights and KV": usable,
        "a gain that counts as one": f"{100 * (planner.WORTH - 1):.0f} %",
    }
    lines = [{"words": words, "value": value} for words, value in rows.items()]
    return table("assumed, not measured | value", "{words} | {value}", lines, words=2)


def agreement() -> str:
    """Return the table of agreements that a plan takes where none is given."""
    rows = []
    for family, is_self in (
        *((name, False) for name in ("llava-onevision", "qwen2.5-vl", "qwen3-vl")),
        *((name, True) for name in ("llava-onevision", "qwen2.5-vl")),
    ):
        found = [planning.default_agreement(family, ratio, is_self) for ratio in (0, 0.5, 0.9, 0.99, 1)]
        words = f"`{family}`" + ", drafting for itself" * is_self
        source = found[0].source.removeprefix("published: ")
        rows.append({"words": words, "p": [one.rates[0] for one in found], "source": source})
    text = table(
        "family | p at 0 | 0.5 | 0.9 | 0.99 | 1 | from",
        "{words} | {p[0]:.3f} | {p[1]:.3f} | {p[2]:.3f} | {p[3]:.3f} | {p[4]:.3f} | {source}",
        rows,
        words=(0, 6),
    )
    return f"{text}\n\nA runner-up is right in {planning.RUNNER_UP:.2f} of the cases left to it."


PLANS = (
    ("Qwen2.5-VL-72B", "7B", "h100", 8, 25_000),
    ("Qwen2.5-VL-72B", "7B", "h100", 4, 25_000),
    ("Qwen2.5-VL-72B", "3B", "h100", 8, 25_000),
    ("Qwen2.5-VL-72B", "7B", "h20", 4, 1_000),
    ("Qwen2.5-VL-32B", "7B", "h200", 2, 1_000),
    ("Qwen2.5-VL-7B", "self", "h100", 1, 25_000),
    ("LLaVA-OneVision-7B", "0.5B", "l40s", 1, 10_000),
    ("Qwen3-VL-235B-A22B", "8B", "h200", 8, 10_000),
)


def question(target_name: str, draft: str, gpu: str, ranks: int, **more: Any) -> planning.Question:
    """Return what is asked of the planner."""
    target = planning.target_shape(target_name)
    return planning.Question(target, planning.draft_shape(draft, target), planning.GPUS[gpu], ranks, **more)


def plans() -> str:
    """Return a table of plans."""
    rows = []
    for target, draft, gpu, ranks, tokens in PLANS:
        asked = question(target, draft, gpu, ranks, video_tokens=tokens)
        result = planning.plan(asked, (1, 8))
        one, eight = map(_plan, result["rows"])
        rows.append({"asked": asked, "draft": draft, "one": one, "eight": eight, "when": result["when"]})
    return table(
        "target, draft | GPUs | video tokens | batch 1 (modelled) | batch 8 (modelled) | when",
        "{asked.target.name}, {draft} | {asked.ranks} x {asked.gpu.name} | {asked.video_tokens:,} | {one} | {eight} | "
        "{when}",
        rows,
        words=(0, 1, 3, 4, 5),
    )


def _plan(row: Row) -> str:
    if not row["fits"]:
        return "does not fit"
    if row["shape"] == "none":
        return "no drafts"
    more = ", 1 GPU more" if row["draft_gpus"] else ""
    return fill("{shape} {num_speculative_tokens}, r {prune_ratio:g}", row) + f"{more}: {row['answer_speedup']:.2f}x"


ATTENTION = (
    ("Qwen2.5-VL-7B", "3B", "l40s", 1),
    ("Qwen2.5-VL-32B", "7B", "l40s", 4),
    ("Qwen2.5-VL-32B", "7B", "a100", 2),
    ("LLaVA-OneVision-72B", "7B", "a100", 4),
)


def who_attends() -> str:
    """Return what verifying a chain takes with tree attention, and by a backend that splits no keys."""
    rows = []
    for target, draft, gpu, ranks in ATTENTION:
        ours, own = (
            planning.Planner(question(target, draft, gpu, ranks, own_attention=is_own)).chain(1, 5, 0.9)
            for is_own in (False, True)
        )
        name = f"{planning.target_shape(target).name} with {draft}, {ranks} x {gpu}"
        times = {"t": 1e3 * ours.target_s, "ours": 1e3 * ours.verify_s, "own": 1e3 * own.verify_s}
        rows.append({"name": name, **times, "gain": ours.speedup, "own_gain": own.speedup})
    return table(
        "pair | T_t, ms (modelled) | T_t^K with tree attention (modelled) | with FlashAttention 2 (modelled) | "
        "speed-up of a chain of 5 (modelled) | with FlashAttention 2 (modelled)",
        "{name} | {t:.1f} | {ours:.1f} | {own:.1f} | {gain:.2f} | {own_gain:.2f}",
        rows,
    )


# ---- what fits on a card ---------------------------------------------------------------------------------------------

# The pairs of docs/models.md, and those of the papers.
PAIRS = (
    *(("Qwen2.5-VL-7B", "3B"), ("Qwen2.5-VL-32B", "3B"), ("Qwen2.5-VL-72B", "3B")),
    *(("Qwen2.5-VL-32B", "7B"), ("Qwen2.5-VL-72B", "7B")),
    *(("LLaVA-OneVision-7B", "0.5B"), ("LLaVA-OneVision-72B", "0.5B")),
    *(("Qwen3-VL-8B", "2B"), ("Qwen3-VL-32B", "4B"), ("Qwen3-VL-30B-A3B", "4B"), ("Qwen3-VL-235B-A22B", "8B")),
)
CARDS_GB = (24, 48, 80, 96, 141)


def fits() -> str:
    """Return the table of what fits, a row for each pair and number of ranks at which any card holds a request."""
    rows = []
    for target_name, draft_name in PAIRS:
        target = planning.target_shape(target_name)
        draft = planning.draft_shape(draft_name, target)
        for ranks in filter(target.is_shared_by, (1, 2, 4, 8)):
            found = [fit(target, draft, ranks, 1e9 * size) for size in CARDS_GB]
            if any(one.vanilla for one in found):
                rows.append({"pair": f"{target.name}, {draft_name}", "ranks": ranks, "fits": found})
    cells = " | ".join(f"{{fits[{place}]}}" for place in range(len(CARDS_GB)))
    head = " | ".join(f"{size} GB" for size in CARDS_GB)
    return table(f"target, draft (modelled) | TP | {head}", f"{{pair}} | {{ranks}} | {cells}", rows)


SECTIONS: dict[str, Callable[[], str]] = {
    "assumed": assumed,
    "agreement": agreement,
    "plans": plans,
    "who-attends": who_attends,
    "fits": fits,
}
