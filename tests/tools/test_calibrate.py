"""`vidspec calibrate` without an engine: candidates, the rule of choice, the search, the file, the plot, errors."""

import json
import os
import signal
import threading

import pytest

from tools.common import invoke, is_gone
from vllm_vidspec.config import parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import NAMES
from vllm_vidspec.tools import calibrate
from vllm_vidspec.tools.calibrate import Calibration, Measurement, choose, layer_sets, uv_layers
from vllm_vidspec.tools.engine_session import EngineSession

TOKENS = 300  # that verify steps emit, whatever the draft


def measured(lambda_r=0.5, layers="all", uv_layer=None, num_drafts=100):
    length = TOKENS / num_drafts
    return Measurement(lambda_r, layers, uv_layer, length, (length - 1) / 5, num_drafts, TOKENS, 1.0)


@pytest.mark.parametrize("steps", [(100, 90, 95), (102, 101, 100)])
def test_the_longest_acceptance_is_chosen(steps):
    """One verify step is no reason to leave an earlier candidate, two are."""
    rows = [measured(num_drafts=count) for count in steps]
    assert choose(rows) is rows[1]


@pytest.mark.parametrize("num_layers", [*range(1, 13), 28, 64, 80])
def test_candidates_are_few_distinct_and_exist(num_layers):
    assert layer_sets(4) == ("all", (0, 1), (2, 3), (3,), (0,), (1,), (2,))
    sets = layer_sets(num_layers)
    assert sets[0] == "all"
    assert len(set(sets)) == len(sets) <= 10
    assert all(0 <= layer < num_layers for layers in sets[1:] for layer in layers)
    layers = uv_layers(num_layers)
    assert len(layers) <= 6 and sorted(set(layers)) == list(layers)
    assert layers[0] >= 1 and layers[-1] == num_layers


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


FOUR_LAYERS = {"num_layers": 4, "default_uv_layer": 4}


@pytest.fixture
def sessions(fake_engines):
    return fake_engines(measure, **FOUR_LAYERS)


def test_specvlm_takes_layers_first_then_lambda(sessions):
    totals = []
    result = calibrate.run(Calibration(), lambda event, fields: totals.append(fields.get("total")))
    assert result["config"] == {"lambda_r": 0.3, "guidance_layers": (2, 3)}
    (session,) = sessions
    knobs = [(c["knobs"]["guidance_layers"], c["knobs"]["lambda_r"]) for c in session.asked]
    assert knobs[:7] == [(layers, 1.0) for layers in layer_sets(4)]
    assert knobs[7:] == [((2, 3), i / 10) for i in range(10)]
    assert len(knobs) in totals, "what is announced is what is measured"
    assert [row["lambda_r"] for row in result["measurements"]].count(0.0) == 1
    assert [row["chosen"] for row in result["measurements"]].count(True) == 1
    assert session.job["prompts"]["held_out"] == [1000, 1001, 1002, 1003], "not the benchmark's videos"
    assert session.job["llm"]["speculative_config"]["on_draft_error"] == "raise"


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
    (tmp_path / "config.json").write_text("{}")
    what = Calibration(target=str(tmp_path), draft="self", engine_args={"max_model_len": 4096})
    calibrate.check(what)
    job = what.job()
    assert job["prompts"]["family"] is None
    assert job["llm"]["max_model_len"] == 4096
    assert job["llm"]["speculative_config"]["model"] == "self"
    assert "dtype" not in job["llm"], "that is vLLM's choice"


@pytest.mark.parametrize("pruner", calibrate.PRUNERS)
def test_command_writes_what_the_configuration_reads(sessions, tmp_path, pruner):
    out = tmp_path / "c.json"
    result = invoke("calibrate", "--pruner", pruner, "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "*" in result.stdout
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
        "    send(event='answer', echo=json.loads(line), pid=os.getpid())\n"
    )
    monkeypatch.setattr(EngineSession, "program", (str(job),))
    with EngineSession({"llm": 1}) as session:
        assert session.ready["echo"] == {"llm": 1}
        assert session.ask({"command": "x"})["echo"] == {"command": "x"}
        for _ in range(2):
            with pytest.raises(VidSpecError, match=r"^the engine stopped: ValueError: it died$"):
                session.ask({"command": "die"})
    assert not session.folder.exists() and is_gone(session.ready["pid"])

    with EngineSession({"llm": 1}) as session:
        threading.Timer(0.1, os.kill, (session.ready["pid"], signal.SIGKILL)).start()
        with pytest.raises(VidSpecError, match=r"^the engine stopped: it wrote nothing$"):
            session.ask({"command": "hang"})
