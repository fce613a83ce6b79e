"""Soak a server: minutes of mixed traffic to `vllm serve` with vidspec, the same to vanilla, every answer compared.

make soak SOAK_ARGS="--minutes 15 --json soak.json"

Vanilla stays up; ours is started once for each configuration, and the minutes are shared out among them. Both get the
same slices of requests, 16 at a time over HTTP, one server after the other in turns: on the cores of one machine their
times would mean nothing side by side. Then ours is left idle: what it holds for requests now has leaked. Exit status 1
if a token differs, something leaked, a request was neither answered nor refused, or memory grows faster than vanilla's
as long after its start, which is judged where a configuration has had eight minutes.
"""

import argparse
import functools
import itertools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import soak_traffic as traffic
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import difference
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.processes import VllmServer, free_port
from vllm_vidspec.tools.provenance import provenance
from vllm_vidspec.tools.user_files import check_output

CONFIGS: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree-static": {"drafting": "tree-static"},
    "tree-adaptive": {"drafting": "tree-adaptive"},
    "parallel": {"parallel": {"device": "cpu"}},
}
# A request may choose any scorer. Without LVSpec's tolerance of shifts, lambda 0 accepts no mismatch.
SCORERS = {
    "request_scorers": ["strict", "loose", "random", "fly", "fly-entropy"],
    "lambda_loose": traffic.LAMBDA_MAX,
    "position_shift": False,
}
# The target's cache is too small for all that runs at a time, so that some are preempted. That of pixels is too small
# for all videos, so that it is full, and some are dropped, before memory is judged.
ENGINE = {
    "kv_cache_memory_bytes": 48 * 2**20,
    "max_model_len": 1024,
    "block_size": 32,
    "num_gpu_blocks_override": 40,
    "mm_processor_cache_gb": 0.05,
    "max_num_seqs": 12,
    "limit_mm_per_prompt": {"video": 2, "image": traffic.MAX_IMAGES},
}
# glibc keeps the room of a video's pixels once they are freed, in pieces that later ones do not fit: for many minutes
# that grows, with vanilla too. From this size on it is given back at once, so that a slope is of what is kept.
# One arena for all threads: each would otherwise keep what another of them could use.
# oneDNN generates code for each number of rows of a product, half a megabyte with its tables, and caches a thousand by
# default: memory grows for as many minutes as there are new numbers, with vanilla too.
_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(2**17),
    "MALLOC_TRIM_THRESHOLD_": str(2**17),
    "MALLOC_ARENA_MAX": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
}
SERVERS = ("ours", "vanilla")
CONCURRENCY, SLICE = 16, 48
MB = 1e6
LEAST_MIN = 8.0  # minutes of traffic in which a slope is judged
MEMORY_EVERY_S = 2.0
IDLE_WITHIN_S = 60.0
MOST_MB_PER_MIN = 3.0  # beyond vanilla's as long after its start: some 40 kB of each request
FAILURES = ("skipped_draft_error", "unguided_error", "strict_error", "drafter_restarts")
SHOWN = (
    *("drafts", "draft_tokens", "accepted_tokens", "prompts", "guided_prompts", "reused_guidance", "loosened_tokens"),
    *("skipped_pool_full", "skipped_too_long", "skipped_unsupported", "late_drafts", "stale_streams"),
)
Say = Callable[[str], None]


class Memory(threading.Thread):
    """Reads the resident memory of a server and all it has started, every few seconds until `stop`.

    What several processes share counts once: a ring of messages would otherwise grow by two of its pages with each.
    """

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self._pid = pid
        self._is_over = threading.Event()
        self.samples: list[tuple[float, int]] = []  # seconds, bytes

    def run(self) -> None:
        while not self._is_over.wait(MEMORY_EVERY_S):
            try:
                root = psutil.Process(self._pid)
                family = (root, *root.children(recursive=True))
                size = sum(process.memory_full_info().pss for process in family)
            except psutil.NoSuchProcess:  # one has just ended: the next reading has the others
                continue
            self.samples.append((time.monotonic(), size))

    def stop(self) -> list[tuple[float, int]]:
        self._is_over.set()
        self.join()
        return self.samples


