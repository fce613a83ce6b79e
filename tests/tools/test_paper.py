"""`vidspec bench paper` without an engine: what is run, its rows, what is published beside, and what is drawn."""

import json

import pytest

from tools.clocks import DECODED, DRAFT_S, TARGET_S, Clocks, num_layers
from tools.common import invoke, refuses
from vidspec_tools import inflation
from vidspec_tools.bench import methods, paper, parallel, published, trials
from vidspec_tools.bench.paper import AUTOREGRESSIVE, PaperBenchmark
from vllm_vidspec.config import parse_config
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.engine_session import EngineSession

CONTRACT = ("method", "family", "acceptance_length", "speedup", "identical_frac", "published_speedup")
SMALL = ("--requests", "1", "--rounds", "1")


def measured(*options):
    result = invoke("bench", "paper", *options, "--json", "-")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def specs(clocks):
    """The speculative configuration of every engine that drafts, in order."""
    return [spec for session in clocks.sessions if (spec := session.job["llm"].get("speculative_config"))]


def test_every_method_is_a_row(clocks):
    """Catches: a method that is left out, or whose knobs are not those of its paper."""
    printed = measured("--quick")
    assert [row["method"] for row in printed["rows"]] == list(paper.ALL)
    assert all(row.keys() >= set(CONTRACT) for row in printed["rows"])
    assert {(row["requests"], row["rounds"], row["max_tokens"]) for row in printed["rows"]} == {(2, 3, 64)}
    found = {row["method"]: row for row in printed["rows"]}
    knobs = ("drafting", "pruner", "num_speculative_tokens")
    assert {name: tuple(row[one] for one in knobs) for name, row in found.items()} == {
        "autoregressive": (None, None, None),
        "SD-chain": ("chain", "none", 5),
        "SD-tree": ("tree-static", "none", 25),
        "SD-Rand": ("tree-static", "random", 25),
        "SpecVLM": ("tree-static", "specvlm", 25),
        "SAGE": ("tree-adaptive", "specvlm", 64),
        "ParallelVLM": ("chain", "uv", 5),
        "LVSpec": ("chain", "specvlm", 10),
        "FLy": ("chain", "specvlm", 10),
        "OnSD": ("chain", "uniform", 5),
        "self-SD": ("tree-static", "specvlm", 25),
        "stock draft_model": ("chain", None, 5),
    }
    ratios = {name: row["prune_ratio"] for name, row in found.items() if row["pruner"] not in (None, "none")}
    assert ratios.pop("OnSD") == 1.0
    assert set(ratios.values()) == {0.9}
    given = dict(zip(methods.METHODS, specs(clocks), strict=True))
    draft = pairs.checkpoint("qwen2.5-vl", "draft")
    stock = {"method": "draft_model", "model": draft, "num_speculative_tokens": 5}
    assert given.pop("stock draft_model") == stock, "nothing of ours"
    assert {name: spec.get("scorer") for name, spec in given.items() if "scorer" in spec} == {
        "LVSpec": "loose",
        "FLy": "fly",
    }
    assert [name for name, spec in given.items() if "parallel" in spec] == ["ParallelVLM"]
    assert [name for name, spec in given.items() if spec["model"] == "self"] == ["self-SD"]


def test_vanilla_takes_turns_with_each_two(clocks, monkeypatch):
    """Catches: more engines alive than there is memory for, a speedup over what vanilla did in other turns."""
    alive, most = [], []
    enter, leave = EngineSession.__enter__, EngineSession.__exit__

    def entered(session):
        alive.append(session)
        most.append(len(alive))
        return enter(session)

    def left(session, *error):
        alive.remove(session)
        return leave(session, *error)

    monkeypatch.setattr(EngineSession, "__enter__", entered)
    monkeypatch.setattr(EngineSession, "__exit__", left)
    measured("--requests", "2", "--rounds", "1")
    assert max(most) == 3 and not alive
    modes = [clocks.mode(session.job) for session in clocks.sessions]
    assert modes[0] == "vanilla" and modes.count("vanilla") == modes.count("parallel") == modes.count("stock") == 1
    turns = [clocks.turns[i : i + 3] for i in range(0, len(clocks.turns), 3)]
    assert [[mode for mode, _ in three].count("vanilla") for three in turns[:10]] == [1] * 10
    assert [mode for mode, _ in clocks.turns[30:]] == ["vanilla", "stock", "stock", "vanilla"]


