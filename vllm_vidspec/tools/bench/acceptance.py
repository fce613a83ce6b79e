"""`vidspec bench acceptance`: acceptance, identity with vanilla and draft KV over a sweep, one engine after another."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_vidspec.config import parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import GUIDANCE_FALLBACKS, SKIP_REASONS, summarize
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.engine_session import EngineSession, answer_command
from vllm_vidspec.tools.progress import Report, silent
from vllm_vidspec.tools.provenance import provenance

# Axes that are knobs of VidSpecConfig (`drafting` is its `draft_shape`).
SPEC_AXES = (
    *("pruner", "prune_ratio", "drafting", "num_speculative_tokens"),
    *("scorer", "draft_noise", "draft_positions"),
)
# Axis -> vLLM's value for "off": one left at it is not sent.
SAMPLING_AXES = {
    "temperature": None,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
AXES = ("family", "draft", *SPEC_AXES, *SAMPLING_AXES)
# Knobs that `Sweep.knobs` cannot hold, because they have a name of their own here.
_NOT_KNOBS = {"model": "draft", "draft_shape": "drafting", **{name: name for name in SPEC_AXES}}
_SHOWN_COUNTERS = (
    *("text_tokens", "visual_tokens_full", "visual_tokens_kept"),
    *("draft_kv_bytes_per_token", "draft_load_bytes"),
)


@dataclass(frozen=True)
class Sweep:
    # For each of AXES its values; rows are their Cartesian product. None for `num_speculative_tokens` is what the row's
    # shape has by default.
    axes: dict[str, list[Any]]
    requests: int = 8  # held-out videos, one request each, in one batch queue
    max_tokens: int = 256  # longest answer in tokens
    batch_size: int = pairs.MAX_NUM_SEQS  # vLLM's max_num_seqs
    seed: int = 0  # request i samples with seed + i
    target: str | None = None  # A checkpoint in place of the bundled target
    question: str = pairs.DEFAULT_QUESTION  # what is asked about each video
    knobs: dict[str, Any] = field(default_factory=dict)  # further knobs of VidSpecConfig, of all rows

    def samplings(self) -> list[dict[str, Any]]:
        return list(_combinations(self.axes, SAMPLING_AXES))

    def configurations(self) -> list[dict[str, Any]]:
        """Return every combination of the draft's axes: `draft`, and knobs of VidSpecConfig."""
        found = list(_combinations(self.axes, ("draft", *SPEC_AXES)))
        for one in found:
            if one["num_speculative_tokens"] is None:
                one["num_speculative_tokens"] = pairs.num_speculative_tokens(one["drafting"])
        return found

    def job(self, family: str, configuration: dict[str, Any]) -> dict[str, Any]:
        """Return what `session_job` reads; vanilla's configuration is empty."""
        knobs = configuration | self.knobs if configuration else {}
        draft = knobs.pop("draft", None)
        llm = pairs.llm_kwargs(family, draft, target=self.target, overrides={"max_num_seqs": self.batch_size}, **knobs)
        # The warm-up is one video outside the measured ones: what happens once is not part of any figure.
        videos = {"held_out": list(range(self.requests)), "warm_up": self.requests}
        return {"llm": llm, "prompts": {"family": family, "question": self.question, **videos}}

    def commands(self) -> Iterator[dict[str, Any]]:
        """Yield what every engine is asked, for each sampling."""
        for sampling in self.samplings():
            sent = {name: value for name, value in sampling.items() if value != SAMPLING_AXES[name]}
            yield answer_command(seed=self.seed, max_tokens=self.max_tokens, **sent)


