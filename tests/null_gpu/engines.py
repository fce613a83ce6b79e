"""Runs engine cases in processes of their own, two at a time, beside the tests that need none."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from null_gpu.cases import CASES

TIMEOUT_S = 1200


class Engines:
    """The processes of some cases, which begin at once; `alone` lets one run at a time, so that times can be told."""

    def __init__(self, names: set[str], alone: bool):
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        small = [name for name in CASES if name in names and not CASES[name].is_whole]
        single, double = ([name for name in small if CASES[name].num_devices == n] for n in (1, 2))
        # What needs two devices takes a quarter of the time and follows the shorter part of the others.
        singles = [single] if alone else split(single, 0.32 if double else 0.5)
        # Models of published size need the whole device, so each has a process of its own.
        large = [[name] for name in CASES if name in names and CASES[name].is_whole]
        parts = [part for part in (*singles, double, *large) if part]
        self._pool, self._is_over = ThreadPoolExecutor(1 if alone else 2), threading.Event()
        self._parts = [self._pool.submit(run, part, self._lines.put, self._is_over) for part in parts]
        self._num_cases = len(names)

    def wait(self, show: Callable[[str], None]) -> list[dict[str, Any]]:
        """Return the measurements of every case; `show` each one's line as it ends."""
        show(f"\n{self._num_cases} engine cases run two at a time; of each a line as it ends")
        while True:
            is_done = all(part.done() for part in self._parts)
            while not self._lines.empty():
                show(self._lines.get())
            if is_done:
                return [row for part in self._parts for row in part.result()]
            time.sleep(0.2)

    def stop(self) -> None:
        """End what still runs."""
        self._is_over.set()
        self._pool.shutdown(cancel_futures=True)


def split(names: list[str], share: float) -> tuple[list[str], list[str]]:
    """Split cases between two processes; the first has about this share of them."""
    middle = int(share * len(names))
    while 0 < middle < len(names) and CASES[names[middle - 1]].shares_engine(CASES[names[middle]]):
        middle += 1
    return names[:middle], names[middle:]


def run(names: list[str], show: Callable[[str], None], is_over: threading.Event) -> list[dict[str, Any]]:
    """Run cases in a process of their own, and show the line that it writes of each as it ends."""
    case, end, num_shown = CASES[names[0]], time.monotonic() + TIMEOUT_S, 0
    machine = {"NULLGPU_DEVICES": str(case.num_devices), "NULLGPU_MEM_GB": str(case.device_gb)}
    environment = os.environ | machine | {"VLLM_LOGGING_LEVEL": "WARNING"}
    with tempfile.TemporaryDirectory(prefix="null-gpu-") as folder:
        path, log = Path(folder, "results.json"), Path(folder, "stderr")
        command = [sys.executable, "-m", "null_gpu.engine_run", str(path), *names]
        with log.open("w") as file, subprocess.Popen(command, env=environment, stderr=file, stdout=file) as process:
            while process.poll() is None:
                time.sleep(0.5)
                text = log.read_text(errors="replace")
                lines = [line for line in text.splitlines() if line.startswith("[null GPU] ")]
                for line in lines[num_shown:]:
                    show(line)
                num_shown = len(lines)
                if is_over.is_set():
                    process.kill()
                if time.monotonic() > end:
                    show(f"[null GPU] {names[min(num_shown, len(names) - 1)]}: not done after {TIMEOUT_S} s, ended")
                    process.kill()
        stderr = log.read_text(errors="replace")
        rows = json.loads(path.read_text()) if path.exists() else []
    for row in rows:
        row["error"] = row["error"] and row["error"] + stderr[-6000:]
    ran = {row["name"] for row in rows}
    lost = {"error": f"the process ended with {process.returncode}:\n{stderr[-4000:]}"}
    return rows + [{"name": name, "steps": [], **lost} for name in names if name not in ran]
