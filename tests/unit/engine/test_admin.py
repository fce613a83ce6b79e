"""The admin route: who may use it, what it changes, and what it says of what is wrong."""

import asyncio
from types import SimpleNamespace

import fastapi
import pytest
from fastapi.testclient import TestClient

from vllm_vidspec.config import METHOD, parse_config
from vllm_vidspec.engine import admin
from vllm_vidspec.engine.admin import KEY, PATH, AdminRoutes
from vllm_vidspec.engine.compat import scheduler
from vllm_vidspec.engine.compat.scheduler import RETUNE
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.report.lines import MAX_LINE, bound_log_lines
from vllm_vidspec.engine.scheduling import SchedulerSide
from vllm_vidspec.errors import VidSpecError

SECRET = {"Authorization": "Bearer a-secret"}


class Engine:
    """An engine client whose workers keep knobs, and whose scheduler keeps a limit."""

    def __init__(self, **knobs):
        config, _ = parse_config({"model": "draft", "num_speculative_tokens": 5, "pruner": "uniform", **knobs})
        self.vllm_config = type("Config", (), {"additional_config": {METHOD: config.model_dump()}})
        self.knobs, self.calls, self.refusal = Knobs(config), [], None
        scheduler = SimpleNamespace(dynamic_sd_lookup=None, scheduler_config=SimpleNamespace(max_num_seqs=8))
        self.vllm_config.instance_id = "nobody's"
        self.vllm_config.parallel_config = SimpleNamespace(data_parallel_index=0, data_parallel_size=1)
        scheduler._vidspec_side = SchedulerSide(scheduler, self.vllm_config)
        self.core = SimpleNamespace(scheduler=scheduler)

    async def collective_rpc(self, method, args=()):
        self.calls.append(method)
        try:
            if method == RETUNE and self.refusal:
                raise VidSpecError(self.refusal)
            return scheduler._Patches.collective_rpc(self.workers, self.core, method, None, args, None)
        except Exception as error:  # as vLLM's engine core tells its client
            raise Exception(f"Call to collective_rpc method failed: {error}") from None

    def workers(self, core, method, timeout, args, kwargs):
        return [self.knobs.current.model_dump()] * 2 if method == "vidspec_knobs" else [self.knobs.retune(*args)] * 2


@pytest.fixture
def client(monkeypatch):
    def make(engine, key="a-secret"):
        monkeypatch.setenv(KEY, key)
        app, routes = fastapi.FastAPI(), AdminRoutes()
        routes.attach_router(app)
        asyncio.run(routes.init_state(engine, app.state, None))
        return TestClient(app)

    return make


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "a-secret"}, {"Authorization": "Bearer "}]
)
@pytest.mark.parametrize("method", ["get", "post"])
def test_without_the_key_nothing_is_told_or_changed(client, headers, method):
    engine = Engine()
    answer = getattr(client(engine), method)(PATH, headers=headers)
    assert answer.status_code == 401 and engine.calls == []


def test_there_is_no_route_without_a_key_or_our_method(client):
    engine = Engine()
    engine.vllm_config.additional_config = {}
    for it, key in ((Engine(), ""), (engine, "a-secret"), (None, "a-secret")):
        assert client(it, key).get(PATH, headers={"Authorization": f"Bearer {key}"}).status_code == 404


def test_knobs_are_told_and_changed(client):
    engine = Engine()
    it = client(engine)
    assert it.get(PATH, headers=SECRET).json()["prune_ratio"] == 0.9
    answer = it.post(PATH, headers=SECRET, json={"prune_ratio": 0.5, "num_speculative_tokens": 0})
    assert answer.status_code == 200 and answer.json()["prune_ratio"] == 0.5
    answer = it.post(PATH, headers=SECRET, json={"pruner": "fastvid"})
    assert (answer.json()["pruner"], answer.json()["prune_ratio"]) == ("fastvid", 0.5), "what was changed before stays"


def test_a_line_of_the_log_is_short_whatever_is_sent(client, caplog):
    """Catches: a POST that fills the log; a change that a long one beside it hides."""
    bound_log_lines()
    bound_log_lines()
    it = client(Engine(request_scorers=["strict", "fly"]))
    caplog.clear()
    sent = {"protected_tokens": ["a" * 60_000], "prune_ratio": 0.5}
    with caplog.at_level("INFO", logger="vllm.vidspec"):
        assert it.post(PATH, headers=SECRET, json=sent).status_code == 200
        admin.logger.warning("vidspec: request %s runs without speculation: %s", "r" * 60_000, "no\nroom")
    changed, request = (record.getMessage() for record in caplog.records)
    assert len(changed) < 300 and "prune_ratio=0.5" in changed
    assert len(request) <= MAX_LINE and request.endswith("...") and "vidspec: request rrr" in request


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ("prune_ratio: no", "prune_ratio: no"),
        ("a\nb: no", "b: no"),
        ("Worker failed with error 'b: no', please check the stack trace above for the root cause", "b: no"),
        ("x" * 60_000, "x" * 497 + "..."),
    ],
)
def test_what_the_engine_refuses_is_told_without_how_it_came(client, refusal, said):
    """Catches: an error that begins with the name of vLLM's call."""
    engine = Engine()
    engine.refusal = refusal
    assert client(engine).post(PATH, headers=SECRET, json={"prune_ratio": 0.5}).json() == {"error": said}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prune_ratio": 2}, "prune_ratio"),
        ({"prune_ratoi": 0.5}, "did you mean"),
        ({"model": "other"}, "model cannot change while the engine runs"),
        ({"pruner": "uv"}, "this engine does not observe the target's uv"),
        ({"pruner": "auto"}, "start the engine with it"),
        ({"num_speculative_tokens": 99}, "between 0 and 5"),
        ({"num_speculative_tokens": "9" * 60_000}, "between 0 and 5"),
        ([1], "a JSON object"),
        ("x" * 70_000, "exceeds 65536 bytes"),
        *((garbage, "") for garbage in (b"", b"{", b"[" * 10_000, b"\xff")),
    ],
)
def test_what_is_wrong_is_one_line(client, body, said):
    engine = Engine()
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = client(engine).post(PATH, headers=SECRET, **sent)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert said in error and "\n" not in error and len(error) <= 500 and "collective_rpc" not in error
    assert engine.knobs.current.model_dump() == Engine().knobs.current.model_dump()
