"""Engines whose steps are timed: `EngineSession` with more commands; the second half runs in the subprocess."""

import ctypes
import dataclasses
import os
import sys
import threading
import time
from typing import Any, ClassVar

from vllm_vidspec import metrics
from vllm_vidspec.config import METHOD
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.names import WRITER_THREAD
from vllm_vidspec.tools import watching
from vllm_vidspec.tools.engine_session import EngineSession
from vllm_vidspec.tools.progress import Report, silent
from vllm_vidspec.tools.session_job import Engine, gain, main, sampling_params

WARM_UP_TOKENS = 8
# What `clock` tells of each step.
_VERIFIED = ("draft_tokens", "accepted_tokens", "stale_streams")
_ADDR_NO_RANDOMIZE = 0x0040000  # of Linux's personality(2)


class TimedSession(EngineSession):
    """An `EngineSession` that knows the commands of `TimedEngine`.

    Its job may also hold `cpus`, the cores that the process may use, and in `prompts` `warm_up`, the index of one more
    video: what happens once, as lazy imports do, is then part of no figure.
    """

    program = ("-m", "vllm_vidspec.tools.bench.session")

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        # By chance of their hashes and addresses two engines that do the same differed by 17 % on this path of Python.
        os.environ.setdefault("PYTHONHASHSEED", "0")
        ctypes.CDLL(None).personality(_ADDR_NO_RANDOMIZE)


class TimedEngine(Engine):
    """An engine whose steps are timed."""

    commands: ClassVar[tuple[str, ...]] = (*Engine.commands, "look", "clock")

    @classmethod
    def prepare(cls, job: dict[str, Any]) -> None:
        """Let this process and the threads that it will start use the job's cores only; vLLM would bind them anew."""
        if "cpus" in job:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            os.sched_setaffinity(0, job["cpus"])

    def warm_up(self) -> None:
        """Answer the warm-up request; then all threads must be on the job's cores."""
        assert self.job is not None
        prompts, cpus = self.job["prompts"], self.job.get("cpus")
        if "warm_up" in prompts:
            requests = self.bundled_requests(prompts | {"held_out": [prompts["warm_up"]]})
            dataclasses.replace(self, requests=requests).ask({"max_tokens": WARM_UP_TOKENS})
        if cpus is not None and (cores := _cores_of_threads()) != set(cpus):
            raise VidSpecError(f"the engine was to run on cores {cpus} and may run on {sorted(cores)}")

    def progress(self) -> Any:
        """Return a tqdm class whose updates become events, or False where nobody listens."""
        return _progress(self.report)

    @property
    def is_stock(self) -> bool:
        """Whether it drafts as vLLM does without us."""
        spec = self.job["llm"].get("speculative_config", {}) if self.job else {}
        return spec.get("method", METHOD) != METHOD

    def counters(self) -> dict[str, int] | None:
        """Return what our counters say now, or vLLM's own, by our names, where it drafts without us; None for vanilla.

        What vLLM does not count is 0.
        """
        if not self.is_stock:
            return super().counters()
        values = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in self.llm.get_metrics()}
        names = [name for name in ("drafts", "draft_tokens", "accepted_tokens") if name in values]
        return dict.fromkeys(metrics.NAMES, 0) | {name: int(values[name].value) for name in names}

    def look(self, path: str) -> dict[str, Any]:
        """Save to `path` how the first item of every prompt was pruned, and what was measured of it for that."""
        import torch

        self.llm.collective_rpc(watching.pruning, args=(True,))
        self.ask({"max_tokens": 2})  # after a first token that is also the last one, nothing is drafted
        watched = self.llm.collective_rpc(watching.pruning, args=(False,))[0]
        records = [
            {
                "grid": (grid.num_frames, grid.height, grid.width, grid.num_trailing),
                "kept_indices": record["kept_indices"][0],
                "scores": None if record["scores"] is None else record["scores"][0],
                "features": None if record["embeddings"] is None else record["embeddings"][0],
            }
            for record in watched
            for grid in record["grids"][:1]
        ]
        torch.save(records, path)
        return {}

    def clock(self, index: int, sampling: dict[str, Any], seed: int | None) -> dict[str, Any]:
        """Answer one request alone; return when its tokens came.

        Returns:
            `token_ids`; `ttft_s`, from handing the request in (its video still to be preprocessed) to the first token;
            `decode_s`, from the first token to the last; `step_s`, the wall time of each step in between; `verified`,
            what our counters gained in each of these steps: drafts verified, drafts accepted, stale streams (nothing
            for vanilla); `metrics`.
        """
        enqueue = self.llm.enqueue_chat if self.is_chat else self.llm.enqueue
        engine, steps, outputs = self.llm.llm_engine, [], []
        counted: list[dict[str, int] | None] = []
        before, start = self.counters(), time.monotonic()
        enqueue([self.requests[index]], sampling_params(sampling, seed=seed), use_tqdm=False)
        while engine.has_unfinished_requests():
            begin = time.monotonic()
            outputs += engine.step()
            steps.append((begin, time.monotonic()))
            counted.append(None if self.is_stock else self.counters())  # vLLM's own take too long to read
        # What vLLM notes of a request: times of time.monotonic(), as each of its steps ends.
        noted = outputs[-1].metrics
        return {
            "token_ids": list(outputs[-1].outputs[0].token_ids),
            "ttft_s": noted.first_token_ts - start,
            "decode_s": noted.last_token_ts - noted.first_token_ts,
            "step_s": [end - begin for begin, end in steps if begin >= noted.first_token_ts],
            "verified": [
                [gained.get(name, 0) for name in _VERIFIED]
                for (begin, _), *readings in zip(steps, [before, *counted], counted, strict=False)
                if begin >= noted.first_token_ts and (gained := gain(*readings)) is not None
            ],
            "metrics": gain(before, self.counters()),
        }


def _progress(report: Report) -> Any:
    """Return a tqdm class whose updates become events, or False where nobody listens."""
    if report is silent:
        return False
    from tqdm import tqdm

    class Reporter(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # LLM.generate shows one bar for rendering prompts and one for processing them; only the second counts.
            self._counts = str(kwargs.get("desc", "")).startswith("Processed")
            super().__init__(*args, **kwargs | {"file": open(os.devnull, "w")})  # noqa: SIM115

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if self._counts:
                report("progress", {"done": int(self.n)})
            return shown

    return Reporter


def _cores_of_threads() -> set[int]:
    """Return every core that a thread of this process may use, but for the one that works for the drafter."""
    writers = {thread.native_id for thread in threading.enumerate() if thread.name.startswith(WRITER_THREAD)}
    threads = {int(thread) for thread in os.listdir("/proc/self/task")} - writers
    return {core for thread in threads for core in os.sched_getaffinity(thread)}


if __name__ == "__main__":
    sys.exit(main(TimedEngine))
