"""Benchmarks interleaved with vanilla, without an engine: turns, ratios, rows, and what `vidspec bench paper` runs."""

import json

import pytest

from benchmarks import inflated, inflation, methods, paper
from benchmarks.paper import PaperBenchmark
from tools.common import DECODED, DRAFT_S, TARGET_S, Clocks, invoke, num_layers, printed, refuses
from vllm_vidspec.config import parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.bench import speed
from vllm_vidspec.tools.bench.speed import Benchmark, Trial

SMALL = ("--requests", "1", "--rounds", "1")
CHAIN = ("--methods", "SD-chain")


def measured(*options):
    return printed("-m", "benchmarks.paper", *options)


def specs(clocks):
    return [spec for session in clocks.sessions if (spec := session.job["llm"].get("speculative_config"))]


# ---- turns -----------------------------------------------------------------------------------------------------------


def test_turns_are_interleaved_on_one_core(clocks):
    """Catches: one engine after another, the same order each time, videos that an engine has seen, another core."""
    rows = measured(*CHAIN, "--requests", "2", "--rounds", "3")["rows"]
    assert [row["mode"] for row in rows] == ["vanilla", "sequential"]
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


def test_vanilla_takes_turns_with_each_two(clocks):
    """Catches: more engines alive than there is memory for, a vanilla that is loaded anew."""
    measured("--requests", "2", "--rounds", "1")
    assert max(session.num_open for session in clocks.sessions) == 3
    assert not any(session.is_open for session in clocks.sessions)
    modes = [clocks.mode(session.job) for session in clocks.sessions]
    assert modes[0] == "vanilla" and modes.count("vanilla") == modes.count("parallel") == modes.count("stock") == 1
    turns = [clocks.turns[i : i + 3] for i in range(0, len(clocks.turns), 3)]
    assert [[mode for mode, _ in three].count("vanilla") for three in turns[:10]] == [1] * 10
    assert [mode for mode, _ in clocks.turns[30:]] == ["vanilla", "stock", "stock", "vanilla"]


def test_speedup_is_over_vanilla_in_the_same_turns(clocks, monkeypatch):
    """Vanilla is half as fast beside the second two. Catches: the first turns' vanilla for all."""
    answer_of = Clocks.__call__

    def slower(self, session, command):
        answer = answer_of(clocks, session, command)
        if clocks.mode(session.job) == "vanilla" and len(session.asked) > 1:
            answer["decode_s"] *= 2
        return answer

    monkeypatch.setattr(Clocks, "__call__", slower)
    rows = measured(*SMALL, "--methods", "SD-chain,SpecVLM,OnSD,SAGE")["rows"]
    speedup = 4 * TARGET_S / (TARGET_S + 4 * DRAFT_S)
    assert [row["speedup"] for row in rows] == pytest.approx([1, speedup, speedup, 2 * speedup, 2 * speedup])


def test_a_method_that_fails_is_named_and_the_others_go_on(clocks):
    def fails(job, command):
        spec = job["llm"].get("speculative_config", {})
        is_late = command["command"] == "clock" and command["index"] == 1
        return VidSpecError("it stopped") if is_late and spec.get("pruner") == "none" and "tree" in str(spec) else None

    clocks.fails = fails
    chosen = ("--methods", "SD-chain,SD-tree,SpecVLM")
    result = invoke("-m", "benchmarks.paper", *chosen, "--requests", "2", "--rounds", "1", "--json", "-")
    assert result.exit_code == 1 and "vidspec: qwen2.5-vl 0.0 SD-tree: it stopped" in result.stderr
    found = json.loads(result.stdout)
    named = {"family": "qwen2.5-vl", "inflate": 0.0, "method": "SD-tree", "reason": "it stopped"}
    assert found["failures"] == [named]
    assert [row["method"] for row in found["rows"]] == ["autoregressive", "SD-chain", "SpecVLM"]
    clocks.fails = lambda job, command: VidSpecError("no") if clocks.mode(job) == "vanilla" else None
    with pytest.raises(VidSpecError, match=r"^no$"):  # nothing to compare with
        speed.run(Benchmark())