def _combinations(axes: dict[str, list[Any]], names: Sequence[str] | dict[str, Any]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*(axes[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def check(sweep: Sweep) -> None:
    """Refuse a wrong value, in one line, before anything runs."""
    for name in sweep.knobs:
        if name in _NOT_KNOBS:
            raise VidSpecError(f"--knob {name}: it has an option of its own, --{_NOT_KNOBS[name].replace('_', '-')}")
    if sweep.target is not None:
        pairs.check_checkpoint("--target", sweep.target)
    for family in sweep.axes["family"]:
        pairs.pair_for(family)
        for draft in sweep.axes["draft"]:
            pairs.check_draft(family, draft)
        for configuration in sweep.configurations():
            parse_config(pairs.speculative_config(family, **configuration | sweep.knobs))


def run(sweep: Sweep, report: Report = silent) -> dict[str, Any]:
    """Return the sweep's `rows` in the order asked for, `failures` (vanilla's is its family's), and `provenance`."""
    check(sweep)
    rows: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    configurations = sweep.configurations()
    report("plan", {"total": len(sweep.axes["family"]) * (1 + len(configurations))})
    for family in sweep.axes["family"]:
        vanilla: list[dict[str, Any]] = []
        for configuration in ({}, *configurations):
            try:
                answers = _run_engine(sweep, family, configuration, report)
            except VidSpecError as error:
                failures.append({"family": family, **configuration, "reason": str(error)})
                if not configuration:
                    break  # nothing to compare with
                continue
            if configuration:
                rows += make_rows(sweep, {"family": family, **configuration}, answers, vanilla)
            else:
                vanilla = answers
    return {"rows": rows, "failures": failures, "provenance": provenance()}


def _run_engine(sweep: Sweep, family: str, configuration: dict[str, Any], report: Report) -> list[dict[str, Any]]:
    """Run one engine; return for each sampling `seconds`, `token_ids` of each request, `metrics` and `scheduling`."""
    names = ("draft", "pruner", "prune_ratio", "drafting", "num_speculative_tokens")
    report("loading", {"label": " ".join([family, *(str(configuration.get(name, "")) for name in names)]).strip()})
    with EngineSession(sweep.job(family, configuration)) as session:
        report("measuring", {})
        answers = [session.ask(command) | {"scheduling": session.ready["scheduling"]} for command in sweep.commands()]
    report("measured", {})
    return answers


def make_rows(
    sweep: Sweep, asked: dict[str, Any], results: Sequence[dict[str, Any]], vanilla: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Turn one engine's results into rows, one per sampling; `vanilla` are those without speculation."""
    rows = []
    for sampling, result, reference in zip(sweep.samplings(), results, vanilla, strict=True):
        counters = result["metrics"]
        rows.append(
            {
                **asked,
                **sampling,
                "knobs": sweep.knobs,
                "scheduling": result["scheduling"],
                **{name: getattr(sweep, name) for name in ("requests", "max_tokens", "batch_size", "seed")},
                **summarize(counters),
                **shape_figures(counters),
                "identical_frac": identical_frac(result["token_ids"], reference["token_ids"]),
                "output_tokens": sum(map(len, result["token_ids"])),
                **{name: counters[name] for name in _SHOWN_COUNTERS},
                "skipped": {reason: counters[f"skipped_{reason}"] for reason in SKIP_REASONS},
                "unguided": {reason: counters[f"unguided_{reason}"] for reason in GUIDANCE_FALLBACKS},
                "decode_s": result["seconds"],
                "vanilla_decode_s": reference["seconds"],
            }
        )
    return rows


def shape_figures(counters: dict[str, int]) -> dict[str, float | None]:
    """Return nodes, depth and longest length per verify step, and forwards per step of a batch; None without drafts."""
    drafts, steps = counters["drafts"], counters["draft_steps"]
    depth = counters["draft_depth"] / drafts if drafts else None
    return {
        "nodes_per_step": counters["draft_tokens"] / drafts if drafts else None,
        "depth_per_step": depth,
        "draft_forwards_per_step": counters["draft_forwards"] / steps if steps else None,
        "max_acceptance_length": None if depth is None else 1 + depth,
    }


def identical_frac(token_ids: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """Return the share of requests whose token ids equal the reference's, ids and lengths."""
    same = [list(ours) == list(theirs) for ours, theirs in zip(token_ids, reference, strict=True)]
    return sum(same) / len(same)
