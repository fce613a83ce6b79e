"""`vidspec show-pruning` without an engine: what is asked of one, the picture's geometry, what is refused."""

import json

import numpy as np
import pytest

from tools.common import invoke
from vllm_vidspec.config import parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.pruning import TokenGrid
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import contact_sheet, pairs, show_pruning, user_files
from vllm_vidspec.tools.contact_sheet import Row
from vllm_vidspec.tools.show_pruning import Show

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("cv2")

GRID = TokenGrid(8, 3, 4)
WHITE = np.full((16, 60, 80, 3), 255, np.uint8)


def row(pruner="uniform", kept=(0, 5, 95), grid=GRID):
    return Row(pruner, np.array(kept, dtype=np.int64), grid)


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


def test_trailing_tokens_are_counted_and_not_drawn():
    one = row("attention", (0, 1, 2, 31, 32), TokenGrid(8, 2, 2, num_trailing=1))
    assert one.is_kept.sum() == 4
    assert one.label() == "attention: 5 of 33 tokens kept, trailing tokens: 1 of 1"


@pytest.mark.parametrize("family", pairs.FAMILIES)
def test_what_is_shown_has_the_engines_knobs(family):
    """The bundled pairs have a calibration. Catches: an engine without it."""
    found = json.loads(pairs.calibration(family).read_text())["config"]
    uncalibrated = parse_config(pairs.speculative_config(family, "draft"))[0]
    engine = Show(family=family).config()
    assert engine.lambda_r == found["lambda_r"] != uncalibrated.lambda_r
    own = Show(family=family, target="/t", draft="self", calibration=str(pairs.calibration(family)))
    assert own.job()["llm"]["model"] == "/t"
    config = own.config()
    assert (config.model, config.lambda_r) == ("self", found["lambda_r"])


@pytest.fixture
def looks(fake_engines):
    """Return what replaces engines by one that answers with `items(pruner)`, and returns the sessions."""

    def replace(items):
        return fake_engines(lambda session, command: {"items": items(command["knobs"]["pruner"])})

    return replace


def test_one_engine_for_all_pruners_writes_a_picture(looks, tmp_path):
    """Catches: an engine that does not observe what a later pruner needs; one for each pruner; an alias drawn twice."""
    pytest.importorskip("matplotlib")
    item = {"grid": [16, 4, 4, 0], "kept_indices": list(range(231, 256)), "scores": [0.0] * 256}
    sessions = looks(lambda pruner: [item])
    out = tmp_path / "p.png"
    result = invoke("show-pruning", "--pruner", "uniform,window,specvlm,window:middle", "--out", str(out))
    assert result.exit_code == 0, result.output
    (session,) = sessions
    assert [command["knobs"]["pruner"] for command in session.asked] == ["uniform", "window:middle", "specvlm"]
    spec = session.job["llm"]["speculative_config"]
    assert (spec["pruner"], spec["auto_pruners"][:3]) == ("auto", ("uniform", "window", "specvlm"))
    assert "window:middle" in result.stdout
    assert Image.open(out).text["Description"].count("25 of 256 tokens kept") == 3


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (None, "nothing was drafted"),
        ({"grid": [4, 4, 4, 0], "kept_indices": [0, 63], "scores": None}, "uv: the engine measured nothing"),
        ({"grid": [1, 1, 64, 0], "kept_indices": [0, 63], "scores": [0.0] * 64}, "the layout .* is unknown"),
    ],
)
def test_what_was_not_pruned_so_is_not_shown(looks, item, words):
    looks(lambda pruner: [] if item is None else [item])
    with pytest.raises(VidSpecError, match=words):
        show_pruning.run(Show(pruners=("uv",)))


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