def test_only_parallel_drafting_needs_a_second_core(clocks, monkeypatch):
    monkeypatch.setattr(speed, "cores", lambda: [0])
    refuses("the parallel drafter needs a core of its own", "-m", "benchmarks.paper")
    assert len(measured(*SMALL, *CHAIN)["rows"]) == 2


# ---- ratios ----------------------------------------------------------------------------------------------------------


def test_ratio_is_reached_by_appended_layers(clocks):
    """Above the pair's own ratio of 10 the target gets layers, below it the draft. Catches: slopes or ends mixed up."""
    for ratio, layers in ((20, (40, 0)), (10, (0, 0)), (5, (0, 8)), (2, (0, 32))):
        clocks.sessions.clear()
        rows = measured(*SMALL, *CHAIN, "--inflate", str(ratio))["rows"]
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
    with pytest.raises(VidSpecError, match="that takes 3960 layers"):
        inflated.StepTimes((40.0, 56.0), (4.0, 8.0)).layers_for(1000)
    with pytest.raises(VidSpecError, match="took no longer"):
        inflated.StepTimes((40.0, 39.0), (4.0, 8.0)).layers_for(20)
    assert inflated.low([5.0]) == 5.0 and inflated.low([float(i) for i in range(101)]) == 20.0
    with pytest.raises(VidSpecError, match="nothing was drafted"):
        inflated.low([])


def test_ratio_is_of_the_parallel_drafter_or_the_pairs_draft(clocks):
    """Catches: a ratio measured on the target's forwards as its own draft, or on none."""
    at_5 = speed.Workload("qwen2.5-vl", 5.0)
    reference = PaperBenchmark().reference(at_5)
    assert (reference.method, reference.spec["num_speculative_tokens"]) == ("ParallelVLM", 10)
    assert PaperBenchmark(methods=("self-SD", "SAGE")).reference(at_5).method == "SAGE"
    assert PaperBenchmark(methods=("self-SD", "stock draft_model")).reference(at_5).method == "SD-chain"
    measured(*SMALL, "--methods", "SD-chain,self-SD", "--inflate", "20")
    vanilla, chain, own = (session.job["llm"] for session in clocks.sessions[-3:])
    assert vanilla["model"] == chain["model"] == own["model"]
    assert num_layers(own["model"]) == 44 and own["speculative_config"]["model"] == "self"


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_rows_say_what_was_measured(clocks):
    """Catches: forwards of all requests together, the first token's among them; vanilla without a length."""
    clocks.ids["sequential"] = [0] * (DECODED + 1)
    vanilla, ours = measured(*CHAIN, "--requests", "1", "--rounds", "2")["rows"]
    assert (vanilla["method"], vanilla["speedup"], vanilla["identical_frac"]) == ("autoregressive", 1.0, 1.0)
    assert (vanilla["acceptance_length"], vanilla["draft"], ours["draft"]) == (1.0, None, "draft")
    assert (vanilla["forwards"], ours["forwards"]) == (DECODED, 12)
    assert vanilla["tokens_per_s"] == pytest.approx(1 / TARGET_S)
    step_s = TARGET_S + 4 * DRAFT_S
    assert ours["speedup"] == pytest.approx(4 * TARGET_S / step_s)
    assert ours["speedup_p20"] == ours["speedup_p80"] == ours["speedup"]
    assert (ours["identical_frac"], ours["acceptance_length"], ours["ttft_s"]) == (0.0, 4.0, 0.2)
    assert (ours["t_target_ms"], ours["t_draft_ms"], ours["ratio"]) == pytest.approx((40, 4, 10))
    assert ours["t_step_ms"] == pytest.approx(1e3 * step_s)
    assert ours["stream_length"] == pytest.approx(DECODED / 13), "twelve rejections, and the rest"
    assert (ours["late_frac"], ours["num_speculative_tokens"]) == (None, 5)


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
    assert Trial([1, 2], 0.0, 1.0, [1.0], verified, None).num_streams == num_streams


