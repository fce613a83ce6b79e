"""What the engine benchmarks share: an in-process engine, its counters, its decode steps and their clock, a command."""

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
from vllm_vidspec import metrics
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs, session_job
from vllm_vidspec.tools.provenance import provenance

Row = dict[str, Any]


def runner_of(engine: Any) -> Any:
    """Return the model runner of an `LLMEngine` whose worker is in this process."""
    return engine.model_executor.driver_worker.worker.model_runner


class Engine:
    def __init__(self, kwargs: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**kwargs)
        self.runner = runner_of(self.llm.llm_engine)
        self._path = metrics.path_for(self.llm.llm_engine.vllm_config.instance_id)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.runner
        gc.collect()  # an engine's memory is free once nothing refers to it
        cleanup_dist_env_and_memory()

    def counters(self) -> dict[str, int]:
        return metrics.read_metrics(self._path)

    def answer(self, prompts: list[Row], **sampling: Any) -> list[list[int]]:
        """Return the token ids of the answers, greedy unless `sampling` says otherwise, each with a seed of its own."""
        outputs = session_job.Engine(self.llm, prompts).ask(sampling, seed=0)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def measure(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, int]]:
        before = self.counters()
        result = call(*args, **kwargs)
        return result, metrics.difference(before, self.counters())


class NotAllDraftError(RuntimeError):
    """Requests do not all run, and draft, at a time."""


class DecodeLoop:
    """Runs requests in an `LLMEngine` of this process, so that single decode steps, and the drafting in them, can be
    timed: on the host, and on a GPU between events, so that nothing is synchronised inside a step.

    Where vidspec drafts (`is_ours`), its draft reads a prompt only after the target has.
    """

    def __init__(self, engine: Any, is_ours: bool):
        import torch

        self._engine, runner = engine, runner_of(engine)
        self._rows = runner.requests if is_ours else None
        self.num_tokens: dict[str, int] = {}  # by request
        self._event = (lambda: torch.cuda.Event(enable_timing=True)) if torch.cuda.is_available() else None
        self._host_ms: list[float] = []
        self._events: list[tuple[Any, Any]] = []
        if runner.speculator is not None:
            self._propose, runner.speculator.propose = runner.speculator.propose, self._timed_propose

    def _timed_propose(self, *args: Any, **kwargs: Any) -> Any:
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
        """Return the medians of drafting since the last call: `propose_ms` and `propose_host_ms`."""
        device_ms = self._host_ms
        if self._events:
            self._events[-1][1].synchronize()
            device_ms = [begin.elapsed_time(end) for begin, end in self._events]
        found = [statistics.median(times) if times else None for times in (device_ms, self._host_ms)]
        self._host_ms, self._events = [], []
        return dict(zip(("propose_ms", "propose_host_ms"), found, strict=True))

    def start(self, prompts: Sequence[Any], max_tokens: int, max_steps: int = 200) -> None:
        """Add requests, and step until all of them draft (NotAllDraftError: they do not within `max_steps`)."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.num_tokens = {f"{len(prompts)}-{number}": 0 for number in range(len(prompts))}
        for name, prompt in zip(self.num_tokens, prompts, strict=True):
            self._engine.add_request(name, prompt, params)
        for _ in range(max_steps):
            self.step()
            has_draft = self._rows is None or self._rows.has_draft_np.sum() == len(prompts)
            if has_draft and all(self.num_tokens.values()):
                return
        raise NotAllDraftError(f"the requests do not draft within {max_steps} steps")

    def step(self) -> None:
        for output in self._engine.step():
            self.num_tokens[output.request_id] = len(output.outputs[0].token_ids)

    def timed(self, num_steps: int) -> float:
        """Run steps; return the milliseconds of one on the device, their mean."""
        import torch

        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begun) / num_steps

    def finish(self) -> float:
        """Run the requests to their ends; return the milliseconds of a token of each, their mean."""
        begun, tokens = time.perf_counter(), sum(self.num_tokens.values())
        while self._engine.has_unfinished_requests():
            self.step()
        elapsed_ms = 1e3 * (time.perf_counter() - begun)
        return elapsed_ms * len(self.num_tokens) / (sum(self.num_tokens.values()) - tokens)

    def stop(self) -> None:
        """Abort the requests and empty the engine; RuntimeError if one had ended before it was timed."""
        if self._engine.get_num_unfinished_requests() != len(self.num_tokens):
            raise RuntimeError("a request has ended before its steps were timed")
        self._engine.abort_request(list(self.num_tokens))
        while self._engine.has_unfinished_requests():
            self._engine.step()


def ci95(tokens: float, steps: int) -> float:
    """Return half the 95 % interval of tokens per step, as of a count that is Poisson's."""
    return round(1.96 * math.sqrt(tokens / steps), 3)


def pair(family: str, **knobs: Any) -> Engine:
    return Engine(pairs.llm_kwargs(family, "draft", **knobs))


def videos(family: str, numbers: Iterable[int]) -> list[Row]:
    return [pairs.video_prompt(family, world.held_out(i).frames) for i in numbers]


def command(doc: str | None, measure: Callable[[argparse.Namespace], Iterable[Row]], /, **defaults: Any) -> list[Row]:
    """Print a benchmark's rows as they come, write them to `--json`, and return them; options are `defaults`, a list
    is given with commas."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        parse: Callable[[str], Any] = type(default)
        if isinstance(default, list):
            parse = lambda text, kind=type(default[0]): [kind(part) for part in text.split(",")]  # noqa: E731
        how: dict[str, Any] = {"action": "store_true"} if default is False else {"type": parse, "default": default}
        parser.add_argument("--" + name.replace("_", "-"), **how, help=f"default: {default}".replace("%", "%%"))
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    rows = []
    for row in measure(options):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps({"rows": rows, "provenance": provenance()}, indent=1) + "\n")
    return rows


def cases(doc: str | None, known: Mapping[str, tuple[Callable[[argparse.Namespace], Iterable[Row]], Row]]) -> list[Row]:
    """Run one of several cases, the first word of the command line; each has what measures it, and its options."""
    if len(sys.argv) < 2 or sys.argv[1] not in known:
        raise SystemExit(f"{doc}\nCases: {', '.join(known)}; each has --help.")
    measure, options = known[sys.argv.pop(1)]
    return command(doc, measure, **options)
