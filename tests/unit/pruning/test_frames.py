"""Images that are a video's frames: which of a prompt are, and what follows; what a target has kept of a video."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_vidspec.config import PruneKnobs
from vllm_vidspec.pruning import TokenGrid, budget
from vllm_vidspec.pruning.frames import MAX_TEXT_BETWEEN, pruned_together, run_grid
from vllm_vidspec.pruning.prompt import plan_prompt, prune
from vllm_vidspec.pruning.sampled import kept_places

SMALL, LARGE = TokenGrid(1, 2, 3), TokenGrid(1, 3, 4)
TURNED, FLAT = TokenGrid(1, 3, 2), TokenGrid(1, 1, 6)  # as many tokens as SMALL
VIDEO = TokenGrid(4, 2, 3)
MARKERS = 2  # text between items, unless a number says otherwise


def prompt(*shown: TokenGrid | int) -> tuple[list[int], list[Any]]:
    """Return ids and features: grids are items, numbers tokens of text, else `MARKERS` before each item."""
    token_ids: list[int] = []
    features = []
    after_item = True
    for part in (*shown, 3):
        if isinstance(part, int):
            token_ids += [7] * part
            after_item = False
            continue
        token_ids += [7] * (MARKERS if after_item else 0)
        modality = "image" if part.num_frames == 1 else "video"
        place = SimpleNamespace(offset=len(token_ids), length=part.num_tokens, is_embed=None)
        data = {f"pixel_values{len(features)}": SimpleNamespace(data=part)}
        features.append(SimpleNamespace(modality=modality, data=data, mm_position=place, identifier="", mm_hash=""))
        token_ids += [99] * part.num_tokens
        after_item = True
    return token_ids, features


def plan_of(token_ids: list[int], features: list[Any], **knobs: Any):
    return plan_prompt(
        token_ids,
        features,
        PruneKnobs(**knobs),
        lambda modality, data, num_tokens: next(iter(data.values())),
        lambda token_ids, features: (torch.arange(len(token_ids)).expand(3, -1), 0),
    )


def plan(*shown: TokenGrid | int, **knobs: Any):
    return plan_of(*prompt(*shown), **knobs)


def places(*shown: TokenGrid | int, frames_as_video: str = "auto") -> list[int | tuple[int, int]]:
    """Return what is pruned together: items by number, runs by their first and last."""
    units = plan(*shown, frames_as_video=frames_as_video).units
    return [unit.places[0] if len(unit.places) == 1 else (unit.places[0], unit.places[-1]) for unit in units]


@pytest.mark.parametrize(
    ("shown", "auto", "always"),
    [
        ([], [], []),
        ([SMALL], [0], [0]),
        ([SMALL] * 2, [0, 1], [(0, 1)]),
        ([SMALL] * 3, [0, 1, 2], [(0, 2)]),
        ([SMALL] * 4, [(0, 3)], [(0, 3)]),
        ([SMALL] * 64, [(0, 63)], [(0, 63)]),
        ([FLAT] * 4, [(0, 3)], [(0, 3)]),  # geometry unknown: as many tokens each
        ([SMALL] * 3 + [LARGE], [0, 1, 2, 3], [(0, 2), 3]),
        ([SMALL] * 3 + [TURNED] * 2, [0, 1, 2, 3, 4], [(0, 2), (3, 4)]),
        ([SMALL] * 3 + [FLAT], [0, 1, 2, 3], [(0, 2), 3]),
        ([LARGE] + [SMALL] * 4 + [LARGE], [0, (1, 4), 5], [0, (1, 4), 5]),
        ([SMALL] * 4 + [LARGE] * 5, [(0, 3), (4, 8)], [(0, 3), (4, 8)]),
        ([SMALL] * 2 + [VIDEO] + [SMALL] * 2, [0, 1, 2, 3, 4], [(0, 1), 2, (3, 4)]),
        ([SMALL] * 4 + [VIDEO] + [SMALL] * 4, [(0, 3), 4, (5, 8)], [(0, 3), 4, (5, 8)]),
        ([VIDEO] * 4, [0, 1, 2, 3], [0, 1, 2, 3]),
        ([VIDEO] + [SMALL] * 4, [0, (1, 4)], [0, (1, 4)]),
        ([SMALL] * 2 + [MAX_TEXT_BETWEEN] + [SMALL] * 2, [(0, 3)], [(0, 3)]),
        ([SMALL] * 2 + [MAX_TEXT_BETWEEN + 1] + [SMALL] * 2, [0, 1, 2, 3], [(0, 1), (2, 3)]),
        ([SMALL] * 4 + [MAX_TEXT_BETWEEN + 1] + [SMALL] * 4, [(0, 3), (4, 7)], [(0, 3), (4, 7)]),
        ([SMALL, 0] * 4, [(0, 3)], [(0, 3)]),  # one right behind the other
        ([500] + [SMALL] * 4 + [500], [(0, 3)], [(0, 3)]),
        ([TokenGrid(1, 0, 0)] * 4, [0, 1, 2, 3], [0, 1, 2, 3]),
    ],
)
def test_runs(shown, auto, always):
    """Catches: a border moved by one, a video taken for a frame, text outside counted, a run that swallows the next."""
    assert places(*shown) == auto
    assert places(*shown, frames_as_video="always") == always
    assert places(*shown, frames_as_video="never") == list(range(sum(isinstance(part, TokenGrid) for part in shown)))


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_video_of_one_frame_is_no_image(place):
    """Catches: a run that takes in a video, as its first item or a later one, because their grids are equal."""
    modalities = ["image"] * 4
    modalities[place] = "video"
    where = [torch.arange(6) + 8 * i for i in range(4)]
    found = pruned_together(modalities, where, [SMALL] * 4, PruneKnobs())
    assert found == [(range(i, i + 1), modality) for i, modality in enumerate(modalities)]


def test_text_within_an_item_is_not_between_items():
    """Separators inside an item's range are text of its own: the next begins behind the last embedding."""
    token_ids, features = prompt(*[SMALL] * 4)
    for i, feature in enumerate(features):
        feature.data = {"pixel_values": SimpleNamespace(data=TokenGrid(1, 1, 3))}
        feature.mm_position.is_embed = torch.tensor([True, False] * 3 if i else [True] * 3 + [False] * 3)

    def found(gap: int) -> int:
        for i, feature in enumerate(features):
            feature.mm_position.offset = i * (gap + 6)
        return len(plan_of(token_ids + [7] * 4 * MAX_TEXT_BETWEEN, features).units)

    assert found(MAX_TEXT_BETWEEN - 3) == 1  # three of the first item's own range are text
    assert found(MAX_TEXT_BETWEEN - 2) == 4  # and one of each later one's