def test_parallel_drafter_has_a_core_of_its_own(clocks):
    knobs = ("--knob", "max_draft_failures=3")
    found = measured(*SMALL, "--methods", "SD-chain,ParallelVLM", *knobs)
    sequential, ours = specs(clocks)
    assert "parallel" not in sequential
    assert ours["parallel"] == {"device": "cpu", "cpu_cores": "1"}
    assert sequential["max_draft_failures"] == ours["max_draft_failures"] == 3
    row = found["rows"][-1]
    assert (row["late_frac"], row["late_drafts"], row["stale_streams"]) == (3 / 12, 3, 3)
    assert row["speedup"] == pytest.approx(4.0)
    assert found["provenance"]["cores"] == [0, 1]


def test_vllms_own_method_has_no_times_where_its_kernels_are_interpreted(clocks, monkeypatch):
    """Catches: a speed of an interpreter beside speeds of kernels; lengths and identity lost with the times."""
    rows = measured(*SMALL, "--methods", "stock draft_model,OnSD")["rows"]
    stock = rows[-1]
    assert (stock["method"], stock["acceptance_length"], stock["identical_frac"]) == ("stock draft_model", 4.0, 1.0)
    assert {stock[name] for name in ("speedup", "speedup_p80", "tokens_per_s", "ttft_s", "t_step_ms")} == {None}
    assert stock["stream_length"] is None and stock["prune_ratio"] is None
    assert rows[1]["speedup"] is not None
    here = speed.provenance()
    monkeypatch.setattr(speed, "provenance", lambda: here | {"device": "a GPU"})
    assert measured(*SMALL, "--methods", "stock draft_model")["rows"][-1]["speedup"] == pytest.approx(4 / 1.4)


# ---- methods ---------------------------------------------------------------------------------------------------------


def test_every_method_is_a_row(clocks):
    """Catches: a method that is left out, or whose knobs do not reach its engine; --quick over what is asked for."""
    rows = measured("--quick", "--requests", "1")["rows"]
    assert [row["method"] for row in rows] == list(paper.ALL)
    assert {(row["requests"], row["rounds"], row["max_tokens"]) for row in rows} == {(1, 3, 64)}
    given = dict(zip(methods.METHODS, specs(clocks), strict=True))
    draft = pairs.checkpoint("qwen2.5-vl", "draft")
    stock = {"method": "draft_model", "model": draft, "num_speculative_tokens": 5}
    assert given.pop("stock draft_model") == stock, "nothing of ours"
    for name, spec in given.items():
        method = methods.METHODS[name]
        shape = method.spec.get("drafting", "chain")
        assert spec["draft_shape"] == shape and spec["pruner"] == method.spec["pruner"], name
        assert spec.get("scorer", "strict") == method.spec.get("scorer", "strict"), name
        assert ("parallel" in spec) == (name == "ParallelVLM") and (spec["model"] == "self") == (name == "self-SD"), (
            name
        )
        if shape == "chain":
            assert spec["num_speculative_tokens"] == (10 if name in ("LVSpec", "FLy") else 5), name
    said = " ".join(invoke("-m", "benchmarks.paper", "--help").stdout.split())
    assert all(name in said for name in paper.ALL)
    table = invoke("-m", "benchmarks.paper", *SMALL).stdout
    assert all(words in table for words in ("the pair as it is", "own token", *paper.ALL[:-1]))


@pytest.mark.parametrize(("draft", "model"), [("draft", "draft"), ("target", "self"), ("PATH", "PATH")])
def test_draft_is_a_role_or_a_path(clocks, draft, model):
    """Catches: a path that is taken for a role, a self-draft that is read from disk, self-SD with another draft."""
    other = pairs.checkpoint("llava-onevision", "draft")
    rows = measured(*SMALL, "--methods", "SD-chain,self-SD", "--draft", other if draft == "PATH" else draft)["rows"]
    expected = {"draft": pairs.checkpoint("qwen2.5-vl", "draft"), "self": "self", "PATH": other}[model]
    assert [spec["model"] for spec in specs(clocks)] == [expected, "self"]
    assert [row["draft"] for row in rows] == [None, other if draft == "PATH" else draft, "target"]


