"""`vidspec bench acceptance`: acceptance, identity with vanilla and draft KV over a sweep; engines are subprocesses."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_vidspec.bench import pairs
from vllm_vidspec.bench.processes import end_group, last_error_line
from vllm_vidspec.bench.provenance import provenance
from vllm_vidspec.config import parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import SKIP_REASONS, summarize

# Axes that are knobs of VidSpecConfig (`drafting` is its `draft`).
SPEC_AXES = (
    "pruner",
    "prune_ratio",
    "drafting",
    "num_speculative_tokens",
    "scorer",
    "draft_noise",
    "draft_positions",
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

Report = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Sweep:
    """What to measure.

    Attributes:
        axes: For each of AXES its values; rows are their Cartesian product.
        requests: Held-out videos, one request each, in one batch queue.
        max_tokens: Longest answer in tokens.
        batch_size: vLLM's max_num_seqs.
        seed: Request i samples with seed + i; None: unseeded.
        ignore_eos: Go on to `max_tokens` whatever is generated.
        target: A checkpoint in place of the bundled target.
        question: What is asked about each video.
    """

    axes: dict[str, list[Any]]
    requests: int = 8
    max_tokens: int = 256
    batch_size: int = pairs.MAX_NUM_SEQS
    seed: int | None = 0
    ignore_eos: bool = False
    target: str | None = None
    question: str = pairs.DEFAULT_QUESTION

    def samplings(self) -> list[dict[str, Any]]:
        """Return every combination of the sampling axes."""
        names = list(SAMPLING_AXES)
        return [dict(zip(names, values, strict=True)) for values in itertools.product(*(self.axes[n] for n in names))]

    def configurations(self, family: str) -> Iterator["Configuration"]:
        """Yield vanilla, then every combination of the draft's axes."""
        yield Configuration(family, None, {})
        for draft, *values in itertools.product(self.axes["draft"], *(self.axes[name] for name in SPEC_AXES)):
            yield Configuration(family, draft, dict(zip(SPEC_AXES, values, strict=True)))


@dataclass(frozen=True)
class Configuration:
    """One engine of the sweep; `draft` None is vanilla."""

    family: str
    draft: str | None
    spec: dict[str, Any] = field(default_factory=dict)

    def label(self) -> str:
        """Return a few words for a progress bar."""
        if self.draft is None:
            return f"{self.family} vanilla"
        spec = self.spec
        return f"{self.family} {self.draft} {spec['pruner']} {spec['prune_ratio']} K={spec['num_speculative_tokens']}"

    def job(self, sweep: Sweep) -> dict[str, Any]:
        """Return what `engine_job` reads."""
        llm = pairs.llm_kwargs(
            self.family,
            self.draft,
            target=sweep.target,
            overrides={"max_num_seqs": sweep.batch_size},
            **self.spec,
        )
        shared = {"max_tokens": sweep.max_tokens, "ignore_eos": sweep.ignore_eos}
        samplings = [
            shared | {name: value for name, value in sampling.items() if value != SAMPLING_AXES[name]}
            for sampling in sweep.samplings()
        ]
        return {
            "llm": llm,
            "family": self.family,
            "question": sweep.question,
            "requests": sweep.requests,
            "samplings": samplings,
            "seed": sweep.seed,
        }


def check(sweep: Sweep) -> None:
    """Refuse a wrong value before anything runs.

    Raises:
        VidSpecError: One line naming it.
    """
    if sweep.requests < 1 or sweep.max_tokens < 1 or sweep.batch_size < 1:
        raise VidSpecError("--requests, --max-tokens and --batch-size must be at least 1")
    for family in sweep.axes["family"]:
        pairs.pair_for(family)
        for configuration in sweep.configurations(family):
            if configuration.draft is not None:
                # The bundled checkpoints are not looked at: a wrong knob is refused without them.
                parse_config(pairs.speculative_config(family, "target", **configuration.spec))


