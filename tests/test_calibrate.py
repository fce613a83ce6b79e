"""`vidspec calibrate` without an engine: candidates, the rule of choice, the search, the file, the plot, errors."""

import json
import sys
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from vllm_vidspec.bench import calibrate, calibration_views, engine_session
from vllm_vidspec.bench.calibrate import Calibration, Measurement, choose, layer_sets, uv_layers
from vllm_vidspec.cli import app
from vllm_vidspec.config import parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import NAMES

TOKENS = 300  # that verify steps emit, whatever the draft


def measured(lambda_r=0.5, layers="all", uv_layer=None, num_drafts=100):
    length = TOKENS / num_drafts
    return Measurement(lambda_r, layers, uv_layer, length, (length - 1) / 5, num_drafts, TOKENS, 1.0)


def test_the_longest_acceptance_is_chosen():
    rows = [measured(num_drafts=steps) for steps in (100, 90, 95)]
    assert choose(rows) is rows[1]


def test_one_verify_step_is_no_reason_to_leave_an_earlier_candidate():
    rows = [measured(num_drafts=steps) for steps in (102, 101, 100)]
    assert choose(rows) is rows[1], "two steps behind the best is worse, one step is not"


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


class FakeSession:
    """An engine of four layers whose drafts get worse with the distance from (lambda_r 0.3, layers 2-3, uv_layer 2)."""

    sessions: ClassVar[list["FakeSession"]] = []
    unguided = 0

    def __init__(self, job):
        self.job, self.asked = job, []
        self.ready = {"num_layers": 4, "default_uv_layer": 4}
        self.sessions.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, command):
        self.asked.append(command)
        knobs = command["knobs"]
        if knobs:
            distance = 10 * abs(knobs["lambda_r"] - 0.3)
            if knobs["lambda_r"]:
                distance += 0 if knobs["guidance_layers"] == (2, 3) else 8
        else:
            layer = self.job["llm"]["speculative_config"].get("uv_layer") or self.ready["default_uv_layer"]
            distance = 5 * abs(layer - 2)
        drafts = 100 + round(3 * distance)
        counters = dict.fromkeys(NAMES, 0) | {
            "guided_prompts": 4 - self.unguided,
            "unguided_memory": self.unguided,
            "drafts": drafts,
            "draft_tokens": 5 * drafts,
            "accepted_tokens": TOKENS - drafts,
        }
        return {"seconds": 1.0, "num_prompts": 4, "output_tokens": TOKENS, "metrics": counters}


@pytest.fixture
def sessions(monkeypatch):
    monkeypatch.setattr(calibrate, "EngineSession", FakeSession)
    monkeypatch.setattr(FakeSession, "sessions", [])
    return FakeSession.sessions


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


def test_whole_grid_measures_lambda_zero_once(sessions):
    result = calibrate.run(Calibration(whole_grid=True))
    assert result["config"] == {"lambda_r": 0.3, "guidance_layers": (2, 3)}
    assert len(result["measurements"]) == 7 * 10 + 1
    assert [row["lambda_r"] for row in result["measurements"]].count(0.0) == 1


def test_uv_loads_an_engine_per_layer(sessions):
    result = calibrate.run(Calibration(pruner="uv"))
    assert result["config"] == {"uv_layer": 2}
    layers = [session.job["llm"]["speculative_config"].get("uv_layer") for session in sessions]
    assert layers == [None, 1, 2, 3], "the default first"
    assert [row["uv_layer"] for row in result["measurements"]] == [4, 1, 2, 3]


def test_unguided_prompts_are_no_measurement(sessions, monkeypatch):
    monkeypatch.setattr(FakeSession, "unguided", 1)
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
    result = CliRunner().invoke(app, ["calibrate", "--pruner", pruner, "--out", str(out), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert "*" in result.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    raw = {"model": "self", "num_speculative_tokens": 5, "pruner": pruner, "calibration": str(out)}
    config, _ = parse_config(raw)
    if pruner == "uv":
        assert config.uv_layer == 2
    else:
        assert (config.lambda_r, config.guidance_layers) == (0.3, (2, 3))
        assert parse_config(raw | {"lambda_r": 0.7})[0].lambda_r == 0.7, "what is given beside the file wins"
    written = json.loads(out.read_text())
    assert {"pruner", "prune_ratio", "target", "draft", "measurements", "provenance"} <= set(written)
    assert written["target"] == "qwen2.5-vl/target"


@pytest.mark.parametrize("suffix", [".svg", ".pdf"])
def test_plot_of_the_whole_grid(sessions, tmp_path, suffix):
    path = tmp_path / f"plot{suffix}"
    calibration_views.plot(calibrate.run(Calibration(whole_grid=True)), path)
    assert path.stat().st_size > 1000


def test_layer_names():
    assert [calibration_views.layers_name(x) for x in ("all", (2,), (0, 1, 2), (0, 2), None)] == [
        *("all", "2", "0-2", "0, 2", "-")
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pruner", "uniform"], "'uniform' has nothing to calibrate"),
        (["--prune-ratio", "1.5"], "prune_ratio"),
        (["--prune-ratio", "1"], "nothing to choose"),
        (["--num-speculative-tokens", "0"], "num_speculative_tokens"),
        (["--family", "llava"], "unknown family 'llava'"),
        (["--target", "some/model"], "--target needs --draft"),
        (["--target", "/no/such/model", "--draft", "self"], "no such checkpoint"),
        (["--video", "/no/such.mp4"], "no such video: /no/such.mp4"),
        (["--out", "/no/such/folder/c.json"], "no such folder"),
        (["--out", "/tmp"], "it is a folder"),
        (["--plot", "plot.jpeg"], "--plot"),
        (["--engine-args", "[1]"], "--engine-args"),
        (["--engine-args", '{"model": "x"}'], "--engine-args: model"),
    ],
)
def test_wrong_options_are_one_line_and_exit_2(sessions, options, words):
    result = CliRunner().invoke(app, ["calibrate", *options])
    assert result.exit_code == 2
    assert result.stderr.startswith("vidspec: ")
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not sessions, "no engine starts before every value is checked"


def test_a_session_answers_and_says_why_it_stopped(tmp_path, monkeypatch):
    """Catches: a hanging parent when the engine's process dies, a traceback instead of its reason."""
    job = tmp_path / "job.py"
    job.write_text(
        "import json, os, sys\n"
        "out = os.fdopen(int(sys.argv[-1]), 'w')\n"
        "for line in sys.stdin:\n"
        "    if 'die' in line: sys.exit('ValueError: it died')\n"
        "    print(json.dumps({'event': 'answer', 'echo': json.loads(line)}), file=out, flush=True)\n"
    )
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {job} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(engine_session.sys, "executable", str(program))
    with engine_session.EngineSession({"llm": 1}) as session:
        assert session.ready == {"echo": {"llm": 1}}
        assert session.ask({"command": "x"}) == {"echo": {"command": "x"}}
        for _ in range(2):
            with pytest.raises(VidSpecError, match=r"^the engine stopped: ValueError: it died$"):
                session.ask({"command": "die"})
    assert not session.folder.exists()
