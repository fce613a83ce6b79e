"""`vidspec studio`: a local page beside a running server; it passes requests on, and keeps nothing of them.

Whoever opens the page brings a key for the server, or none, and it goes with his own requests alone. The operator's key
stays here, so the page is served to this machine only, under its own names, and to who has the token of its address:
not to the machine's other users, nor to another site's scripts.
"""

import asyncio
import base64
import contextlib
import hmac
import io
import json
import os
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_vidspec import assets
from vllm_vidspec.config import AUTO, REQUEST_LAMBDA, REQUEST_RECORD, REQUEST_SCORER, VidSpecConfig, parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.names import PRUNERS
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.processes import VllmServer, free_port
from vllm_vidspec.tools.progress import Report, silent
from vllm_vidspec.tools.status import address
from vllm_vidspec.tools.user_files import frames_of, read_video

try:  # what vLLM's environment has
    import anyio
    import cv2  # noqa: F401 - read_video does without, and says that no frame can be decoded
    import httpx
    import uvicorn
    from PIL import Image
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ModuleNotFoundError as missing:
    raise VidSpecError(f"the page needs {missing.name}: run it in the environment of vLLM") from None

ADMIN_KEY = "VIDSPEC_ADMIN_KEY"
KNOBS = "/vidspec/knobs"
LIMIT = "num_speculative_tokens"
GUARD = "x-vidspec-studio"  # carries the token of the page's address, without which nothing is answered
MAX_BYTES = 96 << 20  # of a request; a video of 64 MiB as text
_ANSWER = {"max_tokens": 256, "temperature": 0.0}
_CHOICES = {"scorer": REQUEST_SCORER, "lambda": REQUEST_LAMBDA}
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)

_NO_REFERRER = {"Referrer-Policy": "no-referrer"}  # the page's address has its token

Answer = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Show:
    """What to show: a running server, maybe a vanilla one beside it; or the bundled pair on a server of its own."""

    server: str | None = None
    vanilla: str | None = None
    family: str = "qwen2.5-vl"
    draft_shape: str = "chain"
    num_speculative_tokens: int | None = None
    frames: int | None = None  # to which the server samples a video; None: those of the pair, and vLLM's default
    port: int = 8010
    log_dir: str | None = None

    @property
    def num_frames(self) -> int:
        return self.frames or pairs.pair_for(self.family).num_frames


