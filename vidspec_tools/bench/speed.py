"""`vidspec bench speed`: where the time of one setting's answers goes, in turns with vanilla on the same requests."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from vidspec_tools.bench import parallel
from vidspec_tools.bench.methods import PARALLEL, SEQUENTIAL, WINDOW, parallel_window
from vidspec_tools.bench.parallel import Contender, Course, Race
from vidspec_tools.bench.race_rows import Turn, flat, gained, speed, spread

SETTING = "vidspec"  # what the row beside vanilla's is called
# What a request's time is made of. The target's are what its worker notes of steps, the others counters. What the
# target's vision tower, scoring and compaction take has no clock of its own: it is inside target_prefill and verify.
PHASES = ("target_prefill", "guidance", "draft_prefill", "draft_decode", "verify", "relevance", "rest")
_COUNTED = ("guidance", "draft_prefill", "draft_decode", "relevance")
_DRAFTERS = ("draft_prefill", "draft_decode")


@dataclass(frozen=True)
class SpeedRace(Race):
    """What to measure: vanilla and one setting.

    Attributes:
        drafting: The draft's shape.
        scorer: Which drafts stand.
        parallel: Whether the drafter has a process of its own.
    """

    own_options: ClassVar[tuple[str, ...]] = (*Race.own_options, "scorer")
    is_watched: ClassVar[bool] = True

    pruner: str = "specvlm"
    drafting: str = "chain"
    scorer: str = "strict"
    parallel: bool = False

    def contenders(self, ratio: float) -> list[Contender]:
        """Return the setting."""
        spec = {name: getattr(self, name) for name in ("pruner", "prune_ratio", "drafting", "scorer")}
        tokens = self.num_speculative_tokens
        if tokens is None and self.drafting == "chain":
            tokens = parallel_window(ratio) if self.parallel else WINDOW
        if tokens is not None:
            spec["num_speculative_tokens"] = tokens
        return [Contender(SETTING, PARALLEL if self.parallel else SEQUENTIAL, spec)]

    def further(self, course: Course, contender: Contender, rounds: Sequence[Sequence[Turn]]) -> dict[str, Any]:
        """Return the columns of a row that only this benchmark has: times between tokens, and by phase."""
        per_token = [1e3 / speed(one) for one in rounds]
        times = {"inter_token_ms": statistics.median(per_token)}
        times |= dict(zip(("inter_token_ms_p20", "inter_token_ms_p80"), spread(per_token), strict=True))
        steps = sorted(1e3 * seconds for turn in flat(rounds) for seconds in turn.step_s)
        times["t_step_ms_p99"] = steps[round(0.99 * (len(steps) - 1))]
        return {"scorer": (contender.spec or {}).get("scorer"), **times, **phases(rounds, contender)}


def phases(rounds: Sequence[Sequence[Turn]], contender: Contender) -> dict[str, float | None]:
    """Return the mean time of a request and what it is made of, in ms; vanilla's is not told apart.

    A drafter in a process of its own works beside the target: its time is shown, and no part of the sum.
    """
    turns = flat(rounds)
    total = 1e3 * statistics.mean(turn.ttft_s + turn.decode_s for turn in turns)
    names = [f"{name}_ms" for name in PHASES]
    counters = gained(rounds)
    if counters is None:
        return {"request_ms": total, **dict.fromkeys(names)}
    found = {name: 1e-3 * counters[f"{name}_us"] / len(turns) for name in _COUNTED}
    for name, kind, inside in (("target_prefill", "prefill", "guidance"), ("verify", "decode", "relevance")):
        spans = sum(
            event["end_s"] - event["start_s"]
            for turn in turns
            for event in turn.events
            if (event["lane"], event["kind"]) == ("target", kind) and event["end_s"] > turn.start_s
        )
        found[name] = 1e3 * spans / len(turns) - found[inside]
    beside = _DRAFTERS if contender.mode == PARALLEL else ()
    found["rest"] = total - sum(value for name, value in found.items() if name not in beside)
    return {"request_ms": total, **{f"{name}_ms": found[name] for name in PHASES}}


check, run = parallel.check, parallel.run
