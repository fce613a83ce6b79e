"""`make bench-gpu` without a GPU: its plan, its time, forced acceptance, refusals, and a page that is its data."""

import argparse
import dataclasses
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tools.common import ROOT, cut_off, load
from vidspec_kernels import TreeShapes, accept

load("scripts/made_up.py"), load("scripts/gpu_smoke.py"), load("scripts/gpu_smoke_steps.py")
rows = load("scripts/gpu_suite_rows.py")
suite = load("scripts/gpu_suite.py")
forced = load("scripts/forced_acceptance.py")
made_up = suite.rows.smoke
GIB = 2**30

# ---- forced acceptance


@pytest.mark.parametrize("length,depth", [(1.0, 5), (2.76, 5), (4.18, 5), (6.0, 5), (1.5, 1)])
def test_the_rate_gives_the_length_exactly(length, depth):
    """Catches: a length that counts without the target's own token, a rate that is good for another depth."""
    rate = forced.rate_for(length, depth)
    # By all ways that the coins of a step may fall, not by the formula that the rate was found with.
    mean = 0.0
    for fall in range(2**depth):
        coins = [bool(fall >> i & 1) for i in range(depth)]
        stands = next((i for i, coin in enumerate(coins) if not coin), depth)
        mean += (1 + stands) * math.prod(rate if coin else 1 - rate for coin in coins)
    assert mean == pytest.approx(length, abs=1e-9)
    assert forced.unconditional_rates(rate, depth) == pytest.approx([rate**k for k in range(1, depth + 1)])


@pytest.mark.parametrize("length", [0.99, 6.01])
def test_lengths_that_no_rate_gives_are_refused(length):
    """Catches: a table that says 6.8 tokens a step where a window has five drafts."""
    with pytest.raises(ValueError, match="give 1 to 6 tokens"):
        forced.rate_for(length, 5)


class Verifier:
    """Stands for `CoupledVerifier`: its `_judge` is what the real one asks of the accept kernel."""

    def __init__(self, num_drafts):
        self.num_drafts, self.seen = num_drafts, []

    def _judge(self, part, target_tokens, logits):
        found = accept(target_tokens, part.drafts, part.cu_num_logits, self.num_drafts, part.shapes)
        self.seen.append(found)
        return found


class Part(SimpleNamespace):
    def _replace(self, **changes):
        return Part(**vars(self) | changes)


def part_of(num_reqs, parents, drafts=None):
    """A verify step of alike drafts: node i + 1 hangs on `parents[i]`; a chain where that is the node before."""
    num_rows, num_drafts = len(parents) + 1, len(parents)
    every = torch.arange(num_reqs)
    depths, above = [0], [0]
    for node, parent in enumerate(parents, 1):
        depths.append(depths[parent] + 1)
        above.append(above[parent] | 1 << (node - 1))
    tables = (torch.tensor([-1, *parents]).int(), torch.tensor(depths).int(), torch.tensor(above))
    tables = [table.repeat(num_reqs, 1) for table in tables]
    is_chain = list(parents) == list(range(num_drafts))
    if drafts is None:
        drafts = torch.arange(100, 100 + num_reqs * num_rows, dtype=torch.int32)
    return Part(
        drafts=drafts,
        nodes=torch.arange(num_rows).repeat(num_reqs),
        expanded_idx_mapping=every.repeat_interleave(num_rows),
        cu_num_logits=torch.arange(0, num_reqs * num_rows + 1, num_rows, dtype=torch.int32),
        shapes=None if is_chain else TreeShapes(every, *tables),
    )


# The greedy path first, as every tree of ours has it; then siblings on every level.
TREE = (0, 1, 2, 3, 4, 0, 0, 1, 2, 6)
VOCAB = 50_000


def play(parents, rate, num_reqs=64, num_steps=1, **more):
    """Force some steps; return drafts, what the scorer was told to sample, and how many tokens each request gets."""
    verifier = Verifier(len(parents))
    forced.ForcedAcceptance(verifier, torch.ones(num_reqs, dtype=torch.bool), rate, **more)
    part, logits = part_of(num_reqs, parents), torch.empty(num_reqs * (len(parents) + 1), VOCAB, device="meta")
    own = torch.zeros(len(logits), dtype=torch.int64)
    found = [verifier._judge(part, own, logits) for _ in range(num_steps)]
    return part, found


