"""The kernels' model: its arithmetic on cases worked by hand, and that the page says what it prints."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vidspec_kernels.limits import DeviceLimits

ROOT = Path(__file__).parents[2]
DATA, PAGE = ROOT / "docs" / "results" / "kernels-compiled.json", ROOT / "docs" / "kernels.md"


@pytest.fixture(scope="module")
def model():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import kernel_model

    yield kernel_model
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture
def device(model):
    """Ten multiprocessors, 1 TB/s, 1 PFLOP/s, 2 TB/s of L2, 1 GHz."""
    return model.Device("by hand", 1e12, 1e15, 2e12, 1e9, DeviceLimits(10, 228 * 1024, 227 * 1024, 90))


@pytest.fixture
def exact(model, monkeypatch):
    """No shares and no latencies: each term alone."""
    for name in ("MEMORY_SHARE", "TENSOR_SHARE", "ISSUE_SHARE"):
        monkeypatch.setattr(model, name, 1.0)
    monkeypatch.setattr(model, "LAUNCH", 0.0)
    monkeypatch.setattr(model, "LATENCY", 1e-6)


def test_floor_is_the_larger_of_both(model, device):
    assert model.floor(model.Call(3e6, 1e9, ()), device) == (3e-6, "M")
    assert model.floor(model.Call(3e6, 7e9, ()), device) == (7e-6, "T")


@pytest.mark.parametrize(
    ("more", "microseconds"),
    [
        ({"memory_bytes": 4e6}, 4.0),
        ({"l2_bytes": 4e6}, 2.0),
        ({"memory_bytes": 4e6, "l2_bytes": 9e6}, 4.5),
        # 20 programs on 10 multiprocessors, two each at a time: every one does a tenth.
        ({"operations": 6e9}, 6.0),
        ({"instructions": 4e5}, 10.0),
        # 20 programs with 100 kB each under way for 1 µs: twice as fast as the memory; with 10 kB, a fifth.
        ({"memory_bytes": 4e6, "in_flight": 1e5}, 4.0),
        ({"memory_bytes": 4e6, "in_flight": 1e4}, 20.0),
        ({"memory_bytes": 4e6, "rounds": 3, "tail": 2e-6}, 9.0),
    ],
)
def test_terms_of_a_launch(model, device, exact, more, microseconds):
    assert model.seconds(model.Launch(20, 2, **more), device) == pytest.approx(microseconds * 1e-6)


def test_waves(model, device, exact):
    """25 programs at 20 a time: the five of the second wave have a multiprocessor each, and fewer copies under way."""
    launch = model.Launch(25, 2, operations=25e9)
    assert model.waves(launch, device) == [20, 5] and model.waves(model.Launch(20, 2), device) == [20]
    # A program is 1e9 operations, a multiprocessor makes 1e14 a second: two in turn, then one.
    assert model.seconds(launch, device) == pytest.approx(30e-6)
    slow = model.Launch(25, 2, memory_bytes=25e6, in_flight=5e4)
    assert model.seconds(slow, device) == pytest.approx(20e-6 + 5e6 / 2.5e11)


def test_a_call_is_the_sum_of_its_launches(model, device, monkeypatch):
    monkeypatch.setattr(model, "LAUNCH", 3e-6)
    call = model.Call(9e5, 0, (model.Launch(10, 1, memory_bytes=9e5), model.Launch(1, 1)))
    assert model.modelled(call, device) == pytest.approx(3e-6 + 1e-6 + 3e-6)


class Always:
    """Compile data in which a multiprocessor always holds two programs."""

    def per_sm(self, kernel, case, device):
        return 2


def test_relevance_by_hand(model):
    """26 queries, 25,000 states of 7,168 bytes on an H100: 256 programs of 98 states, 26 of the merge."""
    call = model.visual_relevance(model.H100, Always(), 26, 1, 25_000)
    main, merge = call.launches
    assert call.memory_bytes == 25_000 * 7168 and call.operations == 2 * 26 * 25_000 * 3584
    assert (main.programs, merge.programs) == (256, 26)
    entries = 256 * 26 * 16 * 4
    assert main.memory_bytes == call.memory_bytes + entries and merge.memory_bytes == entries
    # One tile of 128 a program, 32 padded queries.
    assert main.operations == 2 * 256 * 128 * 32 * 3584 and main.l2_bytes == (25_000 + 256 * 32) * 7168
    assert model.floor(call, model.H100) == (pytest.approx(179.2e6 / 3.35e12), "M")


def test_attention_by_hand(model):
    """65 nodes of a group of 7 over 25,000 keys on an H100: products set the floor, 4 x 65 x 28 x 25,065 x 128."""
    floor_us = 1e6 * 4 * 65 * 28 * 25_065 * 128 / 989e12
    found = model.tree_attention(model.H100, "28/4", 65, 1, 25_000)
    programs, least, time, share, bound = re.fullmatch(r"(\d+): (\S+) → (\S+) \((\d+) % (.)\)", found).groups()
    assert float(least) == pytest.approx(floor_us, abs=0.05) and bound == "T" and int(programs) <= 264
    assert int(share) == pytest.approx(100 * floor_us / float(time), abs=1)


def test_guidance_by_hand(model):
    """32 queries of a group of 7 over 25,000 keys: four row tiles by 391 key tiles by 4 heads, once or twice."""
    given, found = (model.guidance_scores(model.H100, Always(), "28/4", lse, 1, 25_000) for lse in (True, False))
    (sums,) = given.launches
    assert sums.programs == 391 and sums.instructions == 391 * 4 * 4 * 600 * 4
    stats, *between, last = found.launches
    assert stats.programs == 4 * 4 * 49 and len(between) == 6
    assert dataclasses.replace(last, instructions=sums.instructions) == sums
    assert model.modelled(given, model.H100) < model.modelled(found, model.H100)


def test_page_is_what_the_command_prints():
    """Catches: a table that was written by hand, or a kernel that changed after it. Another process: the compile
    report chooses the compiler."""
    done = subprocess.run(
        [sys.executable, "benchmarks/kernel_model.py", str(DATA)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = done.stdout.strip().split("\n\n<!-- ")
    assert len(found) == 5
    page = PAGE.read_text()
    for section in (found[0], *("<!-- " + section for section in found[1:])):
        assert section in page, f"run the command that {PAGE.name} names"
