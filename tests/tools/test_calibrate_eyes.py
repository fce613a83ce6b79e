"""`vidspec calibrate --eyes` without an engine: what is held out, what the file says, what is kept of one before."""

import json

import pytest

from tools.common import invoke
from vllm_vidspec.config import parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import NAMES
from vllm_vidspec.tools import calibrate_eyes, pairs
from vllm_vidspec.tools.calibrate_eyes import Eyes

TOKENS = 300


@pytest.fixture
def sessions(fake_engines):
    return fake_engines(engine(mapped_drafts=102), num_layers=4, default_uv_layer=4)


def engine(mapped_drafts: int):
    """Return what answers: a fit, then 100 verify steps with the draft's own tower, so many with a map."""

    def answer(session, command):
        if command["command"] == "fit":
            return {"r2": {"linear": 0.8, "hidden layer": 0.9}, "tokens": 4096}
        is_own = session.job["llm"]["speculative_config"]["draft_vision"] == "own"
        drafts = 100 if is_own else mapped_drafts
        counted = {"drafts": drafts, "draft_tokens": 5 * drafts, "accepted_tokens": TOKENS - drafts}
        return {"metrics": dict.fromkeys(NAMES, 0) | counted}

    return answer


def test_videos_that_are_asked_about_are_not_fitted_to(sessions, tmp_path):
    """Catches: an acceptance that is measured where the map was fitted; two engines at a time; another's towers."""
    what = Eyes(prompts=64, out=str(tmp_path / "calibration.json"))
    result = calibrate_eyes.run(what)
    own, mapped = sessions
    fit, *answered = own.asked
    assert fit["held_out"] == list(range(0, 64, 5)) and answered[0]["indices"] == fit["held_out"][:12]
    assert mapped.asked[0]["indices"] == answered[0]["indices"] and mapped.num_open == 1
    assert fit["path"] == mapped.job["llm"]["speculative_config"]["draft_vision"] == str(what.map_path)
    assert fit["about"]["towers"] == what.towers() and fit["about"]["videos"] == 64 - 13
    assert result["eyes"]["share"] == pytest.approx(100 / 102)
    assert result["config"] == {"draft_vision": "calibration.safetensors"}


def test_a_map_that_costs_too_much_is_not_the_default(fake_engines, tmp_path):
    """At 94 % of the own tower's tokens per step the file has the map, and does not name it."""
    fake_engines(engine(mapped_drafts=107), num_layers=4, default_uv_layer=4)
    out = tmp_path / "calibration.json"
    result = invoke("calibrate", "--eyes", "--out", str(out))
    assert result.exit_code == 0 and "the draft keeps its own tower" in result.stdout
    assert json.loads(out.read_text())["config"] == {}


def test_a_calibration_of_the_pair_stays_and_gets_the_map(sessions, tmp_path):
    """Catches: knobs that are lost, a map that the next calibration of knobs loses, a file of another pair."""
    out = tmp_path / "calibration.json"
    pair = Eyes().pair
    out.write_text(json.dumps({"config": {"lambda_r": 0.2, "draft_vision": "old"}, **pair}))
    (tmp_path / "calibration.safetensors").touch()
    assert invoke("calibrate", "--eyes", "--out", str(out)).exit_code == 0
    written = json.loads(out.read_text())
    assert written["config"] == {"lambda_r": 0.2, "draft_vision": "calibration.safetensors"}
    raw = {"model": pairs.checkpoint("qwen2.5-vl", "draft"), "num_speculative_tokens": 5, "calibration": str(out)}
    assert parse_config(raw)[0].draft_map == str(tmp_path / "calibration.safetensors")
    kept = calibrate_eyes.with_map({"config": {"lambda_r": 0.5}, **pair}, out)
    assert kept["config"] == {"lambda_r": 0.5, "draft_vision": "calibration.safetensors"} and "eyes" in kept
    other = {"config": {"lambda_r": 0.5}, **pair, "draft": "another"}
    assert calibrate_eyes.with_map(other, out) == other
    with pytest.raises(VidSpecError, match="is no calibration of this pair"):
        calibrate_eyes.check(Eyes(family="llava-onevision", out=str(out)))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"prompts": 4}, "needs 5 videos or more, got 4"),
        ({"draft": "self"}, "has no other tower"),
        ({"draft": pairs.checkpoint("qwen2.5-vl", "target")}, "both vision towers are the same"),
    ],
)
def test_what_cannot_be_fitted_is_refused(what, message):
    with pytest.raises(VidSpecError, match=message):
        calibrate_eyes.check(Eyes(**what))