@pytest.mark.parametrize("parents", [(0, 1, 2, 3, 4), TREE], ids=["chain", "tree"])
def test_the_length_comes_out_of_the_scorer_as_wanted(parents):
    """Through the real accept rule. Catches: siblings that stand in for a draft that does not, coins used twice."""
    wanted = 4.18
    rate = forced.rate_for(wanted, 5)
    _, found = play(parents, rate, num_reqs=256, num_steps=80)
    counts = torch.cat([sampled[1] for sampled in found]).double()
    error = counts.std() / len(counts) ** 0.5
    assert float((counts.mean() - wanted).abs()) < 4 * float(error) < 0.06
    # Each depth by its own rate, not the mean alone.
    for k in range(1, 6):
        assert float((counts > k).double().mean()) == pytest.approx(rate**k, abs=0.02)


@pytest.mark.parametrize("parents", [(0, 1, 2, 3, 4), TREE], ids=["chain", "tree"])
def test_the_emitted_tokens_are_the_path_and_one_more(parents):
    """Catches: a count that is off by the target's own token; a token after a rejection that is the draft's."""
    rate = 0.7
    part, ((sampled, num_sampled, *_),) = play(parents, rate)
    coins = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0)) < rate
    width = len(parents) + 1
    for req_idx in range(len(num_sampled)):
        path = coins[req_idx * width + 1 : req_idx * width + 6].tolist()
        stands = next((i for i, coin in enumerate(path) if not coin), 5)
        assert num_sampled[req_idx] == stands + 1
        drafts = part.drafts[req_idx * width + 1 :][:5].tolist()
        assert sampled[req_idx, :stands].tolist() == drafts[:stands]
        if stands < 5:
            assert int(sampled[req_idx, stands]) == (drafts[stands] + 1) % VOCAB
        assert not sampled[req_idx, stands + 1 :].any()


def test_a_sibling_never_stands_in_for_the_first():
    """Catches: a draft that happens to be what the target is made to say after it has rejected another."""
    verifier = Verifier(2)
    forced.ForcedAcceptance(verifier, torch.ones(200, dtype=torch.bool), 0.5)
    drafts = torch.tensor([9, 5, 6], dtype=torch.int32).repeat(200)
    logits = torch.empty(600, VOCAB, device="meta")
    _, num_sampled, *_ = verifier._judge(part_of(200, (0, 0), drafts), torch.full((600,), 3), logits)
    coins = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(num_sampled == 2, coins[1:600:3])


def test_what_is_no_draft_never_stands():
    """Catches: padding of a window, or of a request without drafts, that counts as accepted."""
    verifier = Verifier(3)
    has_draft = torch.tensor([True, False, True])
    forced.ForcedAcceptance(verifier, has_draft, 1.0, least_token=1)
    drafts = torch.tensor([9, 5, 6, 7, 9, 5, 6, 7, 9, 5, 0, 0], dtype=torch.int32)
    own = torch.full((12,), 3)
    _, num_sampled, *_ = verifier._judge(part_of(3, (0, 1, 2), drafts), own, torch.empty(12, VOCAB, device="meta"))
    assert num_sampled.tolist() == [4, 1, 2]
    assert verifier.seen[0][0][:, 0].tolist() == [5, 3, 5], "without a draft it is the target's own"


def test_the_same_coins_for_every_engine_and_none_twice():
    """Catches: figures that differ by luck, a step that is decided like the one before."""
    first, second = (play((0, 1, 2, 3, 4), 0.5, num_steps=3)[1] for _ in range(2))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0][1], first[1][1])


