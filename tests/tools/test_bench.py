"""`vidspec bench acceptance` without an engine: what is run, its rows, its table; and batches of requests."""

import itertools
import json
import sys

import pytest

from benchmarks import never_slower
from benchmarks.session import BenchEngine
from tools.common import FAMILIES, counters, invoke, printed, refuses
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.bench import acceptance, views
from vllm_vidspec.tools.engine_session import EngineSession


def bench(*options, status=0):
    return printed("bench", "acceptance", *options, "--requests", "2", status=status)


def specs(engines):
    return [session.job["llm"].get("speculative_config") for session in engines.sessions]


@pytest.mark.slow
def test_an_engine_that_fails_is_one_line(tmp_path):
    pytest.importorskip("vllm")
    job = {"llm": {"model": str(tmp_path / "absent")}, "prompts": {"family": "qwen2.5-vl"}}
    with pytest.raises(VidSpecError, match="the engine stopped: ") as caught, EngineSession(job):
        pass
    assert "\n" not in str(caught.value)


def test_json_has_one_row_per_combination(engines):
    engines.ours = [1, 3]
    axes = ("--family", ",".join(FAMILIES), "--draft", "draft,target", "--prune-ratio", "0.5,0.9")
    result = bench(*axes, "--temperature", "0,1", "--top-p", "0.9")
    assert set(result) == {"rows", "failures", "provenance"}
    found = [tuple(row[name] for name in ("family", "draft", "prune_ratio", "temperature")) for row in result["rows"]]
    assert found == list(itertools.product(FAMILIES, ("draft", "target"), (0.5, 0.9), (0.0, 1.0)))
    row = result["rows"][0]
    assert set(acceptance.AXES) <= set(row)
    assert (row["acceptance_length"], row["acceptance_rate"], row["num_drafts"]) == (4.0, 0.6, 100)
    assert row["identical_frac"] == 0.5
    assert (row["draft_kv_bytes"], row["full_draft_kv_bytes"]) == ((20 + 500) * 8, (20 + 1000) * 8)
    assert row["decode_s"] == row["vanilla_decode_s"] == 1.0
    assert {"git_sha", "versions", "argv", "device", "cpu", "date"} <= set(result["provenance"])

    drafts = [spec and spec["model"] == "self" for spec in specs(engines)]
    assert drafts == [None, False, False, True, True] * 2, "vanilla first, then an engine per configuration"
    vanilla, ours, *_ = engines.sessions
    assert vanilla.asked == ours.asked and len(ours.asked) == 2
    assert ours.asked[0]["sampling"] == {"max_tokens": 256, "temperature": 0.0, "top_p": 0.9}
    assert vanilla.job["prompts"]["held_out"] == [0, 1] and vanilla.job["prompts"]["warm_up"] == 2


def test_each_shape_has_its_own_number_of_tokens(engines):
    shapes = [("chain", 5), ("tree-static", 25), ("tree-adaptive", 64)]
    rows = bench("--draft-shape", "chain,tree-static,tree-adaptive")["rows"]
    assert [(row["drafting"], row["num_speculative_tokens"]) for row in rows] == shapes
    assert [(spec["draft_shape"], spec["num_speculative_tokens"]) for spec in specs(engines)[1:]] == shapes
    for name, value in (("nodes", 5.0), ("depth", 4.0), ("draft_forwards", 5.0)):
        assert {row[f"{name}_per_step"] for row in rows} == {value}
    assert {row["max_acceptance_length"] for row in rows} == {5.0}
    assert {row["scheduling"] for row in rows} == {"sync"}, "what the engine says"


def test_knobs_are_those_of_all_rows(engines):
    given = ("--knob", "max_draft_failures=3", "--knob", "state-bytes=9", "--knob", 'quantization="fp8"')
    rows = bench("--drafting", "tree-adaptive", "--prune-ratio", "0.5,0.9", *given)["rows"]
    knobs = {"max_draft_failures": 3, "state_bytes": 9, "quantization": "fp8"}
    assert [row["knobs"] for row in rows] == [knobs] * 2
    assert all(spec is None or spec.items() >= knobs.items() for spec in specs(engines))


