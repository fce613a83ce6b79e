"""Servers whose processes are killed, or whose host lacks something: the rows of docs/notebook/reliability.md."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import httpx
import psutil

from tests.engine import ray_on_cpu
from vllm_vidspec.metrics import difference
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.demo import ask
from vllm_vidspec.tools.processes import VllmServer, free_port

FAMILY, QUESTION, MAX_TOKENS = "qwen2.5-vl", pairs.DEFAULT_QUESTION, 24
OF_RANKS = "llava-onevision"  # its towers have an even number of heads
SMALL = {"kv_cache_memory_bytes": 96 * 2**20}  # an engine fills its cache with zeros when it starts
_SOON_S = 90.0  # bound of every wait after a kill, on a loaded machine
_NOWHERE = "/proc/nowhere"  # where not even root can make a folder
SHM = Path("/dev/shm")


@contextmanager
def serving(
    folder: Path, name: str = "server", env: dict[str, str] | None = None, **overrides: Any
) -> Iterator[VllmServer]:
    """Serve the pair with a temporary directory of its own for counters, and wait until it is ready."""
    port, tmp, cores = free_port(), folder / "tmp", sorted(os.sched_getaffinity(0))
    tmp.mkdir(exist_ok=True)
    # vLLM would give each rank and each engine a NUMA node of its own.
    num_engines = math.prod(overrides.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "data", "pipeline"))
    bind = "|".join(str(cores[i % len(cores)]) for i in range(num_engines))
    family = OF_RANKS if overrides.get("tensor_parallel_size", 1) > 1 else FAMILY
    args = pairs.serve_args(family, "draft", port=port, overrides=SMALL | overrides, on_draft_error="raise")
    with (
        mock.patch.dict(os.environ, {"TMPDIR": str(tmp), "VLLM_CPU_OMP_THREADS_BIND": bind} | (env or {})),
        VllmServer(args, port, folder / f"{name}.log") as server,
    ):
        server.wait_ready(timeout_s=800)
        yield server


def _ask(server: VllmServer) -> list[int]:
    return ask(server.base_url, QUESTION, video=pairs.sample_video(), max_tokens=MAX_TOKENS).token_ids


def _counters(folder: Path) -> list[Path]:
    return sorted((folder / "tmp").glob("vidspec-*.i64"))


def _processes(server: VllmServer) -> list[psutil.Process]:
    root = psutil.Process(server.process.pid)
    return [root, *root.children(recursive=True)]


def _called(processes: list[psutil.Process], name: str, alike: int) -> psutil.Process:
    found = [process for process in processes if name in " ".join(process.cmdline())]
    assert len(found) == alike, (name, [" ".join(process.cmdline())[:80] for process in processes])
    return found[-1]


class _Client(threading.Thread):
    """Streams one long answer; `end` says how the stream ended."""

    def __init__(self, server: VllmServer):
        super().__init__(daemon=True)
        self._url = f"{server.base_url}/v1/chat/completions"
        self.has_begun = threading.Event()
        self.end = ""

    def run(self) -> None:
        body = {"model": "target", "messages": [{"role": "user", "content": QUESTION}], "stream": True}
        body |= {"max_tokens": 1900, "ignore_eos": True}
        try:
            with httpx.stream("POST", self._url, json=body, timeout=300) as stream:
                for line in stream.iter_lines():
                    self.has_begun.set()
                    if '"error"' in line:
                        self.end = "an error in the stream"
                        return
                    if line == "data: [DONE]":
                        self.end = "answered"
            self.end = self.end or "a stream that ends without [DONE]"
        except httpx.HTTPError:
            self.end = "a closed connection"


def _wait(is_there: Callable[[], bool], what: str) -> float:
    start = time.monotonic()
    while not is_there():
        assert time.monotonic() - start < _SOON_S, what
        time.sleep(0.1)
    return time.monotonic() - start


def killed(folder: Path, victim: str, stops: bool = True, alike: int = 1, **overrides: Any) -> str:
    """Kill -9 a process ("" is the API server), the last of so many `alike`, while it answers; the next server finds
    nothing left of it."""
    in_shm = set(os.listdir(SHM))
    with serving(folder, "killed", **overrides) as server:
        expected, processes = _ask(server), _processes(server)
        client = _Client(server)
        client.start()
        assert client.has_begun.wait(_SOON_S), "no answer began"
        (_called(processes[1:], victim, alike) if victim else processes[0]).kill()
        received_s = _wait(lambda: not client.is_alive(), "the client still waits")
        assert client.end and client.end != "answered", client.end
        seen = [f"the client gets {client.end} after {received_s:.0f} s"]
        if stops:
            ended_s = _wait(lambda: server.process.poll() is not None, "the server goes on without it")
            # vLLM's own API server says 0 here, with or without us: the page tells.
            seen.append(f"the server exits (status {server.process.returncode}) after {ended_s:.0f} s more")
        else:
            seen.append("its group is ended")
            server.end(grace_s=20)
        _, alive = psutil.wait_procs(processes, timeout=_SOON_S)
        assert not alive, [process.cmdline() for process in alive]
    left = _counters(folder)
    in_shm_now = set(os.listdir(SHM)) - in_shm
    with serving(folder, "again", **overrides) as server:
        assert _ask(server) == expected, "another answer than before"
        mine = _counters(folder)
        assert len(mine) == 1 and mine[0] not in left, (left, mine)
    assert not _counters(folder), _counters(folder)
    in_shm_left = sorted(set(os.listdir(SHM)) - in_shm)
    ours = [name for name in in_shm_left if "vidspec" in name]
    assert not ours, ours
    seen.append(f"{len(left)} counter file{'' if len(left) == 1 else 's'} left, none after the next start")
    seen.append(f"{len(in_shm_now)} segments in /dev/shm left" + (", all of them vLLM's" if in_shm_left else ""))
    return "; ".join([*seen, "the same answer again"])


def of_ray(folder: Path) -> str:
    """Kill a rank that Ray has placed: Ray's own processes end with the server, too."""
    with mock.patch.dict(os.environ, ray_on_cpu.environment(folder, 2)):
        return killed(folder, "ray::RayWorkerProc", alike=2, tensor_parallel_size=2, distributed_executor_backend="ray")


