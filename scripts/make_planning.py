"""Write what docs/planning.md says of the planner: its model beside what was published and beside what was measured;
and docs/gpu-budget.md, what fits on a card and what a step takes by that model.

    python scripts/make_planning.py

Published figures are METHODS' of the papers, measured ones the rows of docs/results; nothing is run. A test holds the
page to what this writes.
"""

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import budget_tables
import numpy as np
from scipy.optimize import linprog

from vidspec_tools import planning
from vidspec_tools.bench.published import PUBLISHED
from vidspec_tools.planning import acceptance, planner
from vidspec_tools.planning.acceptance import Agreement

ROOT = Path(__file__).resolve().parents[1]
PAGE, BUDGET, RESULTS = (ROOT / "docs" / name for name in ("planning.md", "gpu-budget.md", "results"))
TREE_FORWARDS = 5  # of SpecVLM's tree, and of the baselines' chain of 5


# ---- published times, published acceptance: the speed model alone ----------------------------------------------------


@dataclass(frozen=True)
class PublishedTimes:
    """Times of a pair in ParallelVLM's table 5, 128 frames, 8 L40S.

    Attributes:
        target_ms: T_t.
        draft_ms: T_d, without pruning and at 0.9.
        window: gamma at 0.9.
        figures: By method M and speed-up on VideoDetailCaption, of pairs that `PUBLISHED` does not have.
        shapes: Target and draft, as the planner knows them.
    """

    target_ms: float
    draft_ms: tuple[float, float]
    window: int
    shapes: tuple[str, str]
    figures: Mapping[str, tuple[float, float]] | None = None

    @property
    def draft_ms_of(self) -> dict[str, float]:
        """T_d by method in turns."""
        return {"SD": self.draft_ms[0], "SD-Tree": self.draft_ms[0], "SpecVLM": self.draft_ms[1]}


TIMES = {
    "LLaVA-OV 0.5B & 7B": PublishedTimes(78.3, (46.1, 25.8), 3, ("llava-onevision-7b", "0.5B")),
    "LLaVA-OV 7B & 72B": PublishedTimes(420, (78.3, 46.6), 9, ("llava-onevision-72b", "7B")),
    "Qwen2.5-VL 7B & 32B": PublishedTimes(203, (63.7, 39.8), 5, ("qwen2.5-vl-32b", "7B")),
    "LLaVA-OV 7B & 7B": PublishedTimes(
        *(78.3, (78.3, 46.6), 2, ("llava-onevision-7b", "self")),
        {"SpecVLM": (4.94, 1.21), "ParallelVLM": (acceptance.SELF_STREAMS["llava-onevision"], 1.53)},
    ),
    "Qwen2.5-VL 7B & 7B": PublishedTimes(
        *(63.7, (63.7, 39.8), 2, ("qwen2.5-vl-7b", "self")),
        {"SpecVLM": (4.80, 1.17), "ParallelVLM": (acceptance.SELF_STREAMS["qwen2.5-vl"], 1.52)},
    ),
}
_OWN_FIGURES = {pair.name: pair.figures for pair in PUBLISHED}


def figures_of(name: str) -> Mapping[str, tuple[float, float]]:
    """Return what is published of a pair, M and speed-up by method."""
    return TIMES[name].figures or _OWN_FIGURES[name]


def published_rows() -> list[dict[str, Any]]:
    """Return the speed model, fed with published times and lengths, beside published speed-ups."""
    rows = []
    for name, times in TIMES.items():
        figures = figures_of(name)
        for method, draft_ms in times.draft_ms_of.items():
            if method in figures:
                length, published = figures[method]
                modelled = planning.speedup(length, times.target_ms, TREE_FORWARDS * draft_ms, times.target_ms)
                rows.append(_row(name, method, times.target_ms, draft_ms, length, modelled, published))
        length, published = figures["ParallelVLM"]
        draft_ms = times.draft_ms[1]
        # Whether M counts the target's own token at a rejection decides what p it stands for.
        for words, rate in (("own token in M", 1 - 1 / length), ("own token not in M", length / (length + 1))):
            modelled = planning.rounds_speedup(rate, times.window, times.target_ms, draft_ms)
            row = _row(name, f"ParallelVLM, {words}", times.target_ms, draft_ms, length, modelled, published)
            rows.append(row)
    return rows