def run(sweep: Sweep, report: Report = lambda _event, _fields: None) -> dict[str, Any]:
    """Measure the whole sweep, one engine at a time.

    Args:
        sweep: What to measure.
        report: Called with "start" (`label`, `total`), then "ready", "progress" and "result" of each engine, and
            "failed" (`label`, `reason`).

    Returns:
        `rows` (one per configuration and sampling), `failures` (configuration and reason) and `provenance`.

    Raises:
        VidSpecError: A wrong value.
    """
    check(sweep)
    rows: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    for family in sweep.axes["family"]:
        vanilla: list[dict[str, Any]] | None = None
        for configuration in sweep.configurations(family):
            report("start", {"label": configuration.label(), "total": sweep.requests * len(sweep.samplings())})
            try:
                results = run_job(configuration.job(sweep), report)
            except VidSpecError as error:
                failures.append(
                    {"family": family, "draft": configuration.draft, **configuration.spec, "reason": str(error)}
                )
                report("failed", {"label": configuration.label(), "reason": str(error)})
                if configuration.draft is None:
                    break  # nothing to compare with
                continue
            if configuration.draft is None:
                vanilla = results
            else:
                assert vanilla is not None
                rows += make_rows(sweep, configuration, results, vanilla)
    return {"rows": rows, "failures": failures, "provenance": provenance()}


def run_job(job: dict[str, Any], report: Report) -> list[dict[str, Any]]:
    """Run one engine in a subprocess.

    Returns:
        For each sampling: `seconds`, `token_ids` per request and `metrics` (our counters' gain; None for vanilla).

    Raises:
        VidSpecError: The engine failed; one line with the reason.
    """
    read_end, write_end = os.pipe()
    results: list[dict[str, Any]] = []
    reason = None
    with tempfile.TemporaryDirectory(prefix="vidspec-bench-") as folder, open(read_end) as events:
        log_path = Path(folder, "engine.log")
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "vllm_vidspec.bench.engine_job", str(write_end)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(write_end,),
                env=pairs.engine_env(),
                start_new_session=True,
            )
        os.close(write_end)
        try:
            assert process.stdin is not None
            with process.stdin as stdin:
                stdin.write(json.dumps(job).encode())
            for line in events:
                event = json.loads(line)
                report(event["event"], event)
                if event["event"] == "result":
                    results.append(event)
                if event["event"] == "error":
                    reason = event["message"]
            process.wait(60)
        finally:
            end_group(process)
        if reason is None and len(results) < len(job["samplings"]):
            reason = last_error_line(log_path.read_text(errors="replace"))
    if reason is not None:
        raise VidSpecError(f"the engine stopped: {reason}")
    return results


def make_rows(
    sweep: Sweep, configuration: Configuration, results: Sequence[dict[str, Any]], vanilla: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Turn one engine's results into rows, one per sampling.

    Args:
        sweep: What was measured.
        configuration: The engine's.
        results: As `run_job` returns them.
        vanilla: The same for the engine without speculation.
    """
    rows = []
    for sampling, result, reference in zip(sweep.samplings(), results, vanilla, strict=True):
        counters = result["metrics"]
        comparable = sweep.seed is not None or sampling["temperature"] == 0
        rows.append(
            {
                "family": configuration.family,
                "draft": configuration.draft,
                **configuration.spec,
                **sampling,
                "requests": sweep.requests,
                "max_tokens": sweep.max_tokens,
                "batch_size": sweep.batch_size,
                "seed": sweep.seed,
                **summarize(counters),
                "identical_frac": identical_frac(result["token_ids"], reference["token_ids"]) if comparable else None,
                "output_tokens": sum(map(len, result["token_ids"])),
                "text_tokens": counters["text_tokens"],
                "visual_tokens_full": counters["visual_tokens_full"],
                "visual_tokens_kept": counters["visual_tokens_kept"],
                "draft_kv_bytes_per_token": counters["draft_kv_bytes_per_token"],
                "skipped": {reason: counters[f"skipped_{reason}"] for reason in SKIP_REASONS},
                "decode_s": result["seconds"],
                "vanilla_decode_s": reference["seconds"],
            }
        )
    return rows


def identical_frac(token_ids: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """Return the share of requests whose token ids equal the reference's, ids and lengths."""
    same = [list(ours) == list(theirs) for ours, theirs in zip(token_ids, reference, strict=True)]
    return sum(same) / len(same)
