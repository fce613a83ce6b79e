"""What the trials of a benchmark come to: a row for each variant; no engine."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import summarize
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.bench.acceptance import identical_frac
from vllm_vidspec.tools.bench.trials import PARALLEL, Benchmark, Trial, Variant, Workload

SPREAD = ("p20", "p80")
# What drafting takes of a request, by our counters; the rest is the target's and the host's.
PHASES = ("guidance", "draft_prefill", "draft_decode", "relevance")
_SHARED = ("requests", "rounds", "max_tokens", "temperature", "seed", "knobs")  # fields of `Benchmark`


def make_rows(
    benchmark: Benchmark, workload: Workload, trials: Mapping[Variant, Sequence[Sequence[Trial]]]
) -> list[dict[str, Any]]:
    """Return a row for each variant, of its trials `[rounds][requests]`; the first is vanilla."""
    vanilla = next(iter(trials.values()))
    target_ms = 1e3 * statistics.median(seconds for one in flat(vanilla) for seconds in one.step_s)
    rows = []
    for variant, rounds in trials.items():
        spec = variant.spec or {}
        rows.append(
            {
                "family": workload.family,
                "inflate": workload.ratio,
                "label": workload.label,
                "mode": variant.mode,
                "method": variant.method,
                "drafting": spec.get("drafting", "chain") if spec else None,
                "pruner": spec.get("pruner"),
                "scorer": spec.get("scorer"),
                "prune_ratio": variant.knobs(benchmark)["prune_ratio"] if variant.is_ours else None,
                "num_speculative_tokens": _num_tokens(spec),
                **figures(rounds, vanilla),
                **speculation(rounds, variant),
                "t_target_ms": target_ms,
                **ratio_of(target_ms, rounds),
                **{name: getattr(benchmark, name) for name in _SHARED},
                **{name: getattr(workload, name) for name in ("target_layers", "draft_layers")},
                **phases(rounds),
            }
        )
    return rows


def _num_tokens(spec: Mapping[str, Any]) -> int | None:
    """Return K of a variant, None for vanilla."""
    if not spec:
        return None
    return spec.get("num_speculative_tokens") or pairs.num_speculative_tokens(spec.get("drafting", "chain"))


def flat(rounds: Sequence[Sequence[Trial]]) -> list[Trial]:
    return [trial for one in rounds for trial in one]


def figures(rounds: Sequence[Sequence[Trial]], vanilla: Sequence[Sequence[Trial]]) -> dict[str, Any]:
    """Return what any engine has: speed, beside vanilla in the same round, and whether the answers are vanilla's."""
    found: dict[str, Any] = {}
    by_round = {
        "speedup": [speed(ours) / speed(theirs) for ours, theirs in zip(rounds, vanilla, strict=True)],
        "tokens_per_s": [speed(one) for one in rounds],
        "inter_token_ms": [1e3 / speed(one) for one in rounds],
        "ttft_s": [statistics.median(trial.ttft_s for trial in one) for one in rounds],
    }
    for name, values in by_round.items():
        found |= middle(name, values)
    ours, theirs = flat(rounds), flat(vanilla)
    steps = sorted(1e3 * seconds for trial in ours for seconds in trial.step_s)
    return found | {
        "identical_frac": identical_frac([one.token_ids for one in ours], [one.token_ids for one in theirs]),
        "output_tokens": sum(len(trial.token_ids) for trial in ours),
        "forwards": statistics.mean(len(trial.step_s) for trial in ours),
        "t_step_ms": statistics.median(steps),
        "t_step_ms_p99": steps[round(0.99 * (len(steps) - 1))],
    }


def phases(rounds: Sequence[Sequence[Trial]]) -> dict[str, float | None]:
    """Return the mean time of a request, and what of it drafting took, in ms; None for vanilla."""
    trials, counters = flat(rounds), gained(rounds)
    return {
        "request_ms": 1e3 * statistics.mean(trial.ttft_s + trial.decode_s for trial in trials),
        **{f"{name}_ms": 1e-3 * counters[f"{name}_us"] / len(trials) if counters else None for name in PHASES},
    }


def speed(trials: Sequence[Trial]) -> float:
    """Return the tokens per second of some trials, from each one's first token to its last."""
    seconds = sum(trial.decode_s for trial in trials)
    if not seconds:
        raise VidSpecError("no answer has a second token: there is no decode to measure")
    return sum(trial.num_decoded for trial in trials) / seconds


def middle(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the columns of a figure: its median under its name, and its 20th and 80th percentiles."""
    cuts = statistics.quantiles(values, n=5, method="inclusive") if len(values) > 1 else values
    return {name: statistics.median(values), f"{name}_p20": cuts[0], f"{name}_p80": cuts[-1]}


def gained(rounds: Sequence[Sequence[Trial]]) -> dict[str, int] | None:
    """Return our counters' gain over all trials, None for vanilla."""
    found = [trial.metrics for trial in flat(rounds) if trial.metrics is not None]
    return {name: sum(one[name] for one in found) for name in found[0]} if found else None


def speculation(rounds: Sequence[Sequence[Trial]], variant: Variant) -> dict[str, Any]:
    """Return what became of the drafts; None for vanilla, and where a mode has no such thing. `late_frac` is the share
    of decode steps whose stream was too short, `stream_length` tokens per stream: one ends where a draft is rejected,
    or with the answer.
    """
    names = ("late_drafts", "stale_streams", "stream_tokens", "drafter_restarts")
    empty = ("acceptance_length", "acceptance_rate", "late_frac", "stream_length", "num_drafts", *names)
    found: dict[str, Any] = dict.fromkeys(empty)
    counters = gained(rounds)
    if counters is None:
        return found
    trials = flat(rounds)
    num_decoded, num_steps = sum(trial.num_decoded for trial in trials), sum(len(trial.step_s) for trial in trials)
    summary = summarize(counters)
    found |= {name: summary[name] for name in ("acceptance_length", "acceptance_rate", "num_drafts")}
    if variant.mode == PARALLEL:
        found |= {name: counters[name] for name in names}
        found["late_frac"] = counters["late_drafts"] / num_steps if num_steps else None
    # No tree is accepted whole, and counters of others are not read at each step.
    if variant.is_ours and (variant.spec or {}).get("drafting", "chain") == "chain":
        found["stream_length"] = num_decoded / sum(trial.num_streams for trial in trials)
    return found


def ratio_of(target_ms: float, rounds: Sequence[Sequence[Trial]]) -> dict[str, float | None]:
    """Return the draft's time of a forward, the median of its requests', and the target's of a step divided by it."""
    times = [found for trial in flat(rounds) if trial.metrics and (found := draft_ms(trial.metrics)) is not None]
    if not times:
        return {"t_draft_ms": None, "ratio": None}
    draft = statistics.median(times)
    return {"t_draft_ms": draft, "ratio": target_ms / draft}


def draft_ms(counters: dict[str, int]) -> float | None:
    """Return the mean time of a draft forward in ms, what goes with one included; None where there was none."""
    return 1e-3 * counters["draft_decode_us"] / counters["draft_forwards"] if counters["draft_forwards"] else None
