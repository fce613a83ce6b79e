"""`vidspec calibrate` without an engine: candidates, the rule of choice, the search, the file, the plot, errors."""

import contextlib
import json
import sys
import threading
from types import SimpleNamespace

import pytest

from tools.common import invoke
from vllm_vidspec import metrics
from vllm_vidspec.config import parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import NAMES
from vllm_vidspec.tools import calibrate, calibration_views, costs, engine_session, session_job
from vllm_vidspec.tools.calibrate import Calibration, Measurement, choose, layer_sets, uv_layers
from vllm_vidspec.tools.costs import Cost, Costs, draft_table

TOKENS = 300  # that verify steps emit, whatever the draft


def measured(lambda_r=0.5, layers="all", uv_layer=None, num_drafts=100):
    length = TOKENS / num_drafts
    return Measurement(lambda_r, layers, uv_layer, length, (length - 1) / 5, num_drafts, TOKENS, 1.0)


@pytest.mark.parametrize("steps", [(100, 90, 95), (102, 101, 100)])
def test_the_longest_acceptance_is_chosen(steps):
    """One verify step is no reason to leave an earlier candidate, two are."""
    rows = [measured(num_drafts=count) for count in steps]
    assert choose(rows) is rows[1]


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (1, ("all",)),
        (2, ("all", (0,), (1,))),
        (4, ("all", (0, 1), (2, 3), (3,), (0,), (1,), (2,))),
        (8, ("all", (0, 1, 2, 3), (4, 5, 6, 7), (6, 7), (0, 1), (2, 3), (4, 5))),
    ],
)
def test_layer_sets(num_layers, expected):
    assert layer_sets(num_layers) == expected


@pytest.mark.parametrize("num_layers", [*range(1, 13), 28, 64, 80])
def test_candidates_are_few_distinct_and_exist(num_layers):
    sets = layer_sets(num_layers)
    assert sets[0] == "all"
    assert len(set(sets)) == len(sets) <= 10
    assert all(0 <= layer < num_layers for layers in sets[1:] for layer in layers)
    layers = uv_layers(num_layers)
    assert len(layers) <= 6
    assert sorted(set(layers)) == list(layers)
    assert layers[0] >= 1
    assert layers[-1] == num_layers


BY_POSITION = {f"accepted_at_pos_{i}": accepted for i, accepted in enumerate((9, 7, 3, 1, 0))}
STEP_S = {"chain": 0.020, "tree-static": 0.016, "tree-adaptive": 0.018}