def test_the_package_cannot_fake_acceptance():
    """Catches: the hook, or a knob for it, on its way into what is installed."""
    from vllm_vidspec.config import VidSpecConfig

    assert not [name for name in VidSpecConfig.model_fields if re.search("forc|fake|synthetic", name)]
    sources = [*(ROOT / "vllm_vidspec").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    assert not [path for path in sources if re.search("forced_acceptance|ForcedAcceptance", path.read_text())]


def test_what_is_hooked_is_there():
    """Catches: a verifier whose `_judge` has moved, before a GPU is there to say so."""
    pytest.importorskip("vllm")
    import inspect

    from vllm_vidspec.engine.verify.step import VerifySlice
    from vllm_vidspec.engine.verify.verifier import CoupledVerifier

    assert list(inspect.signature(CoupledVerifier._judge).parameters) == ["self", "part", "target_tokens", "logits"]
    assert {"drafts", "nodes", "expanded_idx_mapping", "shapes"} <= set(VerifySlice._fields)
    assert "self._judge(" in inspect.getsource(CoupledVerifier._verify)


# ---- the plan and its time


def test_the_plan_holds_every_kernel_and_every_engine():
    """Catches: a kernel that nobody measures, a mode that is forgotten, engines that are compared with no vanilla."""
    import bench_kernels

    assert set(rows.KERNELS) == set(rows._TINY_KERNELS) == set(bench_kernels.KERNELS)
    engines = rows.ENGINES.values()
    assert {engine.method for engine in engines} == {"vanilla", "chain", "tree-static", "parallel", "blind"}
    for method in ("vanilla", "chain", "tree-static"):
        assert {engine.graphs for engine in engines if engine.method == method} == {True, False}
    assert rows.BATCHES == (1, 4, 8)
    assert {step.name for steps in suite.STEPS.values() for step in steps} == set(rows.STEPS)
    assert [row["batch"] for row in suite.planned("engine-chain-graphs")] == [1, 4, 8]
    assert suite.planned("kernel-accept") == [{"kernel": "accept"}] == suite.planned("peers-accept")
    assert suite.planned("machine") == []


def test_all_time_outs_fit_into_what_the_pages_say():
    """Catches: a step whose time-out the pages' time does not hold, a time that no step needs."""
    assert {half: sum(step.timeout_s for step in steps) for half, steps in suite.STEPS.items()} == suite.SECONDS
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert all(f"| {half} | {seconds} s |" in page for half, seconds in suite.SECONDS.items())
    assert sum(suite.SECONDS.values()) <= 18 * 60
    assert "in 18 minutes" in suite.__doc__ and "in 18 minutes at most" in page
    assert "Eighteen minutes on a GPU" in (ROOT / "Makefile").read_text()


def test_peers_come_last():
    """Catches: another library's compilation before a figure of ours."""
    names = [step.name for step in suite.STEPS[1]]
    assert names[-len(rows.WITH_PEERS) :] == [f"peers-{kernel}" for kernel in rows.WITH_PEERS]
    from peers import attention

    with rows.beside(peers=False, dry_run=False):
        assert len(attention.PEERS) == 1
    with rows.beside(peers=True, dry_run=False):
        assert len(attention.PEERS) == 5
    assert len(attention.PEERS) == 5


def test_every_axis_of_the_suite_is_one_of_the_kernels(monkeypatch):
    """Catches: a size that replaces nothing because its axis has another name, and runs for minutes instead."""
    import importlib

    for kernel in rows.KERNELS:
        axes = importlib.import_module(f"kernel_cases.{kernel}").AXES
        for given in (*rows.KERNELS[kernel], *rows._TINY_KERNELS[kernel]):
            assert given.partition("=")[0] in axes, (kernel, given)


def test_the_forced_lengths_are_those_that_are_published():
    """Catches: an acceptance of one's own choice, the length of another method or pair."""
    lengths = {engine.method: rows.published_of(engine) for engine in rows.ENGINES.values()}
    assert lengths == {
        "vanilla": (None, None), "chain": (3.37, 1.26), "tree-static": (4.18, 2.11), "parallel": (4.23, 2.40),
        "blind": (2.76, 1.38),
    }  # fmt: skip
    for engine in rows.ENGINES.values():
        if engine.num_drafts:
            forced.rate_for(lengths[engine.method][0], engine.depth)


# A stand-in for gpu_suite_rows.py.
FAKE_ROWS = """
import json, os, pathlib, sys, time
names, folder = sys.argv[1].split(","), sys.argv[sys.argv.index("--work-dir") + 1]
file = (pathlib.Path(folder) / "rows.jsonl").open("a")
def write(name, **row):
    file.write(json.dumps({"step": name, **row}) + chr(10)); file.flush()
for name in names:
    print("this is", name, *([os.getpid()] if name == "engine-chain-graphs" else []), flush=True)
    engine = name.removeprefix("engine-")
    common = {"engine": engine, "method": engine.split("-")[0], "graphs": True, "models": "m"}
    if name == "machine":
        write(name, gpu="G", date="today", versions={})
    elif name.startswith("kernel-"):
        write(name, kernel=name[7:], outcome="measured", reason="", median=2.0)
    else:
        for batch in (1, 4):
            write(name, **common, batch=batch, outcome="measured", reason="", tokens_per_s=10.0 * batch)
    if engine == "chain-graphs":
        file.write('{"step": "engi'); file.flush()
        time.sleep(3600)
    if engine == "blind-graphs":
        sys.exit(7)
    end = "skipped" if engine == "parallel-graphs" else "failed" if engine == "vanilla-eager" else "passed"
    write(name, end=end, reason="" if end == "passed" else "its reason", seconds=0.1)
pathlib.Path(sys.argv[sys.argv.index("--result") + 1]).write_text('{"outcome": "passed", "facts": {}}')
"""


@pytest.fixture
def play_suite(tmp_path, monkeypatch):
    """`play_suite(*arguments)` runs the suite on the stand-in; returns its exit status and what it has written."""
    (tmp_path / "rows.py").write_text(FAKE_ROWS)
    monkeypatch.setattr(suite.rows, "__file__", str(tmp_path / "rows.py"))
    # Only the step that sleeps for ever is to run into its limit, however busy the machine is.
    limits = {"engine-chain-graphs": 3}
    monkeypatch.setattr(
        suite,
        "STEPS",
        {
            half: tuple(dataclasses.replace(step, timeout_s=limits.get(step.name, 100)) for step in steps)
            for half, steps in suite.STEPS.items()
        },
    )
    out = tmp_path / "suite.json"

    def run(*arguments):
        status = suite.main(["--json", str(out), "--work-dir", str(tmp_path / "work"), *arguments])
        return status, json.loads(out.read_text())

    return run


def test_every_planned_row_is_there_whatever_became_of_its_engine(play_suite):
    """Catches: a crash or a time-out that takes measured rows with it, or leaves a planned one out without a word."""
    names = ("vanilla-graphs", "chain-graphs", "blind-graphs", "parallel-graphs", "vanilla-eager")
    status, found = play_suite("--half", "2", "--only", "machine," + ",".join(f"engine-{name}" for name in names))
    assert status == 1
    by_key = {(row["engine"], row["batch"]): row for row in found["rows"]}
    assert set(by_key) == {(name, batch) for name in names for batch in (1, 4, 8)}
    assert all(by_key[name, batch]["outcome"] == "measured" for name in names for batch in (1, 4))
    why = {name: (by_key[name, 8]["outcome"], by_key[name, 8]["reason"]) for name in names}
    assert why["vanilla-graphs"][1] == "it left no row"
    assert why["chain-graphs"][0] == "failed" and why["chain-graphs"][1].startswith("timed out after 6 s")
    assert why["blind-graphs"] == ("failed", "crashed (exit status 7); its last line: this is engine-blind-graphs")
    assert why["parallel-graphs"] == ("skipped", "its reason") and why["vanilla-eager"] == ("failed", "its reason")
    assert by_key["parallel-graphs", 4]["speedup"] == 1.0
    assert found["halves"]["2"]["gpu"] == "G" and "--half 2" in found["command"]


def test_whoever_is_cut_off_leaves_what_was_measured(tmp_path):
    """Catches: a file that is written at the end, or not as a whole; a step that outlives the suite."""
    (tmp_path / "rows.py").write_text(FAKE_ROWS)
    out, work = tmp_path / "suite.json", tmp_path / "work"
    code = f"""
import sys; sys.path.insert(0, {str(ROOT / "scripts")!r})
import gpu_suite as suite
suite.rows.__file__ = {str(tmp_path / "rows.py")!r}
suite.smoke.command(suite.main)
"""
    only = "machine,kernel-accept,engine-vanilla-graphs,engine-chain-graphs"
    arguments = ["--json", str(out), "--work-dir", str(work), "--only", only]
    cut_off([sys.executable, "-c", code, *arguments], work / "engine-chain-graphs.log")
    found = json.loads(out.read_text())
    assert [step["name"] for step in found["steps"]] == ["machine", "kernel-accept", "machine", "engine-vanilla-graphs"]
    assert [row["outcome"] for row in found["rows"]] == ["measured"] * 3 + ["passed"]


def test_a_half_keeps_the_other_halfs_rows(play_suite, monkeypatch):
    """Catches: a second half that throws the first away, or is put together with one of another commit."""
    play_suite("--half", "1", "--only", "machine,kernel-accept")
    _, both = play_suite("--half", "2", "--only", "machine,engine-vanilla-graphs")
    assert {row["half"] for row in both["rows"]} == {1, 2} and set(both["halves"]) == {"1", "2"}
    assert "--half 1" in both["command"] and "--half 2" in both["command"]
    _, again = play_suite("--half", "2", "--only", "machine,engine-vanilla-graphs")
    assert [row["half"] for row in again["rows"]] == [row["half"] for row in both["rows"]]
    monkeypatch.setattr(suite.smoke, "_git_sha", lambda: "another")
    with pytest.raises(ValueError, match="another commit"):
        play_suite("--half", "1", "--only", "machine,kernel-accept")


def test_unknown_steps_are_refused(capsys):
    """Catches: a misspelt step that runs nothing and passes."""
    with pytest.raises(SystemExit):
        suite.main(["--only", "engine-chian-graphs"])
    assert "no step 'engine-chian-graphs'" in capsys.readouterr().err


# ---- what fits, what is refused


def test_without_a_gpu_or_vllm_a_step_says_so(monkeypatch):
    """Catches: a traceback where one word is enough; kernels that need vLLM."""
    lines = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows.run("engine-chain-graphs", argparse.Namespace(), lines.append)
    assert (lines[-1]["end"], lines[-1]["reason"]) == ("skipped", "torch sees no CUDA device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(rows.importlib.util, "find_spec", lambda name: None)
    rows.run("engine-chain-graphs", argparse.Namespace(), lines.append)
    assert (lines[-1]["end"], lines[-1]["reason"]) == ("skipped", "vLLM is not installed")


def test_what_fits_on_which_card():
    """Catches: an engine that dies for want of memory after a minute; a refusal without its numbers."""
    sizes, vanilla, chain = rows.Sizes(), rows.ENGINES["vanilla-graphs"], rows.ENGINES["chain-graphs"]
    h100, h200 = 79 * GIB, 139 * GIB
    assert [rows.chosen_models("auto", sizes, total) for total in (h100, h200)] == ["32b-fp8", "32b-bf16"]
    assert rows.chosen_models("72b-fp8", sizes, h100) == "72b-fp8"
    fp8 = rows.MODELS["32b-fp8"]
    assert not rows.does_not_fit(fp8, chain, 4, sizes, h100)
    assert re.fullmatch(r"needs \d+ GiB, the device has 79 GiB", rows.does_not_fit(fp8, chain, 8, sizes, h100))
    assert not rows.does_not_fit(fp8, chain, 8, sizes, h200)
    assert rows.does_not_fit(rows.MODELS["72b-fp8"], vanilla, 1, sizes, h100)
    for engine in rows.ENGINES.values():
        assert rows.need_bytes(fp8, engine, 4, sizes) >= rows.need_bytes(fp8, dataclasses.replace(vanilla), 4, sizes)


def test_published_sizes_are_what_their_names_say():
    """Catches: a digit that is wrong in a shape; the number of weights is published, too."""
    shapes = rows.SHAPES
    billions = {name: shape.weight_bytes(False) / 2e9 for name, shape in shapes.items()}
    published = {"3b": 3.75, "7b": 8.29, "32b": 33.45, "72b": 73.41, "qwen3-2b": 2.13, "qwen3-8b": 8.77}
    assert billions == pytest.approx(published, abs=0.08)
    assert shapes["32b"].kv_bytes_per_token == 262_144 and shapes["7b"].kv_bytes_per_token == 57_344
    assert rows.Video().num_tokens == 25_088, "128 frames, as in the papers"


def test_engines_are_told_what_the_plan_says(tmp_path):
    """Catches: acceptance that is forced on nobody or twice, a memory that is not the same for all, a graph too few."""
    sizes, models = rows.Sizes(), rows.MODELS["32b-fp8"]
    where = {"target": "T", "draft": "D"}
    kwargs = {n: rows.llm_kwargs(e, models, where, sizes, (1, 4)) for n, e in rows.ENGINES.items()}
    assert "speculative_config" not in kwargs["vanilla-graphs"]
    blind = kwargs["blind-graphs"]["speculative_config"]
    assert blind["rejection_sample_method"] == "synthetic"
    assert 1 + sum(blind["synthetic_acceptance_rates"]) == pytest.approx(2.76)
    ours = kwargs["tree-static-graphs"]["speculative_config"]
    assert ours["method"] == "vidspec" and ours["draft"] == "tree-static" and ours["num_speculative_tokens"] == 25
    assert not [name for name in ours if "synthetic" in name]
    assert kwargs["parallel-graphs"]["speculative_config"]["parallel"] == {"device": "cuda:0"}
    assert kwargs["chain-graphs"]["compilation_config"]["cudagraph_capture_sizes"] == [1, 4, 6, 24]
    assert kwargs["chain-eager"]["enforce_eager"] and "compilation_config" not in kwargs["chain-eager"]
    for name, one in kwargs.items():
        cache = rows.kv_bytes(models, rows.ENGINES[name], 4, sizes)[0]
        assert one["kv_cache_memory_bytes"] >= cache and one["max_num_seqs"] == 4 and one["load_format"] == "dummy"
        assert not one["enable_prefix_caching"]


def test_made_up_pairs_are_accepted(tmp_path):
    """Catches: shapes that start-up refuses, weights in a directory that should have none."""
    pytest.importorskip("transformers")
    from vllm_vidspec.doctor import check_pair

    for name, models in rows.MODELS.items():
        where = rows.checkpoints(models, rows.Sizes(), tmp_path / name)
        check = check_pair(where["target"], where["draft"])
        assert check.status == "ok", check
        config = json.loads(Path(where["target"], "config.json").read_text())
        assert ("quantization_config" in config) == models.fp8
        assert config["text_config"]["hidden_size"] == rows.SHAPES[models.target].hidden_size
        assert config["text_config"]["max_position_embeddings"] > rows.Sizes().max_model_len(
            rows.ENGINES["chain-eager"]
        )
    assert not list(tmp_path.rglob("*.safetensors"))


# ---- the page


def test_the_page_is_what_was_measured_or_says_that_nothing_was():
    """Catches: a figure that was written by hand, a page that lags behind its data."""
    assert suite.PAGE.read_text() == suite.render(suite.stored()), "run scripts/gpu_suite.py --page"
    if suite.stored() is None:
        assert "No GPU has run this suite yet" in suite.PAGE.read_text()
        assert not re.search(r"\d+\.\d+ (ms|µs|x)", suite.PAGE.read_text())


RESULT = {
    "note": "",
    "command": "python scripts/gpu_suite.py",
    "git_sha": "0123456789abcdef",
    "halves": {"1": {"gpu": "G", "date": "today", "seconds": 9.0, "versions": {"torch": "2"}}},
    "rows": [
        {"kernel": "draw", "case": "num_reqs=1", "impl": "triton", "outcome": "measured", "median": 4.0, "floor": 1.0},
        {"kernel": "tree_attention", "outcome": "failed", "reason": "timed out | x"},
        {
            "engine": "chain-graphs", "batch": 4, "outcome": "measured", "models": "32b-fp8", "acceptance": "forced",
            "step_ms": 20.0, "step_ms_low": 19.0, "step_ms_high": 21.0, "acceptance_length": 3.4, "tau_of": "SD",
            "acceptance_length_wanted": 3.37, "propose_ms": 5.0, "tokens_per_s": 170.0, "speedup": 1.5,
            "published_speedup": 1.26,
        },
        {"engine": "chain-graphs", "batch": 8, "outcome": "refused", "reason": "needs 98 GiB, the device has 79 GiB"},
    ],
}  # fmt: skip


def test_the_page_says_of_every_figure_what_it_is():
    """Catches: forced acceptance that reads as measured, a row that failed and is not told."""
    text = suite.render(RESULT)
    assert "| `draw` | num_reqs=1 | triton | 4.0 | 1.00 | 25 % |" in text
    assert (
        "| chain-graphs | 4 | 32b-fp8 | 20.00 (19.00 to 21.00) | 5.00 | forced 3.40 (3.37, SD) | forced 170.0 |" in text
    )
    assert "| forced 1.50 | 1.26 |" in text and "failed: timed out / x" in text and "refused: needs 98 GiB" in text
    assert all(word in text for word in ("**Measured**", "**Forced**", "**Published**"))
    assert len({line.count("|") for line in text.splitlines() if "chain-graphs" in line}) == 1


def test_a_dry_run_makes_no_page():
    """Catches: a null GPU's milliseconds as results."""
    with pytest.raises(ValueError, match="mean nothing"):
        suite.render(RESULT | {"note": suite.DRY_RUN})
