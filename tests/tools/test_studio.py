"""The page's routes: whose key goes where, what is switched for a vanilla answer, what another site can reach."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from vllm_vidspec.config import VidSpecConfig, parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs, studio

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
from starlette.testclient import TestClient  # noqa: E402  # where it is installed

ADMIN = "the-operator's"
TOKEN = "of-its-address"
GUARD = {studio.GUARD: TOKEN}
VIDEO = "data:video/mp4;base64,AAAA"
ASKED = {"model": "target", "question": "what?", "video": VIDEO}
KNOBS = VidSpecConfig(model="draft", num_speculative_tokens=25, draft_shape="auto").model_dump()


class Server:
    """A `vllm serve`: it takes two keys, and answers in a stream that says whose it is."""

    def __init__(self, keeps_records=True):
        self.keeps_records, self.limit, self.shape, self.seen = keeps_records, 25, "auto", []

    def __call__(self, request):
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        self.seen.append((request.url.host, request.url.path, key))
        body = json.loads(request.content or b"null")
        if request.url.path == studio.KNOBS:
            if key != ADMIN:
                return httpx.Response(401, json={"error": "unauthorized"})
            body = body or {}
            self.limit = body.get(studio.LIMIT, self.limit)
            self.shape = body.get("draft_shape", self.shape)
            if body and "pruner" in body:
                return httpx.Response(400, json={"error": "no such pruner"})
            holds = {studio.LIMIT: self.limit, "draft_shape": self.shape}
            first = {name: KNOBS[name] for name in holds}
            return httpx.Response(200, json=KNOBS | holds | {"speculation": "on", "configured": first})
        if key not in ("a", "b"):
            return httpx.Response(401, json={"error": "Unauthorized"})
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "target"}]})
        if "vidspec_record" in body and not self.keeps_records:
            return httpx.Response(400, json={"error": {"message": "vidspec_record: this server keeps none"}})
        if body["messages"][0]["content"][1]["text"] == "fail":
            return httpx.Response(400, json={"error": {"message": "no such thing"}})
        told = {"key": key, "limit": self.limit, "recorded": body.get("vidspec_record", False), "body": body}
        return httpx.Response(200, content=f"data: {json.dumps(told)}\n\ndata: [DONE]\n\n".encode())


@pytest.fixture
def page(monkeypatch):
    def make(server, **more):
        client = staticmethod(lambda: httpx.AsyncClient(transport=httpx.MockTransport(server)))
        monkeypatch.setattr(studio.Studio, "_client", client)
        it = studio.Studio("http://server", **more)
        it.token = TOKEN
        return TestClient(it.app(), base_url="http://127.0.0.1")

    return make


def ask(it, side="drafts", key="a", **more):
    headers = GUARD | {"Authorization": f"Bearer {key}"}
    answer = it.post(f"/api/ask?side={side}", headers=headers, json=ASKED | more)
    return json.loads(answer.text.splitlines()[0].removeprefix("data: ")) if answer.status_code == 200 else answer


def test_each_caller_has_his_own_key_and_the_operators_goes_to_his_route_alone(page):
    """Catches: a key that stays for the next caller, the operator's sent where answers are made."""
    server = Server()
    it = page(server, admin_key=ADMIN, is_own=True)
    assert [ask(it, key=key)["key"] for key in "ab"] == ["a", "b"]
    assert (
        ask(it, key="c")["error"]["message"] == "Unauthorized"
        and it.get("/api/setup", headers=GUARD).status_code == 401
    )
    told = it.get("/api/setup", headers=GUARD | {"Authorization": "Bearer a"}).json()
    assert (told["model"], told["vanilla"], told["knobs"]["pruner"]) == ("target", "switch", "specvlm")
    assert ADMIN not in json.dumps(told) + it.get(f"/?token={TOKEN}").text
    assert {path == studio.KNOBS for _, path, key in server.seen if key == ADMIN} == {True}
    assert not [path for _, path, key in server.seen if key != ADMIN and path == studio.KNOBS]


def test_a_vanilla_answer_of_its_own_server_is_made_without_drafts(page):
    """And what was set before holds again afterwards, also where the answer has failed."""
    server = Server()
    it = page(server, admin_key=ADMIN, is_own=True)
    assert ask(it, "vanilla")["limit"] == 0 and server.limit == 25 and ask(it)["limit"] == 25
    assert it.post("/api/knobs", headers=GUARD, json={studio.LIMIT: 3}).status_code == 200
    assert ask(it, "vanilla", question="fail")["error"]["message"] == "no such thing" and server.limit == 3


