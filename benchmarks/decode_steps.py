"""Decode steps of a running in-process engine: requests that all draft, and a clock of the drafting inside a step."""

import contextlib
import importlib
import statistics
import time
from collections.abc import Sequence
from typing import Any


def runner_of(engine: Any) -> Any:
    """Return the model runner of an engine whose worker is in this process."""
    return engine.model_executor.driver_worker.worker.model_runner


def around(name: str | None) -> contextlib.AbstractContextManager:
    """Return the context manager that "module:name" makes, for an emulated device; no name for none."""
    if not name:
        return contextlib.nullcontext()
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)()


class Clock:
    """Times a speculator's `propose` on the host, and on a GPU between events, so that nothing is synchronised."""

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
        """Return the medians since the last call: `propose_ms` and `propose_host_ms`."""
        device_ms = self._host_ms
        if self._events:
            self._events[-1][1].synchronize()
            device_ms = [begin.elapsed_time(end) for begin, end in self._events]
        found = [statistics.median(times) if times else None for times in (device_ms, self._host_ms)]
        self._host_ms, self._events = [], []
        return dict(zip(("propose_ms", "propose_host_ms"), found, strict=True))


class NotAllDraftError(RuntimeError):
    """Requests do not all run, and draft, at a time."""


class DecodeLoop:
    """Runs requests in an `LLMEngine` of this process, so that single decode steps can be timed.

    Where vidspec drafts (`is_ours`), its draft reads a prompt only after the target has.
    """

    def __init__(self, engine: Any, is_ours: bool):
        self._engine = engine
        self._rows = runner_of(engine).requests if is_ours else None
        self.num_tokens: dict[str, int] = {}  # by request

    def start(self, prompts: Sequence[Any], max_tokens: int, max_steps: int) -> None:
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
