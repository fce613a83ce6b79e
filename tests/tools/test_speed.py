"""`vidspec bench speed` without an engine: what is run, what a request's time is made of, and what is drawn."""

import json

import pytest

from tools.clocks import DRAFT_S, TARGET_S, event
from tools.common import counters, invoke
from vidspec_tools import inflation
from vidspec_tools.bench import speed
from vidspec_tools.bench.trials import Trial, Variant

SMALL = ("--requests", "1", "--rounds", "1")


def measured(*options):
    result = invoke("bench", "speed", *options, "--json", "-")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_vanilla_and_one_setting_are_rows(clocks):
    """Catches: knobs that do not reach the engine, a vanilla asked what it noted, turns that are not watched."""
    given = ("--drafting", "tree-static", "--pruner", "uv", "--scorer", "fly", "--prune-ratio", "0.5")
    vanilla, ours = measured(*SMALL, *given)["rows"]
    assert (vanilla["method"], ours["method"]) == ("vanilla", "vidspec")
    knobs = ("drafting", "pruner", "prune_ratio", "scorer", "num_speculative_tokens")
    assert [ours[name] for name in knobs] == ["tree-static", "uv", 0.5, "fly", 25]
    theirs, mine = clocks.sessions
    assert [one["command"] for one in theirs.asked] == ["clock"]
    assert [(one["command"], one.get("on")) for one in mine.asked] == [
        ("timeline", True),
        ("clock", None),
        ("timeline", False),
    ]
    spec = mine.job["llm"]["speculative_config"]
    assert (spec["draft"], spec["pruner"], spec["scorer"]) == ("tree-static", "uv", "fly")


def test_times_of_rows(clocks):
    vanilla, ours = measured(*SMALL)["rows"]
    assert vanilla["inter_token_ms"] == pytest.approx(1e3 * TARGET_S)
    step_s = TARGET_S + 4 * DRAFT_S
    assert ours["inter_token_ms"] == ours["inter_token_ms_p80"] == pytest.approx(1e3 * step_s / 4)
    assert ours["t_step_ms"] == ours["t_step_ms_p99"] == pytest.approx(1e3 * step_s)
    assert ours["tokens_per_s"] * ours["inter_token_ms"] == pytest.approx(1e3)
    assert vanilla["request_ms"] == pytest.approx(200 + 48 * 40)
    assert vanilla["verify_ms"] is None and vanilla["rest_ms"] is None
    assert ours["draft_decode_ms"] == pytest.approx(48 * 4)
    assert ours["verify_ms"] == pytest.approx(100), "the one step that the fake engine notes"
    assert ours["rest_ms"] == pytest.approx(ours["request_ms"] - 48 * 4 - 100)


def watched():
    """A request of two steps that began at 10: an earlier one's step, a prefill, and what counters say of it."""
    events = [event("target", "prefill", 9.0, 9.5), event("target", "prefill", 10.05, 10.25)]
    events += [event("target", "decode", 10.4, 10.5), event("target", "decode", 10.6, 10.7)]
    events += [event("drafter", "draft", 10.5, 10.6), event("drafter", "prefill", 10.25, 10.3)]
    spent = {"guidance_us": 20_000, "draft_prefill_us": 50_000, "draft_decode_us": 90_000, "relevance_us": 10_000}
    return Trial([1, 2, 3], 10.0, 0.3, 0.5, [0.2, 0.2], [], counters(**spent), events)


def test_phases_add_up():
    """Catches: guidance counted inside the prefill as well, another request's steps, a drafter's events beside
    counters of the same, means of rounds for means of requests.
    """
    found = speed.phases([[watched()], [watched(), watched()]], Variant("vidspec", "sequential", {}))
    assert found == pytest.approx(
        {
            "request_ms": 800,
            "target_prefill_ms": 180,
            "guidance_ms": 20,
            "draft_prefill_ms": 50,
            "draft_decode_ms": 90,
            "verify_ms": 190,
            "relevance_ms": 10,
            "rest_ms": 260,
        }
    )
    assert sum(found[f"{name}_ms"] for name in speed.PHASES) == pytest.approx(found["request_ms"])


def test_a_drafter_beside_the_target_takes_none_of_its_time():
    found = speed.phases([[watched()]], Variant("vidspec", "parallel", {}))
    assert (found["draft_decode_ms"], found["rest_ms"]) == pytest.approx((90, 400))


def test_parallel_setting(clocks):
    rows = measured(*SMALL, "--parallel", "--inflate", "5")["rows"]
    assert rows[-1]["mode"] == "parallel" and rows[-1]["num_speculative_tokens"] == 10
    assert "parallel" in clocks.sessions[-1].job["llm"]["speculative_config"]
    assert inflation.WORDS in rows[-1]["label"]
