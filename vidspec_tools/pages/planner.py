"""Sections of docs/planning.md and docs/gpu-budget.md: the planner's model beside what was published and measured.

Published figures are the papers', measured ones rows of docs/results; nothing is run.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linprog

from vidspec_tools import planning
from vidspec_tools.bench.published import PUBLISHED
from vidspec_tools.pages.tables import Row, fill, read, table
from vidspec_tools.planning import acceptance, planner
from vidspec_tools.planning.acceptance import Agreement
from vidspec_tools.planning.fit import fit

TREE_FORWARDS = 5  # of SpecVLM's tree, and of the baselines' chain of 5


def summary(errors: Sequence[float]) -> str:
    """Return what relative errors come to."""
    sizes = [abs(error) for error in errors]
    return fill("error {mean:%} on average, {most:%} at most", {"mean": statistics.fmean(sizes), "most": max(sizes)})


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
        """T_d by sequential method."""
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
        figures, target_ms = figures_of(name), times.target_ms

        def add(method: str, key: str, draft_ms: float, modelled: float) -> None:
            length, real = figures[key]  # noqa: B023
            row = {"pair": name, "method": method, "target_ms": target_ms, "draft_ms": draft_ms}  # noqa: B023
            rows.append(row | {"length": length, "modelled": modelled, "real": real, "error": modelled / real - 1})

        for method, draft_ms in times.draft_ms_of.items():
            if method in figures:
                spent = (target_ms, TREE_FORWARDS * draft_ms, target_ms)
                add(method, method, draft_ms, planning.speedup(figures[method][0], *spent))
        length, draft_ms = figures["ParallelVLM"][0], times.draft_ms[1]
        # Whether M counts the target's own token at a rejection decides what p it stands for.
        for words, rate in (("own token in M", 1 - 1 / length), ("own token not in M", length / (length + 1))):
            modelled = planning.rounds_speedup(rate, times.window, target_ms, draft_ms)
            add(f"ParallelVLM, {words}", "ParallelVLM", draft_ms, modelled)
    return rows


def published() -> str:
    """Return the table of published settings."""
    rows = published_rows()
    text = table(
        "pair | method | T_t, ms (published) | T_d, ms (published) | M (published) | speed-up (modelled) | "
        "speed-up (published) | error",
        "{pair} | {method} | {target_ms:g} | {draft_ms:g} | {length:g} | {modelled:.2f} | {real:.2f} | {error:+.1f%}",
        rows,
        words=2,
    )
    turns = [row["error"] for row in rows if "Parallel" not in row["method"]]
    own, other = (
        [row["error"] for row in rows if row["method"].endswith(end)] for end in (", own token in M", "not in M")
    )
    return (
        f"{text}\n\nIn turns: {summary(turns)}. In parallel: {summary(own)} if M counts the target's own token, "
        f"{summary(other)} if it does not."
    )


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
    return [
        *(
            Setting("ParallelVLM", one.shapes, "l40s", *figures_of(name)["SpecVLM"], one.target_ms, one.draft_ms[1])
            for name, one in TIMES.items()
        ),
        # 256 tokens of LLaVA-OneVision 72B take 87.0 s there.
        Setting("SpecVLM", ("llava-onevision-72b", "7B"), "a100", acceptance.SPECVLM_TREE, 2.68, 1e3 * 87.0 / 256),
        Setting("SpecVLM", ("qwen2.5-vl-32b", "7B"), "a100", acceptance.SPECVLM_QWEN_TREE, 2.05),
    ]


def roofline_rows() -> list[dict[str, Any]]:
    """Return what the roofline says of published settings: on one card after the other, and on eight ranks."""
    rows = []
    for one in settings():
        target = planning.target_shape(one.shapes[0])
        draft = planning.draft_shape(one.shapes[1], target)
        agreement = planning.default_agreement(target.family, 0.9, draft is target)
        row: dict[str, Any] = {"setting": one, "target": target.name, "draft": one.shapes[1], "gpu": one.gpu}
        for words, ranks in (("one", 1), ("eight", 8)):
            place = planning.Placement(planning.GPUS[one.gpu], ranks)
            # A draft that eight ranks cannot share stands on one.
            own = place if draft.is_shared_by(ranks) else planning.Placement(place.gpu, 1)
            seen = 0.1 * FRAMES_TOKENS + 512
            decode_s, verify_s = (
                planning.forward_seconds(target, place, 1, rows, FRAMES_TOKENS + 512) + place.assumed.step_s
                for rows in (1, 26)
            )
            draft_s = planning.forward_seconds(draft, own, 1, 1, seen)
            spent = (decode_s, TREE_FORWARDS * draft_s, verify_s, place.assumed.speculation_s)
            row[words] = {
                "target_ms": 1e3 * decode_s,
                "draft_ms": 1e3 * draft_s,
                "with_length": planning.speedup(one.length, *spent),
                "throughout": planning.speedup(agreement.tree_length(), *spent),
            }
        rows.append(row)
    return rows


def roofline() -> str:
    """Return the table of the roofline beside the papers."""
    rows = roofline_rows()
    text = table(
        "paper, pair | 8 x | T_t, T_d, ms (published) | one card at a time, ms (modelled) | "
        "eight ranks, ms (modelled) | tau (published) | speed-up (published) | one card at a time (modelled) | "
        "eight ranks (modelled) | with the planner's own tau (modelled)",
        "{setting.paper}, {target} with {draft} | {gpu} | {setting.target_ms:.4g}, {setting.draft_ms:.4g} | "
        "{one[target_ms]:.1f}, {one[draft_ms]:.1f} | {eight[target_ms]:.1f}, {eight[draft_ms]:.1f} | "
        "{setting.length:.2f} | {setting.speedup:.2f} | {one[with_length]:.2f} | {eight[with_length]:.2f} | "
        "{one[throughout]:.2f}",
        rows,
        words=2,
    )
    errors = [row["one"]["with_length"] / row["setting"].speedup - 1 for row in rows]
    return f"{text}\n\nOne card at a time, published tau: {summary(errors)}."


# ---- measured on the CPU engine --------------------------------------------------------------------------------------

# By result: the methods that its rows are taken of, None for all. Adaptive trees have no fixed number of forwards, a
# target that drafts for itself is no draft of an inflated pair, and four methods are in a longer race.
MEASURED: dict[str, tuple[str, ...] | None] = {
    "R14-parallel": None,
    "parallel-table": None,
    "paper-qwen2.5-vl-inflated": ("SD-tree", "SD-Rand", "SpecVLM", "OnSD"),
    "paper-qwen2.5-vl-inflated-race": None,
}
TREE = "tree-static"


def measured_rows() -> list[dict[str, Any]]:
    """Return the rows of inflated pairs that draft, each with what its own fields say of acceptance and answers."""
    found = []
    for result, methods in MEASURED.items():
        rates: dict[float, float] = {}
        for row in read(result)["rows"]:
            if row["mode"] == "vanilla" or row["speedup"] is None:
                continue
            answers = row["requests"] * row["rounds"]
            row["result"], row["answers"] = result, answers
            row["answer"] = round((row["output_tokens"] - answers) / answers)
            row["forwards"] = TREE_FORWARDS if row["drafting"] == TREE else row["num_speculative_tokens"]
            if row["method"] in ("sequential", "SD-chain"):
                rates[row["inflate"]] = planning.rate_of_chain(row["acceptance_length"], row["forwards"])
            row["rate"] = rates[row["inflate"]]  # of the chain beside it: the same pair, pruner and prompts
            if methods is None or row["method"] in methods:
                found.append(row)
    return found


def kind_of(row: Row) -> str:
    """Return which rows have the same rest of a step: chains, trees, streams."""
    return "parallel" if row["mode"] == "parallel" else row["drafting"]


def length_of(row: Row) -> float:
    """Return tau over answers that end: the row's own length, less what its last step said past the end.

    A tree's law is not recorded: it is taken for the chain of its depth that has its length.
    """
    depth = TREE_FORWARDS if row["drafting"] == TREE else row["num_speculative_tokens"]
    rate = planning.rate_of_chain(row["acceptance_length"], depth)
    return planning.answer_length(Agreement((rate,)).chain_emits(row["forwards"]), row["answer"])


def rest_of(row: Row) -> float:
    """Return what a row's step takes beside T_t and its draft forwards, in ms."""
    return row["t_step_ms"] - row["t_target_ms"] - row["forwards"] * row["t_draft_ms"]