def measure(session, command):
    """Answer of a target whose drafts get worse with the distance from (lambda_r 0.3, layers 2-3, uv_layer 2)."""
    knobs = command["knobs"]
    if knobs:
        distance = 10 * abs(knobs["lambda_r"] - 0.3)
        if knobs["lambda_r"]:
            distance += 0 if knobs["guidance_layers"] == (2, 3) else 8
    else:
        layer = session.job["llm"]["speculative_config"].get("uv_layer") or session.ready["default_uv_layer"]
        distance = 5 * abs(layer - 2)
    drafts = 100 + round(3 * distance)
    counters = {"guided_prompts": 4, "drafts": drafts, "draft_tokens": 5 * drafts, "accepted_tokens": TOKENS - drafts}
    return {"seconds": 1.0, "token_ids": [[0] * (TOKENS // 4)] * 4, "metrics": dict.fromkeys(NAMES, 0) | counters}


def time_steps(session, command):
    """The deeper the draft, the more stands; a tree's step takes longer in larger batches."""
    spec = session.job["llm"].get("speculative_config")
    runs = []
    for batch in command["batches"]:
        size, counters, step_s = len(batch), None, 0.010
        if spec:
            is_short = spec["num_speculative_tokens"] == 1
            counters = dict.fromkeys(NAMES, 0) | {"drafts": 10, "draft_tokens": 50}
            counters |= {"accepted_tokens": 9} if is_short else {"accepted_tokens": 20} | BY_POSITION
            is_slow = size > 8 or (size == 8 and spec["draft"] != "chain")
            step_s = STEP_S[spec["draft"]] * (2 if is_slow else 1) * (0.6 if is_short else 1)
        runs.append({"batch_size": size, "step_s": [step_s, step_s, 1.0], "metrics": counters})
    return {"runs": runs}


def answer_of(session, command):
    return measure(session, command) if command["command"] == "answer" else time_steps(session, command)


FOUR_LAYERS = {"num_layers": 4, "default_uv_layer": 4}


@pytest.fixture
def sessions(fake_engines):
    return fake_engines(answer_of, **FOUR_LAYERS)


def test_specvlm_takes_layers_first_then_lambda(sessions):
    totals = []
    result = calibrate.run(Calibration(), lambda event, fields: totals.append(fields.get("total")))
    assert result["config"] == {"lambda_r": 0.3, "guidance_layers": (2, 3)}
    (session,) = sessions
    knobs = [(c["knobs"]["guidance_layers"], c["knobs"]["lambda_r"]) for c in session.asked]
    assert knobs[:7] == [(layers, 1.0) for layers in layer_sets(4)]
    assert knobs[7:] == [((2, 3), i / 10) for i in range(10)]
    assert len(knobs) in totals, "what is announced is what is measured"
    assert [row["chosen"] for row in result["measurements"]].count(True) == 1
    assert session.job["prompts"]["held_out"] == [1000, 1001, 1002, 1003], "not the benchmark's videos"
    assert session.job["llm"]["speculative_config"]["on_draft_error"] == "raise"


@pytest.mark.parametrize("suffix", [".svg", ".pdf"])
def test_whole_grid_measures_lambda_zero_once_and_is_drawn(sessions, tmp_path, suffix):
    result = calibrate.run(Calibration(whole_grid=True))
    assert result["config"] == {"lambda_r": 0.3, "guidance_layers": (2, 3)}
    assert len(result["measurements"]) == 7 * 10 + 1
    assert [row["lambda_r"] for row in result["measurements"]].count(0.0) == 1
    calibration_views.plot(result, tmp_path / f"plot{suffix}")
    assert (tmp_path / f"plot{suffix}").stat().st_size > 1000


def test_uv_loads_an_engine_per_layer(sessions):
    result = calibrate.run(Calibration(pruner="uv"))
    assert result["config"] == {"uv_layer": 2}
    layers = [session.job["llm"]["speculative_config"].get("uv_layer") for session in sessions]
    assert layers == [None, 1, 2, 3], "the default first"
    assert [row["uv_layer"] for row in result["measurements"]] == [4, 1, 2, 3]


def test_unguided_prompts_are_no_measurement(fake_engines):
    def answer(session, command):
        found = measure(session, command)
        return found | {"metrics": found["metrics"] | {"guided_prompts": 3, "unguided_memory": 1}}

    fake_engines(answer, **FOUR_LAYERS)
    with pytest.raises(VidSpecError, match=r"1 of 4 prompts were pruned without guidance \(memory\)"):
        calibrate.run(Calibration())


def test_a_pair_of_ones_own_is_asked_through_its_chat_template(tmp_path):
    what = Calibration(target=str(tmp_path), draft="self", engine_args={"max_model_len": 4096})
    calibrate.check(what)
    job = what.job()
    assert job["prompts"]["family"] is None
    assert job["llm"]["max_model_len"] == 4096
    assert job["llm"]["speculative_config"]["model"] == "self"
    assert "dtype" not in job["llm"], "that is vLLM's choice"


@pytest.mark.parametrize("pruner", calibrate.PRUNERS)
def test_command_writes_what_the_configuration_reads(sessions, tmp_path, pruner):
    out, plot = tmp_path / "c.json", tmp_path / "c.png"
    result = invoke("calibrate", "--pruner", pruner, "--out", str(out), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert "*" in result.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    raw = {"model": "self", "num_speculative_tokens": 5, "pruner": pruner, "calibration": str(out)}
    config, _ = parse_config(raw)
    if pruner == "uv":
        assert config.prune.uv_layer == 2
    else:
        assert (config.prune.lambda_r, config.prune.guidance_layers) == (0.3, (2, 3))
        assert parse_config(raw | {"lambda_r": 0.7})[0].prune.lambda_r == 0.7, "what is given beside the file wins"
    written = json.loads(out.read_text())
    assert {"pruner", "prune_ratio", "target", "draft", "measurements", "provenance"} <= set(written)
    assert written["target"] == "qwen2.5-vl/target"


def test_layer_names():
    assert [calibration_views.layers_name(x) for x in ("all", (2,), (0, 1, 2), (0, 2), None)] == [
        *("all", "2", "0-2", "0, 2", "-")
    ]


def cost(shape, size, tokens_per_s):
    num_tokens = {"vanilla": 0, "chain": 5, "tree-static": 25, "tree-adaptive": 64, "chain-2": 2}[shape]
    return Cost(shape.removesuffix("-2"), size, num_tokens, 2.0, 1.0, tokens_per_s, 9)


def costs_of(**speeds):
    """Costs at batch sizes 1, 2, 4, ... from tokens per second by shape."""
    return [cost(shape.replace("_", "-"), 2**i, speed) for shape, row in speeds.items() for i, speed in enumerate(row)]


@pytest.mark.parametrize(
    ("speeds", "table"),
    [
        (([9, 9, 9], [8, 8, 8], [7, 7, 7]), [(1, 4, "chain", 5)]),
        (([9, 9, 9], [9, 9, 9], [9, 9, 9]), [(1, 4, "chain", 5)]),
        (([5, 6, 9], [8, 8, 8], [7, 7, 7]), [(1, 2, "tree-static", 25), (3, 4, "chain", 5)]),
        (([5, 9], [6, 8], [7, 7]), [(1, 1, "tree-adaptive", 64), (2, 2, "chain", 5)]),
        # One win each: the static tree gains more over the chain in all, and takes the place of the other.
        (([5, 5, 9], [6, 8, 1], [9, 4, 1]), [(1, 2, "tree-static", 25), (3, 4, "chain", 5)]),
        (([5, 5, 9], [6, 8, 1], [12, 4, 1]), [(1, 1, "tree-adaptive", 64), (2, 4, "chain", 5)]),
    ],
)
def test_draft_table_has_what_is_fastest(speeds, table):
    names = ("chain", "tree_static", "tree_adaptive")
    found = draft_table(costs_of(vanilla=[1] * len(speeds[0]), **dict(zip(names, speeds, strict=True))))
    assert found == table
    raw = {"model": "self", "num_speculative_tokens": 64, "draft": "auto", "draft_table": found}
    config, _ = parse_config(raw)
    assert config.plan_for(100) == table[-1][2:]


@pytest.mark.parametrize(
    ("vanilla", "chain", "short_chain", "tree", "table"),
    [
        ([1, 1, 7], [5, 5, 5], [4, 6, 6], [2, 2, 2], [(1, 1, "chain", 5), (2, 2, "chain", 2), (3, 4, "none", 0)]),
        ([1, 5, 5], [5, 5, 5], [4, 4, 4], [2, 2, 2], [(1, 1, "chain", 5), (2, 4, "none", 0)]),  # no gain is no reason
        ([1, 5], [5, 5], [5, 5], [9, 9], [(1, 2, "tree-static", 25)]),
        ([1, 1], [5, 5], [5, 5], [4, 4], [(1, 2, "chain", 2)]),  # of two equal ones the cheaper
        ([9, 9], [5, 5], [5, 5], [4, 4], [(1, 2, "none", 0)]),
    ],
)
def test_draft_table_has_the_length_that_pays_and_none_where_none_does(vanilla, chain, short_chain, tree, table):
    costs = costs_of(tree_adaptive=[1] * len(tree), tree_static=tree, chain=chain, chain_2=short_chain, vanilla=vanilla)
    assert draft_table(costs) == table
    parse_config({"model": "self", "num_speculative_tokens": 64, "draft": "auto", "draft_table": table})


def test_chains_between_two_that_were_measured():
    """Catches: tokens of positions that a shorter chain does not have, or one too few; a time off the line."""
    counters = {"drafts": 10, **BY_POSITION}
    ends = (Cost("chain", 2, 1, 1.9, 12.0, 90.0, 9), Cost("chain", 2, 5, 3.0, 20.0, 90.0, 9))
    between = costs.chains_between(*ends, [{"metrics": counters}] * 2)
    assert [(one.num_speculative_tokens, one.acceptance_length, one.step_ms) for one in between] == [
        *((2, 2.6, 14.0), (3, 2.9, 16.0), (4, 3.0, 18.0))
    ]
    assert all((one.shape, one.batch_size, one.num_steps) == ("chain", 2, 0) for one in between)
    assert between[0].tokens_per_s == pytest.approx(2 * 2.6 / 0.014)
    assert costs.chains_between(ends[1], ends[1], []) == []


def test_batches_of_a_round():
    what = Costs(Calibration(prompts=2, engine_args={"max_num_seqs": 5}))
    assert what.batch_sizes == (1, 2, 4)
    assert what.num_prompts == 4, "no batch asks twice about one video"
    assert what.batches(1) == [[0], [1], [2], [3], [0, 1], [2, 3], [0, 1, 2, 3]]
    whole = Costs(Calibration())
    assert [len(batch) for batch in whole.batches(0)] == [1, 1, 1, 1, 2, 2, 4, 8, 16]
    assert whole.batches(1)[0] == [4], "other videos in another round"
    assert [(shape, k) for shape, k in whole.drafts] == [
        *(("vanilla", 0), ("chain", 1), ("chain", 5), ("tree-static", 25), ("tree-adaptive", 64))
    ]
    assert len(Costs(Calibration(num_speculative_tokens=1)).drafts) == 4, "a chain of one is no two"
    job = whole.job(whole.drafts[3])
    assert job["prompts"]["held_out"] == list(range(1000, 1016))
    assert job["llm"]["max_num_seqs"] == 16
    spec = job["llm"]["speculative_config"]
    assert (spec["draft"], spec["num_speculative_tokens"]) == ("tree-static", 25)
    assert "speculative_config" not in whole.job(whole.drafts[0])["llm"]


TABLE = [[1, 4, "tree-static", 25], [5, 8, "chain", 2], [9, 16, "none", 0]]


def test_costs_are_written_alone(sessions, tmp_path):
    out = tmp_path / "c.json"
    result = invoke("calibrate", "--costs", "--rounds", "2", "--out", str(out))
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["config"] == {"draft_table": TABLE}
    assert {"target", "draft", "costs", "provenance"} <= set(written)
    shapes = [session.job["llm"].get("speculative_config", {}).get("draft") for session in sessions]
    assert shapes == [None, "chain", "chain", "tree-static", "tree-adaptive"] * 2, "in turn"
    (row,) = (row for row in written["costs"] if (row["num_speculative_tokens"], row["batch_size"]) == (5, 2))
    assert (row["acceptance_length"], row["step_ms"], row["num_steps"]) == (3.0, 20.0, 2 * 2 * 3)
    assert row["tokens_per_s"] == pytest.approx(2 * 3.0 / 0.020)
    for words in (
        "188*",
        "3.00 in",
        "16.0 ms",
        "1486*~",
        "2.60 in",
        "14.0 ms",
        "1600*",
        "1.00 in",
        "10.0 ms",
        "chain 1",
    ):
        assert words in result.stdout, words
    assert "chain 3" not in result.stdout
    for words in ("1 to 4 requests: tree-static (25 tokens per step)", "9 to 16 requests: no drafts."):
        assert words in result.stdout
    raw = {"model": "self", "num_speculative_tokens": 64, "draft": "auto", "calibration": str(out)}
    config, _ = parse_config(raw)
    assert [config.plan_for(n)[1] for n in (1, 4, 5, 99)] == [25, 25, 2, 0]


def test_costs_are_added_to_a_calibration(sessions, tmp_path):
    out = tmp_path / "c.json"
    arguments = ["calibrate", "--out", str(out)]
    assert invoke(*arguments).exit_code == 0
    before = json.loads(out.read_text())
    result = invoke(*arguments, "--costs", "--rounds", "1")
    assert result.exit_code == 0, result.output
    after = json.loads(out.read_text())
    assert after["config"] == before["config"] | {"draft_table": TABLE}
    assert {name: after[name] for name in before if name != "config"} == {
        name: before[name] for name in before if name != "config"
    }
    assert after["costs_provenance"]["versions"]
    specs = [session.job["llm"].get("speculative_config", {}) for session in sessions[1:]]
    assert [spec.get("calibration") for spec in specs] == [None, *[str(out)] * 4], "its knobs are in force"

    assert invoke(*arguments, "--costs", "--rounds", "1").exit_code == 0, "and again"
    result = invoke(*arguments, "--costs", "--family", "llava-onevision")
    assert (result.exit_code, "is of another pair: qwen2.5-vl/target" in result.stderr) == (2, True)


def test_what_was_not_drafted_for_is_no_cost(fake_engines):
    skipped = dict.fromkeys(NAMES, 0) | {"drafts": 9, "skipped_pool_full": 1}
    run = {"batch_size": 1, "step_s": [1.0], "metrics": skipped}
    fake_engines(
        lambda session, _: {"runs": [run | ({} if "speculative_config" in session.job["llm"] else {"metrics": None})]}
    )
    with pytest.raises(VidSpecError, match=r"chain 1, batch size 1: requests ran without speculation \(pool_full\)"):
        costs.run(Costs(Calibration()))
    fake_engines(lambda *_: {"runs": [run | {"step_s": [], "metrics": None}]})
    with pytest.raises(VidSpecError, match="vanilla: no step decoded for 1 requests at once"):
        costs.run(Costs(Calibration()))


class FakeEngine:
    """Two requests: a prefill, a step with one of them, two with both, one that ends the first, one of the other."""

    drafted = (0, 1, 2, 2, 2, 1)

    def __init__(self, speculates):
        self.vllm_config = SimpleNamespace(speculative_config=speculates or None, instance_id="x")
        self.counters = dict.fromkeys(NAMES, 0)
        self.left = []

    def has_unfinished_requests(self):
        return bool(self.left)

    def step(self):
        self.counters["drafts"] += self.left.pop(0)
        return ["output"] if len(self.left) < 2 else []


@pytest.mark.parametrize(("speculates", "num_steps"), [(True, 2), (False, 4)])
def test_only_steps_of_the_whole_batch_are_timed(monkeypatch, speculates, num_steps):
    engine, asked = FakeEngine(speculates), []

    def enqueue(requests, params, use_tqdm):
        asked.append((requests, params))
        engine.left = list(engine.drafted)

    monkeypatch.setattr(metrics, "read_metrics", lambda path: dict(engine.counters))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    llm = SimpleNamespace(llm_engine=engine, enqueue=enqueue)
    answer = session_job.Engine(llm, ["a", "b", "c", "d"]).cost([[0, 1], [2, 3]], max_tokens=9)
    sampling = {"temperature": 0, "max_tokens": 9}
    assert asked == [(names, sampling) for names in (["a", "b"], ["a", "b"], ["c", "d"])], "the first to warm up"
    assert [(run["batch_size"], len(run["step_s"])) for run in answer["runs"]] == [(2, num_steps)] * 2
    assert [run["metrics"] and run["metrics"]["drafts"] for run in answer["runs"]] == [8 if speculates else None] * 2


def test_a_session_answers_and_says_why_it_stopped(tmp_path, monkeypatch):
    """Catches: a hanging parent when the engine's process dies or is ended, a traceback instead of its reason."""
    job = tmp_path / "job.py"
    job.write_text(
        "import json, os, sys, time\n"
        "out = os.fdopen(int(sys.argv[-1]), 'w')\n"
        "send = lambda **fields: print(json.dumps(fields), file=out, flush=True)\n"
        "for line in sys.stdin:\n"
        "    if 'die' in line: sys.exit('ValueError: it died')\n"
        "    if 'hang' in line: time.sleep(60)\n"
        "    send(event='progress', done=1)\n"
        "    send(event='answer', echo=json.loads(line))\n"
    )
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {job} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(engine_session.sys, "executable", str(program))
    told, held = [], []

    @contextlib.contextmanager
    def hold(process):
        held.append(process)
        yield
        held.append("let go")

    with engine_session.EngineSession({"llm": 1}, hold) as session:
        assert session.ready == {"echo": {"llm": 1}}
        assert session.ask({"command": "x"}, lambda *event: told.append(event)) == {"echo": {"command": "x"}}
        assert told == [("progress", {"done": 1})]
        for _ in range(2):
            with pytest.raises(VidSpecError, match=r"^the engine stopped: ValueError: it died$"):
                session.ask({"command": "die"})
    assert not session.folder.exists()
    assert held[0].poll() is not None and held[1:] == ["let go"]

    with engine_session.EngineSession({"llm": 1}, hold) as session:
        threading.Timer(0.1, held[-1].kill).start()
        with pytest.raises(VidSpecError, match=r"^the engine stopped: it wrote nothing$"):
            session.ask({"command": "hang"})