class Record:
    """Counts requests and verdicts."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self.requests = self.compared = 0
        self.kinds: Counter[str] = Counter()
        self.traits: Counter[str] = Counter()
        self.bad: dict[str, list[dict[str, Any]]] = {"wrong": [], "error": []}
        self.resent = dict.fromkeys(SERVERS, 0)

    def add(self, config: str, ask: traffic.Ask, vanilla: list[traffic.Reply], ours: list[traffic.Reply]) -> None:
        self.kinds[ask.about] += 1
        self.traits.update([*ask.traits, *(["sampled"] if ask.body.get("temperature") else [])])
        if len(vanilla) != len(ours):
            self._note(config, ask, 0, "error", f"{len(vanilla)} turns and {len(ours)}")
        for turn, (expected, got) in enumerate(zip(vanilla, ours, strict=False)):
            self.requests += 1
            self.compared += ask.rule == traffic.SAME
            kind, why = traffic.verdict(ask.rule, ask.body.get("n", 1), ask.body["max_tokens"], expected, got)
            if kind:
                self._note(config, ask, turn, kind, why)
            for name, reply in zip(SERVERS, (got, expected), strict=True):
                self.resent[name] += reply.resent

    def _note(self, config: str, ask: traffic.Ask, turn: int, kind: str, why: str) -> None:
        fields = {key: value for key, value in ask.body.items() if key not in ("messages", "prompt")}
        found = {"config": config, "about": ask.about, "turn": turn, "traits": ask.traits, "why": why}
        self.bad[kind].append(found | fields)
        self._say(f"{config}: {kind}, {ask.about}: {why}")


class Soak:
    def __init__(self, options: argparse.Namespace, say: Say):
        self._options, self._say = options, say
        self._folder = Path(options.log_dir or tempfile.mkdtemp(prefix="vidspec-soak-"))
        self._folder.mkdir(parents=True, exist_ok=True)
        self._traffic = traffic.Traffic(random.Random(options.seed), ENGINE["max_model_len"])
        self.record = Record(say)

    def run(self) -> dict[str, Any]:
        options, configs = self._options, []
        with (
            traffic.client_for(CONCURRENCY) as client,
            ThreadPoolExecutor(CONCURRENCY) as pool,
            self._server("vanilla", None) as vanilla,
        ):
            memory = Memory(vanilla.process.pid)
            for name in options.configs:
                with self._server(name, "draft", **CONFIGS[name], **SCORERS) as ours:
                    if not configs:  # the first two load side by side
                        vanilla.wait_ready()
                        memory.start()
                    self._say(f"{name}: up after {ours.wait_ready():.0f} s")
                    configs.append(self._soak(name, client, pool, vanilla, ours, memory))
                    processes = psutil.Process(ours.process.pid).children(recursive=True)
                configs[-1]["processes_left"] = _left(processes)
            memory.stop()
            preemptions = _total(vanilla.metrics_text(), "vllm:num_preemptions_total")
        return self._result(configs, preemptions)

    def _server(self, name: str, draft: str | None, **spec: Any) -> VllmServer:
        port, log = free_port(), self._folder / f"{name}.log"
        self._say(f"{name}: starting (log: {log})")
        return VllmServer(pairs.serve_args(self._options.family, draft, port=port, overrides=ENGINE, **spec), port, log)

    def _soak(
        self, name: str, client: httpx.Client, pool: ThreadPoolExecutor, vanilla: VllmServer, ours: VllmServer,
        vanilla_memory: Memory,
    ) -> dict[str, Any]:  # fmt: skip
        """Send slices to both servers until this configuration's share of the time is over; then look what is left."""
        before, record = ours.metrics(), self.record
        first, resent = record.requests, record.resent["ours"]
        memory = Memory(ours.process.pid)
        memory.start()
        urls = {"ours": ours.base_url, "vanilla": vanilla.base_url}
        deadline = time.monotonic() + 60 * self._options.minutes / len(self._options.configs)
        for number in itertools.count():
            if time.monotonic() >= deadline:
                break
            asks, replies = self._traffic.slice(SLICE), {}
            # In turns, so that neither server always has the machine's caches warm.
            for which in reversed(SERVERS) if number % 2 else SERVERS:
                send = functools.partial(traffic.send, client, urls[which], is_ours=which == "ours")
                replies[which] = list(pool.map(send, asks))
            for ask, expected, got in zip(asks, replies["vanilla"], replies["ours"], strict=True):
                record.add(name, ask, expected, got)
            bad = {kind: len(found) for kind, found in record.bad.items()}
            self._say(f"{name}: {record.requests - first} requests, wrong and errors so far: {bad}")
            if not ours.healthy():
                raise VidSpecError(f"the server is gone: {ours.reason()} (log: {ours.log_path})")
        samples = memory.stop()
        beside = first_minutes(vanilla_memory.samples, samples)
        idle = wait_idle(client, ours)
        gained = difference(before, idle)
        failures = {key: gained[key] for key in FAILURES if gained[key]}
        log = ours.log_path.read_text(errors="replace")
        if lost := log.count("the drafter's process is gone"):
            failures["drafters lost"] = lost
        # vLLM has asked a client to send its request again; see `soak_traffic`.
        if (unexplained := record.resent["ours"] - resent - log.count("Multi-modal cache miss for request")) > 0:
            failures["answers of 500"] = unexplained
        return {
            "config": name,
            "requests": record.requests - first,
            **leaks(idle),
            "failures": failures,
            "rss_slope_mb_per_min": slope_mb_per_min(samples),
            "vanilla_rss_slope_mb_per_min": slope_mb_per_min(beside),
            "rss_mb_over_time": thinned(samples),
            "vanilla_rss_mb_over_time": thinned(beside),
            "preemptions": _total(ours.metrics_text(), "vllm:num_preemptions_total"),
            "counters": {key: gained[key] for key in SHOWN},
        }

    def _result(self, configs: list[dict[str, Any]], preemptions: int) -> dict[str, Any]:
        record, bad = self.record, self.record.bad
        failures = sum(sum(row["failures"].values()) + row["processes_left"] for row in configs)
        return {
            "family": self._options.family,
            "minutes": self._options.minutes,
            "seed": self._options.seed,
            "concurrency": CONCURRENCY,
            "requests": record.requests,
            "compared": record.compared,
            "wrong_answers": len(bad["wrong"]),
            "errors_unexpected": len(bad["error"]) + failures,
            "leaked_blocks": sum(row["leaked_blocks"] for row in configs),
            "leaked_states": sum(row["leaked_states"] for row in configs),
            "resent": record.resent,
            "kinds": dict(sorted(record.kinds.items())),
            "traits": dict(sorted(record.traits.items())),
            "vanilla_preemptions": preemptions,
            "configs": configs,
            "bad": {kind: found[:20] for kind, found in bad.items()},
            "provenance": provenance(),
        }


