"""What to change on a server, by its figures: a table of rules, each a pure function of `status.figures`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["info", "warn"]

MIN_STEPS = 128  # fewer verify steps than a window of the alarm say nothing about acceptance
LOW_LENGTH = 1.5  # the alarm's, too: half a draft token per step
MANY_REQUESTS = 0.01  # requests that run without speculation, of all, that are no accident
SELDOM = 0.02  # a position accepted so seldom costs a draft forward in every step and gains next to nothing
FULL_POOL = 0.95
LATE = 0.2  # of a parallel drafter's steps
EAGER = 0.05  # of the batches drafted for


@dataclass(frozen=True)
class Advice:
    """What a rule found. `level` is "warn" where something should be changed, "info" where it is good to know."""

    rule: str
    level: Level
    found: str
    remedy: str


Rule = Callable[[dict[str, Any]], Iterator[Advice]]

_RAISE_POOL = "raise draft_kv_bytes or prune_ratio, or lower --max-num-seqs"
_SKIPPED = {
    "pool_full": _RAISE_POOL,
    "too_long": "where the log's line on the draft KV pool names longer requests, raise draft_kv_bytes; where the "
    "draft's context is the shorter one, lower --max-model-len",
    "draft_error": "look in the log for the first `runs without speculation: the draft failed`; it has the exception",
    "unsupported": "nothing: these requests have an input that the draft cannot see",
    "structured": 'draft chains ("draft_shape": "chain"): trees are not drafted for structured outputs',
    "pixels": "fewer or shorter videos at once, or more cores for the drafter: it reads prompts slower than they come",
}
_UNGUIDED = {
    "cached": "nothing, if rare: the prefix cache held the video, so the target did not look at it again, and no "
    "earlier scores of it are remembered; where it is usual, a pruner without guidance (uniform) costs less",
    "memory": "raise state_bytes",
    "unobserved": "use --enforce-eager or the pruner uv: a layer's attention was not observed",
    "error": "look in the log for `guidance failed`; it has the first exception",
    "no_text": "put the question after the video: guidance is what the question looks at",
}
_STRICT = {
    "cached": "nothing: the prefix cache held the video, and its hidden states are gone",
    "memory": "raise state_bytes",
    "error": "look in the log for `hidden states were not kept`; it has the first exception",
}
# Reasons of which a single one is worth a look; those that nobody can mend.
_NEVER_RIGHT = ("skipped_draft_error", "unguided_error", "unguided_unobserved")
_NOBODYS_FAULT = ("skipped_unsupported", "unguided_cached", "unguided_no_text", "strict_cached")


def advise(figures: dict[str, Any]) -> list[Advice]:
    """Return what the rules find, warnings first."""
    found = [advice for rule in RULES for advice in rule(figures)]
    return sorted(found, key=lambda advice: advice.level != "warn")


def switched_off(figures: dict[str, Any]) -> Iterator[Advice]:
    """Say who has switched drafting off, for as long as it is."""
    if figures["speculation"] == "operator":
        found = "drafting is off: an operator has set num_speculative_tokens to 0"
        remedy = "where that is over, set it to null (docs/operate.md, Switching off and on)"
    elif figures["speculation"] == "cool-down":
        found = f"drafting is off for a while: the draft has failed {figures['draft_failures']} times"
        remedy = "look in the log for `the draft failed`; it resumes by itself after a minute"
    else:
        return
    yield Advice("switched_off", "warn", found, remedy)


def nothing_drafted(figures: dict[str, Any]) -> Iterator[Advice]:
    """Say why no draft was verified."""
    if figures["verify_steps"] or figures["speculation"] != "on":
        return
    skipped, level = sum(figures["skipped_requests"].values()), "warn"
    if not (figures["prompts"] or skipped or figures["undrafted_steps"] or figures["vllm"]["generation_tokens"]):
        level, found, remedy = "info", "no request has come yet", "send one"
    elif figures["undrafted_steps"]:
        found = f"nothing was drafted: in {figures['undrafted_steps']} steps drafts do not pay, or are switched off"
        remedy = "look at the classes above, at draft_table and at num_speculative_tokens_per_batch_size"
    elif skipped and not figures["prompts"]:
        found = f"nothing was drafted: all {skipped} requests were skipped"
        remedy = "see what is said below of their reason"
    elif figures["parallel"]["late_drafts"]:
        found = "nothing was drafted: the drafter was never ahead"
        remedy = "see the drafter's lines in the log; give it cores or a device of its own (docs/parallel.md)"
    else:
        found = "requests came and nothing was drafted"
        remedy = "send longer answers: one of a few tokens ends before its drafts; if they are long, look in the log"
    yield Advice("nothing_drafted", level, found, remedy)  # type: ignore[arg-type]


def few_accepted(figures: dict[str, Any]) -> Iterator[Advice]:
    """Warn of drafts that cost more than they bring."""
    length = figures["acceptance_length"]
    if figures["verify_steps"] >= MIN_STEPS and length < LOW_LENGTH:
        found = f"the acceptance length is {length:.2f}, below {LOW_LENGTH}"
        remedy = "run `vidspec calibrate`; lower prune_ratio, try another pruner, or lower num_speculative_tokens"
        yield Advice("few_accepted", "warn", found, remedy)
    elif figures["low_acceptance_windows"]:
        found = f"{figures['low_acceptance_windows']} runs of {MIN_STEPS} verify steps with draft acceptance near zero"
        remedy = "one kind of request may be hard to draft for: send each kind alone and look at its acceptance"
        yield Advice("few_accepted", "info", found, remedy)


def last_positions(figures: dict[str, Any]) -> Iterator[Advice]:
    """Say how many draft tokens are worth their forwards. Chains only: a tree's depth is not its number of tokens."""
    drafted, depth = figures["draft_tokens_per_step"], figures["draft_depth_per_step"]
    if figures["verify_steps"] < MIN_STEPS or abs(drafted - depth) > 1e-9:
        return
    useful = sum(1 for share in figures["accepted_by_position"] if share >= SELDOM)
    if 1 <= useful < int(drafted):
        found = f"of {drafted:.1f} draft tokens per step those after position {useful} are accepted in < {SELDOM:.0%}"
        yield Advice("last_positions", "warn", found, f"lower num_speculative_tokens to {useful}")