class Studio:
    """The page's routes.

    Args:
        server: Address of a server with vidspec, "http://…".
        vanilla: Address of one without. None: the first answers without drafts, where `is_own` allows to switch them
            off for everybody for so long.
        admin_key: The operator's, of `server`; "" where the page changes nothing.
        num_frames: Of a video that the page shows before an answer; then it shows those that the model saw.
        is_own: Whether nobody else uses `server`.
    """

    def __init__(
        self, server: str, vanilla: str | None = None, admin_key: str = "", num_frames: int = 32, is_own: bool = False
    ):
        self._server = address(server)
        self._vanilla = None if vanilla is None else address(vanilla, "--vanilla")
        self._admin, self._num_frames, self._is_own = admin_key, num_frames, is_own
        self.token = secrets.token_urlsafe(16)  # in the page's address
        self._turn = asyncio.Lock()  # of the server's answers, while some are without drafts

    @property
    def _way(self) -> str | None:
        """How there is a vanilla answer: by a "server" of its own, by a "switch", or None."""
        return "server" if self._vanilla else "switch" if self._is_own and self._admin else None

    def app(self) -> Starlette:
        self._page = (Path(assets.__file__).parent / "studio.html").read_text()
        routes = [Route("/", self._admitted(self.page, lambda request: request.query_params.get("token", "")))]
        for answer, method in (
            *((answer, "GET") for answer in (self.setup, self.sample)),
            *((answer, "POST") for answer in (self.frames, self.ask, self.knobs)),
        ):
            by_header = self._admitted(answer, lambda request: request.headers.get(GUARD, ""))
            routes.append(Route(f"/api/{answer.__name__}", by_header, methods=[method]))
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
        errors = {VidSpecError: self._refuse, httpx.HTTPError: self._miss}
        return Starlette(routes=routes, middleware=[hosts], exception_handlers=errors)

    def _admitted(self, answer: Answer, given: Callable[[Request], str]) -> Answer:
        """Return what answers a route for who gives the token, and refuses everybody else."""

        async def admit(request: Request) -> Response:
            if not hmac.compare_digest(given(request).encode(), self.token.encode()):
                return _refused("the token is missing: open the address that `vidspec studio` has printed", 403)
            return await answer(request)

        return admit

    async def page(self, request: Request) -> Response:
        return HTMLResponse(
            self._page, headers={"Content-Security-Policy": _POLICY, "Cache-Control": "no-store", **_NO_REFERRER}
        )

    async def setup(self, request: Request) -> Response:
        """Tell what there is to choose from; the server's answer where it refuses the caller's key."""
        async with self._client() as client:
            models = await client.get(f"{self._server}/v1/models", headers=_authorization(request))
        knobs = await self._operate() if self._admin else None
        if models.status_code != 200:
            return _refused(f"the server answers {models.status_code}: does it need a key?", models.status_code)
        return _json(
            {
                "server": self._server,
                "model": models.json()["data"][0]["id"],
                "vanilla": self._way,
                "knobs": self._holding(knobs.json()) if knobs is not None and knobs.status_code == 200 else None,
                "pruners": list(PRUNERS),
                "frames": self._num_frames,
                "question": pairs.DEFAULT_QUESTION,
            }
        )

    async def sample(self, request: Request) -> Response:
        return FileResponse(pairs.sample_video(), media_type="video/mp4")

    async def frames(self, request: Request) -> Response:
        """Return frames of a video as data URLs: those that a model of `family` was shown, whose grid of it has so many
        `steps`; without, some that spread evenly.
        """
        family, steps = request.query_params.get("family", ""), request.query_params.get("steps")
        if steps is not None and not (steps.isdecimal() and len(steps) < 6 and int(steps)):
            raise VidSpecError("steps: expected the number of a grid's steps")
        number = self._num_frames if steps is None else frames_of(int(steps), family)
        return _json({"frames": await asyncio.to_thread(_decode, await _body(request), number, family)})

    async def knobs(self, request: Request) -> Response:
        """Change knobs by the operator's route; return those that hold then, or its refusal."""
        changes = _object(await _body(request))
        if not self._admin:
            return _refused(f"nothing can be changed: {ADMIN_KEY} is not set", 403)
        async with self._turn:
            answer = await self._operate(changes)
        if answer.status_code != 200:
            return _json(answer.json(), answer.status_code)
        return _json(self._holding(answer.json()))

    @staticmethod
    def _holding(told: dict[str, Any]) -> dict[str, Any]:
        """Return knobs as they hold, given what the route tells; `most` draft tokens, and `shapes` to choose from."""
        first = told.get("configured", {})
        knobs = {name: value for name, value in told.items() if name not in ("configured", "speculation")}
        try:
            shapes = VidSpecConfig.checked(knobs | first).choosable_shapes
        except VidSpecError:  # a server of another version
            shapes = ()
        return {**knobs, "most": first.get(LIMIT, knobs[LIMIT]), "shapes": shapes}

    async def _operate(self, changes: dict[str, Any] | None = None) -> Any:
        """Ask the operator's route which knobs hold, after these changes."""
        headers = {"Authorization": f"Bearer {self._admin}"}
        async with self._client() as client:
            method = "GET" if changes is None else "POST"
            return await client.request(method, self._server + KNOBS, json=changes, headers=headers)

    async def ask(self, request: Request) -> Response:
        """Stream an answer as the server does, with or without drafts."""
        asked, side = _object(await _body(request)), request.query_params.get("side")
        if side != "drafts" and self._way is None:
            raise VidSpecError("there is no vanilla server: start with --vanilla URL")
        body = _chat(asked)
        turn = self._turn if self._way == "switch" else contextlib.nullcontext()
        lines = self.stream(side, body, _authorization(request), turn)
        return StreamingResponse(lines, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def stream(
        self, side: str | None, body: dict[str, Any], headers: dict[str, str], turn: Any
    ) -> AsyncIterator[bytes]:
        """Yield the server's own lines; an error as one line of the same form."""
        is_switched = side != "drafts" and self._way == "switch"
        server = self._server if side == "drafts" or is_switched else str(self._vanilla)
        if server == self._server:
            body = body | {REQUEST_RECORD: True}
        try:
            async with turn, self._without_drafts() if is_switched else contextlib.nullcontext():
                async for part in self._lines(server, body, headers):
                    yield part
        except (OSError, VidSpecError, httpx.HTTPError) as error:
            yield f"data: {json.dumps({'error': {'message': str(error) or type(error).__name__}})}\n\n".encode()

    async def _lines(self, server: str, body: dict[str, Any], headers: dict[str, str]) -> AsyncIterator[bytes]:
        async with self._client() as client:
            url = f"{server}/v1/chat/completions"
            async with client.stream("POST", url, json=body, headers=headers) as answer:
                if answer.status_code != 200:
                    told = (await answer.aread()).decode(errors="replace")
                    if REQUEST_RECORD not in body or REQUEST_RECORD not in told:
                        raise VidSpecError(_message(told, answer.status_code))
                else:
                    async for part in answer.aiter_bytes():
                        yield part
                    return
        # A server that keeps no records, or that has never heard of them.
        async for part in self._lines(server, {key: body[key] for key in body.keys() - {REQUEST_RECORD}}, headers):
            yield part

    @contextlib.asynccontextmanager
    async def _without_drafts(self) -> AsyncIterator[None]:
        """Let the server draft nothing within, and what it did before afterwards, even if the reader has gone."""
        before = await self._operate()
        answer = before if before.status_code != 200 else await self._operate({LIMIT: 0})
        if answer.status_code != 200:
            raise VidSpecError(f"drafts cannot be switched off: {answer.json().get('error', answer.status_code)}")
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self._operate({LIMIT: before.json()[LIMIT]})

    @staticmethod
    def _client() -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=600, trust_env=False)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        return _refused(str(error))

    async def _miss(self, request: Request, error: Exception) -> Response:
        return _refused(f"no server answers at {self._server} ({error})", 502)


