"""What the soak's answers and readings mean: pure functions, so that planted faults can be put before them."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MB = 1e6
LEAST_MIN = 8.0  # minutes of traffic in which a slope is judged
SAME, COMPLETE, REFUSED = "same", "complete", "refused"  # what an answer is held to


@dataclass
class Choice:
    """One of a reply's answers; a chosen token's log-probability where they were asked for."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Reply:
    status: int = 0  # Of HTTP; 0 where the connection failed, 500 where a stream carried an error
    error: str = ""  # The server's or the client library's message
    choices: dict[int, Choice] = field(default_factory=dict)  # By index
    seconds: float = 0.0  # From sending to the last byte
    is_cut: bool = False  # The client closed the connection in mid-answer
    resent: int = 0  # How often it sent the request again, after a 500


# A chosen token's log-probability in two batches of other shapes, fp32.
_LOGPROB_TOLERANCE = 1e-3


def verdict(rule: str, num_choices: int, max_tokens: int, vanilla: Reply, ours: Reply) -> tuple[str, str]:
    """Judge both servers' replies to one request for `num_choices` answers.

    SAME: vanilla's tokens. COMPLETE: an answer that ended as it should, of any tokens. REFUSED: a 4xx, the same from
    both. Returns "" and "", or "wrong" or "error" and why; "error" is anything but an answer where there should be one.
    """
    if rule == REFUSED:
        if all(400 <= reply.status < 500 for reply in (vanilla, ours)) and vanilla.status == ours.status:
            return "", ""
        return "error", f"not refused by both: {vanilla.status} and {ours.status} {ours.error}".strip()
    for name, reply in (("vanilla", vanilla), ("ours", ours)):
        if reply.status != 200:
            return "error", f"{name}: {reply.status} {reply.error}".strip()
    if vanilla.is_cut or ours.is_cut:  # the other may have met a stop string before its client left
        return _compare_cut(vanilla, ours) if rule == SAME else ("", "")
    for name, reply in (("vanilla", vanilla), ("ours", ours)):
        if why := _unfinished(reply, num_choices, max_tokens):
            return "error", f"{name}: {why}"
    return _compare(vanilla, ours) if rule == SAME else ("", "")


def _unfinished(reply: Reply, num_choices: int, max_tokens: int) -> str:
    """Return what is missing from a reply that claims to be whole, or ""."""
    if sorted(reply.choices) != list(range(num_choices)):
        return f"{len(reply.choices)} answers of {num_choices}"
    for choice in reply.choices.values():
        count, reason = len(choice.token_ids), choice.finish_reason
        if reason not in ("stop", "length") or not count or (reason == "length" and count != max_tokens):
            return f"{count} tokens of at most {max_tokens}, ended by {reason}"
    return ""


def _compare(vanilla: Reply, ours: Reply) -> tuple[str, str]:
    for index, expected in vanilla.choices.items():
        got = ours.choices[index]
        if got.token_ids != expected.token_ids:
            pairs = enumerate(zip(expected.token_ids, got.token_ids, strict=False))
            shorter = min(len(expected.token_ids), len(got.token_ids))
            place = next((i for i, (a, b) in pairs if a != b), shorter)
            differing = [choice.token_ids[place : place + 3] for choice in (expected, got)]
            return "wrong", f"answer {index} differs from token {place} on: {differing[0]} and {differing[1]}"
        if (got.text, got.finish_reason) != (expected.text, expected.finish_reason):
            return "wrong", f"answer {index}: same tokens, another text or end: {got.text!r}, {got.finish_reason}"
        if len(got.logprobs) != len(expected.logprobs) or any(
            abs(a - b) > _LOGPROB_TOLERANCE for a, b in zip(expected.logprobs, got.logprobs, strict=True)
        ):
            return "wrong", f"answer {index}: other log-probabilities"
    return "", ""


def _compare_cut(vanilla: Reply, ours: Reply) -> tuple[str, str]:
    """Compare two answers as far as both clients have received them; ours comes in larger chunks."""
    for index in vanilla.choices.keys() & ours.choices.keys():
        expected, got = vanilla.choices[index].token_ids, ours.choices[index].token_ids
        both = min(len(expected), len(got))
        if expected[:both] != got[:both]:
            return "wrong", f"answer {index} differs before it was cut: {expected[:both]} and {got[:both]}"
    return "", ""


def leaks(idle: Mapping[str, int]) -> dict[str, int]:
    """Return what a server holds though no request runs, of its gauges then: `leaked_blocks` of the draft's pool, and
    `leaked_states`, requests of which anything is held and video tokens whose hidden states are.
    """
    per_token = max(1, idle["relevance_bytes_per_token"])
    return {
        "leaked_blocks": idle["draft_pool_blocks_used"],
        "leaked_states": idle["held_requests"] + math.ceil(idle["relevance_held_bytes"] / per_token),
    }


def slope_mb_per_min(samples: Sequence[tuple[float, int]], least_min: float = LEAST_MIN) -> float | None:
    """Return the slope of memory (seconds, bytes) by regression over the second half, in MB per minute.

    None of less than `least_min` minutes: until then caches fill.
    """
    if not samples or samples[-1][0] - samples[0][0] < 60 * least_min:
        return None
    middle = (samples[0][0] + samples[-1][0]) / 2
    late = [(at / 60, size / MB) for at, size in samples if at >= middle]
    return round(statistics.linear_regression(*zip(*late, strict=True)).slope, 3) if len(late) > 2 else None


def first_minutes(
    vanilla: Sequence[tuple[float, int]], ours: Sequence[tuple[float, int]]
) -> Sequence[tuple[float, int]]:
    """Return a server's readings from its start on, for as long as another's: caches of both are as full."""
    if not vanilla or not ours:
        return []
    end = vanilla[0][0] + ours[-1][0] - ours[0][0]
    return [sample for sample in vanilla if sample[0] <= end]


def percentile(values: Iterable[float], share: float) -> float | None:
    """Return the smallest value that so large a share of them does not exceed; None of nothing."""
    ordered = sorted(values)
    return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3) if ordered else None


def is_bad(result: Mapping[str, Any], most_mb_per_min: float) -> list[str]:
    """Return what of a soak's result fails it, in words; [] for a pass.

    Memory may grow by `most_mb_per_min` more than vanilla's as long after its start, and by more where that is short.
    """
    bad = [name for name in ("wrong_answers", "errors_unexpected", "leaked_blocks", "leaked_states") if result[name]]
    for row in result["configs"]:
        ours, vanillas = row["rss_slope_mb_per_min"], row["vanilla_rss_slope_mb_per_min"]
        if ours is not None and ours - max(0.0, vanillas or 0.0) > most_mb_per_min:
            bad.append(f"memory of {row['config']}")
    return bad
