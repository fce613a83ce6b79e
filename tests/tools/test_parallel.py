"""`vidspec bench parallel` and `vidspec bench timeline` without an engine: what is run, its rows, and what is drawn."""

import itertools
import json

import pytest

from tools.clocks import DECODED, DRAFT_S, TARGET_S, event, num_layers
from tools.common import invoke
from vidspec_tools import inflation
from vidspec_tools.bench import methods, parallel, ratios, timeline
from vidspec_tools.bench.parallel import Benchmark, Trial, Variant, Workload
from vidspec_tools.bench.published import PUBLISHED, published
from vidspec_tools.views import timeline as timeline_view
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs

needs_parallel = pytest.mark.skipif("parallel" not in VidSpecConfig.model_fields, reason="no parallel drafting here")
SEQUENTIAL = ("--modes", "sequential")


def measured(*options):
    result = invoke("bench", "parallel", *options, "--json", "-")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_turns_are_interleaved_on_one_core(clocks):
    """Catches: one engine after another, the same order each time, videos that an engine has seen, another core."""
    printed = measured(*SEQUENTIAL, "--requests", "2", "--rounds", "3")
    assert [row["mode"] for row in printed["rows"]] == ["vanilla", "sequential"]
    assert len(clocks.sessions) == 2
    pairs_of_turns = [clocks.turns[i : i + 2] for i in range(0, len(clocks.turns), 2)]
    assert [{mode for mode, _ in two} for two in pairs_of_turns] == [{"vanilla", "sequential"}] * 6
    assert [two[0][0] for two in pairs_of_turns] == ["vanilla", "sequential"] * 3, "who comes first changes"
    videos = [video for (_, video), _ in pairs_of_turns]
    assert [video for _, (_, video) in pairs_of_turns] == videos and len(set(videos)) == 6
    for session in clocks.sessions:
        assert session.job["cpus"] == [0]
        assert session.job["prompts"]["warm_up"] not in videos
        assert {(one["sampling"]["temperature"], one["seed"]) for one in session.asked} == {(0.0, i) for i in range(6)}


def test_rows_say_what_was_measured(clocks):
    clocks.ids["sequential"] = [0] * (DECODED + 1)
    vanilla, ours = measured(*SEQUENTIAL, "--requests", "1", "--rounds", "2")["rows"]
    assert (vanilla["speedup"], vanilla["identical_frac"], vanilla["acceptance_length"]) == (1.0, 1.0, None)
    assert vanilla["tokens_per_s"] == pytest.approx(1 / TARGET_S)
    step_s = TARGET_S + 4 * DRAFT_S
    assert ours["speedup"] == pytest.approx(4 * TARGET_S / step_s)
    assert ours["speedup_p20"] == ours["speedup_p80"] == ours["speedup"]
    assert (ours["identical_frac"], ours["acceptance_length"], ours["ttft_s"]) == (0.0, 4.0, 0.2)
    assert (ours["t_target_ms"], ours["t_draft_ms"], ours["ratio"]) == pytest.approx((40, 4, 10))
    assert ours["t_step_ms"] == pytest.approx(1e3 * step_s)
    assert ours["stream_length"] == pytest.approx(DECODED / 13), "twelve rejections, and the rest"
    assert (ours["late_frac"], ours["num_speculative_tokens"]) == (None, 5)


@needs_parallel
def test_parallel_drafter_has_a_core_of_its_own(clocks):
    printed = measured("--requests", "1", "--rounds", "1", "--knob", "parallel_max_ahead=7", "--knob", "prune_seed=3")
    assert [row["method"] for row in printed["rows"]] == ["vanilla", "sequential", "ParallelVLM"]
    vanilla, sequential, ours = (session.job["llm"] for session in clocks.sessions)
    assert "speculative_config" not in vanilla
    assert "parallel" not in sequential["speculative_config"]
    assert ours["speculative_config"]["parallel"] == {"device": "cpu", "cpu_cores": "1", "max_ahead": 7}
    assert sequential["speculative_config"]["prune_seed"] == ours["speculative_config"]["prune_seed"] == 3
    row = printed["rows"][-1]
    assert (row["late_frac"], row["late_drafts"], row["stale_streams"]) == (3 / 12, 3, 3)
    assert row["speedup"] == pytest.approx(4.0)
    assert printed["provenance"]["cores"] == [0, 1]


