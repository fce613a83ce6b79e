"""`vidspec show-pruning` without an engine: the choice from measured scores, the picture's geometry, wrong options."""

import json

import numpy as np
import pytest
import torch

from tools.common import invoke
from vllm_vidspec.config import parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.pruning import TokenGrid
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import contact_sheet, pairs, show_pruning, user_files
from vllm_vidspec.tools.contact_sheet import Row
from vllm_vidspec.tools.show_pruning import Record, Show, choose

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("cv2")

GRID = TokenGrid(8, 3, 4)
WHITE = np.full((16, 60, 80, 3), 255, np.uint8)


def row(pruner="uniform", kept=(0, 5, 95), grid=GRID):
    return Row(pruner, torch.tensor(kept, dtype=torch.int64), grid)


def tokens(strip, grid, num_shown):
    """Return what is in the middle of each token of a strip, `[frames, height, width, 3]`."""
    side = strip.shape[0] // grid.height
    each = strip.shape[1] // num_shown
    cells = np.stack([strip[:, i * each : i * each + grid.width * side] for i in range(num_shown)])
    return cells[:, side // 2 :: side, side // 2 :: side]


@pytest.mark.parametrize("columns", [16, 8, 5, 1])
def test_kept_tokens_are_lit_and_dropped_ones_dark(columns):
    shown = contact_sheet.shown_frames(GRID, columns)
    assert len(shown) == min(columns, 8) and (shown[0], shown[-1]) in ((0, 7), (0, 0))
    for one in (row(), row("random", (7, 40, 41, 88))):
        expected = np.where(one.is_kept[shown][..., None], 255, 63) * np.ones(3, int)
        assert np.array_equal(tokens(contact_sheet.strip(WHITE, one, shown), GRID, len(shown)), expected)


def test_of_several_video_frames_to_a_model_frame_the_first_is_drawn():
    frames = np.arange(16, dtype=np.uint8)[:, None, None, None] * 16 * np.ones((1, 30, 40, 3), np.uint8)
    drawn = tokens(contact_sheet.strip(frames, row(kept=range(96)), range(8)), GRID, 8)
    assert drawn[:, 1, 1, 0].tolist() == [32 * frame for frame in range(8)]


def test_more_frames_than_columns_are_evenly_spaced_and_said():
    grid = TokenGrid(64, 2, 2)
    shown = contact_sheet.shown_frames(grid, 16)
    assert (shown[0], shown[-1], len(set(shown))) == (0, 63, 16)
    assert "16 evenly spaced ones shown" in contact_sheet._caption(grid, 16, 1)
    assert "evenly" not in contact_sheet._caption(GRID, 8, 2)


def test_positional_bias_and_trailing_tokens():
    grid = TokenGrid(8, 2, 2, num_trailing=1)
    biased = row("attention", (0, 1, 2, 31, 32), grid)
    assert biased.ends_frac == 1.0
    assert biased.figures()["even_frac"] == 0.5
    assert biased.is_kept.sum() == 4
    bias = "100% of them in the first and last 2 frames (evenly spread: 50%)"
    assert biased.label() == f"attention: 5 of 33 tokens kept, {bias}, trailing tokens: 1 of 1"
    assert row(grid=TokenGrid(4, 4, 6)).ends_frac is None, "a short video has nothing but ends"
    assert row(kept=()).ends_frac is None


def test_choice_is_the_engines_and_a_difference_is_refused():
    record = lambda pruner, kept, scores=None: Record(pruner, GRID, torch.tensor(kept), scores, None)  # noqa: E731
    scores = torch.zeros(96)
    scores[[3, 50, 90]] = torch.tensor([5.0, 2.0, 1.0])  # the first draws lambda_r by itself
    show = Show(prune_ratio=0.97, pruners=("attention", "specvlm", "uniform:stride"))  # 2 of 96 tokens
    config = show.config(pruner="attention")
    records = [record("attention", [3, 50], scores)]
    assert choose(config, records).tolist() == [3, 50]
    assert choose(show.config(pruner="specvlm"), records).tolist() == [0, 3]
    assert choose(show.config(pruner="uniform:stride"), records).tolist() == [0, 95]
    with pytest.raises(VidSpecError, match="kept other tokens"):
        choose(config, [record("attention", [3, 51], scores)])
    with pytest.raises(VidSpecError, match="measured nothing"):
        choose(config, [record("attention", [0, 95])])
    with pytest.raises(VidSpecError, match="measured nothing"):
        choose(show.config(pruner="uv"), records)
    assert choose(Show(prune_ratio=1.0).config(pruner="uv"), records).tolist() == []


@pytest.mark.parametrize("family", pairs.FAMILIES)
def test_what_is_shown_has_the_engines_knobs(family):
    """The bundled pairs have a calibration. Catches: a picture with other knobs than its engine has."""
    found = json.loads(pairs.calibration(family).read_text())["config"]
    uncalibrated = parse_config(pairs.speculative_config(family, "draft"))[0]
    for pruner in show_pruning.PRUNERS:
        show = Show(family=family)
        engine = parse_config(show.job(pruner=pruner)["llm"]["speculative_config"])[0]
        assert show.config(pruner=pruner) == engine
        assert engine.lambda_r == found["lambda_r"] != uncalibrated.lambda_r
    own = Show(family=family, target="/t", draft="self", calibration=str(pairs.calibration(family)))
    assert own.job(pruner="specvlm")["llm"]["model"] == "/t"
    config = own.config(pruner="specvlm")
    assert (config.model, config.lambda_r) == ("self", found["lambda_r"])


def test_one_engine_per_kind_of_guidance():
    def engines(*pruners):
        return show_pruning._engines([Show().config(pruner=pruner) for pruner in pruners])

    assert engines(*show_pruning.PRUNERS) == ["specvlm", "uv", "dycoke"]
    assert engines("random", "frame") == ["random"], "a grid is needed even where no score is"
    assert engines("fastvid", "dycoke", "uniform") == ["fastvid"]


def test_command_writes_a_picture(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    ran, grid, scores = [], TokenGrid(16, 4, 4), torch.arange(256).float()

    def look(show, pruners, report):
        ran.extend(pruners)
        return [Record("attention", grid, torch.arange(231, 256), scores, None)]

    monkeypatch.setattr(show_pruning, "_look", look)
    out = tmp_path / "p.png"
    result = invoke("show-pruning", "--pruner", "uniform,window,specvlm", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "window:middle" in result.stdout and ran == ["specvlm"]
    assert Image.open(out).text["Description"].count("25 of 256 tokens kept") == 3


def test_read_video_samples_as_vllm_does(tmp_path):
    pytest.importorskip("cv2")
    frames = world.held_out(0).frames
    world.write_mp4(frames, tmp_path / "v.mp4")
    every = user_files.read_video(tmp_path / "v.mp4")
    assert every.shape == frames.shape and np.abs(every.astype(int) - frames).mean() < 8
    assert np.array_equal(user_files.read_video(tmp_path / "v.mp4", 100), every)
    assert np.array_equal(user_files.read_video(tmp_path / "v.mp4", 7), every[np.linspace(0, 31, 7, dtype=int)])
    (tmp_path / "bad.mp4").write_bytes(b"nothing")
    for name in ("bad.mp4", "absent.mp4"):
        with pytest.raises(VidSpecError):
            user_files.read_video(tmp_path / name, 8)
