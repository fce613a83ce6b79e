"""Draft decoding in whole engines: our chain beside vLLM's own speculators, on one small model with made-up weights.

The target, our draft, vLLM's draft model and the EAGLE head have the same shapes, so that what differs is how a step
drafts. Each engine is a process of its own; they take turns, round by round. Prompts are text, which vLLM's own draft
models can read too: of a video they would see placeholders. `propose_ms` is a step's drafting, on a GPU between events
on its stream, `propose_host_ms` what it keeps the host, `step_ms` the whole step. Acceptance is next to nothing, as
weights are made up: tokens per second would mean nothing and are not told.
"""

import contextlib
import importlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

VANILLA, OURS = "vanilla", "vidspec"
# What drafts, and vLLM's name of the method: its draft models run eagerly, its EAGLE heads in fused graphs.
METHODS = (VANILLA, OURS, "draft_model", "eagle")
FAMILY = "llava-onevision"  # positions of one axis, as EAGLE heads of Llama's kind have
# Qwen2.5's language models; None: the bundled draft's own.
SHAPES: dict[str, dict[str, Any] | None] = {
    "tiny": None,
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2},
    "3b": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
           "num_key_value_heads": 2},
}  # fmt: skip
VOCAB = 152_064
FIGURES = ("step_ms", "propose_ms", "propose_host_ms")
_WORDS = range(3, 60)  # token ids that stand for words in every vocabulary here
_STEP_TOKENS = 2048  # of a step, at most, of prompts
_SKIP = 4  # steps in which all requests draft, before one is timed
_TIMEOUT_S = 1800