def test_what_fails_is_one_line_and_the_others_stay(engines):
    """Catches: rows compared with a vanilla that failed, engines started for them, a failure that says nothing."""
    error = VidSpecError("the engine stopped: RuntimeError: no")
    engines.fails = lambda job: error if "'num_speculative_tokens': 7" in str(job) else None
    result = invoke("bench", "acceptance", "--num-speculative-tokens", "7,3", "--requests", "2", "--json", "-")
    assert result.exit_code == 1 and result.stderr.count("RuntimeError: no") == 1
    found = json.loads(result.stdout)
    assert [row["num_speculative_tokens"] for row in found["rows"]] == [3]
    assert [(one["num_speculative_tokens"], one["reason"]) for one in found["failures"]] == [(7, str(error))]

    engines.sessions.clear()
    is_broken = lambda job: job["prompts"]["family"] == "qwen2.5-vl" and "speculative_config" not in job["llm"]  # noqa: E731
    engines.fails = lambda job: error if is_broken(job) else None
    found = bench("--family", ",".join(FAMILIES), "--prune-ratio", "0.2,0.3", status=1)
    assert found["failures"] == [{"family": "qwen2.5-vl", "reason": str(error)}]
    assert {row["family"] for row in found["rows"]} == {"llava-onevision"} and len(engines.sessions) == 1 + 3


def test_table_and_files(engines, tmp_path, monkeypatch):
    options = ("bench", "acceptance", "--prune-ratio", "0.5,0.9", "--requests", "2")
    result = invoke(*options, "--json", str(tmp_path / "rows.json"))
    assert result.exit_code == 0
    for words in ("60.0 %", "4.00", "K 5"):  # what does not vary stands in the caption
        assert words in result.stdout, words
    assert "nodes" not in result.stdout
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 2
    trees = invoke("bench", "acceptance", "--drafting", "chain,tree-adaptive", "--knob", "position_shift=true")
    for words in ("tree-adaptive", "64", "sync scheduling", "nodes", "position_shift true"):
        assert words in " ".join(trees.stdout.split()), words
    ran = len(engines.sessions)
    assert invoke(*options, "--json", str(tmp_path / "no" / "x")).exit_code == 2
    with pytest.raises(VidSpecError, match="no row has an acceptance length"):
        views.draw_acceptance([{"acceptance_length": None, "drafting": "chain"}], "f.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refuses("needs matplotlib: pip install matplotlib", "bench", "acceptance", "--plot", str(tmp_path / "f.png"))
    assert len(engines.sessions) == ran


def test_figures_per_step():
    """Of what was drafted: test_each_shape_has_its_own_number_of_tokens."""
    assert set(acceptance.shape_figures(counters() | {"drafts": 0, "draft_steps": 0}).values()) == {None}


# ---- batches of requests, for benchmarks/never_slower.py -------------------------------------------------------


def test_every_length_has_videos_of_its_own():
    """Catches: a prompt that others push out of the cache, one that is too long, a video of two lengths."""
    job = never_slower.job_of("draft", [256, 4096], 16, 64)
    assert job["prompts"]["num_videos"] == [1] * 4 + [16] * 4 and job["prompts"]["held_out"] == list(range(8))
    assert job["llm"]["max_model_len"] > 4096 + 64 and job["llm"]["max_num_seqs"] == 16
    assert job["llm"]["kv_cache_memory_bytes"] > 20 * 4096 * 4096


def test_requests_have_as_many_videos_as_asked_for(monkeypatch):
    """Catches: a video in two requests, as many videos of each request as of the first."""
    asked = []
    monkeypatch.setattr(pairs, "media_prompt", lambda *_, videos, num_frames: asked.append(videos))
    prompts = {"family": "qwen2.5-vl", "question": "?", "held_out": [0, 1]}
    for more in ({}, {"num_videos": [2, 1]}):
        BenchEngine.bundled_requests(prompts | more)
    assert [len(videos) for videos in asked] == [1, 1, 2, 1]
    assert len({frames.tobytes() for videos in asked[2:] for frames in videos}) == 3


def test_a_cell_is_of_decode_alone():
    """Catches: a first token's wait in it, the first round, another's answers, an answer of one token."""
    answers = [{"token_ids": [0] * 11, "first_s": at, "last_s": at + 1.0} for at in (0.25, 0.75)]
    assert never_slower.decode_speed(answers) == 10 and never_slower.traffic_speed(answers) == 22 / 1.75
    with pytest.raises(VidSpecError, match="there is no decode to measure"):
        never_slower.decode_speed([{"token_ids": [0], "first_s": 1.0, "last_s": 1.0}])
    slow = [one | {"last_s": one["last_s"] + 1.0} for one in answers]
    fast, late = ({"answers": those, "metrics": {"drafts": 7}} for those in (answers, slow))
    turns = [dict.fromkeys(never_slower.ROLES, fast) | {"policy": late}, dict.fromkeys(never_slower.ROLES, fast)]
    row = never_slower.row_of(turns, never_slower.decode_speed)["policy"]
    assert row == {"first": 0.5, "median": 1.0, "rounds": [1.0], "verify_steps": [7, 7], "identical_frac": 1.0}