def test_methods_fit_every_family(clocks):
    for name, method in methods.METHODS.items():
        if method.mode != methods.STOCK:
            knobs = method.variant(name, 3.0).knobs(PaperBenchmark())
            for family in pairs.FAMILIES:
                parse_config(pairs.speculative_config(family, method.draft or "draft", **knobs))
    assert [methods.parallel_window(ratio) for ratio in (0, 2, 3, 9)] == [5, 5, 6, 18]


def test_published_lengths_hold_the_targets_own_token(clocks):
    """SpecVLM, SAGE and LVSpec print tau without it, ParallelVLM its M of others' rows with it. Catches: one added
    twice, or nowhere; its own M, which is of several steps, as a length of one.
    """
    assert methods.figure("qwen2.5-vl", "SpecVLM") == {
        "published_acceptance_length": 4.23,
        "published_speedup": 2.05,
        "published_tau": 3.23,
        "published_source": "SpecVLM, Qwen2.5-VL 7B & 32B",
    }
    assert methods.FIGURES["llava-onevision"]["ParallelVLM"].acceptance_length is None
    assert set(methods.figure("qwen3-vl", "OnSD").values()) == {None}
    for family, found in methods.FIGURES.items():
        assert family in pairs.FAMILIES and set(found) <= set(methods.METHODS)
    rows = measured(*SMALL, "--family", "llava-onevision", "--methods", "SAGE,OnSD")["rows"]
    shown = [(row["published_acceptance_length"], row["published_speedup"], row["published_tau"]) for row in rows]
    assert shown == [(None, None, None), (6.74, 3.36, 5.74), (3.67, 2.14, 3.67)]


# ---- bench speed -----------------------------------------------------------------------------------------------------


def test_one_setting_beside_vanilla(clocks):
    """Catches: knobs that do not reach the engine; means of rounds for those of requests; a burst for a token."""
    given = ("--drafting", "tree-static", "--pruner", "uv", "--scorer", "fly", "--prune-ratio", "0.5")
    vanilla, ours = printed("bench", "speed", "--requests", "2", "--rounds", "1", *given)["rows"]
    assert (vanilla["method"], ours["method"]) == ("vanilla", "vidspec")
    knobs = ("drafting", "pruner", "prune_ratio", "scorer", "num_speculative_tokens")
    assert [ours[name] for name in knobs] == ["tree-static", "uv", 0.5, "fly", 25]
    (spec,) = specs(clocks)
    assert (spec["draft_shape"], spec["pruner"], spec["scorer"]) == ("tree-static", "uv", "fly")
    step_s = TARGET_S + 4 * DRAFT_S
    assert vanilla["inter_token_ms"] == pytest.approx(1e3 * TARGET_S)
    assert ours["inter_token_ms"] == ours["inter_token_ms_p80"] == pytest.approx(1e3 * step_s / 4)
    assert ours["t_step_ms"] == ours["t_step_ms_p99"] == pytest.approx(1e3 * step_s)
    assert (vanilla["request_ms"], ours["request_ms"]) == pytest.approx((200 + 48 * 40, 200 + 12e3 * step_s))
    assert vanilla["draft_decode_ms"] is None and ours["draft_decode_ms"] == pytest.approx(48 * 4)
    own = [pairs.checkpoint("llava-onevision", role) for role in ("target", "draft")]
    printed("bench", "speed", *SMALL, "--target", own[0], "--draft", own[1])
    plain, ours = (session.job["llm"] for session in clocks.sessions[-2:])
    assert plain["model"] == ours["model"] == own[0] and ours["speculative_config"]["model"] == own[1]
    assert "lambda_r" not in ours["speculative_config"], "what the bundled pair is calibrated to"
    beside = ("bench", "speed", *SMALL, "--parallel")
    ours = printed(*beside)["rows"][-1]
    assert (ours["mode"], ours["num_speculative_tokens"]) == ("parallel", 5)
    tables = invoke(*beside).stdout
    assert all(words in tables for words in ("chain of 5", "late", "what drafting takes of a request", "relevance"))