@pytest.mark.parametrize(
    ("verified", "num_streams"),
    [
        ([], 1),
        ([[4, 4, 0]] * 3, 1),
        ([[4, 3, 0], [4, 4, 0]], 2),
        ([[4, 3, 0], [0, 0, 1], [0, 0, 1], [4, 4, 0]], 2),  # found stale twice: one rejection
        ([[4, 4, 0], [0, 0, 1], [0, 0, 1], [4, 4, 0]], 2),  # the target's own token behind a whole window
        ([[0, 0, 0], [0, 0, 0], [4, 0, 0], [0, 0, 0], [4, 1, 0]], 3),
    ],
)
def test_streams_end_where_something_is_rejected(verified, num_streams):
    assert Trial([1, 2], 0.0, 0.0, 1.0, [1.0], verified, None).num_streams == num_streams


def test_ratio_is_reached_by_appended_layers(clocks):
    """Above the pair's own ratio of 10 the target gets layers, below it the draft. Catches: slopes or ends mixed up."""
    for ratio, layers in ((20, (40, 0)), (10, (0, 0)), (5, (0, 8)), (2, (0, 32))):
        clocks.sessions.clear()
        rows = measured(*SEQUENTIAL, "--inflate", str(ratio), "--requests", "1", "--rounds", "1")["rows"]
        assert rows[1]["ratio"] == pytest.approx(ratio)
        assert (rows[1]["target_layers"], rows[1]["draft_layers"]) == layers
        vanilla, ours = (session.job["llm"] for session in clocks.sessions[-2:])
        assert vanilla["model"] == ours["model"]
        spec = ours["speculative_config"]
        assert (num_layers(ours["model"]) - 4, num_layers(spec["model"]) - 3) == layers
        assert (spec["guidance_layers"], spec["uv_layer"]) == ([0, 1, 2, 3], 3), "the original's"
        assert len(clocks.sessions) == (2 if ratio != 20 else 6), "what a step takes is measured once"
        words = [words for words, number in zip(("target", "draft"), layers, strict=True) if number]
        expected = f"{words[0]} inflated: {max(layers)} {inflation.WORDS}" if words else ""
        assert {row["label"] for row in rows} == {expected}


def test_step_times_on_a_line():
    times = ratios.StepTimes((40.0, 56.0), (4.0, 8.0))
    assert times.layers_for(20) == (40, 0)
    assert times.layers_for(5) == (0, 8)
    with pytest.raises(VidSpecError, match="that takes 3960 layers"):
        times.layers_for(1000)
    with pytest.raises(VidSpecError, match="took no longer"):
        ratios.StepTimes((40.0, 39.0), (4.0, 8.0)).layers_for(20)
    assert ratios.low([5.0]) == 5.0 and ratios.low([float(i) for i in range(101)]) == 20.0
    with pytest.raises(VidSpecError, match="nothing was drafted"):
        ratios.low([])


def test_measured_times_are_kept_by_machine_and_checkpoint(monkeypatch):
    target, draft = (pairs.checkpoint("llava-onevision", role) for role in ("target", "draft"))
    here = dict.fromkeys(("versions", "device", "cpu", "num_cpus", "omp_threads"), "x")
    keys = set()
    for checkpoints, what, machine in (
        ([target, draft], ["a"], here),
        ([draft, draft], ["a"], here),
        ([target, draft], ["b"], here),
        ([target, draft], ["a"], here | {"cpu": "y"}),
    ):
        monkeypatch.setattr(ratios, "provenance", lambda machine=machine: machine)
        keys.add(ratios.key_of(checkpoints, what))
    assert len(keys) == 4


