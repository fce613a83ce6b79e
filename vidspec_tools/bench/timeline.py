"""`vidspec bench timeline`: what target and drafter do when, sequentially and in parallel, on the same requests."""

from dataclasses import dataclass
from typing import Any, ClassVar

from vidspec_tools.bench import parallel, trials
from vidspec_tools.bench.methods import VANILLA
from vidspec_tools.bench.rows import flat
from vidspec_tools.bench.trials import Benchmark
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools.progress import Report, silent
from vllm_vidspec.tools.provenance import provenance

LANES = ("target", "drafter")


@dataclass(frozen=True)
class TimelineBenchmark(Benchmark):
    """What to draw: one family, one ratio, one round; its modes from above."""

    is_watched: ClassVar[bool] = True


def check(benchmark: TimelineBenchmark) -> None:
    """Refuse a wrong value, in one line, before an engine starts."""
    parallel.check(benchmark)
    if VANILLA in benchmark.modes:
        raise VidSpecError("--modes: vanilla has no drafter to draw")


def run(benchmark: TimelineBenchmark, report: Report = silent) -> dict[str, Any]:
    """Let each mode answer the same requests in turn, and return what it did when.

    Returns:
        `family`, `inflate`, `label`, `modes` (by mode `method`, `num_speculative_tokens`, `token_ids` and `events`, a
        list for each request: `lane`, `kind`, `num_reqs`, `num_tokens`, and `start_s` and `end_s` from the moment when
        the request was handed in) and `provenance`.
    """
    check(benchmark)
    (family,), (ratio,) = benchmark.families, benchmark.inflate
    workload = parallel.workload_for(benchmark, family, ratio, report)
    answered, failures = parallel.run_variants(benchmark, workload, {}, benchmark.variants(ratio), report)
    if failures:
        raise VidSpecError(failures[0]["reason"])
    modes = {
        variant.mode: {
            "method": variant.method,
            "num_speculative_tokens": (variant.spec or {})["num_speculative_tokens"],
            "token_ids": [trial.token_ids for trial in flat(rounds)],
            "events": [from_start(trial.events, trial.start_s) for trial in flat(rounds)],
        }
        for variant, rounds in answered.items()
    }
    return {
        "family": family,
        "inflate": ratio,
        "label": workload.label,
        "modes": modes,
        "provenance": provenance() | {"cores": trials.cores()[:2]},
    }


def from_start(events: list[dict[str, Any]], start_s: float) -> list[dict[str, Any]]:
    """Return events in order, in seconds from `start_s`; what ended before is of an earlier request."""
    moved = [event | {name: event[name] - start_s for name in ("start_s", "end_s")} for event in events]
    return sorted((event for event in moved if event["end_s"] > 0), key=lambda event: event["start_s"])


def busy_s(events: list[dict[str, Any]], lane: str, begin_s: float = 0.0) -> float:
    """Return the time from `begin_s` on in which a lane works; waiting is no work, and nothing counts twice."""
    busy, reached = 0.0, begin_s
    for event in events:
        if event["lane"] == lane and event["kind"] != "wait" and event["end_s"] > reached:
            busy += event["end_s"] - max(event["start_s"], reached)
            reached = event["end_s"]
    return busy


def shares(events: list[dict[str, Any]]) -> dict[str, float]:
    """Return of one request's decode, from the target's first decode step on: its length, and how busy each lane was.

    Returns:
        `decode_s`, and by lane the share of it that was work.
    """
    decodes = [event for event in events if event["lane"] == "target" and event["kind"] == "decode"]
    if not decodes:
        return {"decode_s": 0.0, **dict.fromkeys(LANES, 0.0)}
    begin, end = decodes[0]["start_s"], decodes[-1]["end_s"]
    inside = [event for event in events if event["start_s"] < end]
    inside = [event | {"end_s": min(event["end_s"], end)} for event in inside]
    return {"decode_s": end - begin} | {lane: busy_s(inside, lane, begin) / (end - begin) for lane in LANES}