def levels_of(row: Row) -> list[float]:
    """Return a row's levels in draft forwards and in target steps, in ms."""
    return [row["forwards"] * row["t_draft_ms"], row["forwards"] * row["t_target_ms"]]


def rest_from(others: Sequence[Row], row: Row) -> float:
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


def stream_costs(row: Row) -> tuple[float, float, float]:
    """Return what a parallel row's own times say.

    Returns:
        What a step with drafts takes more than T_t, in target steps; what a turn of the drafter takes more than a
        forward, and how long an answer waits for its drafter, in draft forwards.
    """
    forward = row["t_draft_ms"]
    decode_ms = 1e3 * (row["output_tokens"] - row["answers"]) / row["tokens_per_s"]
    startup_ms = row["late_drafts"] / row["answers"] * row["t_target_ms"]
    drafting_ms = decode_ms - row["answers"] * startup_ms  # while it waits it drafts nothing
    step = row["t_step_ms"] / row["t_target_ms"] - 1
    return step, drafting_ms / row["stream_tokens"] / forward - 1, startup_ms / forward


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
            of_run = [one for one in others if one["result"] == row["result"]]
            others = of_run if len(of_run) > 1 else others
            costs = [statistics.median(values) for values in zip(*map(stream_costs, others), strict=True)]
            full = streams(row, costs)
        else:
            times = (length_of(row), row["t_target_ms"], row["forwards"] * row["t_draft_ms"], row["t_target_ms"])
            bare = planning.speedup(*times)
            full = planning.speedup(*times, overhead=rest_from(others, row))
        found.append(row | {"bare": bare, "full": full, "error": full / row["speedup"] - 1})
    return found


