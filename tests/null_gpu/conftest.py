"""Everything here runs in the null GPU's own environment (make test-cuda-host), and nowhere else."""

import os

import pytest

RESULTS = pytest.StashKey[list]()  # rows of report.summary
IN_ENVIRONMENT = "VIDSPEC_NULL_GPU" in os.environ
collect_ignore_glob = [] if IN_ENVIRONMENT else ["test_*.py"]


def pytest_configure(config):
    """Name the marks of these tests."""
    config.addinivalue_line("markers", "cases(*names): the engine configurations that a test reads")


def pytest_sessionstart(session):
    """Refuse to pass a machine's real GPU for the null one."""
    if not IN_ENVIRONMENT:
        return
    import torch

    if torch.cuda.get_device_name(0) != "Null H100":
        pytest.exit("the null GPU's libraries are not the ones that torch has loaded", returncode=3)


def pytest_terminal_summary(terminalreporter, config):
    """Print the table of what was measured."""
    if rows := config.stash.get(RESULTS, []):
        from null_gpu import report

        terminalreporter.section("decode steps on the null GPU")
        terminalreporter.write_line(report.table(rows))
