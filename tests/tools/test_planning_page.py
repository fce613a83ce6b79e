"""docs/planning.md says what its script computes, its predictions are of other rows, and errors stay within bounds."""

import pytest

from tools.common import ROOT, load
from vidspec_tools import planning


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        yield load("scripts/make_planning.py")


def test_pages_are_what_the_script_writes(script):
    """Catches: a page that was edited by hand, or not made again after a figure or the model changed."""
    for path, sections in ((script.PAGE, script.SECTIONS), (script.BUDGET, script.budget_tables.SECTIONS)):
        page = path.read_text()
        assert script.filled(page, sections) == page, "run scripts/make_planning.py"


def test_the_budget_page_says_that_it_is_modelled(script):
    """Catches: a figure that reads as if a GPU had been there."""
    for name, text in script.budget_tables.SECTIONS.items():
        first = next(line for line in text().splitlines() if line.startswith("| "))
        assert "modelled" in first, name
    assert "no figure of this page was taken on a" in script.BUDGET.read_text()


def test_every_table_says_what_its_numbers_are(script):
    """Catches: a column of numbers without measured, modelled or published."""
    for name, text in script.SECTIONS.items():
        if name in ("plans", "agreement", "assumed"):
            continue
        for column in text().splitlines()[0].strip("| ").split(" | "):
            free = column in ("pair", "method", "error", "rows", "K", "drafts", "8 x") or column.startswith("paper")
            assert free or any(kind in column for kind in ("measured", "modelled", "published")), column


def test_published_rows_by_hand(script):
    """SD of LLaVA-OneVision 72B with 7B: 4.14 x 420 / (5 x 78.3 + 420) = 2.143. Catches: a swapped column."""
    rows = {(row["pair"], row["method"]): row for row in script.published_rows()}
    row = rows["LLaVA-OV 7B & 72B", "SD"]
    assert (row["modelled"], row["real"]) == pytest.approx((2.143, 1.98), abs=1e-3)
    assert rows["LLaVA-OV 7B & 72B", "SpecVLM"]["draft_ms"] == 46.6, "pruned"
    assert len(rows) == 3 * 5 + 2 * 3
    assert max(abs(row["error"]) for row in rows.values()) < 0.14


def test_figures_that_stand_twice_are_the_same(script):
    """The pure room may not import the bench's table. Catches: one of the two mended alone."""
    pairs = {pair.name: pair.figures for pair in script.PUBLISHED}
    assert pairs["LLaVA-OV 7B & 72B"]["ParallelVLM"][0] == script.acceptance.STREAM_LENGTHS[0.9]


def test_a_row_is_predicted_from_the_others(script, monkeypatch):
    """Its own speed-up and step time change nothing of its prediction. Catches: a row that predicts itself."""
    before = {index: row["full"] for index, row in enumerate(script.checked_rows())}
    real = script.measured_rows
    for changed in (0, 1, 9):

        def rows(changed=changed):
            found = real()
            found[changed] |= {"speedup": 9.0, "t_step_ms": 99.0, "tokens_per_s": 9.0, "late_drafts": 999}
            return found

        monkeypatch.setattr(script, "measured_rows", rows)
        after = {index: row["full"] for index, row in enumerate(script.checked_rows())}
        assert after[changed] == before[changed]
        assert any(after[index] != before[index] for index in before if index != changed)


def test_measured_rows_are_met(script):
    """2.4 % on average when this was written. Catches: a model that drifts from what was measured."""
    rows = script.checked_rows()
    errors = [abs(row["error"]) for row in rows if row["inflate"] != 9.0]
    assert len(errors) == 12
    assert sum(errors) / len(errors) < 0.03
    assert sum(error < 0.05 for error in errors) >= 11
    errors = [abs(row["error"]) for row in rows]
    assert len(rows) == 20
    assert sum(errors) / len(errors) < 0.03
    assert sum(error < 0.05 for error in errors) >= 17
    at_nine = {row["method"]: abs(row["error"]) for row in rows if row["inflate"] == 9.0}
    assert at_nine["ParallelVLM"] < 0.05 and at_nine["LVSpec"] < 0.05, "the fastest: exact, and loose"
    assert at_nine["SD-chain"] < 0.06
    assert max(abs(row["error"]) for row in script.length_rows()) < 0.07


def test_what_a_row_says_by_hand(script):
    """A chain of 5: its step less T_t and five forwards."""
    row = dict(mode="sequential", drafting="chain", acceptance_length=6.0, num_speculative_tokens=5, forwards=5)
    row |= dict(answer=96, t_target_ms=10.0, t_draft_ms=2.0, t_step_ms=30.0)
    assert script.length_of(row) == pytest.approx(6.0)
    assert script.rest_of(row) == pytest.approx(30 - 10 - 5 * 2)
    assert script.levels_of(row) == pytest.approx([10.0, 50.0])
    row |= {"output_tokens": 220, "answers": 20, "tokens_per_s": 50.0, "late_drafts": 40, "stream_tokens": 400}
    # 200 tokens in 4 s; two late steps an answer; 3.6 s of drawing 400 tokens; a step of 13 ms.
    assert script.stream_costs(row | {"t_step_ms": 13.0}) == pytest.approx((0.3, 9.0 / 2 - 1, 10.0))


def test_the_rest_of_a_step_is_forwards_and_target_steps(script, monkeypatch):
    """Rows that are 1.5 forwards and 0.1 target steps a level long give both back, whatever one of them says."""
    times = [(1.0, 3.0, 5), (1.0, 6.0, 5), (2.0, 18.0, 10), (1.0, 5.0, 5)]
    rows = [{"t_draft_ms": draft, "t_target_ms": target, "forwards": levels} for draft, target, levels in times]
    wrong = rows[3]

    def rest_of(row):
        forwards, steps = script.levels_of(row)
        return 1.5 * forwards + 0.1 * steps + 9.0 * (row is wrong)

    monkeypatch.setattr(script, "rest_of", rest_of)
    row = {"t_draft_ms": 1.0, "t_target_ms": 9.0, "forwards": 10}
    assert script.rest_from(rows, row) == pytest.approx(10 * (1.5 + 0.9))


def test_rooflines_of_the_papers_settings(script):
    """The ratio of times decides: near for large drafts, far off for small ones, as the page says."""
    rows = {(row["target"], row["draft"], row["gpu"]): row for row in script.roofline_rows()}
    near = rows["LLaVA-OneVision 72B", "7B", "l40s"]
    assert near[1]["with_length"] == pytest.approx(near["setting"].speedup, rel=0.15)
    assert near[1]["target_ms"] < near["setting"].target_ms, "a roofline is a bound"
    own = near[1]["target_ms"], near[1]["draft_ms"]
    place = planning.Placement(planning.GPUS["l40s"])
    shape = planning.target_shape("llava-onevision-72b")
    assert own[0] == pytest.approx(1e3 * planning.forward_seconds(shape, place, 1, 1, 25_600) + 0.5)