def streams(row: Row, costs: Sequence[float]) -> float:
    """Return the speed-up of a parallel row by following its streams; `costs` as `stream_costs` returns them."""
    target, forward = row["t_target_ms"], row["t_draft_ms"]
    step, turn, startup = target * costs[0], forward * costs[1], forward * costs[2]
    window = planning.window_of(target + step, forward, row["acceptance_rate"], row["num_speculative_tokens"])
    times = planning.StreamTimes(lambda drafts: target + step * (drafts > 0), forward + turn, startup)
    run = planning.run_streams(Agreement((row["rate"],)), window, times, answers=400, answer=row["answer"])
    return run.speedup(target)


def measured() -> str:
    """Return the table of measured rows."""
    rows = checked_rows()
    names = {"sequential": "chain, in turns", "ParallelVLM": "in parallel"}
    text = table(
        "rows | method | K | T_t, ms (measured) | T_d, ms (measured) | tokens a step (measured) | "
        "T_t, T_d, tau only (modelled) | with the rest of a step from the other rows (modelled) | "
        "speed-up, 20 % to 80 % (measured) | error",
        "[{result}](results/{result}.json), {target_layers} layers appended | {name} | {num_speculative_tokens} | "
        "{t_target_ms:.2f} | {t_draft_ms:.3f} | {acceptance_length:.2f} | {bare:.2f} | {full:.2f} | "
        "{speedup:.2f} ({speedup_p20:.2f} to {speedup_p80:.2f}) | {error:+.1f%}",
        [row | {"name": names.get(row["method"], row["method"])} for row in rows],
        words=2,
    )
    bare = [row["bare"] / row["speedup"] - 1 for row in rows]
    full = [row["error"] for row in rows]
    within = sum(abs(error) < 0.05 for error in full)
    return (
        f"{text}\n\nWith the rest from the other rows: {summary(full)}; {within} of {len(rows)} rows are within 5 %. "
        f"From T_t, T_d and tau alone: {summary(bare)}."
    )


# ---- acceptance of one length from that of another -------------------------------------------------------------------


def length_rows() -> list[dict[str, Any]]:
    """Return R11's lengths at K = 5 and of the static tree beside what those at K = 1 let expect."""
    found = []
    for family, calibration in read("R11")["calibrations"].items():
        costs = {(one["batch_size"], one["shape"], one["num_speculative_tokens"]): one for one in calibration["costs"]}
        batch = max(size for size, *_ in costs)  # the most requests, so the most steps
        rate = costs[batch, "chain", 1]["acceptance_length"] - 1
        agreement = Agreement((rate,), planning.RUNNER_UP)
        for words, plan, modelled in (
            ("chain of 5", ("chain", 5), agreement.chain_length(5)),
            ("static tree", (TREE, 25), agreement.tree_length()),
        ):
            real = costs[batch, *plan]["acceptance_length"]
            row = {"family": family, "drafts": words, "rate": rate, "modelled": modelled, "real": real}
            found.append(row | {"error": modelled / real - 1})
    return found


def lengths() -> str:
    """Return the table of lengths."""
    return table(
        "pair | p, at K = 1 (measured) | drafts | tokens a step (modelled) | tokens a step (measured) | error",
        "`{family}` | {rate:.3f} | {drafts} | {modelled:.2f} | {real:.2f} | {error:+.1f%}",
        length_rows(),
        words=(0, 2),
    )


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
    "published": published,
    "roofline": roofline,
    "measured": measured,
    "lengths": lengths,
    "fits": fits,
}