def test_table_has_the_papers_rows_beside_ours(clocks):
    printed = measured(*SEQUENTIAL, "--table", "--requests", "1", "--rounds", "1", "--family", "llava-onevision")
    found = {row["method"]: row for row in printed["rows"]}
    assert list(found) == ["vanilla", "sequential", "SD", "SD-Tree", "SpecVLM", "OnSD"]
    seen = {name: (row["drafting"], row["pruner"], row["num_speculative_tokens"]) for name, row in found.items()}
    assert seen["SD"] == ("chain", "none", 5)
    assert seen["SD-Tree"] == ("tree-static", "none", 25)
    assert seen["SpecVLM"] == ("tree-static", "specvlm", 25)
    assert (*seen["OnSD"], found["OnSD"]["prune_ratio"]) == ("chain", "uniform", 5, 1.0)
    assert found["SD-Tree"]["stream_length"] is None
    assert (found["SD"]["published_m"], found["SD"]["published_speedup"]) == (4.26, 1.08)
    assert found["vanilla"]["published_speedup"] is None
    modes = [clocks.mode(session.job) for session in clocks.sessions]
    assert modes == ["vanilla", *["sequential"] * 5]
    assert len(clocks.sessions[0].asked) == 3, "again beside every two others"


def test_published_figures_are_of_the_nearest_pair():
    assert published("llava-onevision", 5, "ParallelVLM") == {
        "published_pair": "LLaVA-OV 7B & 72B",
        "published_m": 6.82,
        "published_speedup": 3.43,
    }
    assert published("llava-onevision", 2.4, "SpecVLM")["published_speedup"] == 1.83
    assert published("qwen2.5-vl", 9, "OnSD")["published_m"] == 2.76
    assert published("qwen2.5-vl", 9, "vanilla")["published_m"] is None
    for pair in PUBLISHED:
        assert set(pair.figures) == {*methods.BASELINES, methods.OURS}
        assert pair.family in pairs.FAMILIES


def test_a_mode_that_fails_is_named_and_the_others_go_on(clocks):
    def fails(job, command):
        spec = job["llm"].get("speculative_config", {})
        is_late = command["command"] == "clock" and command["index"] == 1
        return VidSpecError("it stopped") if is_late and spec.get("pruner") == "none" and "tree" in str(spec) else None

    clocks.fails = fails
    result = invoke("bench", "parallel", *SEQUENTIAL, "--table", "--requests", "2", "--rounds", "1", "--json", "-")
    assert result.exit_code == 1
    printed = json.loads(result.stdout)
    named = {"family": "qwen2.5-vl", "inflate": 0.0, "method": "SD-Tree", "reason": "it stopped"}
    assert printed["failures"] == [named]
    assert [row["method"] for row in printed["rows"]] == ["vanilla", "sequential", "SD", "SpecVLM", "OnSD"]
    clocks.fails = lambda job, command: VidSpecError("no") if clocks.mode(job) == "vanilla" else None
    with pytest.raises(VidSpecError, match=r"^no$"):  # nothing to compare with
        parallel.run(Benchmark(modes=("sequential",)))


# ---- timeline ------------------------------------------------------------------------------------------------------


def overlapping():
    """A request of two lanes: a prefill, then four target steps while the drafter draws, waits and draws."""
    target = [event("target", "prefill", -0.2, 0.0), *(event("target", "decode", i, i + 0.9) for i in range(4))]
    drafter = [event("drafter", "draft", 0.0, 1.0), event("drafter", "wait", 1.0, 3.0)]
    return [*target, *drafter, event("drafter", "draft", 3.0, 5.0)]


def test_shares_of_a_lane():
    """Catches: time counted twice, waiting as work, what is before the first step or after the last."""
    found = timeline.shares(overlapping())
    assert found["decode_s"] == pytest.approx(3.9)
    assert found["target"] == pytest.approx(3.6 / 3.9)
    assert found["drafter"] == pytest.approx((1.0 + 0.9) / 3.9)
    twice = [event("drafter", "draft", 0.0, 1.0), event("drafter", "draft", 0.5, 2.0)]
    assert timeline.busy_s(twice, "drafter") == pytest.approx(2.0)
    assert timeline.shares([])["decode_s"] == 0.0