def test_somebody_elses_server_is_never_switched(page):
    server = Server()
    it = page(server, admin_key=ADMIN)
    assert ask(it, "vanilla").status_code == 400 and "--vanilla" in ask(it, "vanilla").json()["error"]
    it = page(server, admin_key=ADMIN, vanilla="http://other/")
    assert ask(it, "vanilla")["recorded"] is False and server.seen[-1][0] == "other"
    assert studio.KNOBS not in [path for _, path, _ in server.seen]


def test_a_server_without_records_answers_all_the_same(page):
    assert ask(page(Server()))["recorded"] is True
    assert ask(page(Server(keeps_records=False)))["recorded"] is False


ROUTES = [("get", "/"), ("get", "/api/setup"), ("get", "/api/sample")]
ROUTES += [("post", f"/api/{name}") for name in ("frames", "ask", "knobs")]


def test_every_route_is_tried_below(page):
    assert {path for _, path in ROUTES} == {route.path for route in page(Server()).app.routes}


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_without_the_token_of_its_address_nothing_is_reached(page, method, path):
    """Catches: knobs turned, or a video asked about, by another user of this machine or another site's script."""
    server = Server()
    it = page(server, admin_key=ADMIN, is_own=True)
    body = {"json": ASKED | {studio.LIMIT: 0}} if method == "post" else {}
    wrong = [{}, {studio.GUARD: "1"}, {studio.GUARD: TOKEN[:-1]}, {studio.GUARD: ""}, {studio.GUARD: b"\xff"}]
    for headers in wrong:
        answer = getattr(it, method)(path, headers=headers, **body)
        assert answer.status_code == 403 and "token" in answer.json()["error"]
        assert getattr(it, method)(f"{path}?token=1", headers=headers, **body).status_code == 403
    # In an address alone it opens the page, and what an address cannot carry by accident stays closed.
    assert getattr(it, method)(f"{path}?token={TOKEN}", **body).status_code == (200 if path == "/" else 403)
    assert getattr(it, method)(path, headers=GUARD | {"Host": "evil.example"}, **body).status_code == 400
    assert server.seen == []


def test_the_token_is_of_a_run_and_in_the_address_that_is_told(monkeypatch):
    """Catches: one that can be guessed, or is the same every time."""
    told = []
    monkeypatch.setattr(studio, "serve", lambda it, listener: told.append(it.token))
    for _ in range(2):
        studio.run(studio.Show(server="http://server", port=0), lambda what, of: told.append(of["url"]))
    (first, one), (second, two) = told[:2], told[2:]
    assert one != two and len(one) >= 22 and first.endswith(f"/?token={one}") and second.endswith(f"/?token={two}")


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"[" * 10_000, json.dumps(ASKED | {"video": "x"}).encode()])
def test_what_is_wrong_is_one_line(page, body):
    answer = page(Server()).post("/api/ask?side=drafts", headers=GUARD, content=body)
    assert answer.status_code == 400 and "\n" not in answer.json()["error"]


def test_knobs_are_changed_by_the_operators_route(page):
    refused = page(Server(), admin_key=ADMIN).post("/api/knobs", headers=GUARD, json={"pruner": "x"})
    assert (refused.status_code, refused.json()["error"]) == (400, "no such pruner")
    assert page(Server()).post("/api/knobs", headers=GUARD, json={studio.LIMIT: 0}).status_code == 403


def test_the_page_is_told_what_holds_and_which_shapes_there_are(page):
    """Catches: a knob that a reload of the page takes back, a bound that sinks with what was chosen."""
    it = page(Server(), admin_key=ADMIN)
    told = it.post("/api/knobs", headers=GUARD, json={"draft_shape": "chain", studio.LIMIT: 3}).json()
    for knobs in (told, it.get("/api/setup", headers=GUARD | {"Authorization": "Bearer a"}).json()["knobs"]):
        assert (knobs["draft_shape"], knobs[studio.LIMIT], knobs["most"]) == ("chain", 3, 25)
        assert knobs["shapes"] == ["auto", "chain", "tree-2", "tree-3", "tree-4"]


