"""What the generated tables of README.md and docs/ say, from recorded results; needs neither vLLM nor torch."""

import functools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_vidspec import assets
from vllm_vidspec.tools.tables import Row, by, fill, markdown

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"

Result = dict[str, Any]
Requests = list[Row]  # of one setting: `accepted`, `drafts`, `is_identical` of each


@functools.cache
def read(name: str) -> Result:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: str, line: str, rows: Iterable[Row], words: int | Collection[int] = 1) -> str:
    """Return the Markdown table of rows; `line` is the template of one, and " | " parts columns (see `fill`)."""
    templates = line.split(" | ")
    cells = ([fill(template, row).replace("|", "\\|") for template in templates] for row in rows)
    return markdown(head.split(" | "), cells, words)


def counts(numbers: Mapping[str, Any], template: str = "{name} {count}") -> str:
    return ", ".join(template.format(name=name, count=count) for name, count in numbers.items())


def origin(result: Result) -> str:
    """Return one line that says where a result comes from."""
    found = result["provenance"]
    commit = (found["git_sha"] or "no commit")[:10] + (" with local changes" if found["git_dirty"] else "")
    where = found["device"] if found["device"] != "cpu" else f"{found['cpu']}, {found['num_cpus']} cores"
    return f"{found['date'][:10]}, commit {commit}, vLLM {found['versions'].get('vllm')}, {where}."


# ---- tokens per verify step, with 95 % intervals over requests -------------------------------------------------------

PRUNED = 0.9  # the share dropped of the tables
LONG = "long-videos"  # the result whose lengths and speeds README.md shows
NAMES = dict(zip(assets.LONG_PAIRS, (LONG, f"{LONG}-llava"), strict=True))  # of results, by pair
NAMES |= {family: f"pruners-{family}" for family in (*assets.FAMILIES, assets.PLAIN)}
_DRAWS = 4000
_PRUNERS = ("specvlm", "specvlm:stride", "uniform", "uniform:stride", "random", "uv")
# Heading -> two settings whose difference it shows.
_DIFFERENCES = {
    "`specvlm` less `random`": ("specvlm {}", "random {}"),
    "`specvlm` less `uniform`": ("specvlm {}", "uniform {}"),
    "lattice less stride, `specvlm`": ("specvlm {}", "specvlm:stride {}"),
    "lattice less stride, `uniform`": ("uniform {}", "uniform:stride {}"),
    "`original` less `compacted`, `specvlm`": ("specvlm {}", "specvlm {} compacted"),
    "`original` less `compacted`, `uniform`": ("uniform {}", "uniform {} compacted"),
}


def mean_length(requests: Requests) -> float:
    """Return output tokens per verify step."""
    drafts = sum(one["drafts"] for one in requests)
    return 1 + sum(one["accepted"] for one in requests) / drafts if drafts else float("nan")


def interval(requests: Requests, less: Requests | None = None) -> tuple[float, float]:
    """Return the 95 % interval of tokens per verify step, or of the difference from the same requests in `less`.

    By bootstrap over requests, which are drawn in pairs.
    """
    drawn = np.random.default_rng(0).integers(0, len(requests), (_DRAWS, len(requests)))

    def lengths(rows: Requests) -> np.ndarray:
        accepted, drafts = (np.array([row[name] for row in rows])[drawn].sum(1) for name in ("accepted", "drafts"))
        return 1 + accepted / drafts

    low, high = np.quantile(lengths(requests) - (0 if less is None else lengths(less)), (0.025, 0.975))
    return float(low), float(high)


def with_interval(requests: Requests | None) -> str:
    """Return tokens per verify step and half of their 95 % interval, a dash where there are no requests."""
    if requests is None:
        return "-"
    low, high = interval(requests)
    return f"{mean_length(requests):.2f} ± {(high - low) / 2:.2f}"


def difference(requests: Requests | None, others: Requests | None) -> str:
    """Return the interval of a difference, bold where 0 is not in it."""
    if requests is None or others is None:
        return "-"
    low, high = interval(requests, others)
    text = f"{low:+.2f} to {high:+.2f}"
    return f"**{text}**" if low > 0 or high < 0 else text


def _identical(settings: Mapping[str, Requests]) -> str:
    same = [one["is_identical"] for requests in settings.values() for one in requests]
    return f"{sum(same):,} of {len(same):,}"


def _by_tokens(name: str) -> dict[int, dict[str, Requests]]:
    """Return requests by video tokens and setting, where today's pruners were measured."""
    found = read(name)["acceptance"].items()
    return {int(t): of for t, of in sorted(found, key=lambda one: int(one[0])) if f"specvlm {PRUNED:g}" in of}


def _points() -> Iterator[tuple[list[str], dict[str, Requests]]]:
    """Yield each pair's lengths: the first cells of a row, and requests by setting."""
    for family, name in _recorded().items():
        for tokens, settings in _by_tokens(name).items():
            yield [f"`{family}`", f"{tokens:,}"], settings


def _recorded() -> dict[str, str]:
    return {family: name for family, name in NAMES.items() if (RESULTS / f"{name}.json").exists()}


