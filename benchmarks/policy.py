"""The policy without models: what it chooses in simulated cells, and what it takes of the host.

    python -m benchmarks.policy host-time --requests 64 --steps 1500
    python -m benchmarks.policy cells --json cells.json

`host-time`: what stands beside vLLM's scheduler (`SchedulerSide`) plans and observes steps of made-up requests, half of
them good, half hopeless, whose clock is simulated; in one step of thirty one ends and another comes. Microseconds
a step, the first tenth left out; `step` is both together.

`cells`: tokens a second with the policy over those with the best fixed option, 0 to 5 draft tokens, on the engine
without models of the policy's tests: 2 costs of steps, 3 batch sizes, 4 lengths of video, 6 chances of acceptance.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import harness


def side_of(num_reqs: int) -> Any:
    """Return a `SchedulerSide` without a scheduler, with a policy for so many requests."""
    from tests.unit.engine.simulated import measured, memory_bound
    from vllm_vidspec import metrics
    from vllm_vidspec.config import METHOD, parse_config
    from vllm_vidspec.engine.policy import Policy
    from vllm_vidspec.engine.scheduling import SchedulerSide

    metrics.MetricsFile.create(metrics.path_for("policy", 0))
    config, _ = parse_config({"model": "draft", "num_speculative_tokens": 5, "adaptive_tokens": True})
    vllm_config = SimpleNamespace(
        additional_config={METHOD: config.model_dump()},
        instance_id="policy",
        parallel_config=SimpleNamespace(data_parallel_index=0, data_parallel_size=1),
    )
    side = SchedulerSide(SimpleNamespace(requests={}), vllm_config)
    side._policy = Policy(side.options, measured(memory_bound, side.options), 2 * num_reqs, False)
    return side


def host_time(options: argparse.Namespace) -> Iterator[harness.Row]:
    from tests.unit.engine.simulated import memory_bound
    from vllm_vidspec.engine import scheduling
    from vllm_vidspec.engine.compat.scheduler import _DECISION, Attached, StepReport, attach

    random, names = np.random.default_rng(0), itertools.count()
    chances: dict[str, float] = {}  # of running requests, by their names
    in_flight: dict[str, int] = {}
    times: dict[str, list[float]] = defaultdict(list)
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(tempfile, "tempdir", folder),
        mock.patch.object(scheduling, "time", clock),
    ):
        side = side_of(options.requests)
        for number in range(options.steps):
            ended = [str(random.choice(list(chances)))] if number and not number % options.one_ends_every else []
            for req_id in ended:
                del chances[req_id]
                in_flight.pop(req_id, None)
            while len(chances) < options.requests:
                number_of = next(names)
                req_id, place = f"r{number_of}", number_of % 2
                chances[req_id] = (0.9, 0.05)[place]
                size = SimpleNamespace(mm_position=SimpleNamespace(length=(256, 4096)[place]), modality="video")
                request = SimpleNamespace(
                    request_id=req_id, mm_features=[size], sampling_params=None, num_tokens=size.mm_position.length,
                    num_computed_tokens=0, max_tokens=1024, num_output_tokens=128,
                )  # fmt: skip
                side.admits(request)
            step = SimpleNamespace(
                num_scheduled_tokens=dict.fromkeys(chances, 1),
                total_num_scheduled_tokens=len(chances) + sum(in_flight.values()),
                scheduled_spec_decode_tokens={req_id: [0] * count for req_id, count in in_flight.items()},
                scheduled_new_reqs=ended,
                finished_req_ids=set(ended),
            )
            begin = time.perf_counter()
            decision = side.plan(step)
            planned = time.perf_counter() - begin
            setattr(step, _DECISION, decision)
            drafted = np.array([in_flight.get(req_id, 0) for req_id in chances])
            clock.now += memory_bound(len(chances), np.full(len(chances), 2.0), drafted, decision.option.num_levels)
            accepted = [
                int((random.random(in_flight.get(req_id, 0)) < chance).cumprod().sum())
                for req_id, chance in chances.items()
            ]
            output = SimpleNamespace(req_ids=list(chances), sampled_token_ids=[[7] * (1 + count) for count in accepted])
            attach(output, Attached(StepReport(frozenset(in_flight))))
            begin = time.perf_counter()
            side.observe(step, output)
            observed = time.perf_counter() - begin
            who = chances.keys() - decision.paused if decision.option.num_tokens else ()
            in_flight = dict.fromkeys(who, decision.option.num_tokens)
            if number >= options.steps // 10:
                for name, seconds in (("plan", planned), ("observe", observed), ("step", planned + observed)):
                    times[name].append(1e6 * seconds)
    for name, found in times.items():
        quantiles = {f"p{share}_us": round(float(np.percentile(found, share)), 1) for share in (50, 90, 99)}
        yield {"what": name, "steps": len(found), "mean_us": round(statistics.mean(found), 1), **quantiles}


def cells(options: argparse.Namespace) -> Iterator[harness.Row]:
    """Yield each cell, and of all of them the mean, the lowest, and how many are below `below`."""
    from tests.unit.engine.test_policy import COSTS, FIXED, rate

    found = []
    for cost, batch, tokens, chance in itertools.product(COSTS, options.batch, options.tokens, options.chance):
        told = {"batch": batch, "requests": max(48, 4 * batch), "seed": options.seed}
        rates = {fixed: float(rate(fixed, cost, (tokens, chance), **told)) for fixed in (*FIXED, None)}
        ours, none = rates.pop(None), rates[0]
        best = max(rates, key=rates.__getitem__)
        found.append(ours / rates[best])
        row = {"cost": cost.__name__, "batch": batch, "tokens": tokens, "chance": chance, "best": best}
        yield row | {"of_best": round(found[-1], 4), "of_none": round(ours / none, 4)}
    row = {"cells": len(found), "mean": round(statistics.mean(found), 4), "lowest": round(min(found), 4)}
    yield row | {"below": sum(one < options.below for one in found)}


CASES = {
    "host-time": (host_time, {"requests": 64, "steps": 1500, "one_ends_every": 30}),
    "cells": (
        cells,
        {"batch": [1, 4, 16], "tokens": [256, 1024, 4096, 16384], "chance": [0.95, 0.8, 0.6, 0.4, 0.2, 0.05]}
        | {"below": 0.97, "seed": 1},
    ),
}

if __name__ == "__main__":
    harness.cases(__doc__, CASES)
