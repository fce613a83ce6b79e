"""The planner beside what one H100 took (docs/results/gpu-h100.json), to which a part of its assumptions is fitted."""

import json
import re
from pathlib import Path

import pytest

from vllm_vidspec.planning.acceptance import RUNNER_UP, Agreement, rate_of_chain, rate_of_tree
from vllm_vidspec.planning.candidates import Question
from vllm_vidspec.planning.draft_cost import FP8
from vllm_vidspec.planning.planner import WORTH, Planner, plan
from vllm_vidspec.planning.roofline import GPUS
from vllm_vidspec.planning.shapes import draft_shape, target_shape

RECORD = json.loads((Path(__file__).resolve().parents[3] / "docs" / "results" / "gpu-h100.json").read_text())
ROWS = {(row["engine"], row["batch"]): row for row in RECORD["engines"] if row["outcome"] == "measured"}
REAL = {step["name"]: step["facts"] for step in RECORD["checks"] if step["name"].startswith("real-")}
WITHIN = 0.05


def planner(target, draft, quantization=None, **given):
    shape = target_shape(target)
    shapes = [shape, draft_shape(draft, shape)]
    if quantization:
        shapes = [one.quantised(quantization) for one in shapes]
    asked = {"draft_gpus": 0, "text_tokens": 100, "prune_ratios": (0.9,)} | given
    return Planner(Question(*shapes, GPUS["h100"], **asked))


def suite():
    """32B with 7B, both fp8, over the suite's video; memory is not what is asked."""
    return planner("Qwen2.5-VL-32B", "7B", FP8, video_tokens=25_088)


def steps(shape, batch):
    """Return what the steps of a row took and what they are modelled as, in ms: (measured, modelled) by what it is."""
    row, asked = ROWS[shape, batch], suite()
    if shape == "vanilla":
        return {"a step": (row["step_ms"], 1e3 * asked.vanilla(batch).target_s)}
    found = asked.chain(batch, 5, 0.9) if shape == "chain" else asked.tree(batch, 0.9)
    verify_ms = 1e3 * (found.verify_s + asked.question.assumed.speculation_s)
    return {
        "drafting": (row["propose_ms"], 1e3 * found.drafting_s),
        "verifying": (row["step_ms"] - row["propose_ms"], verify_ms),
    }


def compiled_steps(batch):
    """Return the same of 7B with 3B in bf16, compiled, over the short video: vanilla's, and a chain's of 5."""
    vanilla, chain = (REAL[name][f"batch_{batch}"] for name in ("real-vanilla", "real-chain"))
    asked = planner("Qwen2.5-VL-7B", "3B", video_tokens=256)
    found = asked.chain(batch, 5, 0.9)
    step_s = found.drafting_s + found.verify_s + asked.question.assumed.speculation_s
    drafting = {"drafting": (chain["propose_ms"], 1e3 * found.drafting_s)}
    return {"a step": (vanilla["step_ms"], 1e3 * found.target_s)}, drafting | {
        "a step": (chain["step_ms"], 1e3 * step_s)
    }


@pytest.mark.parametrize(("shape", "batch"), [key for key in ROWS if key[0] in ("vanilla", "chain", "tree-static")])
def test_times_are_those_that_were_measured(shape, batch):
    """Catches: a draft forward without what its layers take beside their bytes, a tree verified at a chain's price."""
    for measured, modelled in steps(shape, batch).values():
        assert modelled == pytest.approx(measured, rel=WITHIN)


@pytest.mark.parametrize("batch", [1, 2])
def test_gains_at_the_published_lengths_are_those_that_were_measured(batch):
    """Catches: plans that are 10 % too good for chains and 25 % for trees, as the data sheet alone made them."""
    asked = suite()
    chain = asked.chain(batch, 5, 0.9, Agreement((rate_of_chain(3.37, 5),)))
    tree = asked.tree(batch, 0.9, Agreement((rate_of_tree(4.18, RUNNER_UP),), RUNNER_UP))
    assert chain.speedup == pytest.approx(ROWS["chain", batch]["speedup"], rel=WITHIN)
    assert tree.speedup == pytest.approx(ROWS["tree-static", batch]["speedup"], rel=WITHIN)


def test_no_plan_says_yes_where_the_device_said_no():
    """7B with 3B in bf16: a step of five drafts takes 3.8 of vanilla's, and gives 3.4 tokens as published.
    Catches: a chain of 5, SpecVLM's tree, or any draft of more than two forwards, that a plan calls worth it.
    """
    vanilla, chain = REAL["real-vanilla"]["batch_1"], REAL["real-chain"]["batch_1"]
    short = planner("Qwen2.5-VL-7B", "3B", video_tokens=256)
    found = short.chain(1, 5, 0.9)
    assert 1e3 * found.target_s == pytest.approx(vanilla["step_ms"], rel=WITHIN)
    assert 1e3 * found.drafting_s == pytest.approx(chain["propose_ms"], rel=WITHIN)
    assert found.acceptance_length / found.speedup == pytest.approx(chain["step_ms"] / vanilla["step_ms"], rel=WITHIN)
    for batch in (1, 8):  # both were measured
        assert short.chain(batch, 5, 0.9).speedup < 1 and short.tree(batch, 0.9).speedup < 1
    long = planner("Qwen2.5-VL-7B", "3B", video_tokens=25_000)
    assert long.chain(1, 5, 0.9).speedup < 1 and long.tree(1, 0.9).speedup < WORTH
    for asked in (short, long):
        row = next(row for row in plan(asked.question, (1,))["rows"] if row["choice"] == "draft")
        assert row["shape"] == "tree-2" or (row["shape"] == "chain" and row["num_speculative_tokens"] <= 2)
    measured = found.acceptance_length * vanilla["step_ms"] / chain["step_ms"]
    assert found.speedup == pytest.approx(measured, rel=WITHIN) and measured < 1
    assert not long.pays(2), "a whole answer waits for two prefills of a draft that gains little"


def test_the_page_says_what_was_measured_and_what_is_modelled():
    """docs/notebook/planning.md, beside the measured steps. Catches: rows of another record, an error above 5 %."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "notebook" / "planning.md").read_text()
    rows = re.findall(
        r"^\| (.+) \| (\d) \| (a step|drafting|verifying) \| ([\d.]+) \| ([\d.]+) \| (\S+) % \|$", page, re.M
    )
    assert len(rows) == 17
    engines = {"SpecVLM's tree": "tree-static", "chain of 5": "chain", "vanilla": "vanilla"}
    for name, requests, what, measured, modelled, error in rows:
        batch = int(requests)
        if name in engines:
            found = steps(engines[name], batch)
        else:
            found = compiled_steps(batch)["chain" in name]
        assert (measured, modelled) == tuple(f"{ms:.2f}" for ms in found[what])
        assert abs(float(error)) <= 5
        assert float(error) == pytest.approx(100 * (found[what][1] / found[what][0] - 1), abs=0.06)
