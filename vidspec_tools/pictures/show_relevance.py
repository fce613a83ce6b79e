"""`vidspec show-relevance`: one caption, each token in the colour of its visual relevance; an engine subprocess."""

from dataclasses import dataclass
from typing import Any

from vidspec_tools.bench.session import BenchSession
from vidspec_tools.captions import kind_shares, relevance_auc
from vidspec_tools.pictures import relevance_views
from vidspec_tools.pictures.picture import Picture
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import summarize
from vllm_vidspec.tools.engine_session import answer_command
from vllm_vidspec.tools.progress import Report, silent
from vllm_vidspec.tools.provenance import provenance
from vllm_vidspec.tools.subject import reasons

_KNOBS = ("lambda_loose", "top_n", "position_shift", "relevance_rows")


@dataclass(frozen=True)
class Show(Picture):
    """What to show.

    Attributes:
        lambda_loose: Share of a step's draft tokens whose mismatches are accepted; 0 measures relevance only.
        top_n: Video tokens that make a relevance.
        position_shift: Whether a mismatch is accepted where the target's token is among the draft's.
        relevance_rows: Whose state is compared, "token" or "prediction".
        temperature: Of the target and the draft.
        seed: Of the request.
        max_tokens: Longest answer in tokens.
    """

    out: str = "relevance.png"
    num_speculative_tokens: int = 10
    lambda_loose: float = 0.7
    top_n: int = 10
    position_shift: bool = True
    relevance_rows: str = "token"
    temperature: float = 0.0
    seed: int = 0
    max_tokens: int = 256

    @property
    def knobs(self) -> dict[str, Any]:
        """The scorer and its knobs."""
        return {"scorer": "loose"} | {name: getattr(self, name) for name in _KNOBS}


def check(show: Show) -> None:
    """Refuse a wrong value, in one line, before an engine starts."""
    show.check_files(relevance_views.SUFFIXES)
    show.config(**show.knobs)
    if show.max_tokens < 2:
        raise VidSpecError("--max-tokens must be at least 2")
    if not 0 <= show.temperature < float("inf"):
        raise VidSpecError(f"--temperature: {show.temperature:g} is no temperature")


def run(show: Show, report: Report = silent) -> dict[str, Any]:
    """Write one caption and the picture of it; return the caption as the only one of `rows` (see `make_row`)."""
    check(show)
    report("plan", {"total": 1})
    report("loading", {"label": "the engine"})
    with BenchSession(show.job(**show.knobs)) as session:
        report("measuring", {})
        command = answer_command(seed=show.seed, watch=True, temperature=show.temperature, max_tokens=show.max_tokens)
        answer = session.ask(command)
    report("measured", {})
    row = make_row(show, answer)
    relevance_views.write(row, show.out)
    return {"rows": [row], "provenance": provenance()}


def make_row(show: Show, answer: dict[str, Any]) -> dict[str, Any]:
    """Return what a picture shows."""
    counters, (caption,) = answer["metrics"], answer["captions"]
    for what, prefix in (("request ran without speculation", "skipped_"), ("caption was verified strictly", "strict_")):
        if found := reasons(counters, prefix):
            raise VidSpecError(f"the {what} ({found}): nothing was measured")
    if all(value is None for value in caption["relevance"]):
        raise VidSpecError("no relevance was measured: the answer is too short")
    is_bundled = show.target is None
    return {
        "family": show.family if is_bundled else None,
        **show.pair,
        "video": show.path.name,
        "question": show.question,
        **show.knobs,
        **{name: getattr(show, name) for name in ("num_speculative_tokens", "prune_ratio", "temperature", "seed")},
        "acceptance_length": summarize(counters)["acceptance_length"],
        **kind_shares([caption["kinds"]]),
        "relevance_auc": relevance_auc([caption["words"]], [caption["relevance"]]) if is_bundled else None,
        **caption,
    }
