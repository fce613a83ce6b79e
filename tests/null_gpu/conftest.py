"""Everything here runs in the null GPU's own environment (make test-cuda-host), and nowhere else."""

import importlib.metadata
import os
from pathlib import Path

import pytest

from null_gpu.cases import CASES, ON_EVERY_VERSION
from null_gpu.engines import Engines
from vllm_vidspec import SUPPORTED_VLLM

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENGINES = pytest.StashKey[Engines]()
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
    # Tests of engines come last: until then these run.
    items.sort(key=lambda item: (item.path.name != "test_instrument.py", bool(cases_of(item))))
    has_all_rows = bool(os.environ.get("NULL_GPU_RESULTS"))  # of the table; whole models have one of their own
    for item in items:
        cases = [CASES[name] for name in cases_of(item)]
        if any(case.is_slow and (case.is_whole or not has_all_rows) for case in cases):
            item.add_marker(pytest.mark.slow)
        is_everywhere = cases and {case.name for case in cases} <= set(ON_EVERY_VERSION)
        if HERE in item.path.parents and not is_everywhere and not is_oldest():
            item.add_marker(pytest.mark.skip(reason="the oldest supported vLLM runs it"))


def pytest_collection_finish(session):
    """Start the engines that the selected tests need, beside the tests that need none."""
    items = [item for item in session.items if not item.get_closest_marker("skip")]
    wanted = set().union(*map(cases_of, items))
    if wanted and not session.testsfailed and not session.config.option.collectonly:
        wanted |= {CASES[name].vanilla for name in wanted}
        session.config.stash[ENGINES] = Engines(wanted, alone=bool(os.environ.get("NULL_GPU_RESULTS")))


def pytest_sessionfinish(session):
    if engines := session.config.stash.get(ENGINES, None):
        engines.stop()


def pytest_sessionstart(session):
    """Refuse to pass a machine's real GPU for the null one."""
    if not IN_ENVIRONMENT:
        return
    import torch

    if torch.cuda.get_device_name(0) != "Null H100":
        pytest.exit("the null GPU's libraries are not the ones that torch has loaded", returncode=3)


def pytest_terminal_summary(terminalreporter, config):
    if rows := config.stash.get(RESULTS, []):
        from null_gpu import report

        terminalreporter.section("decode steps on the null GPU")
        for whole in sorted({"memory" in row for row in rows}):
            terminalreporter.write_line(report.table(rows, whole))