def make_checkpoints(folder: Path, shape: str) -> dict[str, str]:
    """Write directories without weights for the model and for the EAGLE head; return the model of each method."""
    from vllm_vidspec.tools import pairs

    source, model, head = Path(pairs.checkpoint(FAMILY, "draft")), folder / "model", folder / "eagle-head"
    for directory in (model, head):
        directory.mkdir()
        for file in source.iterdir():
            if file.suffix in (".json", ".jinja", ".txt") and "index" not in file.name:
                (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    text = config["text_config"]
    if sizes := SHAPES[shape]:
        text |= sizes | {"layer_types": ["full_attention"] * sizes["num_hidden_layers"], "vocab_size": VOCAB}
    (model / "config.json").write_text(json.dumps(config))
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_parameters")  # fmt: skip
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
    (head / "config.json").write_text(json.dumps(llama | {name: text[name] for name in kept}))
    return {OURS: str(model), "draft_model": str(model), "eagle": str(head)}


def job_of(method: str, models: dict[str, str], options: Any) -> dict[str, Any]:
    """Return what a process is told: `llm`, `method`, `batch_sizes`, `context`, `around`, and steps: `steps` that are
    timed, at most `wait` until all requests draft.
    """
    wait = 16 + 4 * options.context * max(options.batch) // _STEP_TOKENS
    num_tokens = options.context + (wait + _SKIP + options.steps) * (options.num_tokens + 1)
    llm = {
        "model": models[OURS],
        "load_format": "dummy",
        "max_model_len": num_tokens,
        "max_num_seqs": max(options.batch),
        "max_num_batched_tokens": max(_STEP_TOKENS, 4 * max(options.batch)),
        "enable_prefix_caching": False,
        "limit_mm_per_prompt": {"video": 0, "image": 0},
        "seed": 0,
        **options.engine_args,
    }
    if method != VANILLA:
        spec = {"method": method, "model": models[method], "num_speculative_tokens": options.num_tokens}
        llm["speculative_config"] = spec | ({"pruner": "none", "on_draft_error": "raise"} if method == OURS else {})
    return {
        "llm": llm,
        "method": method,
        "batch_sizes": options.batch,
        "context": options.context,
        "wait": wait,
        "steps": options.steps,
        "around": options.around,
    }


def ask(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a job in a process of its own; return a row per batch size.

    Raises:
        RuntimeError: It ended without an answer; its last words.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder, "job.json"), Path(folder, "rows.json")
        paths[0].write_text(json.dumps(job))
        done = subprocess.run(
            [sys.executable, __file__, *map(str, paths)], capture_output=True, text=True, timeout=_TIMEOUT_S
        )
        if not paths[1].exists():
            raise RuntimeError(_last_words(done.stderr) or f"the process ended with {done.returncode}")
        return json.loads(paths[1].read_text())


def _last_words(stderr: str) -> str:
    """Return the line of a traceback that says what was wrong."""
    errors = [line.strip() for line in stderr.splitlines() if "Error" in line and not line.startswith(" ")]
    return errors[-1][:200] if errors else ""


def measure(options: Any, show: Callable[[str], None]) -> list[dict[str, Any]]:
    """Let the engines take turns; return a row per method and batch size.

    Args:
        options: `draft_shape`, `num_tokens`, `batch`, `context`, `steps`, `rounds`, `engine_args`, `around`, `methods`.
        show: Called with a line before each engine.
    """
    found: dict[str, list[list[dict[str, Any]]]] = {method: [] for method in options.methods}
    notes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = make_checkpoints(Path(folder), options.draft_shape)
        for number in range(options.rounds):
            for method in options.methods:
                if method in notes:
                    continue
                show(f"round {number + 1} of {options.rounds}: {method}")
                try:
                    found[method].append(ask(job_of(method, models, options)))
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    notes[method] = str(error)
    return [
        {"method": method, "batch_size": size} | summary(found, method, i) | {"note": notes.get(method, "")}
        for method in options.methods
        for i, size in enumerate(options.batch)
    ]


def summary(found: dict[str, list[list[dict[str, Any]]]], method: str, index: int) -> dict[str, Any]:
    """Return medians over rounds, and of the ratio to ours in the same round; None where there is nothing.

    Args:
        found: By method, per round, per batch size a row.
        method: Whose.
        index: Of the batch size.
    """
    row: dict[str, Any] = {}
    ours = found.get(OURS, [])
    for name in FIGURES:
        values = [rows[index][name] for rows in found[method] if rows[index][name] is not None]
        row[name] = round(statistics.median(values), 4) if values else None
        ratios = [
            rows[index][name] / own[index][name]
            for rows, own in zip(found[method], ours, strict=False)
            if rows[index][name] is not None and own[index][name]
        ]
        row[f"{name.removesuffix('_ms')}_ratio"] = round(statistics.median(ratios), 3) if ratios else None
    return row


# ---- the process of an engine ----------------------------------------------------------------------------------------


def _runner(engine: Any) -> Any:
    return engine.model_executor.driver_worker.worker.model_runner


class Clock:
    """Times a speculator's `propose`; on a GPU also between events, so that nothing waits while steps run."""

    def __init__(self, speculator: Any):
        import torch

        self._event = (lambda: torch.cuda.Event(enable_timing=True)) if torch.cuda.is_available() else None
        self._host_ms: list[float] = []
        self._events: list[tuple[Any, Any]] = []
        if speculator is not None:
            self._propose, speculator.propose = speculator.propose, self._timed

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        events = None if self._event is None else (self._event(), self._event())
        if events is not None:
            events[0].record()
        begun = time.perf_counter()
        result = self._propose(*args, **kwargs)
        self._host_ms.append(1e3 * (time.perf_counter() - begun))
        if events is not None:
            events[1].record()
            self._events.append(events)
        return result

    def take(self) -> dict[str, float | None]:
        """Return the medians since the last call."""
        device_ms = self._host_ms
        if self._event is not None and self._events:
            self._events[-1][1].synchronize()
            device_ms = [begin.elapsed_time(end) for begin, end in self._events]
        found = [statistics.median(times) if times else None for times in (device_ms, self._host_ms)]
        self._host_ms, self._events = [], []
        return dict(zip(FIGURES[1:], found, strict=True))


def time_steps(engine: Any, clock: Clock, batch_size: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return what a decode step of so many requests takes, all of which draft.

    Raises:
        RuntimeError: They never do, or one ends before the others have been timed.
    """
    from vllm import SamplingParams

    names, words = [f"{batch_size}-{i}" for i in range(batch_size)], random.Random(batch_size)
    params = SamplingParams(temperature=0.0, max_tokens=job["llm"]["max_model_len"], ignore_eos=True)
    for name in names:
        engine.add_request(name, {"prompt_token_ids": words.choices(_WORDS, k=job["context"])}, params)
    begun: set[str] = set()
    # Our draft reads a prompt when the target has; others' read it with the target.
    rows = _runner(engine).requests if job["method"] == OURS else None
    for _ in range(job["wait"]):
        begun |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
        if len(begun) == batch_size and (rows is None or rows.has_draft_np.sum() == batch_size):
            break
    else:
        raise RuntimeError("the requests do not come to draft")
    for _ in range(_SKIP):
        engine.step()
    clock.take()
    times = []
    for _ in range(job["steps"]):
        start = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - start))
    row = {"batch_size": batch_size, "step_ms": statistics.median(times), **clock.take()}
    if engine.get_num_unfinished_requests() != batch_size:
        raise RuntimeError("a request has ended before its steps were timed")
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return row


@contextlib.contextmanager
def _around(name: str | None) -> Iterator[None]:
    """Enter the context manager that `MODULE:NAME` makes, if any."""
    if not name:
        yield
        return
    module, _, attribute = name.partition(":")
    with getattr(importlib.import_module(module), attribute)():
        yield


def main(argv: Sequence[str]) -> None:
    """Run one engine: read a job, write its rows."""
    from vllm import LLM

    job = json.loads(Path(argv[0]).read_text())
    engine = LLM(**job["llm"]).llm_engine
    clock = Clock(_runner(engine).speculator)
    with _around(job["around"]):
        rows = [time_steps(engine, clock, size, job) for size in job["batch_sizes"]]
    Path(argv[1]).write_text(json.dumps(rows))
    engine.engine_core.shutdown()


if __name__ == "__main__":
    import os

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main(sys.argv[1:])
