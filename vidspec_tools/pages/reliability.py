"""Sections of docs/reliability.md and docs/coexistence.md, from what was recorded."""

from collections.abc import Callable

from vidspec_tools.pages.tables import Result, counts, markdown, read, recorded, table


def quarters(readings: list[int]) -> str:
    """Return what a list says at its begin, its quarters and its end."""
    last = len(readings) - 1
    return ", ".join(str(readings[round(part * last / 4)]) for part in range(5)) if readings else "-"


def soak(result: Result) -> list[str]:
    made, traits = result["provenance"], dict(result["traits"])
    sampled = traits.pop("sampled", 0)
    configs = []
    for row in result["configs"]:
        accepted = f"{row['counters']['accepted_tokens'] / max(1, row['counters']['drafts']):.2f}"
        memory = {"memory": quarters(row["rss_mb_over_time"]), "beside": quarters(row["vanilla_rss_mb_over_time"])}
        configs.append(row | memory | {"accepted": accepted})
    answered = sum(row["answered"] for row in result["by_kind"].values())
    times = {**result["by_kind"], "all": result | {"answered": answered}}
    totals = {
        "wrong answers": "wrong_answers",
        "errors that were not expected": "errors_unexpected",
        "draft KV blocks held when idle": "leaked_blocks",
        "stored states held when idle": "leaked_states",
    }
    return [
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
            "{preemptions} | {accepted}",
            configs,
        ),
        table(
            "latency, s | answered | p50 | p95 | vanilla p50 | vanilla p95",
            "{name} | {answered} | {p50_s:.2f} | {p95_s:.2f} | {vanilla_p50_s:.2f} | {vanilla_p95_s:.2f}",
            [row | {"name": name} for name, row in times.items()],
        ),
    ]


def restarts(result: Result) -> list[str]:
    rows = [row | {"wrong": "" if row["is_right"] else "**not as it should be:** "} for row in result["rows"]]
    return [table("what happens | what was seen (measured)", "{case} | {wrong}{seen}", rows, words=2)]


def faults(result: Result) -> list[str]:
    rows = [
        row
        | {"counts": counts(row["counted"], "`{name}` {count}")}
        | {"after": "drafted for" if row["drafted_after"] else "**not drafted for**"}
        for row in result["rows"]
    ]
    head = "fault | answers as vanilla's | counted (measured) | requests after it"
    line = "{what} | {right} of {requests} | {counts} | {right_after} of 2 right, {after}"
    return [table(head, line, rows, words=(0, 2, 3))]


def auto(result: Result) -> list[str]:
    pruners = list(result["rows"][0]["requests_by_pruner"])
    fixed = " | ".join(f"{{{pruner}:.2f}}" for pruner in pruners)
    head = f"pair | guidance | auto | {' | '.join(pruners)} | auto over the best | given while it learned and after"
    line = f"{{family}} | {{guidance}} | {{auto:.2f}} | {fixed} | {{share_of_best:%}} | {{given}}"
    rows = [row | {"given": counts(row["requests_by_pruner"])} for row in result["rows"]]
    return [table(head, line, rows, words=(0, 1, len(pruners) + 4))]


def coexistence(result: Result) -> list[str]:
    line = "{feature} | {setting} | {verdict} | {detail}"
    return [table("feature | setting | what happens | seen", line, result["rows"], words=4)]


# Section -> its record in docs/results, and what writes it.
RECORDS: dict[str, tuple[str, Callable[[Result], list[str]]]] = {
    "soak": ("reliability-soak", soak),
    "restarts": ("reliability-restarts", restarts),
    "faults": ("reliability-faults", faults),
    "auto": ("auto-pruner", auto),
    "coexistence": ("coexistence", coexistence),
}


def sections() -> dict[str, Callable[[], str]]:
    return {
        name: lambda record=record, blocks=blocks: "\n\n".join(blocks(read(record)))  # type: ignore[misc]
        for name, (record, blocks) in RECORDS.items()
        if recorded(record)
    }