def pruners() -> str:
    """Return tokens per verify step of every pair and length, by pruner."""
    names = {"whole": "whole video", **{f"{one} {PRUNED:g}": f"`{one}`" for one in _PRUNERS}, "blind": "no video"}
    rows = [
        [*first, str(len(of["whole"])), *(with_interval(of.get(name)) for name in names), _identical(of)]
        for first, of in _points()
    ]
    origins = "  \n".join(dict.fromkeys(origin(read(name)) for name in _recorded().values()))
    head = ["pair", "video tokens", "requests", *names.values(), "identical to vanilla"]
    return f"{markdown(head, rows)}\n\n{origins}"


def pruner_differences() -> str:
    pairs = [[name.format(f"{PRUNED:g}") for name in two] for two in _DIFFERENCES.values()]
    rows = [[*first, *(difference(of.get(one), of.get(other)) for one, other in pairs)] for first, of in _points()]
    return markdown(["pair", "video tokens", *_DIFFERENCES], rows)


def long_videos() -> str:
    """Return what README.md shows: tokens per step by length, and decode speed over vanilla where it was measured."""
    found, timed = _by_tokens(LONG), read(LONG)["speed"]

    def decoded(pads: int, name: str) -> list[str]:
        points = [timed.get(f"{tokens} {pads}", {"engines": {}})["engines"].get(name, {}) for tokens in found]
        return [fill("{speed:x}", {"speed": point.get("decode_over_vanilla")}) for point in points]

    def accepted(name: str) -> list[str]:
        return [with_interval(settings[name]) for settings in found.values()]

    pruned = "draft sees 10 %, chosen by the target's attention (`specvlm`)"
    rows = [
        ["tokens per verify step, draft sees the whole video", *accepted("whole")],
        [f"the same, {pruned}", *accepted(f"specvlm {PRUNED:g}")],
        ["the same, draft sees 10 %, evenly spread (`uniform`)", *accepted(f"uniform {PRUNED:g}")],
        ["the same, draft sees no video", *accepted("blind")],
        ["decode speed over vanilla, target padded to nine drafts, draft sees the whole video", *decoded(9, "whole")],
        ["the same, draft sees 10 %", *decoded(9, "specvlm")],
        ["the same, the pair as it is, draft sees 10 %", *decoded(0, "specvlm")],
        ["answers identical to vanilla vLLM's", *map(_identical, found.values())],
    ]
    return markdown(["video tokens", *(f"{tokens:,}" for tokens in found)], rows)


def wall_clock() -> str:
    """Return decode speed of short videos: two lossless methods, and a loose one."""
    rows = {row["method"]: row for row in read("paper-qwen2.5-vl-inflated-race")["rows"]}
    words = {
        "SD-chain": "5-token chain, sequential",
        "ParallelVLM": "in parallel (`parallel`)",
        "LVSpec": "10-token chain, `loose`",
    }
    return table(
        f"target {rows['SD-chain']['inflate']:g} times the draft | decode speed over vanilla | identical outputs",
        "{words} | {speedup:x} ({speedup_p20:.2f} to {speedup_p80:.2f}) | {identical_frac:%}",
        [rows[method] | {"words": text} for method, text in words.items()],
    )


# ---- a full server ---------------------------------------------------------------------------------------------------

_T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's, of 1 to 9 degrees of freedom


