"""Runs vLLM's CUDA engine on the null GPU, one configuration after another, and measures every decode step.

    python -m null_gpu.engine_run OUT.json NAME...

It runs in a process of its own, as an engine leaves threads and caches behind. Each name is one of `CASES`; consecutive
cases with the same engine share it. A case that fails is reported with its traceback, and its engine is shut down.
"""

import contextlib
import gc
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from null_gpu import device
from null_gpu.cases import CASES, Case
from null_gpu.probe import Probe

_MOST_STEPS = 400


@dataclass
class Measured:
    name: str  # the case
    error: str | None = None  # traceback, None if it ran
    start_s: float = 0.0  # 0 if an earlier case has started the engine
    took_s: float = 0.0  # the whole case
    start: dict[str, int] = field(default_factory=dict)  # counters
    prefill: dict[str, int] = field(default_factory=dict)  # counters of the steps before the counted ones
    steps: list[dict[str, int]] = field(default_factory=list)  # counters of each counted decode step
    lines: dict[str, list[int]] = field(default_factory=dict)  # `event|line` to `[times, bytes]` of these
    tokens: int = 0  # output tokens of these
    host_ms: list[float] = field(default_factory=list)  # of each timed step, nothing emulated
    timed: dict[str, int] = field(default_factory=dict)  # counters of all timed steps
    not_emulated: dict[str, str] = field(default_factory=dict)  # errors of the emulation, by kernel
    extra: dict[str, Any] = field(default_factory=dict)  # of the case's own


class Session:
    def __init__(self, case: Case):
        from vllm import LLM

        self.case = case
        self.llm = LLM(**case.llm_kwargs())
        self.engine = self.llm.llm_engine
        self._probe = None if case.num_ranks > 1 else Probe()
        self._prompted = 0
        self.tokens: dict[str, int] = {}

    @property
    def worker(self) -> Any:
        return self.engine.model_executor.driver_worker.worker

    def probe(self, name: str, *args: Any) -> list[Any]:
        """Call a method of every rank's probe; return the answers by rank."""
        if self._probe is not None:
            return [getattr(self._probe, name)(*args)]
        return self.llm.collective_rpc("null_gpu", args=(name, *args))

    @contextlib.contextmanager
    def decoding(self, **sampling: Any) -> Iterator[list[str]]:
        """Let new requests with new videos decode under emulation; yield their ids, and abort them at the end."""
        from vllm import SamplingParams

        self.probe("emulate", True)
        self._prompted, names = self._prompted + 1, []
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 1800, "ignore_eos": True, "seed": 1} | sampling)
        for prompt in self.case.prompts(seed=self._prompted):
            names.append(f"{self._prompted}-{len(names)}")
            self.engine.add_request(names[-1], prompt, params)
        self._prefill(names)
        yield names
        self.probe("emulate", False)
        self._abort(names)

    def counted(self) -> dict[str, int]:
        """Return our counters; vanilla vLLM has none."""
        from vllm_vidspec import metrics

        if self.case.spec is None:
            return {}
        return metrics.read_metrics(metrics.path_for(self.engine.vllm_config.instance_id))

    def step(self) -> None:
        for output in self.engine.step():
            self.tokens[output.request_id] = len(output.outputs[0].token_ids)

    def _prefill(self, names: list[str]) -> None:
        for _ in range(_MOST_STEPS):
            if all(self.tokens.get(name, 0) > 0 for name in names):
                for _ in range(self.case.skip):
                    self.step()
                return
            self.step()
        raise RuntimeError(f"no tokens after {_MOST_STEPS} steps: {self.tokens}")

    def _abort(self, names: list[str]) -> None:
        self.engine.abort_request(names)
        for _ in range(_MOST_STEPS):
            if not self.engine.has_unfinished_requests():
                return
            self.step()
        raise RuntimeError("aborted requests do not end")

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        with mock.patch.object(gc, "unfreeze"):
            self.engine.engine_core.shutdown()
            del self.llm, self.engine
            cleanup_dist_env_and_memory()
        gc.unfreeze()
        gc.collect()