def _authorization(request: Request) -> dict[str, str]:
    given = request.headers.get("authorization")
    return {"Authorization": given} if given else {}


def _json(value: Any, status: int = 200) -> Response:
    return JSONResponse(value, status, headers={"Cache-Control": "no-store"})


def _refused(why: str, status: int = 400) -> Response:
    return _json({"error": why}, status)


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BYTES:
            raise VidSpecError(f"the request exceeds {MAX_BYTES >> 20} MiB: give a shorter video")
    return bytes(body)


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise VidSpecError("expected a JSON object")
    return found


def _chat(asked: dict[str, Any]) -> dict[str, Any]:
    """Return a chat request about a video, given what the page asks for. How many frames of it count is the server's
    choice: vLLM takes none of a request's by default.
    """
    video, question = asked.get("video"), asked.get("question")
    if not isinstance(question, str) or not isinstance(video, str) or not video.startswith("data:video/"):
        raise VidSpecError("expected a question and a video")
    content = [{"type": "video_url", "video_url": {"url": video}}, {"type": "text", "text": question}]
    chosen = {name: asked[key] for key, name in _CHOICES.items() if key in asked}
    given = {key: asked[key] for key in ("model", "seed", *_ANSWER) if key in asked}
    salt = secrets.token_hex(16)  # what is cached for others is not looked at: each answer reads its prompt anew
    body = {"messages": [{"role": "user", "content": content}], "stream": True, "cache_salt": salt}
    return body | _ANSWER | given | chosen


def _message(told: str, status: int) -> str:
    try:
        error = json.loads(told)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return f"the server answers {status}"


def _decode(video: bytes, num_frames: int, family: str) -> list[str]:
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        file.write(video)
        file.flush()
        try:
            frames = read_video(file.name, num_frames, family)
        except VidSpecError:
            raise VidSpecError("no frame of this file can be decoded: is it a video?") from None
    urls = []
    for frame in frames:
        image, made = Image.fromarray(frame), io.BytesIO()
        image.thumbnail((640, 640))
        kind = "png" if max(frame.shape) <= 128 else "jpeg"
        image.save(made, kind, quality=88)
        urls.append(f"data:image/{kind};base64," + base64.b64encode(made.getvalue()).decode())
    return urls


# ---- the command -----------------------------------------------------------------------------------------------------


def run(show: Show, report: Report = silent) -> None:
    """Serve the page until Ctrl-C; `report` is told "server", "ready" (`seconds`) and "page" (`url`)."""
    listener = _listen(show.port)
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        if show.server is not None:
            studio = Studio(show.server, show.vanilla, os.environ.get(ADMIN_KEY, ""), show.num_frames)
        else:
            server = stack.enter_context(_own_server(show))
            report("server", {"name": "vidspec"})
            report("ready", {"seconds": server.wait_ready()})
            studio = Studio(server.base_url, show.vanilla, os.environ[ADMIN_KEY], show.num_frames, is_own=True)
        listener.listen()  # who opens the page as soon as it is told waits, and is not refused
        report("page", {"url": f"http://127.0.0.1:{listener.getsockname()[1]}/?token={studio.token}"})
        serve(studio, listener)


def serve(studio: Studio, listener: socket.socket) -> None:
    """Serve a page on a socket that listens, until the process is told to end."""
    config = uvicorn.Config(studio.app(), log_level="warning", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listener])


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise VidSpecError(f"port {port}: {error.strerror}; give --port") from None
    return listener


@contextlib.contextmanager
def _own_server(show: Show) -> Iterator[VllmServer]:
    """Start the bundled pair, with an operator's key that nobody else has."""
    os.environ |= {"VLLM_PLUGINS": "vidspec", ADMIN_KEY: secrets.token_urlsafe(16)}
    log_dir, port = Path(show.log_dir or tempfile.mkdtemp(prefix="vidspec-studio-")), free_port()
    log_dir.mkdir(parents=True, exist_ok=True)
    with VllmServer(own_args(show, port), port, log_dir / "server.log") as server:
        yield server


def own_args(show: Show, port: int) -> list[str]:
    """Return what follows `vllm serve` on the bundled pair: requests may be recorded, and loose."""
    spec: dict[str, Any] = {"request_scorers": ["strict", "loose", "fly"], "request_records": True}
    shape = show.draft_shape
    if shape == AUTO:  # among chains and trees, by the policy
        shape, spec["adaptive_tokens"] = "tree-static", True
    spec["num_speculative_tokens"] = show.num_speculative_tokens or pairs.num_speculative_tokens(shape)
    parse_config(pairs.speculative_config(show.family, "draft", drafting=show.draft_shape, **spec))  # before it starts
    return pairs.serve_args(show.family, "draft", port=port, drafting=show.draft_shape, **spec)