def ratio_with_interval(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the mean ratio of rounds that were played in turn, and its 95 % interval, of logarithms."""
    logs = np.log(np.array(ours) / np.array(theirs))
    if len(logs) < 2:
        return f"{np.exp(logs.mean()):.2f}"
    half = _T_975[min(len(logs) - 2, 8)] * logs.std(ddof=1) / np.sqrt(len(logs))
    return "{:.2f} ({:.2f} to {:.2f})".format(*np.exp(logs.mean() + half * np.array([0, -1, 1])))


def full_server() -> str:
    """Return each cell's figures of vanilla, medians of rounds, and ours over them."""
    result = read("R19")
    figures = {
        "tokens/s": "tokens_per_s",
        "first token, p50": "ttft_p50_ms",
        "p99": "ttft_p99_ms",
        "a token": "tpot_ms",
    }
    lines = []
    for cell, rows in by(result["rows"], "load", "videos", "answer_tokens", "clients").items():
        of = {
            server: {row["round"]: row for row in rows if row["server"] == server} for server in ("vanilla", "vidspec")
        }
        rounds = sorted(of["vanilla"].keys() & of["vidspec"].keys())
        if not rounds:  # of a run that was cut
            continue
        load, videos, answer, clients = cell
        line = [load, videos, str(answer), str(clients)]
        seen = [
            np.median([of["vanilla"][one][name] for one in rounds]) for name in ("answers_per_s", *figures.values())
        ]
        line.append("{:.2f}, {:.0f}; {:,.0f}, {:,.0f}; {:.1f}".format(*seen))
        for name in figures.values():
            line.append(ratio_with_interval(*([of[s][one][name] for one in rounds] for s in ("vidspec", "vanilla"))))
        lengths = [length for one in rounds if (length := of["vidspec"][one]["acceptance_length"])]
        lines.append([*line, f"{np.mean(lengths):.2f}" if lengths else "-"])
    vanilla = "vanilla: answers/s, tokens/s; first token p50, p99; a token, ms"
    head = ["requests come", "videos", "answer", "clients", vanilla, *(f"ours over vanilla: {one}" for one in figures)]
    return f"{markdown([*head, 'tokens a verify step'], lines, words=2)}\n\n{origin(result)}"


def eyes() -> str:
    """Return tokens per verify step by whose tower the draft sees through, and the share of the own tower's."""
    result = read("R20-eyes")
    head = ["pair", "own tower"]
    lines = []
    for (family,), rows in by(result["rows"], "family").items():
        line = [family]
        for row in rows:
            share = "" if row["vision"] == "own tower" else f" ({row['of_own']:.0%})"
            line.append(f"{row['tokens_per_step']:.2f} ± {row['ci95']:.2f}{share}")
        lines.append(line)
        head[2:] = [f"{row['vision']}, {row['videos']} videos" for row in rows[1:-1]] + [rows[-1]["vision"]]
    return f"{markdown(head, lines)}\n\n{origin(result)}"


# ---- reliability and coexistence -------------------------------------------------------------------------------------


def _quarters(readings: list[int]) -> str:
    """Return what a list says at its begin, its quarters and its end."""
    last = len(readings) - 1
    return ", ".join(str(readings[round(part * last / 4)]) for part in range(5)) if readings else "-"


def soak() -> str:
    result = read("reliability-soak")
    made, traits = result["provenance"], dict(result["traits"])
    sampled = traits.pop("sampled", 0)
    configs = [
        row
        | {"memory": _quarters(row["rss_mb_over_time"]), "beside": _quarters(row["vanilla_rss_mb_over_time"])}
        | {"accepted": row["counters"]["accepted_tokens"] / max(1, row["counters"]["drafts"])}
        for row in result["configs"]
    ]
    totals = {
        "wrong answers": "wrong_answers",
        "errors that were not expected": "errors_unexpected",
        "draft KV blocks held when idle": "leaked_blocks",
        "stored states held when idle": "leaked_states",
    }
    parts = [
        f'`make soak SOAK_ARGS="--minutes {result["minutes"]:g}"` on {made["date"][:10]}, commit '
        f"`{made['git_sha'][:12]}`, vLLM {made['versions']['vllm']}, {made['cpu']}, {made['num_cpus']} cores; "
        f"{result['family']}, fp32, {result['concurrency']} clients at a time (measured).",
        f"{result['requests']} requests, {result['compared']} of them compared token by token with vanilla's "
        f"({sampled} sampled with a seed, the others greedy). By kind: {counts(result['kinds'])}. "
        f"With: {counts(traits)}.",
        markdown(["checked", "count"], [(words, str(result[name])) for words, name in totals.items()]),
        table(
            "configuration | requests | memory over its time, MB | vanilla's, MB | slope, MB a minute | vanilla's | "
            "preempted | accepted / drafts",
            "{config} | {requests} | {memory} | {beside} | {rss_slope_mb_per_min} | {vanilla_rss_slope_mb_per_min} | "
            "{preemptions} | {accepted:.2f}",
            configs,
        ),
    ]
    return "\n\n".join(parts)


def restarts() -> str:
    rows = read("reliability-restarts")["rows"]
    rows = [row | {"wrong": "" if row["is_right"] else "**not as it should be:** "} for row in rows]
    return table("what happens | what was seen (measured)", "{case} | {wrong}{seen}", rows, words=2)


def faults() -> str:
    rows = [
        row
        | {"counts": counts(row["counted"], "`{name}` {count}")}
        | {"after": "drafted for" if row["drafted_after"] else "**not drafted for**"}
        for row in read("reliability-faults")["rows"]
    ]
    head = "fault | answers as vanilla's | counted (measured) | requests after it"
    line = "{what} | {right} of {requests} | {counts} | {right_after} of 2 right, {after}"
    return table(head, line, rows, words=(0, 2, 3))


def auto() -> str:
    rows = [row | {"given": counts(row["requests_by_pruner"])} for row in read("auto-pruner")["rows"]]
    names = list(rows[0]["requests_by_pruner"])
    head = f"pair | guidance | auto | {' | '.join(names)} | auto over the best | given while it learned and after"
    fixed = " | ".join(f"{{{name}:.2f}}" for name in names)
    line = f"{{family}} | {{guidance}} | {{auto:.2f}} | {fixed} | {{share_of_best:%}} | {{given}}"
    return table(head, line, rows, words=(0, 1, len(names) + 4))


def coexistence() -> str:
    line = "{feature} | {setting} | {verdict} | {detail}"
    return table("feature | setting | what happens | seen", line, read("coexistence")["rows"], words=4)


SECTIONS: dict[str, Callable[[], str]] = {
    "figure": long_videos,
    "wall-clock": wall_clock,
    "pruners": pruners,
    "pruner-differences": pruner_differences,
    "full-server": full_server,
    "eyes": eyes,
    **{one.__name__: one for one in (soak, restarts, faults, auto, coexistence)},
}
