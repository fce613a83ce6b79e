"""`vidspec bench speed`: where the time of one setting's answers goes, in trials with vanilla on the same requests."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from vidspec_tools.bench import parallel
from vidspec_tools.bench.methods import PARALLEL
from vidspec_tools.bench.rows import flat, gained, middle, speed
from vidspec_tools.bench.trials import Benchmark, Trial, Variant, Workload

# What a request's time is made of. The target's are what its worker notes of steps, the others counters. What the
# target's vision tower, scoring and compaction take has no clock of its own: it is inside target_prefill and verify.
PHASES = ("target_prefill", "guidance", "draft_prefill", "draft_decode", "verify", "relevance", "rest")
_COUNTED = ("guidance", "draft_prefill", "draft_decode", "relevance")
_DRAFTERS = ("draft_prefill", "draft_decode")

check, run = parallel.check, parallel.run


@dataclass(frozen=True)
class SpeedBenchmark(Benchmark):
    """What to measure: vanilla and one setting, whose trials are watched."""

    is_watched: ClassVar[bool] = True

    def further(self, workload: Workload, variant: Variant, rounds: Sequence[Sequence[Trial]]) -> dict[str, Any]:
        """Return the columns of a row that only this benchmark has: times between tokens, and by phase."""
        times = middle("inter_token_ms", [1e3 / speed(one) for one in rounds])
        steps = sorted(1e3 * seconds for trial in flat(rounds) for seconds in trial.step_s)
        times["t_step_ms_p99"] = steps[round(0.99 * (len(steps) - 1))]
        return {"scorer": (variant.spec or {}).get("scorer"), **times, **phases(rounds, variant)}


def phases(rounds: Sequence[Sequence[Trial]], variant: Variant) -> dict[str, float | None]:
    """Return the mean time of a request and what it is made of, in ms; vanilla's is not told apart.

    A drafter in a process of its own works beside the target: its time is shown, and no part of the sum.
    """
    trials = flat(rounds)
    total = 1e3 * statistics.mean(trial.ttft_s + trial.decode_s for trial in trials)
    names = [f"{name}_ms" for name in PHASES]
    counters = gained(rounds)
    if counters is None:
        return {"request_ms": total, **dict.fromkeys(names)}
    found = {name: 1e-3 * counters[f"{name}_us"] / len(trials) for name in _COUNTED}
    for name, kind, inside in (("target_prefill", "prefill", "guidance"), ("verify", "decode", "relevance")):
        spans = sum(
            event["end_s"] - event["start_s"]
            for trial in trials
            for event in trial.events
            if (event["lane"], event["kind"]) == ("target", kind) and event["end_s"] > trial.start_s
        )
        found[name] = 1e3 * spans / len(trials) - found[inside]
    beside = _DRAFTERS if variant.mode == PARALLEL else ()
    found["rest"] = total - sum(value for name, value in found.items() if name not in beside)
    return {"request_ms": total, **{f"{name}_ms": found[name] for name in PHASES}}
