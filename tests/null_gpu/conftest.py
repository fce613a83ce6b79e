"""Everything here runs in the null GPU's own environment (make test-cuda-host), and nowhere else."""

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from null_gpu.cases import CASES, ON_EVERY_VERSION
from vllm_vidspec import SUPPORTED_VLLM

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIMEOUT_S = 1200
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}}
RESULTS = pytest.StashKey[list]()  # rows of report.summary
IN_ENVIRONMENT = "VIDSPEC_NULL_GPU" in os.environ
collect_ignore_glob = [] if IN_ENVIRONMENT else ["test_*.py"]


def pytest_configure(config):
    config.addinivalue_line("markers", "cases(*names): the engine configurations that a test reads")


def cases_of(item):
    """Return the cases that a test asks for: its parameter `name`, or what its mark `cases` says."""
    marks = [name for mark in item.iter_markers("cases") for name in mark.args]
    name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
    return {*marks, *([name] if name in CASES else [])}


def is_oldest():
    """Return whether the vLLM of this environment is the oldest that is supported, on which all cases run."""
    return importlib.metadata.version("vllm").startswith(f"{SUPPORTED_VLLM[0]}.")


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config, items):
    """Mark what runs a slow case; skip what only the oldest vLLM runs: the instrument's own tests, most cases."""
    if not IN_ENVIRONMENT:
        return
    # The instrument is tested on an allocator that nobody has used: what others leave in it is neither zeros nor free.
    items.sort(key=lambda item: item.path.name != "test_instrument.py")
    has_all_rows = bool(os.environ.get("NULL_GPU_RESULTS"))  # of the table; whole models have one of their own
    for item in items:
        cases = [CASES[name] for name in cases_of(item)]
        if any(case.is_slow and (case.is_whole or not has_all_rows) for case in cases):
            item.add_marker(pytest.mark.slow)
        is_everywhere = cases and {case.name for case in cases} <= set(ON_EVERY_VERSION)
        if HERE in item.path.parents and not is_everywhere and not is_oldest():
            item.add_marker(pytest.mark.skip(reason="the oldest supported vLLM runs it"))


def pytest_sessionstart(session):
    """Refuse to pass a machine's real GPU for the null one."""
    if not IN_ENVIRONMENT:
        return
    import torch

    if torch.cuda.get_device_name(0) != "Null H100":
        pytest.exit("the null GPU's libraries are not the ones that torch has loaded", returncode=3)


@pytest.fixture(scope="session")
def dry_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("peers") / "peers.json"
    with started("benchmarks/peers/run.py", out, "--out", str(out), "--engine-args", json.dumps(GRAPHS)) as running:
        yield running


@pytest.fixture(scope="session")
def gpu_suite(tmp_path_factory):
    out = tmp_path_factory.mktemp("suite") / "suite.json"
    # Beside other tests on two cores it takes longer than on a GPU.
    with started("scripts/gpu_suite.py", out, "--json", str(out), "--seconds", str(TIMEOUT_S)) as running:
        yield running


@contextlib.contextmanager
def started(script, out, *arguments):
    """Start a dry run under emulation; yield its process, its result's place and its log's."""
    around = ["--dry-run", "--around", "null_gpu.emulate:emulating"]
    command = [sys.executable, str(ROOT / script), *around, *arguments]
    log = out.with_name("log")
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "WARNING"}
    with (
        log.open("w") as file,
        subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True) as process,
    ):
        try:
            yield process, out, log
        finally:
            if process.poll() is None:  # with the engine that it runs
                process.send_signal(signal.SIGINT)  # it ends what it has started in sessions of their own
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="session", autouse=True)
def dry_run_from_the_start(request):
    """Let the benchmark run beside the other tests, if it is asked for, and no times are that can be reported."""
    if any("dry_run" in item.fixturenames for item in request.session.items) and not os.environ.get("NULL_GPU_RESULTS"):
        request.getfixturevalue("dry_run")


def pytest_terminal_summary(terminalreporter, config):
    if rows := config.stash.get(RESULTS, []):
        from null_gpu import report

        terminalreporter.section("decode steps on the null GPU")
        for whole in sorted({"memory" in row for row in rows}):
            terminalreporter.write_line(report.table(rows, whole))