def _row(name: str, method: str, target: float, draft: float, length: float, modelled: float, real: float) -> dict:
    return {
        "pair": name,
        "method": method,
        "target_ms": target,
        "draft_ms": draft,
        "length": length,
        "modelled": modelled,
        "real": real,
        "error": modelled / real - 1,
    }


def published_text() -> str:
    """Return the table of published settings."""
    rows = published_rows()
    lines = [
        "| pair | method | T_t, ms (published) | T_d, ms (published) | M (published) | speed-up (modelled) "
        "| speed-up (published) | error |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        lines.append(
            f"| {row['pair']} | {row['method']} | {row['target_ms']:g} | {row['draft_ms']:g} | {row['length']:g} "
            f"| {row['modelled']:.2f} | {row['real']:.2f} | {percent(row['error'], '+.1f')} |"
        )
    turns = [row["error"] for row in rows if "Parallel" not in row["method"]]
    own, other = (
        [row["error"] for row in rows if row["method"].endswith(end)] for end in (", own token in M", "not in M")
    )
    lines += [
        "",
        f"In turns: {summary(turns)}. In parallel: {summary(own)} if M counts the target's own token, {summary(other)} "
        "if it does not.",
    ]
    return "\n".join(lines)


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


def percent(share: float, form: str = ".1f") -> str:
    """Return a share as a percentage."""
    return f"{100 * share:{form}} %"


def summary(errors: Sequence[float]) -> str:
    """Return what errors come to."""
    sizes = [abs(error) for error in errors]
    return f"error {percent(mean(sizes))} on average, {percent(max(sizes))} at most"


# ---- published settings, times by the roofline -----------------------------------------------------------------------

FRAMES_TOKENS = 25_088  # 128 frames of 196


@dataclass(frozen=True)
class Setting:
    """A setting of a paper.

    Attributes:
        paper: Which.
        shapes: Target and draft.
        gpu: Of eight.
        length: tau of SpecVLM's tree at 0.9, the target's own token counted.
        speedup: Published.
        target_ms: T_t, where published.
        draft_ms: T_d at 0.9, where published.
    """

    paper: str
    shapes: tuple[str, str]
    gpu: str
    length: float
    speedup: float
    target_ms: float | None = None
    draft_ms: float | None = None


def settings() -> list[Setting]:
    """Return the settings of SpecVLM's tree at 0.9, in ParallelVLM's paper and in its own."""
    found = [
        Setting("ParallelVLM", times.shapes, "l40s", *figures_of(name)["SpecVLM"], times.target_ms, times.draft_ms[1])
        for name, times in TIMES.items()
    ]
    # 256 tokens of LLaVA-OneVision 72B take 87.0 s there.
    found.append(
        Setting("SpecVLM", ("llava-onevision-72b", "7B"), "a100", acceptance.SPECVLM_TREE, 2.68, 1e3 * 87.0 / 256)
    )
    found.append(Setting("SpecVLM", ("qwen2.5-vl-32b", "7B"), "a100", acceptance.SPECVLM_QWEN_TREE, 2.05))
    return found


def roofline_rows() -> list[dict[str, Any]]:
    """Return what the roofline says of published settings: on one card after the other, and on eight ranks."""
    rows = []
    for one in settings():
        target = planning.target_shape(one.shapes[0])
        draft = planning.draft_shape(one.shapes[1], target)
        agreement = planning.default_agreement(target.family, 0.9, draft is target)
        row = {"paper": one.paper, "target": target.name, "draft": one.shapes[1], "gpu": one.gpu, "setting": one}
        for ranks in (1, 8):
            place = planning.Placement(planning.GPUS[one.gpu], ranks)
            # A draft that eight ranks cannot share stands on one.
            own = place if draft.is_shared_by(ranks) else planning.Placement(place.gpu, 1)
            seen = 0.1 * FRAMES_TOKENS + 512
            times = [
                planning.forward_seconds(target, place, 1, rows, FRAMES_TOKENS + 512) + place.assumed.step_s
                for rows in (1, 26)
            ]
            draft_s = planning.forward_seconds(draft, own, 1, 1, seen)
            spent = (times[0], TREE_FORWARDS * draft_s, times[1], place.assumed.speculation_s)
            row[ranks] = {
                "target_ms": 1e3 * times[0],
                "draft_ms": 1e3 * draft_s,
                "with_length": planning.speedup(one.length, *spent),
                "throughout": planning.speedup(agreement.tree_length(), *spent),
            }
        rows.append(row)
    return rows