def two_servers(folder: Path) -> str:
    """Two servers of one user share a temporary directory: each counts its own requests."""
    with serving(folder, "one") as one, serving(folder, "two") as two:
        assert len(_counters(folder)) == 2
        before = [server.metrics() for server in (one, two)]
        assert _ask(one) == _ask(one) == _ask(two), "two answers"
        counted = [difference(b, s.metrics())["prompts"] for b, s in zip(before, (one, two), strict=True)]
        assert counted == [2, 1], counted
    assert not _counters(folder), _counters(folder)
    return "each counts its own requests; both files are gone afterwards"


def lacking(folder: Path, variable: str) -> str:
    """Serve and ask where a folder that an environment variable names is none."""
    with serving(folder, env={variable: _NOWHERE}) as server:
        assert _ask(server), "no answer"
        assert server.metrics()["accepted_tokens"] > 0, "nothing is counted"
        log = server.log_path.read_text(errors="replace")  # before it is ended, of which vLLM may leave a trace
    # vLLM logs traces of its own where it cannot keep a cache; in ours is a frame of ours.
    ours = [line for line in log.splitlines() if 'File "' in line and "/vllm_vidspec/" in line]
    assert not ours, ours
    is_vllms = "Traceback" in log
    return "it serves and counts" + ("; vLLM logs that it cannot keep a cache of its own" if is_vllms else "")


class Case(NamedTuple):
    name: str
    run: Callable[[Path], str]


CASES = (
    Case("kill -9 of the engine core", lambda folder: killed(folder, "EngineCore")),
    Case("kill -9 of the API server", lambda folder: killed(folder, "", stops=False)),
    Case("kill -9 of a tensor-parallel rank", lambda folder: killed(folder, "Worker_TP1", tensor_parallel_size=2)),
    Case("kill -9 of a pipeline stage", lambda folder: killed(folder, "Worker_PP1", pipeline_parallel_size=2)),
    Case("kill -9 of a Ray worker", of_ray),
    Case("two servers at once", two_servers),
    Case("HOME that nobody can write to", lambda folder: lacking(folder, "HOME")),
    Case("TMPDIR that does not exist", lambda folder: lacking(folder, "TMPDIR")),
)