def test_speedup_is_over_vanilla_in_the_same_turns(clocks, monkeypatch):
    """Vanilla is half as fast beside the second two. Catches: the first turns' vanilla for all."""
    slow = Clocks.__call__

    def slower(session, command):
        answer = slow(clocks, session, command)
        if clocks.mode(session.job) == "vanilla" and len(session.asked) > 1:
            answer["decode_s"] *= 2
        return answer

    monkeypatch.setattr(Clocks, "__call__", lambda self, session, command: slower(session, command))
    rows = measured(*SMALL, "--methods", "SD-chain,SpecVLM,OnSD,SAGE")["rows"]
    speedup = 4 * TARGET_S / (TARGET_S + 4 * DRAFT_S)
    assert [row["speedup"] for row in rows] == pytest.approx([1, speedup, speedup, 2 * speedup, 2 * speedup])


def test_figures_of_rows(clocks):
    """Catches: forwards of all requests together, the first token's among them; vanilla without a length."""
    rows = measured("--requests", "2", "--rounds", "1", "--methods", "SD-chain")["rows"]
    vanilla, ours = rows
    assert (vanilla["method"], vanilla["acceptance_length"], vanilla["speedup"]) == (AUTOREGRESSIVE, 1.0, 1.0)
    assert (vanilla["forwards"], ours["forwards"]) == (DECODED, 12)
    assert ours["acceptance_length"] == 4.0
    assert ours["speedup"] == pytest.approx(4 * TARGET_S / (TARGET_S + 4 * DRAFT_S))
    assert (vanilla["draft"], ours["draft"]) == (None, "draft")


def test_loose_rows_say_how_much_is_vanillas(clocks):
    clocks.ids["sequential"] = [0] * (DECODED + 1)
    rows = measured(*SMALL, "--methods", "LVSpec,FLy")["rows"]
    assert [row["identical_frac"] for row in rows] == [1.0, 0.0, 0.0]


def test_quick_gives_way_to_what_is_asked_for(clocks):
    row = measured("--quick", "--requests", "1", "--methods", "OnSD")["rows"][0]
    assert (row["requests"], row["rounds"], row["max_tokens"]) == (1, 3, 64)
    row = measured("--rounds", "1", "--methods", "OnSD")["rows"][0]
    assert (row["requests"], row["rounds"], row["max_tokens"]) == (4, 1, 128)


def test_vllms_own_method_has_no_times_where_its_kernels_are_interpreted(clocks, monkeypatch):
    """Catches: a speed of an interpreter beside speeds of kernels; lengths and identity lost with the times."""
    rows = measured(*SMALL, "--methods", "stock draft_model,OnSD")["rows"]
    stock = rows[-1]
    assert (stock["method"], stock["acceptance_length"], stock["identical_frac"]) == ("stock draft_model", 4.0, 1.0)
    assert {stock[name] for name in ("speedup", "speedup_p80", "tokens_per_s", "ttft_s", "t_step_ms")} == {None}
    assert stock["stream_length"] is None and stock["prune_ratio"] is None
    assert rows[1]["speedup"] is not None
    here = parallel.provenance()
    monkeypatch.setattr(parallel, "provenance", lambda: here | {"device": "a GPU"})
    assert measured(*SMALL, "--methods", "stock draft_model")["rows"][-1]["speedup"] == pytest.approx(4 / 1.4)


@pytest.mark.parametrize(("draft", "model"), [("draft", "draft"), ("target", "self"), ("PATH", "PATH")])
def test_draft_is_a_role_or_a_path(clocks, draft, model, tmp_path):
    """Catches: a path that is taken for a role, a self-draft that is read from disk, self-SD with another draft."""
    other = pairs.checkpoint("llava-onevision", "draft")
    rows = measured(*SMALL, "--methods", "SD-chain,self-SD", "--draft", other if draft == "PATH" else draft)["rows"]
    expected = {"draft": pairs.checkpoint("qwen2.5-vl", "draft"), "self": "self", "PATH": other}[model]
    assert [spec["model"] for spec in specs(clocks)] == [expected, "self"]
    assert [row["draft"] for row in rows] == [None, other if draft == "PATH" else draft, "target"]


