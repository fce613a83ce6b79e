"""The benchmark beside others: engines that take turns, its one command and what it writes; no engine."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))
    module = importlib.import_module("run")
    monkeypatch.setattr(module.bench_kernels, "_COPY_BYTES", 2**20)
    monkeypatch.setattr(module.bench_kernels, "_PRODUCT_SIZE", 64)
    return module


def answer(asked, propose_ms):
    """Stand in for `ask`: each round is slower than the one before, one method cannot run."""

    def ask(job):
        spec = job["llm"].get("speculative_config", {"method": "vanilla"})
        asked.append(job)
        if spec["method"] == "eagle":
            raise RuntimeError("ValueError: no such head")
        number = sum(one["llm"].get("speculative_config") == job["llm"].get("speculative_config") for one in asked)
        ms = propose_ms[spec["method"]]
        return [
            {
                "batch_size": size,
                "step_ms": 10.0 * number,
                "propose_ms": ms and ms * number * size,
                "propose_host_ms": ms,
            }
            for size in job["batch_sizes"]
        ]

    return ask


def test_engines_take_turns_and_are_compared_within_a_round(run, monkeypatch, tmp_path):
    """Catches: a method that a machine's slow minute meets alone; one that cannot run and takes the table with it;
    figures of another batch size."""
    asked = []
    times = {"vanilla": None, "vidspec": 2.0, "draft_model": 6.0}
    monkeypatch.setattr(run.engines, "ask", answer(asked, times))
    arguments = ["--only", "drafting", "--batch", "1,4", "--rounds", "3", "--out", str(tmp_path / "peers.json")]
    found = run.main([*arguments, "--draft-shape", "tiny"])
    methods = [job["llm"].get("speculative_config", {}).get("method") for job in asked]
    assert methods == [None, "vidspec", "draft_model", "eagle"] + [None, "vidspec", "draft_model"] * 2
    shown = [(row["method"], row["batch_size"], row["propose_ms"], row["propose_ratio"]) for row in found["drafting"]]
    assert shown == [
        *(("vanilla", 1, None, None), ("vanilla", 4, None, None)),
        *(("vidspec", 1, 4.0, 1.0), ("vidspec", 4, 16.0, 1.0)),
        *(("draft_model", 1, 12.0, 3.0), ("draft_model", 4, 48.0, 3.0)),
        *(("eagle", 1, None, None), ("eagle", 4, None, None)),
    ]
    assert [row["step_ratio"] for row in found["drafting"]] == [1.0] * 6 + [None] * 2
    text = (tmp_path / "peers.md").read_text()
    assert "ValueError: no such head" in text and "mean nothing" not in text and "| 4 | draft_model | 48 | 3 |" in text
    assert json.loads((tmp_path / "peers.json").read_text()) == found


def test_engines_of_a_round_are_alike(run, tmp_path):
    """Catches: a peer of another size, or one that sees another prompt's length or more tokens a step."""
    options = run.arguments(["--draft-shape", "0.5b", "--num-tokens", "4"])
    models = run.engines.make_checkpoints(tmp_path, options.draft_shape)
    jobs = {method: run.engines.job_of(method, models, options) for method in options.methods}
    assert [job.pop("method") for job in jobs.values()] == options.methods
    specs = {method: job["llm"].pop("speculative_config", None) for method, job in jobs.items()}
    assert len({json.dumps(job) for job in jobs.values()}) == 1, "all but the drafts is the same"
    assert specs.pop("vanilla") is None
    assert {spec["num_speculative_tokens"] for spec in specs.values()} == {4}
    text, head = (json.loads(Path(models[name], "config.json").read_text()) for name in ("vidspec", "eagle"))
    text = text["text_config"]
    assert (text["num_hidden_layers"], text["vocab_size"], len(text["layer_types"])) == (24, run.engines.VOCAB, 24)
    assert all(text[name] == value for name, value in head.items() if name in text and name != "model_type")
    assert models["draft_model"] == models["vidspec"] == jobs["eagle"]["llm"]["model"]


def test_a_clock_tells_what_a_step_drafts_for(run):
    """Catches: a speculator that is called twice or loses what it returns; figures that are returned twice."""
    speculator = SimpleNamespace(propose=lambda *args, **kwargs: (args, kwargs))
    clock = run.engines.Clock(speculator)
    assert [speculator.propose(i, n=2) for i in range(3)] == [((i,), {"n": 2}) for i in range(3)]
    assert all(ms >= 0 for ms in clock.take().values())
    assert clock.take() == run.engines.Clock(None).take() == {"propose_ms": None, "propose_host_ms": None}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_peer_that_is_off_ends_the_run(run, monkeypatch, tmp_path):
    """Unless nothing is computed: then both files note that the numbers mean nothing."""

    def off(inputs):
        call, tokens = run.attention.ours(inputs)
        return call, lambda result: tokens(result) + 1

    monkeypatch.setitem(run.attention.PEERS, "sdpa", off)
    arguments = ["--only", "attention", "--calls", "2", "--out", str(tmp_path / "peers.json")]
    with pytest.raises(RuntimeError, match=r"sdpa at shape=\S+ context=200 .* computes something else"):
        run.main(arguments)
    found = run.main([*arguments, "--dry-run"])
    assert all(row["max_error"] is None and row["unit"] == "us" for row in found["attention"])
    assert [row["impl"] for row in found["attention"]] == list(run.attention.PEERS)
    for file in ("peers.json", "peers.md"):
        assert "these numbers mean nothing" in (tmp_path / file).read_text()
