"""How a request may choose its verification, and which requests are always verified strictly."""

from typing import Any, NamedTuple

from vllm_vidspec.config import REQUEST_LAMBDA, REQUEST_RECORD, REQUEST_SCORER, ScoreKnobs
from vllm_vidspec.errors import VidSpecError, nearest, quoted

PREFIX = "vidspec_"  # of every parameter of ours; an unknown one with this prefix is an error
REQUEST_KEYS = (REQUEST_SCORER, REQUEST_LAMBDA, REQUEST_RECORD)
# What we tell ourselves beside them, after an underscore: a client's own value never gets here.
CALLS_TOOLS = f"_{PREFIX}calls_tools"  # by the API server, on requests whose output a parser may read
PRUNE_VARIANT = (
    f"_{PREFIX}prune_variant"  # by the scheduler, to the workers: which of `PruneKnobs.variants` prunes the prompt
)
INTERNAL_KEYS = (CALLS_TOOLS, PRUNE_VARIANT)

_LONGEST = 60  # characters of a client's value that are worth quoting


class Choice(NamedTuple):
    """How a request is verified: a scorer's name and, for those that take a share of the drafts, lambda."""

    scorer: str
    share: float


def choose(extra_args: dict[str, Any] | None, knobs: ScoreKnobs, has_records: bool = True) -> Choice:
    """Return the scorer and lambda of a request: of its `extra_args` (the API's `vllm_xargs`), else the server's.

    A VidSpecError, one line for the client, for a wrong name or value, or more than the server allows; `has_records`
    says whether that may be a record of itself.
    """
    asked = {key: value for key, value in (extra_args or {}).items() if key.startswith(PREFIX)}
    if unknown := sorted(asked.keys() - set(REQUEST_KEYS)):
        hint = nearest(unknown[0][:_LONGEST], REQUEST_KEYS)
        raise VidSpecError(f"unknown request parameter {quoted(unknown[0])}{hint}")
    scorer, share = asked.get(REQUEST_SCORER, knobs.scorer), asked.get(REQUEST_LAMBDA, knobs.lambda_loose)
    if not isinstance(scorer, str) or (REQUEST_SCORER in asked and scorer not in knobs.scorers):
        allowed = ", ".join(sorted(knobs.scorers))
        raise VidSpecError(f"{REQUEST_SCORER}: this server allows {allowed}, got {quoted(scorer)}")
    if REQUEST_LAMBDA in asked:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= knobs.lambda_loose:
            allowed = f"0 to {knobs.lambda_loose:g}"
            raise VidSpecError(f"{REQUEST_LAMBDA}: this server allows {allowed}, got {quoted(share)}")
        if scorer not in ("strict", "loose", "random"):
            raise VidSpecError(f"{REQUEST_LAMBDA}: the scorer {scorer} takes none")
    if not isinstance(asked.get(REQUEST_RECORD, False), bool):
        raise VidSpecError(f"{REQUEST_RECORD}: true or false, got {quoted(asked[REQUEST_RECORD])}")
    if asked.get(REQUEST_RECORD) and not has_records:
        raise VidSpecError(f"{REQUEST_RECORD}: this server keeps none; start it with request_records")
    return Choice(scorer, float(share))


def prune_variant_of(sampling: Any) -> int:
    """Return which of `PruneKnobs.variants` prunes a request's prompt, given its `SamplingParams`."""
    number = (getattr(sampling, "extra_args", None) or {}).get(PRUNE_VARIANT, 0)
    return number if isinstance(number, int) else 0


def strict_reason(sampling: Any) -> str | None:
    """Return why a request is always verified strictly (one of `STRICT_REASONS`), or None: it has a reader that takes
    the output for the target's own, token by token.
    """
    if sampling.structured_outputs is not None:
        return "structured"
    if (sampling.extra_args or {}).get(CALLS_TOOLS):
        return "tools"
    if sampling.logprobs is not None or sampling.logprob_token_ids:
        return "logprobs"
    return "stop_strings" if sampling.stop else None