def leaks(idle: Mapping[str, int]) -> dict[str, int]:
    """Return what a server holds though no request runs, of its gauges then: `leaked_blocks` of the draft's pool, and
    `leaked_states`, requests of which anything is held and video tokens whose hidden states are.
    """
    per_token = max(1, idle["relevance_bytes_per_token"])
    return {
        "leaked_blocks": idle["draft_pool_blocks_used"],
        "leaked_states": idle["held_requests"] + math.ceil(idle["relevance_held_bytes"] / per_token),
    }


def slope_mb_per_min(samples: Sequence[tuple[float, int]], least_min: float = LEAST_MIN) -> float | None:
    """Return the slope of memory (seconds, bytes) by regression over the second half, in MB per minute.

    None of less than `least_min` minutes: until then caches fill.
    """
    if not samples or samples[-1][0] - samples[0][0] < 60 * least_min:
        return None
    middle = (samples[0][0] + samples[-1][0]) / 2
    late = [(at / 60, size / MB) for at, size in samples if at >= middle]
    return round(statistics.linear_regression(*zip(*late, strict=True)).slope, 3) if len(late) > 2 else None


def first_minutes(
    vanilla: Sequence[tuple[float, int]], ours: Sequence[tuple[float, int]]
) -> Sequence[tuple[float, int]]:
    """Return a server's readings from its start on, for as long as another's: caches of both are as full."""
    if not vanilla or not ours:
        return []
    end = vanilla[0][0] + ours[-1][0] - ours[0][0]
    return [sample for sample in vanilla if sample[0] <= end]


