"""`vidspec bench scaling` without an engine: its points, how a run goes on, its rows, and what is drawn."""

import json

import numpy as np
import pytest

from tools.clocks import DECODED, TARGET_S
from tools.common import invoke
from vidspec_tools import inflation
from vidspec_tools.bench import scaling
from vidspec_tools.bench.scaling import AXES, ScalingBenchmark
from vidspec_tools.bench.session import BenchEngine
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs


def measured(*options, status=0):
    result = invoke("bench", "scaling", *options, "--json", "-")
    assert result.exit_code == status, result.stderr
    return json.loads(result.stdout)


def test_batches_are_asked_sequential(clocks):
    """Catches: one batch for all sizes, more requests than the engine takes, videos seen before, a fixed order."""
    rows = measured("--values", "1,16", "--rounds", "2")["rows"]
    assert [(row["value"], row["method"]) for row in rows] == [
        (1, "vanilla"),
        (1, "vidspec"),
        (16, "vanilla"),
        (16, "vidspec"),
    ]
    assert [session.job["llm"]["max_num_seqs"] for session in clocks.sessions] == [8, 8, 16, 16]
    assert [mode for mode, _ in clocks.turns] == ["vanilla", "sequential", "sequential", "vanilla"] * 2
    asked = [indices for mode, indices in clocks.turns if mode == "vanilla"]
    assert asked == [(0,), (1,), tuple(range(16)), tuple(range(16, 32))]
    for session in clocks.sessions:
        videos = session.job["prompts"]["held_out"]
        assert session.job["prompts"]["warm_up"] not in videos
        assert len(videos) == 1 + max(i for one in session.asked for i in one["indices"])


def test_rows_say_what_was_measured(clocks):
    """Catches: a decode from the last request's first token, means over tokens of all requests, TTFT of the first."""
    vanilla, ours = measured("--values", "2", "--rounds", "1")["rows"]
    span = DECODED * TARGET_S + TARGET_S
    assert vanilla["tokens_per_s"] == pytest.approx(2 * DECODED / span)
    assert vanilla["ttft_s"] == pytest.approx(0.2 + TARGET_S / 2)
    assert (vanilla["inter_token_ms"], ours["inter_token_ms"]) == pytest.approx((40, 20))
    assert ours["speedup"] == pytest.approx(span / (DECODED * TARGET_S / 2 + TARGET_S))
    assert (ours["acceptance_length"], vanilla["acceptance_length"]) == (4.0, None)
    assert (ours["identical_frac"], ours["output_tokens"]) == (1.0, 2 * (DECODED + 1))
    assert ours["speedup_p20"] == ours["speedup_p80"] == ours["speedup"]


def test_video_tokens_are_videos_or_parts_of_one(clocks):
    measured("--axis", "video_tokens", "--values", "128,256,1024,8192", "--rounds", "1")
    prompts = [session.job["prompts"] for session in clocks.sessions[1::2]]
    assert [(one["num_videos"], one["video_frac"]) for one in prompts] == [(1, 0.5), (1, 1.0), (4, 1.0), (32, 1.0)]
    llms = [session.job["llm"] for session in clocks.sessions[1::2]]
    assert [llm["limit_mm_per_prompt"]["video"] for llm in llms] == [1, 1, 4, 32]
    assert [llm["max_model_len"] for llm in llms] == [2048, 2048, 2368, 16384]


@pytest.mark.parametrize(("axis", "knob"), [("num_speculative_tokens", None), ("prune_ratio", None)])
def test_knobs_are_varied(clocks, axis, knob):
    values = [1, 8] if axis == "num_speculative_tokens" else [0.5, 1.0]
    rows = measured("--axis", axis, "--values", ",".join(map(str, values)), "--rounds", "1")["rows"]
    specs = [session.job["llm"].get("speculative_config") for session in clocks.sessions]
    assert [spec[axis] for spec in specs if spec] == values
    assert [row[axis] for row in rows if row["mode"] != "vanilla"] == values


def test_every_axis_has_values(clocks):
    for axis, values in AXES.items():
        scaling.check(ScalingBenchmark(axis=axis, values=values))
        assert values == tuple(sorted(values)) and len(values) >= 5


def test_a_stopped_run_goes_on(clocks, tmp_path):
    """Catches: a finished point that is measured again, one of another setting that is taken for it, a lost row."""
    path = tmp_path / "points.jsonl"
    options = ("--rounds", "1", "--resume", str(path))
    clocks.fails = lambda job, command: VidSpecError("out of memory") if job["llm"]["max_num_seqs"] == 16 else None
    printed = measured("--values", "1,16,2", *options, status=1)
    assert [(one["value"], one["reason"]) for one in printed["failures"]] == [(16, "out of memory")]
    assert [row["value"] for row in printed["rows"]] == [1, 1, 2, 2]
    assert len(path.read_text().splitlines()) == 2

    clocks.fails = lambda job, command: None
    clocks.sessions.clear()
    again = measured("--values", "1,16,2", *options)["rows"]
    assert [row["value"] for row in again] == [1, 1, 16, 16, 2, 2]
    assert again[:2] + again[4:] == printed["rows"]
    assert len(clocks.sessions) == 2, "the one that is missing"
    clocks.sessions.clear()
    measured("--values", "1", *options, "--pruner", "uv")
    assert len(clocks.sessions) == 2, "another setting is another point"


def test_points_of_other_code_are_others(clocks, monkeypatch):
    point = ScalingBenchmark(values=(1.0,)).at(1.0)
    workload = scaling.Workload("qwen2.5-vl")
    keys = {scaling.point_key(point, workload)}
    keys.add(scaling.point_key(ScalingBenchmark(values=(1.0, 2.0)).at(1.0), workload))
    assert len(keys) == 1, "which other values there are is no matter"
    here = scaling.provenance()
    monkeypatch.setattr(scaling, "provenance", lambda: here | {"git_sha": "another"})
    keys.add(scaling.point_key(point, workload))
    keys.add(scaling.point_key(point, scaling.Workload("qwen2.5-vl", 5.0, 9)))
    assert len(keys) == 3


def test_inflated_pairs_say_so(clocks):
    rows = measured("--values", "1", "--rounds", "1", "--inflate", "5")["rows"]
    assert all(inflation.WORDS in row["label"] for row in rows)


def test_requests_have_as_many_videos_as_asked_for(monkeypatch):
    """Catches: a video in two requests, frames of its beginning alone, a whole video that is sampled twice."""
    asked = []
    monkeypatch.setattr(pairs, "media_prompt", lambda family, question, videos: asked.append(videos))
    prompts = {"family": "qwen2.5-vl", "question": "?", "held_out": [0, 1]}
    for more in ({}, {"num_videos": 2}, {"video_frac": 0.5}):
        BenchEngine.bundled_requests(prompts | more)
    assert [[len(frames) for frames in videos] for videos in asked] == [[32]] * 2 + [[32, 32]] * 2 + [[16]] * 2
    first, second = asked[2:4]
    whole = [frames.tobytes() for frames in (*first, *second)]
    assert len(set(whole)) == 4
    assert np.array_equal(asked[4][0][[0, -1]], asked[0][0][[0, -1]])