def less_than_asked_for(figures: dict[str, Any]) -> Iterator[Advice]:
    """Say what to do where more than a few requests were not drafted for, guided or scored as configured."""
    skipped, prompts = figures["skipped_requests"], figures["prompts"]
    # One that is skipped after its prompt was read is in both, so the share is a little low.
    requests = prompts + sum(skipped.values())
    # What a request asks for itself is its own affair.
    strict = {reason: figures["strict_requests"].get(reason, 0) for reason in _STRICT}
    unguided = figures["unguided_prompts"]
    for prefix, counts, of, found, remedies in (
        ("skipped", skipped, requests, f"of about {requests} requests ran without speculation", _SKIPPED),
        ("unguided", unguided, prompts, f"of {prompts} prompts were pruned uniformly, guidance unavailable", _UNGUIDED),
        ("strict", strict, 0, "requests were verified strictly though their scorer is loose", _STRICT),
    ):
        for reason, count in counts.items():
            rule = f"{prefix}_{reason}"
            if count and (rule in _NEVER_RIGHT or count > MANY_REQUESTS * of):
                remedy = remedies.get(reason, "see this reason in docs/metrics.md")
                level: Level = "info" if rule in _NOBODYS_FAULT else "warn"
                yield Advice(rule, level, f"{count} {found}: {reason}", remedy)


def full_pool(figures: dict[str, Any]) -> Iterator[Advice]:
    """Warn before requests are skipped because no block is free."""
    pool = figures["pool"]
    if pool["blocks"] and pool["used_blocks"] >= FULL_POOL * pool["blocks"]:
        found = f"{pool['used_blocks']} of {pool['blocks']} blocks of the draft's pool are in use"
        yield Advice("full_pool", "warn", found, _RAISE_POOL)


def late_drafter(figures: dict[str, Any]) -> Iterator[Advice]:
    """Say what ails a drafter with a process of its own."""
    late, stale, restarts = (figures["parallel"][name] for name in ("late_drafts", "stale_streams", "drafter_restarts"))
    if restarts:
        remedy = "look in the log for `the drafter's process is gone`; it says why"
        yield Advice("drafter_restarts", "warn", f"the drafter's process was started again {restarts} times", remedy)
    steps = figures["verify_steps"] + late
    if steps >= MIN_STEPS and late > LATE * steps:
        found = f"in {late / steps:.0%} of the steps the drafter was not ahead of the target"
        remedy = "give it cores or a device of its own"
        yield Advice("late_drafts", "warn", found, remedy)
    if steps >= MIN_STEPS and stale > LATE * steps:
        found = f"{stale} streams in {steps} steps said something else than the target had committed"
        remedy = "see the acceptance length: what is drawn beyond a mismatch is lost"
        yield Advice("stale_streams", "info", found, remedy)


def eager_steps(figures: dict[str, Any]) -> Iterator[Advice]:
    """Warn of batches that no CUDA graph serves."""
    eager, steps = figures["draft_eager_steps"], figures["draft_steps"]
    if eager > EAGER * max(steps, 1):
        found = f"{eager} of {steps} batches were drafted for without CUDA graphs"
        remedy = "raise --max-cudagraph-capture-size, or lower --max-num-seqs; all of them: see the line at start-up"
        yield Advice("eager_steps", "warn", found, remedy)


RULES: tuple[Rule, ...] = (
    switched_off,
    nothing_drafted,
    few_accepted,
    last_positions,
    less_than_asked_for,
    full_pool,
    late_drafter,
    eager_steps,
)