def test_a_run_has_one_budget_at_the_ratio_of_videos():
    """Seven frames, a lone image of their size behind much text, a video: 0.9, 0.5 and 0.9 of them go."""
    shown = [*[SMALL] * 7, 40, SMALL, VIDEO]
    knobs = {"prune_ratio": 0.9, "image_prune_ratio": 0.5}
    run, image, video = plan(*shown, **knobs).units
    assert (run.num_keep, image.num_keep, video.num_keep) == (budget(42, 0.9), 3, budget(24, 0.9)) == (4, 3, 2)
    assert (run.grid, image.grid, video.grid) == (TokenGrid(7, 2, 3), SMALL, VIDEO)
    alone = plan(*shown, **knobs, frames_as_video="never")
    assert [unit.num_keep for unit in alone.units] == [3] * 8 + [2]
    for planned, kept in ((plan(*shown, **knobs), 9), (alone, 26)):
        assert planned.num_visual == 72 and planned.num_dropped == 72 - kept
        assert planned.num_kept == planned.num_tokens - planned.num_dropped
        assert planned.pos_delta == 0
    compacted = plan(*shown, **knobs, draft_positions="compacted")
    assert compacted.pos_delta == -compacted.num_dropped
    assert plan(*shown, pruner="none").num_dropped == 0


def test_run_grids():
    """Catches: trailing tokens that are lost, or that shift every later frame."""
    assert run_grid(LARGE, 5) == TokenGrid(5, 3, 4)
    assert run_grid(FLAT, 4) == TokenGrid(4, 1, 6)
    assert run_grid(TokenGrid(1, 2, 3, num_trailing=1), 4) == TokenGrid(4, 1, 7)
    assert run_grid(TokenGrid(2, 2, 3), 4) == TokenGrid(4, 1, 12)


@pytest.mark.parametrize("positions", ["original", "compacted"])
def test_images_that_keep_nothing_leave_their_text(positions):
    """Four frames, of the first and the third of which nothing stays: two markers before each, and the question."""
    planned = plan(*[SMALL] * 4, prune_ratio=0.9, draft_positions=positions)
    (unit,) = planned.units
    pruned = prune(planned, unit.split(torch.tensor([6, 23])))
    assert pruned.token_ids.tolist() == [7, 7, 7, 7, 99, 7, 7, 7, 7, 99, 7, 7, 7]
    assert pruned.media_at.tolist() == [4, 9]
    expected = [0, 1, 8, 9, 10, 16, 17, 24, 25, 31, 32, 33, 34] if positions == "original" else list(range(13))
    assert pruned.positions.tolist() == [expected] * 3


GRID = TokenGrid(4, 3, 2)


def positions_of(places: torch.Tensor, grid: TokenGrid, ticks_per_frame: float, start: int) -> torch.Tensor:
    """Return what vLLM gives these places of a video that begins at a position."""
    frames, spots = places // grid.tokens_per_frame, places % grid.tokens_per_frame
    return start + torch.stack(((frames * ticks_per_frame).long(), spots // grid.width, spots % grid.width))


@given(
    st.sets(st.integers(GRID.tokens_per_frame, GRID.num_tokens - 1)),
    st.sampled_from([1, 2, 2.5, 50]),
    st.integers(0, 9),
)
def test_places_are_found_again(more, ticks_per_frame, start):
    """Any choice beside the first frame. Catches: a place off by one, by a frame, or by where the video begins."""
    places = torch.tensor([*range(GRID.tokens_per_frame), *sorted(more)])
    positions = positions_of(places, GRID, ticks_per_frame, start)
    assert kept_places(positions, GRID, ticks_per_frame).tolist() == places.tolist()


def test_frames_of_one_tick_go_by_the_order_of_their_tokens():
    """Several frames a tick: every token is in place where the choice has no gap, and in order in any case."""
    places = torch.arange(GRID.num_tokens)
    assert kept_places(positions_of(places, GRID, 0, 5), GRID, 0).tolist() == places.tolist()
    sparse = torch.tensor([0, 1, 2, 3, 4, 5, 7, 19])
    found = kept_places(positions_of(sparse, GRID, 0.5, 5), GRID, 0.5)
    assert (found.diff() > 0).all() and (found % 6 == sparse % 6).all()


@pytest.mark.parametrize(
    "positions",
    [
        torch.tensor([[0, 0, 9], [0, 1, 1], [0, 0, 0]]),  # no frame is there
        torch.tensor([[0, 0, 1], [0, 3, 1], [0, 0, 0]]),  # no such row
        torch.zeros(3, 0, dtype=torch.int64),
        torch.zeros(1, 4, dtype=torch.int64),
    ],
)
def test_positions_of_something_else_are_refused(positions):
    assert kept_places(positions, GRID, 1) is None
