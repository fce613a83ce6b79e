"""The admin route: knobs read and changed on a running server, over HTTP, by who has the key.

vLLM offers plugins a way to add routes, and loads them only where its `VLLM_PLUGINS` names them; ours needs a key in
`VIDSPEC_ADMIN_KEY` besides, and is not there without.
"""

import hmac
import json
import os
import re
from argparse import Namespace
from typing import Any

from vllm.logger import init_logger

from vllm_vidspec.config import METHOD, VidSpecConfig
from vllm_vidspec.engine.compat.scheduler import KNOBS, RETUNE
from vllm_vidspec.engine.knobs import SCHEDULER_KNOBS, Knobs
from vllm_vidspec.errors import VidSpecError, quoted, shortened

logger = init_logger("vllm.vidspec")

KEY = "VIDSPEC_ADMIN_KEY"
PATH = "/vidspec/knobs"
_MOST_BYTES = 1 << 16  # of a body
_MOST_SAID = 500  # characters of a refusal
# What vLLM puts around the engine's refusal: the call's name, and for a worker's a hint to its log.
_WRAPPED = re.compile(r"(?:Call to \w+ method failed: )?(?:Worker failed with error '(.*)', please check .*|(.*))")


class AdminRoutes:
    """vLLM's `EndpointPlugin`: GET returns the knobs in force, POST with a JSON object of knobs changes them."""

    name = METHOD
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._key = os.environ.get(KEY, "")
        self._engine: Any = None

    def attach_router(self, app: Any) -> None:
        from fastapi import Request

        if not self._key:
            logger.warning("vidspec: no admin route: %s is not set", KEY)
            return

        async def answer(request: Request):  # type: ignore[no-untyped-def]
            return await self._answer(request, change=request.method == "POST")

        app.add_api_route(PATH, answer, methods=["GET", "POST"], include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        self._engine = engine_client

    async def _answer(self, request: Any, change: bool) -> Any:
        from fastapi.responses import JSONResponse

        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), self._key.encode()):
            return JSONResponse({"error": "unauthorized"}, 401)
        config = None if self._engine is None else (self._engine.vllm_config.additional_config or {}).get(METHOD)
        if not config:
            return JSONResponse({"error": "this server does not use vidspec"}, 404)
        try:
            if change:
                await self._change(VidSpecConfig(**config), await _body(request))
            (knobs, *_) = await self._engine.collective_rpc(KNOBS)
        except VidSpecError as error:
            return JSONResponse({"error": shortened(str(error), _MOST_SAID)}, 400)
        return JSONResponse(knobs)

    async def _change(self, first: VidSpecConfig, changes: dict[str, Any]) -> None:
        """Change knobs, all or none; a VidSpecError of one line for the client, before anything reaches the engine."""
        knobs = Knobs(first)
        (now, *_) = await self._engine.collective_rpc(KNOBS)
        held = knobs.current.model_dump().keys() - set(SCHEDULER_KNOBS)
        knobs.current = knobs.current.changed({name: value for name, value in now.items() if name in held})
        knobs.retune({name: value for name, value in changes.items() if name not in SCHEDULER_KNOBS})
        try:
            await self._engine.collective_rpc(RETUNE, args=(changes,))
        except Exception as error:  # what the engine refuses comes back as text
            raise VidSpecError(_unwrapped(error)) from None
        logger.info("vidspec: knobs changed: %s", ", ".join(f"{name}={quoted(of)}" for name, of in changes.items()))


def _unwrapped(error: Exception) -> str:
    """Return the last line of what the engine says, without vLLM's words around it."""
    *_, line = str(error).strip().splitlines() or [type(error).__name__]
    found = _WRAPPED.fullmatch(line)
    return line if found is None else found[1] or found[2] or line


async def _body(request: Any) -> dict[str, Any]:
    """Return the JSON object that a client has sent; a VidSpecError if it is none, or too long."""
    text = b""
    async for part in request.stream():
        text += part
        if len(text) > _MOST_BYTES:
            raise VidSpecError(f"the request body exceeds {_MOST_BYTES} bytes")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise VidSpecError("expected a JSON object of knobs, as in --speculative-config")
    return body
