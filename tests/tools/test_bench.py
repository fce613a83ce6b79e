"""`vidspec bench acceptance` without an engine: what is run, its rows, their CSV file and the figures drawn from it."""

import itertools
import subprocess
import threading
import time

import pytest

from tools.common import FAMILIES, counters, sweep
from vidspec_tools.bench import acceptance
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs, tables

PRUNERS = ("none", "random", "uniform", "specvlm", "attention", "uv", "window:front", "frame", "fastvid", "dycoke")
RATIOS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0)


@pytest.mark.slow
def test_an_engine_that_fails_is_one_line(tmp_path):
    pytest.importorskip("vllm")
    job = {"llm": {"model": str(tmp_path / "absent")}, "samplings": [{}], "prompts": {"family": "qwen2.5-vl"}}
    with pytest.raises(VidSpecError, match="the engine stopped: ") as caught:
        acceptance.run_job(job, lambda *_: None, acceptance.Running())
    assert "\n" not in str(caught.value)


def test_identical_frac_counts_lengths():
    assert acceptance.identical_frac([[1, 2], [3]], [[1, 2], [3]]) == 1.0
    assert acceptance.identical_frac([[1, 2], [3]], [[1, 2, 3], [3]]) == 0.5


def test_percent_never_rounds_up_to_all():
    assert [tables.percent(x) for x in (None, 1.0, 0.99999, 0.5)] == ["-", "100 %", "99.9 %", "50.0 %"]


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (("none", 0.9), ("none", 0.0)),
        (("none", 1.0), ("none", 0.0)),
        (("uv", 0.0), ("none", 0.0)),
        (("uv", 1.0), ("uniform", 1.0)),
        (("uv", 0.999), ("uv", 0.999)),
        (("window", 0.5), ("window:middle", 0.5)),
    ],
)
def test_canonical_names_what_the_draft_sees(given, seen):
    assert tuple(acceptance.canonical(*given).values()) == seen


def test_each_distinct_configuration_is_run_once():
    families = pairs.FAMILIES
    what = sweep(family=families, pruner=PRUNERS, prune_ratio=RATIOS)
    engines = list(what.engines().values())
    assert len(engines) == len(families) * (1 + 1 + 9 * 5 + 1), (
        "vanilla, unpruned, nine pruners at five ratios, text only"
    )
    assert [engine.family for engine in engines if engine.draft is None] == list(families)
    assert engines[0].draft is None
    assert len(list(sweep(pruner=("none",), num_speculative_tokens=(3, 5)).engines())) == 1 + 2
    assert len(list(sweep(prune_ratio=(1.0,), draft_positions=("original", "compacted")).engines())) == 1 + 2


@pytest.mark.parametrize("jobs", [1, 3])
def test_rows_are_all_combinations_in_order(engines, jobs):
    families = ("llava-onevision", "qwen2.5-vl")
    result = acceptance.run(sweep(family=families, pruner=PRUNERS, prune_ratio=RATIOS, jobs=jobs))
    rows = result["rows"]
    found = [(row["family"], row["pruner"], row["prune_ratio"]) for row in rows]
    assert found == list(itertools.product(families, PRUNERS, RATIOS))
    assert {row["jobs"] for row in rows} == {result["provenance"]["jobs"]} == {jobs}
    themselves = {key for row, key in zip(rows, found, strict=True) if acceptance.measured_itself(row)}
    assert len(themselves) == 2 * 47
    for row in rows:
        assert (row["family"], *row["measured_as"].values()) in themselves, "it names a row of this result"
        assert acceptance.canonical(**row["measured_as"]) == acceptance.canonical(row["pruner"], row["prune_ratio"])
    assert rows[0]["measured_as"] == {"pruner": "none", "prune_ratio": 0.0}
    assert rows[13]["measured_as"] == {"pruner": "random", "prune_ratio": 1.0}, "the first that was asked for"


def test_engines_run_at_once_but_no_more_than_jobs(monkeypatch, engines):
    barrier, lock, counts = threading.Barrier(2, timeout=20), threading.Lock(), [0, 0]

    def run_job(job, report, running):
        with lock:
            counts[0] += 1
            counts[1] = max(counts)
        barrier.wait()  # nobody passes alone
        with lock:
            counts[0] -= 1
        return engines(job, report, running)

    monkeypatch.setattr(acceptance, "run_job", run_job)
    busy = []
    report = lambda event, fields: (busy.append(event), fields["engine"])  # noqa: E731
    rows = acceptance.run(sweep(prune_ratio=(0.2, 0.3, 0.4), jobs=2), report)["rows"]
    assert len(rows) == 3
    assert counts[1] == 2
    assert busy.count("start") == busy.count("done") == 4


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_family_without_vanilla_has_no_rows(engines, jobs):
    is_broken = lambda job: job["prompts"]["family"] == "qwen2.5-vl" and "speculative_config" not in job["llm"]  # noqa: E731
    engines.fails = lambda job: VidSpecError("no") if is_broken(job) else None
    what = sweep(family=FAMILIES, prune_ratio=(0.2, 0.3, 0.4, 0.5), jobs=jobs)
    result = acceptance.run(what)
    assert result["failures"] == [{"family": "qwen2.5-vl", "draft": None, "reason": "no"}]
    assert {row["family"] for row in result["rows"]} == {"llava-onevision"}
    if jobs == 1:
        assert len(engines.jobs) == 1 + 5, "nothing of that family after vanilla"


def test_a_failed_engine_is_missing_from_all_its_rows(engines):
    engines.fails = lambda job: VidSpecError("no") if "'prune_ratio': 1.0" in str(job) else None
    result = acceptance.run(sweep(pruner=("random", "uniform"), prune_ratio=(0.9, 1.0)))
    found = {name: [(row["pruner"], row["prune_ratio"]) for row in result[name]] for name in ("rows", "failures")}
    assert found["rows"] == [("random", 0.9), ("uniform", 0.9)]
    assert found["failures"] == [("random", 1.0), ("uniform", 1.0)]


def test_an_interrupt_ends_the_engines(monkeypatch):
    """What is no VidSpecError, here out of one engine's thread, ends what the other threads wait for."""
    processes_run = []

    def run_job(job, report, running):
        process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        processes_run.append(process)
        with running.holding(process):
            if len(processes_run) == 2:
                raise KeyboardInterrupt
            process.wait()
        raise VidSpecError("the engine stopped")

    monkeypatch.setattr(acceptance, "run_job", run_job)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        acceptance.run(sweep(prune_ratio=(0.2, 0.3, 0.4, 0.5), jobs=2))
    assert time.monotonic() - start < 20
    assert len(processes_run) <= 3, "the queue is dropped"
    assert all(process.poll() is not None for process in processes_run)


def test_figures_per_step():
    assert set(acceptance.shape_figures(counters() | {"drafts": 0, "draft_steps": 0}).values()) == {None}
    spent = counters(drafts=4, draft_tokens=100, draft_depth=20, draft_steps=2, draft_forwards=10)
    assert acceptance.shape_figures(spent) == {
        "nodes_per_step": 25.0,
        "depth_per_step": 5.0,
        "draft_forwards_per_step": 5.0,
        "max_acceptance_length": 6.0,
    }
