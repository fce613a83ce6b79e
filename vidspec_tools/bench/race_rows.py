"""What the turns of `vidspec bench parallel` come to: a row for each contender; no engine."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vidspec_tools.bench.acceptance import identical_frac
from vidspec_tools.bench.methods import STOCK
from vidspec_tools.bench.ratios import draft_ms
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import summarize

if TYPE_CHECKING:
    from vidspec_tools.bench.parallel import Contender, Course, Race

SPREAD = ("p20", "p80")
# Figures that every row has with their spread over rounds.
SPREADING = ("speedup", "tokens_per_s", "ttft_s")


@dataclass(frozen=True)
class Turn:
    """One request that one engine answered alone; see `session_job`'s `clock`, and of `events` its `timeline`."""

    token_ids: list[int]
    start_s: float
    ttft_s: float
    decode_s: float
    step_s: list[float]
    verified: list[list[int]]
    metrics: dict[str, int] | None
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def num_streams(self) -> int:
        """Streams of drafts that the answer took: one ends where a draft is rejected, the last one with the answer.

        A window that stands whole ends its stream, too, if the target's own token behind it is not the stream's; the
        stream is then found stale before anything else of it is verified.
        """
        found, is_new = 1, True
        for drafted, accepted, stale in self.verified:
            if accepted < drafted or (stale and not is_new):
                found += 1
                is_new = True
            elif drafted:
                is_new = False
        return found

    @property
    def num_decoded(self) -> int:
        """Tokens that came in `decode_s`: all but the first."""
        return len(self.token_ids) - 1


def make_rows(
    race: "Race", course: "Course", turns: "Mapping[Contender, Sequence[Sequence[Turn]]]"
) -> list[dict[str, Any]]:
    """Return a row for each contender.

    Args:
        race: What was measured.
        course: The pair that it was measured on.
        turns: `[rounds][requests]` of each; the first is vanilla.
    """
    vanilla = next(iter(turns.values()))
    target_ms = 1e3 * statistics.median(seconds for one in flat(vanilla) for seconds in one.step_s)
    rows = []
    for contender, rounds in turns.items():
        spec = contender.spec or {}
        rows.append(
            {
                "family": course.family,
                "inflate": course.ratio,
                "label": course.label,
                "mode": contender.mode,
                "method": contender.method,
                "drafting": spec.get("drafting", "chain") if spec else None,
                "pruner": spec.get("pruner"),
                "prune_ratio": contender.knobs(race)["prune_ratio"] if spec and contender.mode != STOCK else None,
                "num_speculative_tokens": spec_tokens(spec),
                **figures(rounds, vanilla),
                **speculation(rounds, contender),
                "t_target_ms": target_ms,
                **ratio_of(target_ms, rounds),
                **{name: getattr(race, name) for name in ("requests", "rounds", "max_tokens", "temperature", "seed")},
                "knobs": race.knobs,
                **{name: getattr(course, name) for name in ("target_layers", "draft_layers")},
                **race.further(course, contender, rounds),
            }
        )
    return rows


def spec_tokens(spec: Mapping[str, Any]) -> int | None:
    """Return K of a contender, None for vanilla."""
    from vllm_vidspec.tools import pairs

    if not spec:
        return None
    return spec.get("num_speculative_tokens") or pairs.num_speculative_tokens(spec.get("drafting", "chain"))


def flat(rounds: Sequence[Sequence[Turn]]) -> list[Turn]:
    """Return the turns of all rounds."""
    return [turn for one in rounds for turn in one]


def figures(rounds: Sequence[Sequence[Turn]], vanilla: Sequence[Sequence[Turn]]) -> dict[str, Any]:
    """Return what any engine has: speed, beside vanilla in the same round, and whether the answers are vanilla's."""
    found: dict[str, Any] = {}
    by_round = {
        "speedup": [speed(ours) / speed(theirs) for ours, theirs in zip(rounds, vanilla, strict=True)],
        "tokens_per_s": [speed(one) for one in rounds],
        "ttft_s": [statistics.median(turn.ttft_s for turn in one) for one in rounds],
    }
    for name in SPREADING:
        found[name] = statistics.median(by_round[name])
        found |= {f"{name}_{p}": value for p, value in zip(SPREAD, spread(by_round[name]), strict=True)}
    ours, theirs = flat(rounds), flat(vanilla)
    return found | {
        "identical_frac": identical_frac([one.token_ids for one in ours], [one.token_ids for one in theirs]),
        "output_tokens": sum(len(turn.token_ids) for turn in ours),
        "forwards": statistics.mean(len(turn.step_s) for turn in ours),
        "t_step_ms": 1e3 * statistics.median(seconds for turn in ours for seconds in turn.step_s),
    }


def speed(turns: Sequence[Turn]) -> float:
    """Return the tokens per second of some turns, from each one's first token to its last.

    Raises:
        VidSpecError: No answer has a second token.
    """
    seconds = sum(turn.decode_s for turn in turns)
    if not seconds:
        raise VidSpecError("no answer has a second token: there is no decode to measure")
    return sum(turn.num_decoded for turn in turns) / seconds


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the 20th and the 80th percentile."""
    if len(values) == 1:
        return values[0], values[0]
    cuts = statistics.quantiles(values, n=5, method="inclusive")
    return cuts[0], cuts[-1]


def gained(rounds: Sequence[Sequence[Turn]]) -> dict[str, int] | None:
    """Return our counters' gain over all turns, None for vanilla."""
    counted = [turn.metrics for turn in flat(rounds)]
    if any(one is None for one in counted):
        return None
    return {name: sum(one[name] for one in counted if one) for name in (counted[0] or {})}


def speculation(rounds: Sequence[Sequence[Turn]], contender: "Contender") -> dict[str, Any]:
    """Return what became of the drafts; None for vanilla, and where a mode has no such thing.

    Returns:
        `acceptance_length` of a verify step; `late_frac`, the share of decode steps whose stream was too short;
        `stream_length`, tokens per stream: a stream ends where a draft is rejected, or with the answer; and counters.
    """
    names = ("late_drafts", "stale_streams", "stream_tokens", "drafter_restarts")
    empty = ("acceptance_length", "acceptance_rate", "late_frac", "stream_length", "num_drafts", *names)
    found: dict[str, Any] = dict.fromkeys(empty)
    counters = gained(rounds)
    if counters is None:
        return found
    turns = flat(rounds)
    num_decoded, num_steps = sum(turn.num_decoded for turn in turns), sum(len(turn.step_s) for turn in turns)
    summary = summarize(counters)
    found |= {name: summary[name] for name in ("acceptance_length", "acceptance_rate", "num_drafts")}
    if contender.mode == "parallel":
        found |= {name: counters[name] for name in names}
        found["late_frac"] = counters["late_drafts"] / num_steps if num_steps else None
    # No tree stands whole, and vLLM's own counters are not read at each step.
    if (contender.spec or {}).get("drafting", "chain") == "chain" and contender.mode != STOCK:
        found["stream_length"] = num_decoded / sum(turn.num_streams for turn in turns)
    return found


def ratio_of(target_ms: float, rounds: Sequence[Sequence[Turn]]) -> dict[str, float | None]:
    """Return the draft's time of a forward, the median of its requests', and the target's of a step divided by it."""
    times = [found for turn in flat(rounds) if turn.metrics and (found := draft_ms(turn.metrics)) is not None]
    if not times:
        return {"t_draft_ms": None, "ratio": None}
    draft = statistics.median(times)
    return {"t_draft_ms": draft, "ratio": target_ms / draft}