def is_bad(result: Mapping[str, Any], most_mb_per_min: float) -> list[str]:
    """Return what of a soak's result fails it, in words; [] for a pass.

    Memory may grow by `most_mb_per_min` more than vanilla's as long after its start, and by more where that is short.
    """
    bad = [name for name in ("wrong_answers", "errors_unexpected", "leaked_blocks", "leaked_states") if result[name]]
    for row in result["configs"]:
        ours, vanillas = row["rss_slope_mb_per_min"], row["vanilla_rss_slope_mb_per_min"]
        if ours is not None and ours - max(0.0, vanillas or 0.0) > most_mb_per_min:
            bad.append(f"memory of {row['config']}")
    return bad


def thinned(samples: list[tuple[float, int]], at_most: int = 20) -> list[int]:
    """Return some of a server's memory readings at even distances, in MB, the last one included."""
    step = max(1, -(-len(samples) // at_most))
    return [round(size / MB) for _, size in samples[::-1][::step]][::-1]


def wait_idle(client: httpx.Client, server: VllmServer) -> dict[str, int]:
    """Return a server's metrics once nothing is held, or what is held after a minute without traffic.

    vLLM makes a step of its own for the end of the last request, so the gauges fall without any help, but for a drafter
    with a process of its own: its gauges arrive with the target's next step. So now and then a request of one token
    is sent. It cannot hide a leak: a gauge of 0 covers everything that is held at that time.
    """
    deadline, number = time.monotonic() + IDLE_WITHIN_S, 0
    body = {"model": "target", "prompt": "the video", "max_tokens": 1, "temperature": 0.0}
    while True:
        idle = server.metrics()
        if not any(leaks(idle).values()) or time.monotonic() > deadline:
            return idle
        number += 1
        if number % 4 == 0:
            client.post(f"{server.base_url}{traffic.COMPLETIONS}", json=body, timeout=60)
        time.sleep(0.25)


def _total(text: str, name: str) -> int:
    lines = (line for line in text.splitlines() if line.startswith((name + "{", name + " ")))
    return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines))


def _left(processes: list[psutil.Process]) -> int:
    """Return how many of an ended server's processes still run, a moment later at the latest."""
    _, alive = psutil.wait_procs(processes, timeout=10)
    return sum(process.status() != psutil.STATUS_ZOMBIE for process in alive if process.is_running())


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0, help="of traffic, starts of servers not counted")
    parser.add_argument("--family", default="qwen2.5-vl", choices=pairs.FAMILIES)
    parser.add_argument("--configs", help=f"of {','.join(CONFIGS)}; default: as many as there are minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-mb-per-min", type=float, default=MOST_MB_PER_MIN, help="beyond vanilla's: a leak")
    parser.add_argument("--log-dir", help="where the servers' logs go")
    parser.add_argument("--json", help="write the result here")
    options = parser.parse_args(arguments)
    names = list(CONFIGS)[: max(1, int(options.minutes))] if options.configs is None else options.configs.split(",")
    if unknown := set(names) - set(CONFIGS):
        parser.error(f"unknown configuration {', '.join(sorted(unknown))}; known: {', '.join(CONFIGS)}")
    options.configs = names
    return options


def main() -> int:
    options = parsed()
    for name, value in _ENVIRONMENT.items():  # of the servers
        os.environ.setdefault(name, value)
    say: Say = lambda line: print(f"[soak] {line}", flush=True)  # noqa: E731
    try:
        if options.json:
            check_output(options.json, "--json", suffixes=(".json",))
        result = Soak(options, say).run()
    except VidSpecError as error:
        say(f"error: {error}")
        return 1
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    hidden = ("configs", "bad", "provenance", "kinds", "traits")
    print(json.dumps({key: value for key, value in result.items() if key not in hidden}, indent=1))
    for kind, found in result["bad"].items():
        for one in found:
            say(f"{kind}: {json.dumps(one)}")
    for row in result["configs"]:
        ours, vanillas = row["rss_slope_mb_per_min"], row["vanilla_rss_slope_mb_per_min"]
        words = f"{ours} MB a minute, vanilla's {vanillas}" if ours is not None else "too short a time to judge"
        say(f"{row['config']}: memory: {words}")
    bad = is_bad(result, options.most_mb_per_min)
    say("failed: " + ", ".join(bad) if bad else "passed")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
