"""benchmarks/bench_before.py: what it makes of two engines' answers; neither is started here."""

import json
from typing import ClassVar

import pytest

from tools.common import ROOT, load


class Told:
    """Stands for an engine: gives prepared answers, and notes when."""

    asked: ClassVar[list[str]] = []
    last: ClassVar[dict[str, int]] = {}

    def __init__(self, checkout, drafting, max_batch):
        self.name, self.times = checkout, 0

    def ask(self, batch_size):
        Told.asked.append(self.name)
        self.times += 1
        rate = {"old": [999.0, 10.0, 20.0, 10.0], "new": [1.0, 20.0, 60.0, 10.0]}[self.name][self.times - 1]
        return {"rate": rate, "tokens": [[1, 2] if self.times < 4 else [1, Told.last[self.name]]]}

    def close(self):
        Told.asked.append("end")


@pytest.fixture
def bench(monkeypatch):
    bench = load("benchmarks/bench_before.py")
    monkeypatch.setattr(bench, "Engine", Told)
    monkeypatch.setattr(bench, "ROOT", "new")
    monkeypatch.setattr(Told, "asked", [])
    return bench


@pytest.mark.parametrize("last", [{"old": 2, "new": 2}, {"old": 2, "new": 3}])
def test_ratios_are_of_rounds(bench, monkeypatch, last):
    """Catches: a warm-up that counts, a ratio of medians, an engine that always comes first, other tokens untold."""
    monkeypatch.setattr(Told, "last", last)
    (row,) = bench.compare("old", "chain", [4], rounds=3)
    assert (row["before_tokens_per_s"], row["now_tokens_per_s"], row["ratio"]) == (10.0, 20.0, 2.0)
    assert (row["ratio_p20"], row["ratio_p80"]) == (1.4, 2.6)
    assert row["same_tokens"] == (last["old"] == last["new"])
    assert Told.asked == ["new", "old", "old", "new", "new", "old", "old", "new", "end", "end"]


def cells_of_arrivals(row):
    yield f"{row['video_tokens']:,}"
    for name in ("first_token", "longest_step", "longest_later_step"):
        ratios = row[f"{name}_ratios"]
        yield f"{row[f'{name}_ratio']:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def cells_of_decoding(row):
    yield from (row["drafting"], str(row["batch_size"]))
    yield from (f"{row[name]:.1f}" for name in ("before_tokens_per_s", "now_tokens_per_s"))
    yield from (f"{row['ratio']:.2f}", f"{row['ratio_p20']:.2f} to {row['ratio_p80']:.2f}")


@pytest.mark.parametrize(
    ("name", "cells_of"), [("arriving-video", cells_of_arrivals), ("decode-before", cells_of_decoding)]
)
def test_the_page_says_what_the_file_says(name, cells_of):
    """Catches: a table that was edited, or is of another run."""
    results = ROOT / "docs/results"
    page = (results / "README.md").read_text()
    for row in json.loads((results / f"{name}.json").read_text())["rows"]:
        assert row["same_tokens"] and f"| {' | '.join(cells_of(row))} |" in page