def test_every_role_that_is_bundled_can_draft(clocks, monkeypatch):
    """A pair may have more than two checkpoints. Catches: roles named here as well as there."""
    far = pairs.checkpoint("llava-onevision", "draft")
    known = pairs.checkpoint
    monkeypatch.setattr(pairs, "checkpoint", lambda family, role: far if role == "far" else known(family, role))
    measured(*SMALL, "--methods", "SD-chain", "--draft", "far")
    assert specs(clocks)[0]["model"] == far


def test_ratio_is_of_the_parallel_drafter_or_the_pairs_draft(clocks):
    """Catches: a ratio measured on the target's forwards as its own draft, or on none."""
    everything = PaperBenchmark()
    assert everything.reference(5.0).method == "ParallelVLM"
    assert everything.reference(5.0).spec["num_speculative_tokens"] == 10
    assert PaperBenchmark(methods=("self-SD", "SAGE")).reference(5.0).method == "SAGE"
    assert PaperBenchmark(methods=("self-SD", "stock draft_model")).reference(5.0).method == "SD"
    rows = measured(*SMALL, "--methods", "SD-chain,self-SD", "--inflate", "20")["rows"]
    assert {(row["target_layers"], row["draft_layers"]) for row in rows} == {(40, 0)}
    assert all(inflation.WORDS in row["label"] for row in rows)
    vanilla, chain, own = (session.job["llm"] for session in clocks.sessions[-3:])
    assert vanilla["model"] == chain["model"] == own["model"]
    assert num_layers(own["model"]) == 44 and own["speculative_config"]["model"] == "self"


def test_only_parallel_drafting_needs_a_second_core(clocks, monkeypatch):
    monkeypatch.setattr(trials, "cores", lambda: [0])
    refuses("the parallel drafter needs a core of its own", "bench", "paper")
    assert len(measured(*SMALL, "--methods", "SD-chain")["rows"]) == 2


def test_methods_are_one_list():
    """Catches: a baseline of `bench parallel --table` that is not what the same method is here."""
    assert all(one in methods.METHODS.values() for one in methods.BASELINES.values())
    for name, method in methods.METHODS.items():
        if method.mode == methods.STOCK:
            continue
        for family in pairs.FAMILIES:
            knobs = trials.Variant.of(name, method, 3.0).knobs(PaperBenchmark())
            parse_config(pairs.speculative_config(family, method.draft or "draft", **knobs))
    assert [methods.parallel_window(ratio) for ratio in (0, 2, 3, 9)] == [5, 5, 6, 18]
    said = " ".join(invoke("bench", "paper", "--help").stdout.split())
    assert all(name in said for name in paper.ALL)


def test_published_lengths_hold_the_targets_own_token():
    """SpecVLM, SAGE and LVSpec print tau without it, ParallelVLM M with it. Catches: one added twice, or nowhere."""
    assert published.figure("qwen2.5-vl", "SpecVLM") == {
        "published_acceptance_length": 4.23,
        "published_speedup": 2.05,
        "published_tau": 3.23,
        "published_source": "SpecVLM, Qwen2.5-VL 7B & 32B",
    }
    lengths = {
        family: {name: one.acceptance_length for name, one in found.items()}
        for family, found in published.FIGURES.items()
    }
    assert lengths["llava-onevision"] == {
        "SD-chain": 4.14,
        "SD-tree": 4.68,
        "SD-Rand": 4.19,
        "SpecVLM": 4.48,
        "SAGE": 6.74,
        "ParallelVLM": 6.82,
        "LVSpec": 8.34,
        "FLy": 5.12,
        "OnSD": 3.67,
        "self-SD": 4.98,
    }
    assert lengths["qwen3-vl"] == {"SD-tree": 4.58, "SpecVLM": 4.24, "SAGE": 5.39}
    assert set(published.figure("qwen3-vl", "OnSD").values()) == {None}
    assert set(published.figure("qwen2.5-vl", "autoregressive").values()) == {None}
    for family, found in published.FIGURES.items():
        assert family in pairs.FAMILIES and set(found) <= set(methods.METHODS)


def test_published_stands_beside(clocks):
    rows = measured(*SMALL, "--family", "llava-onevision", "--methods", "SAGE,OnSD")["rows"]
    shown = [(row["published_acceptance_length"], row["published_speedup"], row["published_tau"]) for row in rows]
    assert shown == [(None, None, None), (6.74, 3.36, 5.74), (3.67, 2.14, 3.67)]
