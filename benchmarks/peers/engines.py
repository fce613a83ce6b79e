"""Draft decoding in whole engines: our chain beside vLLM's own speculators, on one small model with made-up weights.

The target, our draft, vLLM's draft model and the EAGLE head have the same shapes, so that what differs is how a step
drafts. Each engine is a process of its own; they take turns, round by round. Prompts are text, which vLLM's own draft
models can read too: of a video they would see placeholders. `propose_ms` is a step's drafting, on a GPU between events
on its stream, `propose_host_ms` what it keeps the host, `step_ms` the whole step. Acceptance is near zero, as
weights are made up, so tokens per second would mean nothing and are not reported.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_BENCHMARKS), str(_BENCHMARKS.parent)]
# ruff: noqa: E402
from decode_steps import Clock, DecodeLoop, around, runner_of

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
    """Return a process's job: `llm`, `method`, `batch_sizes`, `context`, `around`, and steps: `steps` that are
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
    """Return the line of a traceback that names the error."""
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


def time_steps(loop: DecodeLoop, clock: Clock, batch_size: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the time of a decode step of so many requests, all of which draft."""
    words = random.Random(batch_size)
    prompts = [{"prompt_token_ids": words.choices(_WORDS, k=job["context"])} for _ in range(batch_size)]
    loop.start(prompts, job["llm"]["max_model_len"], job["wait"])
    for _ in range(_SKIP):
        loop.step()
    clock.take()
    times = []
    for _ in range(job["steps"]):
        start = time.perf_counter()
        loop.step()
        times.append(1e3 * (time.perf_counter() - start))
    row = {"batch_size": batch_size, "step_ms": statistics.median(times), **clock.take()}
    loop.stop()
    return row


def main(argv: Sequence[str]) -> None:
    """Run one engine: read a job, write its rows."""
    from vllm import LLM

    job = json.loads(Path(argv[0]).read_text())
    engine = LLM(**job["llm"]).llm_engine
    clock, loop = Clock(runner_of(engine).speculator), DecodeLoop(engine, job["method"] == OURS)
    with around(job["around"]):
        rows = [time_steps(loop, clock, size, job) for size in job["batch_sizes"]]
    Path(argv[1]).write_text(json.dumps(rows))
    engine.engine_core.shutdown()


if __name__ == "__main__":
    import os

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(sys.argv[1:])