def roofline_text() -> str:
    """Return the table of the roofline beside the papers."""
    lines = [
        "| paper, pair | 8 x | T_t, T_d, ms (published) | one card at a time, ms (modelled) "
        "| eight ranks, ms (modelled) | tau (published) | speed-up (published) | one card at a time (modelled) "
        "| eight ranks (modelled) "
        "| with the planner's own tau (modelled) |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in roofline_rows():
        one, serial, ranks = row["setting"], row[1], row[8]
        published = ", ".join("-" if value is None else f"{value:.4g}" for value in (one.target_ms, one.draft_ms))
        lines.append(
            f"| {row['paper']}, {row['target']} with {row['draft']} | {row['gpu']} | {published} "
            f"| {serial['target_ms']:.1f}, {serial['draft_ms']:.1f} "
            f"| {ranks['target_ms']:.1f}, {ranks['draft_ms']:.1f} "
            f"| {one.length:.2f} | {one.speedup:.2f} | {serial['with_length']:.2f} | {ranks['with_length']:.2f} "
            f"| {serial['throughout']:.2f} |"
        )
    errors = [row[1]["with_length"] / row["setting"].speedup - 1 for row in roofline_rows()]
    lines += ["", f"One card at a time, published tau: {summary(errors)}."]
    return "\n".join(lines)


# ---- measured on the CPU engine --------------------------------------------------------------------------------------

# By file: the methods that its rows are taken of, None for all. Adaptive trees have no fixed number of forwards, a
# target that drafts for itself is no draft of an inflated pair, and four methods are in a longer race.
FILES: dict[str, tuple[str, ...] | None] = {
    "R14-parallel.json": None,
    "parallel-table.json": None,
    "paper-qwen2.5-vl-inflated.json": ("SD-tree", "SD-Rand", "SpecVLM", "OnSD"),
    "paper-qwen2.5-vl-inflated-race.json": None,
}
TREE = "tree-static"


def measured_rows() -> list[dict[str, Any]]:
    """Return the rows of inflated pairs that draft, each with what its own fields say of acceptance and answers."""
    found = []
    for file, methods in FILES.items():
        rates: dict[float, float] = {}
        for row in json.loads((RESULTS / file).read_text())["rows"]:
            if row["mode"] == "vanilla" or row["speedup"] is None:
                continue
            answers = row["requests"] * row["rounds"]
            row["file"], row["answers"] = file, answers
            row["answer"] = round((row["output_tokens"] - answers) / answers)
            row["forwards"] = TREE_FORWARDS if row["drafting"] == TREE else row["num_speculative_tokens"]
            if row["method"] in ("sequential", "SD-chain"):
                rates[row["inflate"]] = planning.rate_of_chain(row["acceptance_length"], row["forwards"])
            row["rate"] = rates[row["inflate"]]  # of the chain beside it: the same pair, pruner and prompts
            if methods is None or row["method"] in methods:
                found.append(row)
    return found


def kind_of(row: Mapping[str, Any]) -> str:
    """Return which rows have the same rest of a step: chains, trees, streams."""
    return "parallel" if row["mode"] == "parallel" else row["drafting"]


def length_of(row: Mapping[str, Any]) -> float:
    """Return tau over answers that end: the row's own length, less what its last step said past the end."""
    if row["drafting"] == TREE:
        # A tree's law is not recorded: the chain of its depth that has its length.
        rate = planning.rate_of_chain(row["acceptance_length"], TREE_FORWARDS)
    else:
        rate = planning.rate_of_chain(row["acceptance_length"], row["num_speculative_tokens"])
    return planning.answer_length(Agreement((rate,)).chain_emits(row["forwards"]), row["answer"])


def rest_of(row: Mapping[str, Any]) -> float:
    """Return what a row's step takes beside T_t and its draft forwards, in ms."""
    return row["t_step_ms"] - row["t_target_ms"] - row["forwards"] * row["t_draft_ms"]


def rest_from(others: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> float:
    """Return the rest of a row's step in ms, from what others take.

    Each level adds a share of a draft forward, which is the host's work, and a share of T_t, as more rows are verified.
    Neither is below 0, and the sum of what is off is least (each row in units of its T_t): one row that is far off does
    not pull the others' along.
    """
    times = np.array([levels_of(one) for one in others])
    scale = 1.0 / np.array([one["t_target_ms"] for one in others])
    parts, rests, off = times * scale[:, None], scale * [rest_of(one) for one in others], np.eye(len(others))
    found = linprog(
        np.r_[0.0, 0.0, np.ones(len(others))],
        A_ub=np.block([[parts, -off], [-parts, -off]]),
        b_ub=np.r_[rests, -rests],
    )
    return float(found.x[:2] @ levels_of(row))


def levels_of(row: Mapping[str, Any]) -> list[float]:
    """Return a row's levels in draft forwards and in target steps, in ms."""
    return [row["forwards"] * row["t_draft_ms"], row["forwards"] * row["t_target_ms"]]


def stream_costs(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return what a parallel row's own times say.

    Returns:
        What a step with drafts takes more than T_t, in target steps; what a turn of the drafter takes more than a
        forward, and how long an answer waits for its drafter, in draft forwards.
    """
    forward = row["t_draft_ms"]
    decode_ms = 1e3 * (row["output_tokens"] - row["answers"]) / row["tokens_per_s"]
    startup_ms = row["late_drafts"] / row["answers"] * row["t_target_ms"]
    drawing_ms = decode_ms - row["answers"] * startup_ms  # while it waits it draws nothing
    step = row["t_step_ms"] / row["t_target_ms"] - 1
    return step, drawing_ms / row["stream_tokens"] / forward - 1, startup_ms / forward


def checked_rows() -> list[dict[str, Any]]:
    """Return every measured row with both predictions: from its own times, and with the rest from the other rows.

    Of streams each cost is the others' median: as in `rest_from`, the sum of what is off is least. The others are those
    of the same run where it has two: two processes share a machine's memory, and how fast that is changes by the hour.
    """
    rows, found = measured_rows(), []
    for row in rows:
        others = [one for one in rows if one is not row and kind_of(one) == kind_of(row)]
        if row["mode"] == "parallel":
            bare = streams(row, (0.0, 0.0, 0.0))
            of_run = [one for one in others if one["file"] == row["file"]]
            others = of_run if len(of_run) > 1 else others
            costs = tuple(statistics.median(values) for values in zip(*map(stream_costs, others), strict=True))
            full = streams(row, costs)
        else:
            times = (length_of(row), row["t_target_ms"], row["forwards"] * row["t_draft_ms"], row["t_target_ms"])
            bare = planning.speedup(*times)
            full = planning.speedup(*times, overhead=rest_from(others, row))
        found.append(row | {"bare": bare, "full": full, "error": full / row["speedup"] - 1})
    return found


def streams(row: Mapping[str, Any], costs: Sequence[float]) -> float:
    """Return the speed-up of a parallel row by following its streams; `costs` as `stream_costs` returns them."""
    target, forward = row["t_target_ms"], row["t_draft_ms"]
    step, turn, startup = target * costs[0], forward * costs[1], forward * costs[2]
    window = planning.window_of(target + step, forward, row["acceptance_rate"], row["num_speculative_tokens"])
    times = planning.StreamTimes(lambda drafts: target + step * (drafts > 0), forward + turn, startup)
    run = planning.run_streams(Agreement((row["rate"],)), window, times, answers=400, answer=row["answer"])
    return run.speedup(target)


def measured_text() -> str:
    """Return the table of measured rows."""
    rows = checked_rows()
    lines = [
        "| rows | method | K | T_t, ms (measured) | T_d, ms (measured) | tokens a step (measured) "
        "| T_t, T_d, tau only (modelled) | with the rest of a step from the other rows (modelled) "
        "| speed-up, 20 % to 80 % (measured) | error |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        lines.append(
            f"| [{Path(row['file']).stem}](results/{row['file']}), {row['target_layers']} layers appended "
            f"| {method_of(row)} | {row['num_speculative_tokens']} | {row['t_target_ms']:.2f} "
            f"| {row['t_draft_ms']:.3f} | {row['acceptance_length']:.2f} | {row['bare']:.2f} | {row['full']:.2f} "
            f"| {row['speedup']:.2f} ({row['speedup_p20']:.2f} to {row['speedup_p80']:.2f}) "
            f"| {percent(row['error'], '+.1f')} |"
        )
    bare = [row["bare"] / row["speedup"] - 1 for row in rows]
    full = [row["error"] for row in rows]
    within = sum(abs(error) < 0.05 for error in full)
    lines += [
        "",
        f"With the rest from the other rows: {summary(full)}; {within} of {len(rows)} rows are within 5 %. From "
        f"T_t, T_d and tau alone: {summary(bare)}.",
    ]
    return "\n".join(lines)


def method_of(row: Mapping[str, Any]) -> str:
    """Return what a row is called."""
    names = {"sequential": "chain, in turns", "ParallelVLM": "in parallel"}
    return names.get(row["method"], row["method"])


# ---- acceptance of one length from that of another -------------------------------------------------------------------


def length_rows() -> list[dict[str, Any]]:
    """Return R11's lengths at K = 5 and of the static tree beside what those at K = 1 let expect."""
    found = []
    for family, calibration in json.loads((RESULTS / "R11.json").read_text())["calibrations"].items():
        costs = {(one["batch_size"], one["shape"], one["num_speculative_tokens"]): one for one in calibration["costs"]}
        (batch,) = {max(size for size, *_ in costs)}  # the most requests, so the most steps
        rate = costs[batch, "chain", 1]["acceptance_length"] - 1
        agreement = Agreement((rate,), planning.RUNNER_UP)
        for shape, num_tokens, modelled in (
            ("chain", 5, agreement.chain_length(5)),
            (TREE, 25, agreement.tree_length()),
        ):
            real = costs[batch, shape, num_tokens]["acceptance_length"]
            found.append(
                {
                    "family": family,
                    "shape": shape,
                    "rate": rate,
                    "modelled": modelled,
                    "real": real,
                    "error": modelled / real - 1,
                }
            )
    return found


def length_text() -> str:
    """Return the table of lengths."""
    lines = [
        "| pair | p, at K = 1 (measured) | drafts | tokens a step (modelled) | tokens a step (measured) | error |",
        "| --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for row in length_rows():
        words = "chain of 5" if row["shape"] == "chain" else "static tree"
        lines.append(
            f"| `{row['family']}` | {row['rate']:.3f} | {words} | {row['modelled']:.2f} | {row['real']:.2f} "
            f"| {percent(row['error'], '+.1f')} |"
        )
    return "\n".join(lines)


# ---- what the planner assumes, and some plans ------------------------------------------------------------------------


def assumed_text() -> str:
    """Return what a plan assumes of cards beside their data sheets."""
    one = planning.ASSUMED
    latencies = sorted({gpu.link_latency_s for gpu in planning.GPUS.values()})
    return "\n".join(
        [
            "| assumed, not measured | |",
            "| --- | --- |",
            f"| of a card's peaks | {percent(one.memory_frac, '.0f')} of the memory's, "
            f"{percent(one.flops_frac, '.0f')} of the tensor cores', "
            f"{percent(one.link_frac, '.0f')} of the link's |",
            f"| kernels | {1e6 * one.launch_s:g} µs each, {one.layer_launches} a layer and {one.forward_launches} more "
            "a forward |",
            f"| an all-reduce | {' or '.join(f'{1e6 * latency:.0f}' for latency in latencies)} µs (NVLink, PCIe) "
            "and its bytes |",
            f"| host time that no kernel hides | {1e3 * one.step_s:g} ms a step, {1e3 * one.speculation_s:g} ms more "
            "with drafts |",
            f"| FlashAttention 2 over a request's keys, where they are not split | {1e9 * one.walk_s:.0f} ns a key of "
            "128 dimensions and layer (published, of an RTX 3090) |",
            f"| memory for weights and KV | {percent(one.usable_frac, '.0f')} |",
            f"| a gain that counts as one | {percent(planner.WORTH - 1, '.0f')} |",
        ]
    )


def agreement_text() -> str:
    """Return the table of agreements that a plan takes where none is given."""
    lines = ["| family | p at 0 | 0.5 | 0.9 | 0.99 | 1 | from |", "| --- | ---: | ---: | ---: | ---: | ---: | --- |"]
    for family, is_self in (
        *((name, False) for name in ("llava-onevision", "qwen2.5-vl", "qwen3-vl")),
        *((name, True) for name in ("llava-onevision", "qwen2.5-vl")),
    ):
        found = [planning.default_agreement(family, ratio, is_self) for ratio in (0, 0.5, 0.9, 0.99, 1)]
        rates = " | ".join(f"{one.rates[0]:.3f}" for one in found)
        words = f"`{family}`" + ", drafting for itself" * is_self
        lines.append(f"| {words} | {rates} | {found[0].source.removeprefix('published: ')} |")
    return "\n".join([*lines, "", f"A runner-up is right in {planning.RUNNER_UP:.2f} of the cases left to it."])


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


def plans_text() -> str:
    """Return a table of plans."""
    lines = [
        "| target, draft | GPUs | video tokens | batch 1 (modelled) | batch 8 (modelled) | when |",
        "| --- | --- | ---: | --- | --- | --- |",
    ]
    for target_name, draft_name, gpu, ranks, video_tokens in PLANS:
        target = planning.target_shape(target_name)
        draft = planning.draft_shape(draft_name, target)
        question = planning.Question(target, draft, planning.GPUS[gpu], ranks, video_tokens=video_tokens)
        result = planning.plan(question, (1, 8))
        cells = " | ".join(map(_cell, result["rows"]))
        lines.append(
            f"| {target.name}, {draft_name} | {ranks} x {gpu} | {video_tokens:,} | {cells} | {result['when']} |"
        )
    return "\n".join(lines)


def _cell(row: Mapping[str, Any]) -> str:
    if not row["fits"]:
        return "does not fit"
    if row["shape"] == "none":
        return "no drafts"
    more = ", 1 GPU more" if row["draft_gpus"] else ""
    return (
        f"{row['shape']} {row['num_speculative_tokens']}, r {row['prune_ratio']:g}{more}: {row['answer_speedup']:.2f}x"
    )


# ---- who attends -----------------------------------------------------------------------------------------------------

ATTENTION = (
    ("Qwen2.5-VL-7B", "3B", "l40s", 1),
    ("Qwen2.5-VL-32B", "7B", "l40s", 4),
    ("Qwen2.5-VL-32B", "7B", "a100", 2),
    ("LLaVA-OneVision-72B", "7B", "a100", 4),
)
CHAIN = 5


def attention_text() -> str:
    """Return what verifying a chain takes with tree attention, and by a backend that splits no keys."""
    lines = [
        "| pair | T_t, ms (modelled) | T_t^K with tree attention (modelled) | with FlashAttention 2 (modelled) "
        "| speed-up of a chain of 5 (modelled) | with FlashAttention 2 (modelled) |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for target_name, draft_name, gpu, ranks in ATTENTION:
        target = planning.target_shape(target_name)
        draft = planning.draft_shape(draft_name, target)
        ours, own = (
            planning.Planner(planning.Question(target, draft, planning.GPUS[gpu], ranks, own_attention=is_own)).chain(
                1, CHAIN, 0.9
            )
            for is_own in (False, True)
        )
        times = " | ".join(f"{1e3 * seconds:.1f}" for seconds in (ours.target_s, ours.verify_s, own.verify_s))
        lines.append(
            f"| {target.name} with {draft_name}, {ranks} x {gpu} | {times} | {ours.speedup:.2f} | {own.speedup:.2f} |"
        )
    return "\n".join(lines)


# ---- the page --------------------------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[], str]] = {
    "assumed": assumed_text,
    "agreement": agreement_text,
    "plans": plans_text,
    "who-attends": attention_text,
    "published": published_text,
    "roofline": roofline_text,
    "measured": measured_text,
    "lengths": length_text,
}


def filled(page: str, sections: Mapping[str, Callable[[], str]] = SECTIONS) -> str:
    """Return a page with every section made anew."""
    for name, text in sections.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, rest = page.split(start)
        page = f"{before}{start}\n\n{text()}\n\n{end}{rest.split(end)[1]}"
    return page


def main() -> int:
    """Write the pages."""
    PAGE.write_text(filled(PAGE.read_text()))
    BUDGET.write_text(filled(BUDGET.read_text(), budget_tables.SECTIONS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
