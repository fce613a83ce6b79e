"""The matrix: every pair of settings that can meet has met, and the output was vanilla's.

A cell is a value of each axis (matrix.py). Of each cell: its tokens are those of vanilla vLLM, in fp32, or where its
scorer is lossy, those that the record calls the target's own; drafts were proposed, and accepted unless the draft knows
nothing; and nothing was skipped, unguided or verified strictly for a reason that `matrix.REASONS` does not list.
"""

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.engine import harness, matrix, matrix_run
from tests.engine.harness import in_place_of
from tests.engine.matrix import ENGINE, LOSSY, TREES, Row
from tests.engine.matrix_run import BLOCK_SIZE
from vllm_vidspec.engine.draft.noise import CoupledSampler
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.pruning import budget

ENGINES = matrix.engines()
# Experts on one core beside a drafter's process take longer than any other.
LONGEST = {"family": "qwen3-vl-moe", "drafting": "parallel"}


def _marks(engine: matrix.Cell) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] * (matrix.is_slow(engine) or LONGEST.items() <= engine.items())


CASES = [
    pytest.param(number, id="_".join(engine.values()), marks=_marks(engine)) for number, engine in enumerate(ENGINES)
]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return matrix.make_rows()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> matrix_run.Checkpoints:
    return matrix_run.Checkpoints(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def answered() -> Iterator[dict[str, list[matrix_run.Answered]]]:
    """By family: what the engines have answered so far, for vanilla to read."""
    yield {}


# By input: items with a budget of their own, and what is pruned of them. Frames sent as images are one video.
ITEMS = {"video": (1, 0.9), "videos": (2, 0.9), "images": (2, 0.8), "frames": (1, 0.9), "text": (1, 0.9)}


@pytest.mark.parametrize("refusal", matrix.REFUSALS, ids=lambda refusal: refusal.line)
def test_what_cannot_meet_is_refused(refusal):
    """Catches: a row of the table that is not true, or a refusal that is gone."""
    for one, value, other, another in refusal.pairs():
        with pytest.raises(VidSpecError, match=refusal.line):
            matrix_run.ASKED[refusal.asked]({one: value, other: another})


def test_every_pair_that_can_meet_does(rows):
    cells = [cell for row in rows for batch in row.batches for cell in batch]
    met = set().union(*map(matrix.pairs_of, cells))
    assert met == matrix.possible_pairs()
    assert [row.engine for row in rows] == ENGINES
    assert {cell["blind"] for cell in cells if cell["pruner"] == "blind"} == {*matrix.BLIND}
    scorers = [{cell["scorer"] for cell in batch} for row in rows for batch in row.batches]
    assert any({"strict", "loose"} <= one for one in scorers), "a strict request beside a loose one"


@pytest.mark.engine
@pytest.mark.parametrize("number", CASES)
def test_cells(rows, models, answered, number):
    """An engine and its batches. Catches: two settings that each work, and together do not."""
    row, wrong = rows[number], []
    with matrix_run.started(row.engine, models) as engine:
        for i, batch in enumerate(row.batches):
            found = matrix_run.run(engine, batch, 100 * number + 10 * i)
            answered.setdefault(row.engine["family"], []).append(found)
            wrong += complaints(found)
    assert not wrong, "\n".join(map(str, wrong))


def complaints(found: matrix_run.Answered) -> Iterator[tuple]:
    """Yield what is wrong with a batch: nothing was lost for a reason that is not listed, and all was drafted for."""
    cells, counted = found.batch, found.counted
    expected: Counter = Counter()
    for cell, num_runs in zip(cells, found.num_runs, strict=True):
        expected.update(dict.fromkeys(matrix.reasons(cell), num_runs))
    lost = {name: n for name, n in counted.items() if n and name.startswith(("skipped_", "unguided_", "strict_"))}
    lost |= {n: counted[n] for n in ("draft_failures", "cooldowns", "drafter_restarts") if counted[n]}
    if lost != expected:
        yield "counted", lost, "instead of", dict(expected), cells
    if any((num_runs > 1) != (cells[0]["prefill"] == "preempted") for num_runs in found.num_runs):
        yield "runs", found.num_runs, cells
    if cells[0]["pruner"] != "auto":
        guided = sum(n * bool(matrix.is_guided(cell)) for cell, n in zip(cells, found.num_runs, strict=True))
        if counted["guided_prompts"] != guided:
            yield "guided", counted["guided_prompts"], "instead of", guided, cells
    budgets: Counter = Counter()
    spare = 0  # tokens that a target which drafts for itself may see besides, to make whole blocks of what is copied
    for cell, num_runs, num_visual in zip(cells, found.num_runs, found.num_visual, strict=True):
        num_items, ratio = ITEMS[cell["input"]]
        kept = num_items * budget(num_visual // num_items, 0.0 if cell["pruner"] == "none" else ratio)
        if matrix.is_drafted(cell):
            budgets.update(full=num_runs * num_visual, kept=num_runs * kept)
            spare += num_runs * 2 * (BLOCK_SIZE - 1) * (cell["draft"] == "self")
    more = counted["visual_tokens_kept"] - budgets["kept"]
    if budgets["full"] != counted["visual_tokens_full"] or not 0 <= more <= spare:
        yield "pruned to", counted["visual_tokens_kept"], counted["visual_tokens_full"], "instead of", budgets, cells
    for cell, num_drafts, kinds in zip(cells, found.num_drafts, found.kinds, strict=True):
        if (num_drafts > 0) != matrix.is_drafted(cell):
            yield "drafted", num_drafts, cell
        if matrix.is_able(cell) and not any(kinds):
            yield "nothing accepted", cell
    is_parallel = cells[0]["drafting"] == "parallel"
    # A grammar, of which the draft knows nothing, may let none of its tokens through.
    has_drafts = any(matrix.is_drafted(cell) and cell["sampling"] != "grammar" for cell in cells)
    if has_drafts and not counted["stream_tokens" if is_parallel else "draft_tokens"]:
        yield "no drafts", cells
    if all(map(matrix.is_equal, cells)):
        rejected = counted["draft_depth"] - counted["accepted_tokens"]
        # A scheduler that runs ahead plans K drafts whatever a stream has: what it has not is verified, and rejected.
        num_without = counted["late_drafts"] + counted["streams_to_come"] + len(cells)
        most = found.num_planned * num_without if is_parallel else 0
        if rejected > (most if cells[0]["scheduler"] == "ahead" else 0) or counted["stale_streams"]:
            yield "rejected", rejected, counted["stale_streams"], cells
        if not is_parallel and (counted["draft_tokens"] > counted["draft_depth"]) != (cells[0]["shape"] in TREES):
            yield "no trees, or no chains", counted["draft_tokens"], counted["draft_depth"], cells


@pytest.mark.engine
@pytest.mark.parametrize("family", ENGINE["family"])
def test_answers_are_vanillas(models, answered, family):
    """One vanilla engine reads back what all engines of a family have answered."""
    if family not in answered:
        pytest.skip("no engine of this family has run")
    kinds, wrong = [one for found in answered[family] for one in found.kinds], []
    for (cell, output, vanilla, is_own), of_cell in zip(
        matrix_run.read_back(models, family, answered[family]), kinds, strict=True
    ):
        if is_own != [kind < 2 for kind in of_cell] or (cell["scorer"] not in LOSSY and not all(is_own)):
            wrong.append((is_own.index(False) if False in is_own else None, is_own, of_cell, cell))
        elif cell["scorer"] not in LOSSY:
            harness.assert_same_answers([vanilla], [output])
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.slow
@pytest.mark.engine
def test_what_a_draft_mistakes_is_seen(rows, models, monkeypatch):
    """Drafts that are sampled by the next position's noise: the cells above say so, which are silent without."""
    row = rows[0]
    assert row.engine["shape"] == "chain"
    with matrix_run.started(row.engine, models) as engine:

        @in_place_of(monkeypatch, CoupledSampler, "draw_into")
        def next_position(draw, self, logits, heat, seeds, pos, **outputs):
            draw(self, logits, heat, seeds, pos + 1, **outputs)

        found = matrix_run.run(engine, row.batches[0], 0)
    assert [what for what, *_ in complaints(found)] == ["rejected"]
