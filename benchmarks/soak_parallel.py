"""Soak parallel drafting: minutes of mixed requests while its drafter is killed, stopped and slowed down at random.

python benchmarks/soak_parallel.py [--minutes 5] [--family llava-onevision] [--seed 0] [--out soak.json]

Vanilla vLLM answers a pool of prompts first, greedily and at temperature 1. Then one engine with parallel drafting gets
them at random: some at a time, of random length, now and then given up in the middle. Every answer is compared. At the
end no request may be left, none may have waited for the drafter, and nothing may be left in shared memory; the resident
memory of both processes is told as a slope. Exit status 1 if a token differs or something is left.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import psutil

from vllm_vidspec import metrics
from vllm_vidspec.engine.parallel import client
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.provenance import provenance

ANSWER_TOKENS = 80
NUM_PROMPTS = 8
FAULT_EVERY_S = (2.0, 12.0)
LONGEST_STEP_S = 20.0  # of a loaded machine; one that waited for the drafter would wait for the stall time-out
SHOWN = ("drafts", "draft_tokens", "accepted_tokens", "late_drafts", "stale_streams", "drafter_restarts", "prompts")


class Saboteur(threading.Thread):
    """Does something to the drafter every few seconds.

    Args:
        drafter: The engine's client.
        rng: What, and when.
    """

    def __init__(self, drafter: client.DrafterClient, rng: random.Random):
        super().__init__(daemon=True)
        self._drafter, self._rng = drafter, rng
        self.done: Counter[str] = Counter()
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(self._rng.uniform(*FAULT_EVERY_S)):
            pids = self._drafter.pids
            if not pids or not self._drafter.is_up:
                continue
            fault = self._rng.choice(("kill", "halt", "slow", "slow", "halt"))
            self.done[fault] += 1
            with contextlib.suppress(ProcessLookupError):
                getattr(self, f"_{fault}")(pids[0])

    @staticmethod
    def _kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def _halt(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self._rng.uniform(0.1, 4.0))
        os.kill(pid, signal.SIGCONT)

    def _slow(self, pid: int) -> None:
        """Let it run a tenth of the time, for two seconds."""
        for _ in range(40):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.045)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.005)


def pool(family: str) -> list[tuple[dict, dict]]:
    """Return prompts with sampling parameters, half of them greedy."""
    return [
        (
            pairs.video_prompt(family, world.held_out(i // 2).frames),
            {"temperature": float(i % 2), "seed": i, "ignore_eos": True, "max_tokens": ANSWER_TOKENS},
        )
        for i in range(2 * NUM_PROMPTS)
    ]


def vanilla(family: str, requests: list[tuple[dict, dict]]) -> list[list[int]]:
    """Return vanilla's tokens."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(**pairs.llm_kwargs(family))
    outputs = llm.generate([prompt for prompt, _ in requests], [SamplingParams(**args) for _, args in requests])
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    return tokens


def soak(family: str, minutes: float, seed: int) -> dict[str, Any]:
    """Return what happened."""
    from vllm import LLM, SamplingParams

    requests = pool(family)
    expected = vanilla(family, requests)
    rng = random.Random(seed)
    client._BACKOFF_S = (0.5,)  # type: ignore[misc]  # minutes, not hours
    in_shm = set(os.listdir("/dev/shm"))
    llm = LLM(**pairs.llm_kwargs(family, "draft", pruner="uniform", parallel={"device": "cpu"}))
    engine = llm.llm_engine
    drafter = engine.model_executor.driver_worker.worker.model_runner.drafter_client
    path = metrics.path_for(engine.vllm_config.instance_id)
    before = metrics.read_metrics(path)
    saboteur = Saboteur(drafter, random.Random(seed + 1))
    saboteur.start()
    deadline = time.monotonic() + 60 * minutes
    running: dict[str, tuple[int, int]] = {}  # by request: which prompt, and how many tokens
    seen: Counter[str] = Counter()
    wrong, longest, memory = [], 0.0, []
    next_id, next_look = 0, time.monotonic()
    while time.monotonic() < deadline or running:
        while time.monotonic() < deadline and len(running) < rng.randint(0, 4):
            which, length = rng.randrange(len(requests)), rng.randint(1, ANSWER_TOKENS)
            prompt, args = requests[which]
            engine.add_request(str(next_id), prompt, SamplingParams(**{**args, "max_tokens": length}))
            running[str(next_id)] = (which, length)
            next_id += 1
        if running and rng.random() < 0.01:
            given_up = rng.choice(sorted(running))
            engine.abort_request([given_up])
            del running[given_up]
            seen["aborted"] += 1
        start = time.monotonic()
        for output in engine.step():
            if output.finished and output.request_id in running:
                which, length = running.pop(output.request_id)
                seen["answered"] += 1
                if list(output.outputs[0].token_ids) != expected[which][:length]:
                    wrong.append(output.request_id)
        longest = max(longest, time.monotonic() - start)
        if time.monotonic() > next_look:
            next_look = time.monotonic() + 5
            memory.append((time.monotonic(), psutil.Process().memory_info().rss))
    saboteur.is_over.set()
    saboteur.join()
    counted = metrics.difference(before, metrics.read_metrics(path))
    pids = drafter.pids
    engine.engine_core.shutdown()
    half = memory[len(memory) // 3 :]  # what was warmed up by then
    slope = statistics.linear_regression([at for at, _ in half], [rss for _, rss in half]).slope if len(half) > 2 else 0
    left = [pid for pid in pids if psutil.pid_exists(pid)]
    return {
        "family": family,
        "minutes": minutes,
        **seen,
        "wrong": len(wrong),
        "faults": dict(saboteur.done),
        "longest_step_s": round(longest, 2),
        "processes_left": len(left),
        "shared_memory_left": sorted(set(os.listdir("/dev/shm")) - in_shm),
        "rss_slope_mib_per_minute": round(60 * slope / 2**20, 3),
        "rss_mib": round(memory[-1][1] / 2**20),
        "counters": {name: counted[name] for name in SHOWN},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--family", default="llava-onevision", choices=pairs.FAMILIES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write the result as JSON")
    args = parser.parse_args()
    result = soak(args.family, args.minutes, args.seed)
    text = json.dumps({"results": [result], "provenance": provenance()}, indent=1)
    print(json.dumps(result, indent=1))
    if args.out:
        Path(args.out).write_text(text + "\n")
    is_bad = result["wrong"] or result["processes_left"] or result["shared_memory_left"]
    return int(bool(is_bad or result["longest_step_s"] > LONGEST_STEP_S))


if __name__ == "__main__":
    sys.exit(main())
