"""`vidspec show-relevance` without an engine: what is measured, colours, the picture."""

import json

import numpy as np
import pytest

from tools.common import invoke
from vidspec_tools.pictures import relevance_views, show_relevance
from vidspec_tools.pictures.relevance_views import color, scale
from vidspec_tools.pictures.show_relevance import Show
from vllm_vidspec.config import parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import NAMES
from vllm_vidspec.tools import pairs

Image = pytest.importorskip("PIL.Image")

CAPTION = {
    "words": ["the", " red", " <b>ring</b>", ' "&', "\n", "", " $x_1$"],
    "relevance": [0.1, 0.5, 0.3, None, 0.2, 0.4, None],
    "kinds": [0, 1, 2, 3, 1, 1, 0],
}
COUNTERS = dict.fromkeys(NAMES, 0) | {"drafts": 2, "draft_tokens": 20, "accepted_tokens": 5}


ANSWER = {"metrics": COUNTERS, "captions": [CAPTION]}


def row(**fields):
    return show_relevance.make_row(Show(), ANSWER) | fields


def test_colours_grow_with_relevance():
    ends = (0.2, 0.6)
    shades = [int(color(value, ends)[5:], 16) for value in (0.0, 0.2, 0.3, 0.5, 0.6, 9.0)]
    assert shades == sorted(shades, reverse=True)
    assert color(0.2, ends) == color(0.0, ends) == "#ffffff"
    assert color(0.6, ends) == color(9.0, ends)
    assert color(None, ends) not in (color(0.2, ends), color(0.6, ends))
    assert color(0.5, (0.5, 0.5)).startswith("#"), "all alike"
    assert scale([None, None]) == (0.0, 0.0)
    strongest = [int(color(1.0, ends)[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    assert np.dot(strongest, (0.2126, 0.7152, 0.0722)) > 0.5, "black text stays readable"


def test_picture_has_the_colours_and_marks(tmp_path):
    relevance_views.write(row(), str(tmp_path / "r.png"))
    pixels = np.asarray(Image.open(tmp_path / "r.png").convert("RGB")).reshape(-1, 3)
    found = {"#" + bytes(pixel).hex() for pixel in np.unique(pixels, axis=0)}
    ends = scale(CAPTION["relevance"])
    shown = {color(value, ends) for value in CAPTION["relevance"]}
    assert shown | {tint for tint, _ in relevance_views._MARKS.values()} <= found


def test_words_of_a_pair_of_ones_own_are_not_judged():
    bundled = row()
    assert bundled["relevance_auc"] == 1.0, "red against the"
    assert bundled["acceptance_length"] == 3.5
    assert bundled["loosened_frac"] == bundled["shifted_frac"] == 1 / 5
    own = show_relevance.make_row(Show(target="some/target", draft="self"), ANSWER)
    assert own["relevance_auc"] is own["family"] is None
    assert relevance_views.title(own).endswith("sample.mp4, target"), "of a path its last part"
    assert not any("fillers" in line for line in relevance_views.figures(own))
    assert any("fillers in 100 %" in line for line in relevance_views.figures(bundled))
    assert relevance_views.setting(own).startswith("lambda 0.7, N 10, with position shift, relevance of its own state")


@pytest.mark.parametrize(
    ("counters", "words"),
    [
        ({"skipped_too_long": 1}, r"ran without speculation \(too_long\)"),
        ({"strict_cached": 1}, r"verified strictly \(cached\)"),
    ],
)
def test_a_caption_that_was_not_measured_is_refused(counters, words):
    with pytest.raises(VidSpecError, match=words):
        show_relevance.make_row(Show(), ANSWER | {"metrics": COUNTERS | counters})
    unmeasured = CAPTION | {"relevance": [None] * 7}
    with pytest.raises(VidSpecError, match="no relevance was measured"):
        show_relevance.make_row(Show(), ANSWER | {"captions": [unmeasured]})


@pytest.fixture
def sessions(fake_engines):
    """Replace the engine by one that says CAPTION."""
    return fake_engines(lambda *_: ANSWER)


def test_command_writes_a_file(sessions, tmp_path):
    pytest.importorskip("cv2")
    out = tmp_path / "r.png"
    result = invoke(
        *("show-relevance", "--out", str(out), "--lambda", "0.3", "--top-n", "5", "--no-position-shift"),
        *("--relevance-rows", "prediction", "--json", str(tmp_path / "r.json"), "--max-tokens", "40"),
    )
    assert result.exit_code == 0, result.output
    assert "<b>ring</b>" in result.stdout
    assert f"Wrote {out}" in result.stdout.replace("\n", "")
    assert out.read_bytes()[:4] == b"\x89PNG"
    (session,) = sessions
    job, (command,) = session.job, session.asked
    config, _ = parse_config(job["llm"]["speculative_config"])
    asked = {"scorer": "loose", "lambda_loose": 0.3, "top_n": 5, "position_shift": False}
    assert config.score.model_dump().items() >= (asked | {"relevance_rows": "prediction"}).items()
    assert job["prompts"]["videos"] == [str(pairs.sample_video())]
    assert (command["command"], command["watch"], command["sampling"]["max_tokens"]) == ("answer", True, 40)
    written = json.loads((tmp_path / "r.json").read_text())
    assert set(written) == {"rows", "provenance"}
    assert written["rows"][0]["words"] == CAPTION["words"]


def test_a_pair_of_ones_own_has_its_own_engine_arguments(sessions, tmp_path):
    pytest.importorskip("cv2")
    result = invoke(
        *("show-relevance", str(pairs.sample_video()), "--target", str(tmp_path), "--draft", "self"),
        *("--out", str(tmp_path / "r.png"), "--engine-args", '{"max_model_len": 4096}', "--prune-ratio", "0"),
    )
    assert result.exit_code == 0, result.output
    job = sessions[0].job
    assert job["prompts"]["family"] is None
    assert (job["llm"]["model"], job["llm"]["max_model_len"]) == (str(tmp_path), 4096)
    assert job["llm"]["speculative_config"]["scorer"] == "loose"