@pytest.fixture
def loaded(tmp_path):
    """Return what writes a video of so many frames at 2 per second, and what vLLM's own loader reads of it."""
    pytest.importorskip("cv2")
    pytest.importorskip("vllm")
    from vllm.multimodal.media.image import ImageMediaIO
    from vllm.multimodal.media.video import VideoMediaIO
    from vllm.multimodal.video import get_video_loader_backend_for_processor as loader_of

    def made(processor, total):
        path = tmp_path / "video.mp4"
        frames = np.zeros((total, 56, 56, 3), np.uint8)
        frames[:, :, :, 0], frames[:, :, :, 1] = np.linspace(0, 255, total)[:, None, None], 255
        world.write_mp4(frames, path)
        backend = loader_of(processor)
        loader = VideoMediaIO(ImageMediaIO(), **({"video_backend": backend} if backend else {}))
        return path.read_bytes(), loader.load_bytes(path.read_bytes()).media[0]

    return made


def pictures(answer):
    urls = answer.json()["frames"]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))) for url in urls]


@pytest.mark.parametrize("total", [5, 33, 40, 41, 64, 451])
@pytest.mark.parametrize(
    ("family", "processor", "per_step"),
    [
        ("qwen2.5-vl", "Qwen2VLVideoProcessor", 2),
        ("qwen2-vl", "Qwen2VLVideoProcessor", 2),
        ("qwen3-vl", "Qwen3VLVideoProcessor", 2),
        ("llava-onevision", "LlavaOnevisionVideoProcessor", 1),
        ("internvl", "InternVLVideoProcessor", 1),
    ],
)
def test_pictures_are_of_the_frames_that_the_server_has_shown(page, loaded, family, processor, per_step, total):
    """Catches: kept tokens that are drawn over another moment of the video than the model saw there."""
    video, shown = loaded(processor, total)
    steps = -(-len(shown) // per_step)
    answer = page(Server()).post(f"/api/frames?family={family}&steps={steps}", headers=GUARD, content=video)
    found = pictures(answer)
    assert -(-len(found) // steps) == per_step
    assert [np.array_equal(*both) for both in zip(found, shown, strict=True)] == [True] * len(shown)


def test_frames_before_an_answer_are_spread_evenly(page):
    pytest.importorskip("cv2")
    it = page(Server(), num_frames=7)
    sample = it.get("/api/sample", headers=GUARD).content
    found = it.post("/api/frames", headers=GUARD, content=sample).json()["frames"]
    assert len(found) == 7 and all(url.startswith("data:image/png;base64,") for url in found)
    assert "is it a video" in it.post("/api/frames", headers=GUARD, content=b"no video").json()["error"]
    for wrong in ("x", "-1", "0", "9" * 9, "1.5"):
        answer = it.post(f"/api/frames?family=qwen2.5-vl&steps={wrong}", headers=GUARD, content=sample)
        assert answer.status_code == 400 and "steps" in answer.json()["error"]


def test_a_server_that_is_not_there_is_one_line(page):
    """Catches: an error page that the browser cannot read."""

    def gone(request):
        raise httpx.ConnectError("refused")

    it = page(gone, admin_key=ADMIN)
    for answer in (it.get("/api/setup", headers=GUARD), it.post("/api/knobs", headers=GUARD, json={studio.LIMIT: 0})):
        assert (answer.status_code, answer.json()["error"]) == (502, "no server answers at http://server (refused)")
    with pytest.raises(VidSpecError, match="--vanilla: 'ftp://x' is no address"):
        studio.Studio("127.0.0.1:8000/v1", "ftp://x")
    with pytest.raises(VidSpecError, match="got 'treee'"):
        studio.own_args(studio.Show(draft_shape="treee"), 1234)


def test_its_own_server_records_and_may_be_loose():
    args = studio.own_args(studio.Show(draft_shape="tree-static"), 1234)
    spec = json.loads(args[args.index("--speculative-config") + 1])
    assert spec["request_records"] and "loose" in spec["request_scorers"] and spec["draft_shape"] == "tree-static"
    assert spec["num_speculative_tokens"] == pairs.num_speculative_tokens("tree-static")
    args = studio.own_args(studio.Show(draft_shape="auto"), 1234)
    config, _ = parse_config(json.loads(args[args.index("--speculative-config") + 1]))
    assert config.choosable_shapes == ("auto", "chain", "tree-2", "tree-3", "tree-4")
