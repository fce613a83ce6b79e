"""`vidspec demo`: the bundled pair behind `vllm serve`, vanilla and vidspec, one video, one question; HTTP only."""

import base64
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_vidspec.config import parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import difference, summarize
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.processes import VllmServer, free_port
from vllm_vidspec.tools.progress import Report, silent
from vllm_vidspec.tools.provenance import provenance
from vllm_vidspec.tools.user_files import check_video


@dataclass(frozen=True)
class Demo:
    """What to show; `target` and `video` take the place of what is bundled, `spec` holds knobs of VidSpecConfig."""

    family: str = "qwen2.5-vl"
    target: str | None = None
    draft: str = "draft"
    video: str | None = None
    question: str = pairs.DEFAULT_QUESTION
    max_tokens: int = 256
    port: int | None = None
    log_dir: str | None = None
    spec: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """One streamed answer: its text, its token ids, seconds to the first token and from there to the last."""

    text: str
    token_ids: list[int]
    ttft_s: float
    decode_s: float


def run(demo: Demo, report: Report = silent) -> dict[str, Any]:
    """Serve twice, ask the same question, compare; `report` gets "server", "ready", "text" and "answered"."""
    pairs.pair_for(demo.family)
    pairs.check_draft(demo.family, demo.draft)
    if demo.target is not None:
        pairs.check_checkpoint("--target", demo.target)
    config = pairs.speculative_config(demo.family, demo.draft, **demo.spec)
    parse_config(config)
    video = Path(demo.video or pairs.sample_video())
    check_video(video, is_decoded=False)  # the server reads it
    log_dir = Path(demo.log_dir or tempfile.mkdtemp(prefix="vidspec-demo-"))
    log_dir.mkdir(parents=True, exist_ok=True)
    shown = {}
    for name, draft in (("vanilla", None), ("vidspec", demo.draft)):
        report("server", {"name": name})
        shown[name] = _serve_and_ask(demo, name, draft, video, log_dir / f"{name}.log", report)
    counters = shown["vidspec"].pop("counters")
    shown["vanilla"].pop("counters")
    return {
        "family": demo.family,
        "identical": shown["vanilla"]["token_ids"] == shown["vidspec"]["token_ids"],
        **summarize(counters),
        **shown,
        "speculative_config": config,
        "question": demo.question,
        "video": video.name,
        "log_dir": str(log_dir),
        "provenance": provenance(),
    }


def _serve_and_ask(
    demo: Demo, name: str, draft: str | None, video: Path, log_path: Path, report: Report
) -> dict[str, Any]:
    port = demo.port or free_port()
    spec = demo.spec if draft is not None else {}
    args = pairs.serve_args(demo.family, draft, target=demo.target, port=port, **spec)
    with VllmServer(args, port, log_path) as server:
        seconds = server.wait_ready()
        report("ready", {"seconds": seconds})
        # A text-only answer first: what a server does once is not part of the times below.
        ask(server.base_url, demo.question, max_tokens=8)
        before = server.metrics()
        try:
            tell = lambda delta: report("text", {"delta": delta})  # noqa: E731
            answer = ask(server.base_url, demo.question, video=video, max_tokens=demo.max_tokens, on_text=tell)
        except VidSpecError as error:
            reason = str(error) if server.healthy() else server.reason()
            raise VidSpecError(f"the {name} server did not answer: {reason} (log: {log_path})") from None
        counters = difference(before, server.metrics())
    report("answered", {"name": name})
    told = {"output_tokens": len(answer.token_ids), "server_start_s": seconds, "command": ["vllm", "serve", *args]}
    return asdict(answer) | told | {"counters": counters}


def ask(
    base_url: str,
    question: str,
    *,
    video: Path | None = None,
    max_tokens: int = 256,
    video_kwargs: dict[str, Any] | None = None,
    on_text: Callable[[str], None] = lambda _: None,
    **sampling: Any,
) -> Answer:
    """Ask one question, maybe about an mp4 file, and stream the answer to `on_text`; greedily by default."""
    import openai

    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=600)
    content: list[Any] = [{"type": "video_url", "video_url": {"url": data_url(video)}}] if video else []
    content.append({"type": "text", "text": question})
    media = {"media_io_kwargs": {"video": video_kwargs}} if video_kwargs else {}
    text, first, start = "", None, time.perf_counter()
    token_ids: list[int] = []
    try:
        stream = client.chat.completions.create(
            model="target",
            messages=[{"role": "user", "content": content}],
            max_tokens=max_tokens,
            stream=True,
            extra_body={"return_token_ids": True, **media},
            **{"temperature": 0, **sampling},
        )
        for chunk in stream:
            for choice in chunk.choices:
                fresh = getattr(choice, "token_ids", None) or []
                if fresh and first is None:
                    first = time.perf_counter()
                token_ids += fresh
                if choice.delta.content:
                    text += choice.delta.content
                    on_text(choice.delta.content)
    except openai.OpenAIError as error:
        raise VidSpecError(_one_line(error)) from None
    end = time.perf_counter()
    first = end if first is None else first
    return Answer(text, token_ids, first - start, end - first)


def data_url(video: Path) -> str:
    """Return an mp4 file as a data URL."""
    return "data:video/mp4;base64," + base64.b64encode(video.read_bytes()).decode()


def _one_line(error: Exception) -> str:
    body = getattr(error, "body", None)
    message = body.get("message") if isinstance(body, dict) else None
    lines = str(message or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
