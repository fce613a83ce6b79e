"""The admin route: who may use it, what it changes, and what it says of what is wrong."""

import asyncio

import fastapi
import pytest
from fastapi.testclient import TestClient

from vllm_vidspec.config import METHOD, parse_config
from vllm_vidspec.engine.admin import KEY, PATH, AdminRoutes
from vllm_vidspec.engine.knobs import Knobs

SECRET = {"Authorization": "Bearer a-secret"}


class Engine:
    """An engine client whose workers keep knobs, and whose scheduler keeps a limit."""

    def __init__(self, **knobs):
        config, _ = parse_config({"model": "draft", "num_speculative_tokens": 5, "pruner": "uniform", **knobs})
        self.vllm_config = type("Config", (), {"additional_config": {METHOD: config.model_dump()}})
        self.knobs, self.limit, self.calls = Knobs(config), None, []

    async def collective_rpc(self, method, args=()):
        self.calls.append(method)
        if method == "vidspec_knobs":
            return [self.knobs.current.flat()] * 2
        changes = dict(*args)
        if "num_speculative_tokens" in changes:
            self.limit = changes.pop("num_speculative_tokens")
            if self.limit == 99:
                raise Exception("Call to collective_rpc method failed: a\nnum_speculative_tokens: between 0 and 5")
        self.knobs.retune(changes)
        return [None] * 2


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
    answer = it.post(PATH, headers=SECRET, json={"prune": {"ratio": 0.5}, "num_speculative_tokens": 0})
    assert answer.status_code == 200 and answer.json()["prune_ratio"] == 0.5 and engine.limit == 0
    answer = it.post(PATH, headers=SECRET, json={"pruner": "fastvid"})
    assert (answer.json()["pruner"], answer.json()["prune_ratio"]) == ("fastvid", 0.5), "what was changed before stays"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prune_ratio": 2}, "prune_ratio"),
        ({"prune_ratoi": 0.5}, "did you mean"),
        ({"model": "other"}, "model cannot change while the engine runs"),
        ({"pruner": "uv"}, "this engine does not observe the target's uv"),
        ({"pruner": "auto"}, "start the engine with it"),
        ({"num_speculative_tokens": 99}, "between 0 and 5"),
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
    assert said in answer.json()["error"] and "\n" not in answer.json()["error"]
    assert engine.knobs.current.flat() == Engine().knobs.current.flat()