def start(case: Case, out: Measured) -> Session:
    """Start a case's engine; write time and counters into `out`."""
    if case.before is not None:
        case.before()
    gc.freeze()  # vLLM collects garbage some twenty times an engine, over all that the process has imported
    before, begun = [device.counters() if case.num_ranks == 1 else {}], time.perf_counter()
    session = Session(case)
    out.start_s = round(time.perf_counter() - begun, 2)
    out.start = dict(gained(before, session.probe("counters")[:1])[0])
    return session


def measure(session: Session, out: Measured) -> None:
    """Count decode steps of the session's case under emulation, and time others without."""
    case, counted = session.case, session.counted()
    before, decides = session.probe("counters"), contextlib.nullcontext()
    if case.decide is not None:
        decides = mock.patch("vllm_vidspec.engine.policy.Policy.decide", case.decide)
    with decides, session.decoding(**case.sampling):
        out.prefill = dict(gained(before, session.probe("counters"))[0])
        count_steps(session, out)
        session.probe("emulate", False)
        before = session.probe("counters")
        for _ in range(case.timed_steps):
            begun = time.perf_counter()
            session.step()
            out.host_ms.append(round((time.perf_counter() - begun) * 1e3, 3))
        out.timed = dict(gained(before, session.probe("counters"))[0])
        # Steps that do nothing would count as cheap ones.
        assert session.engine.has_unfinished_requests(), (
            f"requests ended meanwhile: {session.tokens}; count fewer steps"
        )
    out.not_emulated = session.probe("not_emulated")[0]
    out.extra["counted"] = {name: value - counted[name] for name, value in session.counted().items()}
    if case.after is not None:
        out.extra |= case.after(session)


def count_steps(session: "Session", out: Measured) -> None:
    """Count and trace a case's decode steps into `out`: the first rank's, and every rank's launches."""
    first, launches = sum(session.tokens.values()), []
    session.probe("trace", True)
    before = session.probe("counters")
    for _ in range(session.case.steps):
        session.step()
        after = session.probe("counters")
        step = gained(before, after)
        out.steps.append(dict(step[0]))
        launches.append([rank["launch"] for rank in step])
        before = after
    out.lines = session.probe("trace", False)[0]
    out.tokens = sum(session.tokens.values()) - first
    out.extra["launches_by_rank"] = [sum(rank) for rank in zip(*launches, strict=True)]


def gained(before: list[dict[str, int]], after: list[dict[str, int]]) -> list[Counter]:
    """Return the increase of each counter by rank; counters that have not changed are missing."""
    return [Counter(late) - Counter(early) for early, late in zip(before, after, strict=True)]


def run(names: list[str]) -> Iterator[Measured]:
    """Measure cases in the order given; consecutive ones with the same engine share it."""
    session = None
    for name, following in zip(names, [*names[1:], None], strict=True):
        case, out, begun = CASES[name], Measured(name), time.perf_counter()
        try:
            if session is None:
                session = start(case, out)
            session.case = case
            measure(session, out)
        except Exception:
            out.error = traceback.format_exc()
        if session is not None and (out.error or following is None or not case.shares_engine(CASES[following])):
            session.close()
            session = None
        out.took_s = round(time.perf_counter() - begun, 2)
        yield out


def main() -> int:
    """Measure the cases named on the command line and write them to the file named there."""
    from null_gpu import emulate

    target, *names = sys.argv[1:]
    emulate.zero_blocks()
    results = []
    for out in run(names):
        results.append(out)
        print(f"[null GPU] {out.name}: {'failed' if out.error else 'ran'}, {out.took_s} s", file=sys.stderr, flush=True)
        with open(target, "w") as file:
            json.dump([asdict(result) for result in results], file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
