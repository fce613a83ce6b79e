"""Drafting that pays, by default: decode speed of the policy and of a fixed chain over vanilla vLLM, cell by cell.

    python -m benchmarks.never_slower --json never-slower.json

A cell is a video's length, a draft and a batch size. One engine plays vanilla, the policy (`adaptive_tokens`) and a
chain of 5 in interleaved rounds, so that no engine's start favours any; the first round of a cell is shown apart. Every
round asks about the same few videos, which are in the prefix cache. With the bundled draft mixed traffic follows: half
of the requests are about 256 video tokens, half about 4,096, where that draft is hopeless, 16 of them at a time.
"""

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.methods import POLICY
from benchmarks.session import BenchSession
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.bench.acceptance import identical_frac
from vllm_vidspec.tools.bench.speed import SEQUENTIAL, VANILLA, Benchmark, Variant, Workload

FAMILY, DRAFTS = "qwen2.5-vl", ("bundled", "untrained")
VIDEO_TOKENS = 256  # of a whole video of the bundled pair
KEPT = 4  # videos of each length
WAVES = 6  # of sixteen requests each, in a round of mixed traffic
SPEC = {"num_speculative_tokens": 5, "pruner": "specvlm", "adaptive_tokens": True}
ROLES: dict[str, str | int] = {VANILLA: VANILLA, POLICY: POLICY, "chain of 5": 5}
SAMPLING = {"temperature": 0.0, "ignore_eos": True}


def untrained(folder: Path) -> str:
    """Write the bundled draft with made-up weights; return its directory."""
    import torch
    from safetensors.torch import load_file, save_file

    for path in Path(pairs.checkpoint(FAMILY, "draft")).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights, random = folder / "model.safetensors", torch.Generator().manual_seed(0)
    made = {
        name: torch.randn(weight.shape, generator=random).to(weight.dtype) * 0.05 if weight.ndim > 1 else weight
        for name, weight in load_file(weights).items()
    }
    save_file(made, weights, metadata={"format": "pt"})
    return str(folder)


def job_of(draft: str, lengths: list[int], batch: int, max_tokens: int) -> dict[str, Any]:
    """Return what an engine's subprocess reads: `KEPT` videos of each length, so many requests at a time."""
    benchmark = Benchmark(families=(FAMILY,), draft=draft, max_tokens=max_tokens)
    places = list(range(KEPT * len(lengths)))
    job = Workload(FAMILY).job(benchmark, Variant(POLICY, SEQUENTIAL, SPEC), places)
    longest = 2 * max(lengths) + 2 * max_tokens + 256
    job["llm"] |= {
        "max_model_len": longest,
        "max_num_seqs": batch,
        "limit_mm_per_prompt": {"video": max(lengths) // VIDEO_TOKENS},
        "kv_cache_memory_bytes": pairs.KV_CACHE_BYTES // 2 + (KEPT + batch) * longest * 4096,
        "mm_processor_cache_gb": 8,
    }
    job["prompts"] |= {"held_out": places, "num_videos": np.repeat(np.array(lengths) // VIDEO_TOKENS, KEPT).tolist()}
    return job


def decode_speed(answers: list[dict[str, Any]]) -> float:
    """Return decoded tokens a second: the mean over answers of one's tokens after the first over the time they took."""
    spans = [(len(one["token_ids"]) - 1, one["last_s"] - one["first_s"]) for one in answers]
    if not any(num > 0 and seconds > 0 for num, seconds in spans):
        raise VidSpecError("no answer has a second token: there is no decode to measure")
    return 1 / statistics.mean(seconds / max(num, 1) for num, seconds in spans)


def traffic_speed(answers: list[dict[str, Any]]) -> float:
    """Return tokens a second of all answers, first tokens and waits included."""
    return sum(len(one["token_ids"]) for one in answers) / max(one["last_s"] for one in answers)


def rounds_of(session: BenchSession, command: dict[str, Any], rounds: int) -> Iterator[dict[str, dict[str, Any]]]:
    """Let every role answer the same requests, each first in turn; yield `answers` and `metrics` of each by name."""
    for number in range(rounds):
        names = list(ROLES)
        turned = names[number % len(names) :] + names[: number % len(names)]
        answers = {}
        for name in turned:
            session.ask({"command": "play", "role": ROLES[name], "keeps_prefixes": True})
            answers[name] = session.ask(command)
        yield answers


def row_of(turns: list[dict[str, dict[str, Any]]], speed: Any, picked: slice = slice(None)) -> dict[str, Any]:
    """Return each role's speed over vanilla's by round, the first round apart, verify steps with drafts of each round,
    and how many answers are vanilla's.
    """
    row: dict[str, Any] = {}
    for name in ROLES:
        ratios = [speed(turn[name]["answers"][picked]) / speed(turn[VANILLA]["answers"][picked]) for turn in turns]
        if name != VANILLA:
            row[name] = {"first": ratios[0], "median": statistics.median(ratios[1:]), "rounds": ratios[1:]}
            row[name]["verify_steps"] = [turn[name]["metrics"]["drafts"] for turn in turns]
            ours, its = ([one["token_ids"] for turn in turns for one in turn[of]["answers"]] for of in (name, VANILLA))
            row[name]["identical_frac"] = identical_frac(ours, its)
    return row


def measure(args: argparse.Namespace, name: str, draft: str) -> Iterator[dict[str, Any]]:
    """Yield the cells of one draft, and mixed traffic with the bundled one."""
    with BenchSession(job_of(draft, args.tokens, max(args.batches), args.max_tokens)) as session:
        sampling = SAMPLING | {"max_tokens": args.max_tokens}
        for index in range(KEPT * len(args.tokens)):
            session.ask({"command": "keep", "index": index, "sampling": sampling})
        command = {"command": "batch", "sampling": sampling, "seed": 0, "keeps_prefixes": True}
        for (place, tokens), batch in itertools.product(enumerate(args.tokens), args.batches):
            indices = [KEPT * place + number % KEPT for number in range(batch)]
            turns = list(rounds_of(session, command | {"indices": indices}, 1 + args.rounds))
            yield {"tokens": tokens, "draft": name, "batch": batch, **row_of(turns, decode_speed)}
        if name != "bundled" or len(args.tokens) < 2:
            return
        # Hopeless and good ones in turn; lengths differ, so that with drafts or without they end one by one.
        indices = [KEPT * (len(args.tokens) - 1) * (number % 2) + number // 2 % KEPT for number in range(16 * WAVES)]
        lengths = np.random.default_rng(0).integers(args.max_tokens // 2, args.max_tokens * 3 // 2, len(indices))
        mixed = command | {"indices": indices, "lengths": lengths.tolist()}
        turns = list(rounds_of(session, mixed, 1 + args.rounds))
        yield {"mixed": "good", **row_of(turns, decode_speed, slice(0, None, 2))}
        yield {"mixed": "all tokens", **row_of(turns, traffic_speed)}


def cells(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="vidspec-untrained-") as folder:
        for name in args.drafts:
            yield from measure(args, name, "draft" if name == "bundled" else untrained(Path(folder)))


if __name__ == "__main__":
    options = {"tokens": [256, 4096], "drafts": list(DRAFTS), "batches": [1, 4, 16], "max_tokens": 128}
    harness.command(__doc__, cells, rounds=3, **options)  # rounds: after a first one that is shown apart