def test_events_begin_with_their_request():
    events = [event("target", "decode", 12.0, 13.0), event("target", "decode", 9.0, 9.5)]
    assert timeline.from_start(events, 10.0) == [event("target", "decode", 2.0, 3.0)], "the other is an earlier one's"


def test_timeline_watches_each_turn(clocks, tmp_path):
    pytest.importorskip("matplotlib")
    out, trace = tmp_path / "t.png", tmp_path / "t.json"
    args = (*SEQUENTIAL, "--requests", "2", "--out", str(out), "--trace", str(trace), "--json", "-")
    result = invoke("bench", "timeline", *args)
    assert result.exit_code == 0, result.stderr
    (session,) = clocks.sessions
    asked = [(one["command"], one.get("on")) for one in session.asked]
    assert asked == [("timeline", True), ("clock", None), ("timeline", False)] * 2
    printed = json.loads(result.stdout)
    (events, _) = printed["modes"]["sequential"]["events"]
    assert (events[0]["start_s"], events[0]["end_s"]) == pytest.approx((0.1, 0.2))
    assert out.stat().st_size > 5_000
    assert len(json.loads(trace.read_text())["traceEvents"]) == 1 + 2 + 2


def drawn(requests):
    modes = {mode: {"events": requests, "token_ids": [[1, 2]], "num_speculative_tokens": 5} for mode in ("a", "b")}
    about = {"family": "qwen2.5-vl", "inflate": 5.0, "label": "target " + inflation.label(3), "provenance": {}}
    return about | {"modes": modes}


def test_trace_is_what_chrome_reads():
    """Catches: seconds for microseconds, lanes or modes in one row, requests on top of each other."""
    found = timeline_view.trace(drawn([overlapping(), overlapping()]))
    spans = [one for one in found["traceEvents"] if one["ph"] == "X"]
    assert {(one["pid"], one["tid"]) for one in spans} == set(itertools.product((1, 2), (1, 2)))
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in found["traceEvents"] if one["ph"] == "M"}
    assert names[(1, 0)] == "a" and names[(2, 2)] == "drafter"
    steps = [one for one in spans if one["pid"] == 1 and one["name"] == "decode"]
    assert [one["dur"] for one in steps] == pytest.approx([9e5] * 8)
    assert all(b["ts"] >= a["ts"] + a["dur"] for a, b in itertools.pairwise(steps))
    assert found["otherData"]["label"] == f"target inflated: 3 {inflation.WORDS}"
    json.dumps(found)


def test_lanes_are_drawn_one_above_the_other(tmp_path):
    matplotlib_figure = pytest.importorskip("matplotlib.figure")
    panel = matplotlib_figure.Figure().subplots()
    found = timeline_view._draw_lanes(panel, overlapping())
    assert set(found) == {"target prefill", "target step", "draft forward", "drafter waits"}
    boxes = {words: shown.get_paths()[0].get_extents() for words, shown in found.items()}
    assert boxes["target step"].ymin >= 1 > boxes["draft forward"].ymax
    assert boxes["target step"].xmax == pytest.approx(900)
    timeline_view.draw(drawn([overlapping()]), str(tmp_path / "t.svg"))
    assert (tmp_path / "t.svg").stat().st_size > 5_000
    with pytest.raises(VidSpecError, match="there is no event"):
        timeline_view.draw(drawn([]), str(tmp_path / "t.svg"))
    assert timeline_view.table(drawn([overlapping()])).row_count == 2


def test_course_without_ratio_is_the_pair_itself(clocks):
    job = Workload("llava-onevision").job(Benchmark(), Variant("vanilla", "vanilla"), [7, 0, 1])
    assert job["llm"]["model"] == pairs.checkpoint("llava-onevision", "target")
    assert (job["prompts"]["held_out"], job["prompts"]["warm_up"]) == ([0, 1], 7)
