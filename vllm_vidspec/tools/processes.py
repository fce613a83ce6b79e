"""Engine processes of the benchmarks: start one in its own group, read why it stopped, end it whole; no vLLM."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools.pairs import engine_env
from vllm_vidspec.tools.scrape import from_prometheus

_OURS = re.compile(r"vidspec: (.+)")
_PYTHON_ERROR = re.compile(r"(?:^|\s)((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b: .+)")


def last_error_line(log: str) -> str:
    """Return the line of an engine's log that says why it stopped: our own, an exception's, or the last of all."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for pattern in (_OURS, _PYTHON_ERROR):
        hits = [
            hit.group(1) for line in lines if (hit := pattern.search(line)) and "see root cause" not in line.lower()
        ]
        if hits:
            return hits[-1]
    return lines[-1] if lines else "it wrote nothing"


def end_group(process: subprocess.Popen, grace_s: float = 15.0) -> None:
    """End a process started with `start_new_session=True` and everything it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    finally:  # a second Ctrl-C ends the patience, not the duty
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """Return a TCP port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class LoggedProcess:
    """A process with an engine in a group of its own: what it writes goes to a file, and it is ended whole."""

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self.process: subprocess.Popen | None = None

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen:
        """Start `command`; `options` are further ones of Popen."""
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=engine_env(), start_new_session=True, **options
            )
        return self.process

    def reason(self) -> str:
        """Return the log's line that says why the process stopped."""
        return last_error_line(self.log_path.read_text(errors="replace"))

    def end(self, grace_s: float = 15.0) -> None:
        """End the process, if it was started, and everything it has started."""
        if self.process is not None:
            end_group(self.process, grace_s)


class VllmServer(LoggedProcess):
    """One `vllm serve` process: `with VllmServer(args, port, log) as server: server.wait_ready()`."""

    def __init__(self, args: Sequence[str], port: int, log_path: Path) -> None:
        """Prepare; `args` is what follows `vllm serve` and must name the same port."""
        super().__init__(log_path)
        self.args, self.port = list(args), port
        self.base_url = f"http://127.0.0.1:{port}"

    def __enter__(self) -> "VllmServer":
        """Start the process; it is not ready yet."""
        program = Path(sys.executable).with_name("vllm")
        if not program.exists():
            raise VidSpecError("this environment has no `vllm` command; see `vidspec doctor`")
        self._launched = time.monotonic()
        self.start([str(program), "serve", *self.args], stdin=subprocess.DEVNULL)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the server and its engine processes, whatever happened."""
        # A server that is still loading does not heed SIGTERM, and after an error nobody waits for its last words.
        self.end(grace_s=15.0 if kind is None else 2.0)

    def wait_ready(self, timeout_s: float = 600.0) -> float:
        """Wait until the server answers; return the seconds from its launch to the first healthy answer."""
        assert self.process is not None, "enter the context first"
        while (elapsed := time.monotonic() - self._launched) < timeout_s:
            if self.process.poll() is not None:
                raise VidSpecError(f"vllm serve stopped: {self.reason()} (log: {self.log_path}; see `vidspec doctor`)")
            if self.healthy():
                return elapsed
            time.sleep(0.3)
        raise VidSpecError(f"vllm serve did not answer within {timeout_s:.0f} s (log: {self.log_path})")

    def healthy(self) -> bool:
        """Return whether GET /health answers 200 now."""
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def metrics_text(self) -> str:
        """Return the Prometheus text of GET /metrics."""
        with urllib.request.urlopen(f"{self.base_url}/metrics", timeout=30) as answer:
            return answer.read().decode()

    def metrics(self) -> dict[str, int]:
        """Return our counters, by the names of `metrics.NAMES`; zeros where the server runs without us."""
        return from_prometheus(self.metrics_text())
