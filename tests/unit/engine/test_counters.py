"""Counters without an engine: who writes where, what a server shows, warm-up, and why an engine did not start."""

import os
import tempfile
from types import SimpleNamespace
from unittest import mock

import fastapi
import prometheus_client
import pytest
import torch
from fastapi.testclient import TestClient
from vllm.entrypoints.serve.instrumentator.metrics import attach_router

from tests.unit.engine.fakes import CPU, NUM_ROWS
from vllm_vidspec import metrics
from vllm_vidspec.engine import worker
from vllm_vidspec.engine.report import counters as counters_module
from vllm_vidspec.engine.report import server_counters
from vllm_vidspec.engine.report.counters import WINDOW, AcceptanceAlarm, Counters
from vllm_vidspec.engine.requests import NewRequest, RequestRows
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.scoring import ScoreInputs, score


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Publish the counters of a server in a temporary directory of the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(counters_module, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(server_counters, "_current", None)
    monkeypatch.delenv(server_counters._INSTANCE, raising=False)

    def publish(**parallel):
        config = vllm_config(**parallel)
        server_counters.publish(config)
        return config

    yield publish
    if collector := metrics.prometheus._registered.pop("collector", None):
        prometheus_client.REGISTRY.unregister(collector)
    os.environ.pop(server_counters._INSTANCE, None)


def vllm_config(instance_id="abcde", **parallel):
    ones = ("data_parallel_size", "data_parallel_size_local", "_api_process_count")
    zeros = ("data_parallel_index", "_api_process_rank", "local_engines_only", "node_rank_within_dp")
    parallel = dict.fromkeys(ones, 1) | dict.fromkeys(zeros, 0) | {"data_parallel_rank_local": None} | parallel
    return SimpleNamespace(
        instance_id=instance_id,
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(served_model_name="m"),
        observability_config=SimpleNamespace(per_request_spec_decode_metrics="summary"),
    )


def counters_of(config) -> Counters:
    """Return the counters of a worker, all of whose rows have real drafts."""
    requests = RequestRows(NUM_ROWS, CPU)
    requests.has_draft.fill_(True)
    return Counters(config, CPU, metrics.MAX_POSITIONS, requests)


def worker_counters(config, engine: int = 0, suffix: str = "") -> Counters:
    return counters_of(vllm_config(config.instance_id + suffix, data_parallel_index=engine))


def begin(counters: Counters, req_state_idx: int, req_id: str) -> None:
    counters.begin_request(NewRequest(req_id, req_state_idx, [], [], None))


def verify(counters: Counters, accepted: list[int], num_drafts: int = 3) -> None:
    """Count one step in which request i, on row i, accepted `accepted[i]` of `num_drafts` tokens."""
    idx_mapping = torch.arange(len(accepted))
    bounds = torch.arange(len(accepted) + 1, dtype=torch.int32) * (num_drafts + 1)
    drafts = torch.tensor([[9] + [int(place < count) for place in range(num_drafts)] for count in accepted]).int()
    tally = counters.tally(idx_mapping)
    score(ScoreInputs(torch.ones(drafts.numel()).long(), drafts.flatten(), bounds, num_drafts, tally=tally))
    counters.flush()


def test_the_alarm_speaks_once_and_is_armed_by_a_sound_window(warned):
    """Catches: a line per window, an alarm that a single good answer re-arms, one that never speaks again."""
    alarm = AcceptanceAlarm()
    assert not alarm.observe(WINDOW - 1, 0), "a window is not full"
    assert alarm.observe(1, 0) and len(warned) == 1
    assert alarm.observe(WINDOW, WINDOW // 4) and len(warned) == 1
    assert not alarm.observe(WINDOW, 3 * WINDOW // 4), "neither near zero nor sound"
    assert alarm.observe(3 * WINDOW, WINDOW) and len(warned) == 1
    assert not alarm.observe(WINDOW, 5 * WINDOW)
    assert not alarm.observe(WINDOW, WINDOW // 2), "half a token pays"
    assert alarm.observe(WINDOW, 0) and len(warned) == 2


def test_every_data_parallel_engine_has_a_file_of_its_own(server, warned):
    """Catches: two workers that add to the same words, so that counts are lost."""
    config = server(data_parallel_size=2, data_parallel_size_local=2)
    first, second = worker_counters(config, 0), worker_counters(config, 1)
    for _ in range(3):
        verify(first, [3])
        verify(second, [1])
    files = server_counters._current
    assert [file.values()["accepted_tokens"] for file in files.values()] == [9, 3]
    assert not warned


@pytest.mark.parametrize("suffix", ["", "_dp1"], ids=["processes", "ray"])
def test_a_later_rank_finds_its_file(server, warned, suffix):
    """An external load balancer: this server has rank 1 alone; Ray's actors add the rank to the server's name."""
    config = server(data_parallel_size=2, data_parallel_index=1, local_engines_only=True)
    verify(worker_counters(config, 1, suffix), [2])
    assert server_counters._current[1].values()["accepted_tokens"] == 2
    assert not warned


@pytest.mark.parametrize("node", [0, 1], ids=["no file here", "another node"])
def test_counts_of_another_host_go_with_outputs(server, node):
    """Ray's worker, or the last stage on its own node. Catches: counts that vanish or come twice, gauges added up."""
    config = server()
    counters = counters_of(vllm_config("elsewhere" if node == 0 else config.instance_id, node_rank_within_dp=node))
    file = server_counters._current[0]
    for accepted in (2, 3):
        begin(counters, 0, "a")
        verify(counters, [accepted])
        counters.set("held_requests", accepted)
        assert file.values()["accepted_tokens"] == (accepted - 2) * 2
        file.take_in(counters.carried())
        assert counters.carried() is None
    assert file.values()["accepted_tokens"] == 5 and file.values()["held_requests"] == 3


def test_what_is_not_on_this_metrics_is_said(server, warned):
    """Engines of other hosts, and a front end that knows nothing of us."""
    server(data_parallel_size=4, data_parallel_size_local=2)
    assert list(server_counters._current) == [0, 1]
    server(_api_process_rank=-1)
    assert warned[0] == "vidspec: the counters of 2 engines on other hosts are not on this /metrics"
    assert len(warned) == 2 and "the Rust front end" in warned[1]


def test_every_api_server_shows_the_same_counters(server, warned, tmp_path, monkeypatch):
    """Each has a configuration of its own, and every scrape makes a registry: nothing vanishes, no file is idle."""
    config = server(_api_process_count=2, _api_process_rank=-1)
    verify(worker_counters(config), [2])
    server_counters.publish(vllm_config("fghij", _api_process_count=2, _api_process_rank=1))  # inherits the environment
    assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / "prometheus").mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "prometheus"))
    app = fastapi.FastAPI()
    attach_router(app)
    for _ in range(2):
        text = TestClient(app).get("/metrics").text
        found = [line for line in text.splitlines() if line.startswith("vidspec:accepted_tokens_total{")]
        assert len(found) == 1 and found[0].endswith("} 2.0")
    assert not warned


def test_a_directory_that_takes_no_file_costs_the_counters_and_no_more(server, warned, monkeypatch, tmp_path):
    """Catches: a server that does not start because the temporary directory is full."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    counters = worker_counters(server())
    verify(counters, [1])
    counters.skip("pool_full", "r", "no room")
    assert len(warned) == 3 and all("\n" not in line for line in warned)
    assert "nothing is counted" in warned[0] and "not published" in warned[1]
    assert server_counters.refusal() is None


def test_vllms_warm_up_leaves_no_trace(server, warned):
    """On a GPU it sends real requests: no count or line stays of them, not even of a warm-up that fails."""
    counters = worker_counters(server())
    begin(counters, 1, "before")
    verify(counters, [2, 0])
    before = server_counters._current[0].values()

    class Base:
        model_runner = SimpleNamespace(counters=counters, uncounted=counters.paused)

        def compile_or_warm_up_model(self):
            for row in range(3):
                begin(counters, row, f"_warmup_{row}_")
            verify(counters, [3, 3, 3])
            counters.skip("pool_full", "_warmup_0_", "no room")
            counters.add("prompts", 3)
            return 1 / self.num_seconds

    warming = type("Worker", (worker.VidSpecWorker, Base), {})()
    warming.num_seconds = 0
    with pytest.raises(ZeroDivisionError):
        warming.compile_or_warm_up_model()
    warming.num_seconds = 2
    assert warming.compile_or_warm_up_model() == 0.5
    counters.flush()
    assert server_counters._current[0].values() == before
    assert not warned
    counters.skip("pool_full", "user", "no room")
    begin(counters, 0, "user")
    verify(counters, [1])
    gained = metrics.difference(before, server_counters._current[0].values())
    assert (gained["drafts"], gained["accepted_tokens"], gained["skipped_pool_full"]) == (1, 1, 1)
    assert len(warned) == 1


def test_a_workers_refusal_reaches_the_server(server):
    """Catches: a step of start-up whose refusal stays in the worker's log, a hundred lines above the end."""
    config = server(data_parallel_size=2, data_parallel_size_local=2)

    names, refuse = ("init_device", "load_model", "determine_available_memory", "initialize_from_config"), mock.Mock()
    starting = type("Worker", (worker.VidSpecWorker, type("Base", (), dict.fromkeys(names, refuse))), {})()
    starting.vllm_config = vllm_config(config.instance_id + "_dp1", data_parallel_index=1)
    assert server_counters.refusal() is None
    for name in names:
        refuse.side_effect = VidSpecError(f"refused in {name}")
        with pytest.raises(VidSpecError):
            getattr(starting, name)()
        assert server_counters.refusal() == f"refused in {name}"
    os.unlink(metrics.path_for(config.instance_id, 1))
    with pytest.raises(VidSpecError, match="refused in"):  # the reason, not that it cannot be left
        starting.init_device()
