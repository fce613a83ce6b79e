"""What `vidspec status` knows: a reading of a running server's /metrics, and the figures made of one or of two."""

import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vllm_vidspec import metrics
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.names import CLASS_LABELS
from vllm_vidspec.tools import scrape
from vllm_vidspec.tools.status_rules import advise

_TIMEOUT_S = 10.0
# Host time of ours that is counted, by phase (docs/metrics.md).
_PHASES = {
    "prefill": "draft_prefill_us",
    "decode": "draft_decode_us",
    "guidance": "guidance_us",
    "relevance": "relevance_us",
}

# Bytes per rank, by owner. The rest of a device is activations, graphs and what vLLM leaves free.
_MEMORY = {
    "target": "target_load_bytes",
    "its KV": "target_kv_bytes",
    "draft": "draft_load_bytes",
    "its KV pool": "draft_pool_bytes",
    "vision embeddings": "draft_encoder_bytes",
    "pixels": "draft_pixel_bytes",
    "hidden states": "observed_bytes",
}

_PARALLEL = ("stream_tokens", "late_drafts", "stale_streams", "streams_to_come", "drafter_restarts")

Figures = dict[str, Any]


@dataclass(frozen=True)
class Reading:
    """What a server showed at one time: our counters and vLLM's figures, which may be empty, by engine."""

    at: float  # seconds of a clock that does not jump
    engines: scrape.Engines
    vllm: scrape.Engines

    def since(self, before: "Reading") -> "Reading | None":
        """Return what was gained since an earlier reading; None where the server was started anew in between."""
        if self.engines.keys() != before.engines.keys():
            return None
        engines = {name: metrics.difference(before.engines[name], values) for name, values in self.engines.items()}
        vllm = {name: _gained(before.vllm.get(name, {}), values) for name, values in self.vllm.items()}
        gains: list[Mapping[str, float]] = [*engines.values(), *vllm.values()]
        if any(value < 0 for values in gains for value in values.values()):
            return None
        return Reading(self.at - before.at, engines, vllm)

    def figures(self, engine: str | None = None) -> Figures:
        """Return the figures of one engine, or of all together."""
        if engine is not None:
            return figures(self.engines[engine], self.vllm.get(engine, {}))
        return figures(scrape.together(self.engines.values()), scrape.together(self.vllm.values()))


def _gained(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return what vLLM's counters gained; gauges keep their later value."""
    return {n: value if n in scrape.VLLM_GAUGES else value - before.get(n, 0.0) for n, value in after.items()}


def readings(server: str, every_s: float | None) -> Iterator[tuple[Reading, Reading | None]]:
    """Yield readings of a server, and what was gained since the one before: None at first, and after a restart."""
    before = read(server)
    yield before, None
    while every_s is not None:
        time.sleep(every_s)
        now = read(server)
        yield now, now.since(before)
        before = now


def result(server: str, reading: Reading, gained: Reading | None = None) -> dict[str, Any]:
    """Return what `vidspec status` says, as plain data: `engines` by index where there are several."""
    now = reading.figures()
    interval = None if gained is None else gained.figures()
    several = reading.engines if len(reading.engines) > 1 else ()
    return {
        "server": server,
        "since_start": now,
        "interval": interval,
        "interval_seconds": None if gained is None else gained.at,
        "engines": {engine: reading.figures(engine) for engine in several},
        "advice": [asdict(advice) for advice in advise(now if interval is None else interval)],
    }


def address(server: str, option: str = "--server") -> str:
    """Return a server's address; what clients append to it (`/v1`, `/metrics`) may be there, and `http://` left out."""
    url = (server if "://" in server else f"http://{server}").rstrip("/")
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise VidSpecError(f"{option}: {server!r} is no address such as http://127.0.0.1:8000")
    return url.removesuffix("/metrics").removesuffix("/v1")


def read(server: str) -> Reading:
    """Read a server's /metrics."""
    url = address(server) + "/metrics"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            text = answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        raise VidSpecError(f"{url} answers {error.code} {error.reason}: is it a vLLM server?") from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # URLError is an OSError
        reason = " ".join(str(getattr(error, "reason", error)).split())
        raise VidSpecError(f"no server answers at {url} ({reason})") from None
    return parse(text, server)


def parse(text: str, server: str = "the server", at: float | None = None) -> Reading:
    """Return what the text of /metrics says; messages name the server, and it was read now, unless `at` says when."""
    engines, vllm = scrape.ours(text), scrape.vllms(text)
    if engines:
        return Reading(time.monotonic() if at is None else at, engines, vllm)
    if not vllm:
        raise VidSpecError(f"{server} shows no metrics of vLLM's: is it a vLLM server, with its statistics on?")
    raise VidSpecError(
        f"{server} is a vLLM server that shows no counters of vidspec: it runs without (the log has no `vidspec is "
        "active`), or its log says `nothing is counted`, or its API servers are the Rust front end"
    )


def figures(ours: Mapping[str, int], vllm: Mapping[str, float]) -> Figures:
    """Turn counters into what an operator looks at, as `--json` prints it; ratios without a denominator are None."""
    values = dict.fromkeys(metrics.NAMES, 0) | dict(ours)
    drafts = values["drafts"]
    summary = metrics.summarize(values)
    stood = [values[f"accepted_at_pos_{i}"] for i in range(metrics.MAX_POSITIONS)]
    num_positions = max((i + 1 for i, count in enumerate(stood) if count), default=0)
    seconds = {phase: values[name] / 1e6 for phase, name in _PHASES.items()}
    blocks, used = values["draft_pool_blocks_total"], values["draft_pool_blocks_used"]
    off = "cool-down" if values["cooling_down"] else "operator"
    return {
        "speculation": "on" if values["speculation_on"] else off,
        "draft_failures": values["draft_failures"],
        "acceptance_length": summary["acceptance_length"],
        "acceptance_rate": summary["acceptance_rate"],
        "verify_steps": drafts,
        "draft_tokens_per_step": _ratio(values["draft_tokens"], drafts),
        "draft_depth_per_step": _ratio(values["draft_depth"], drafts),
        "accepted_by_position": [count / drafts for count in stood[:num_positions]] if drafts else [],
        "prompts": values["prompts"],
        "guided_prompts": values["guided_prompts"],
        "skipped_requests": {reason: values[f"skipped_{reason}"] for reason in metrics.SKIP_REASONS},
        "unguided_prompts": {reason: values[f"unguided_{reason}"] for reason in metrics.GUIDANCE_FALLBACKS},
        "strict_requests": {reason: values[f"strict_{reason}"] for reason in metrics.STRICT_REASONS},
        "pool": {
            "blocks": blocks,
            "used_blocks": used,
            "bytes": values["draft_pool_bytes"],
            "used_bytes": round(values["draft_pool_bytes"] * used / blocks) if blocks else 0,
        },
        "memory": {owner: values[name] for owner, name in _MEMORY.items()},
        "draft_steps": values["draft_steps"],
        "draft_eager_steps": values["draft_eager_steps"],
        "undrafted_steps": values["undrafted_steps"],
        "draft_seconds": seconds,
        "draft_seconds_per_step": _ratio(seconds["decode"], values["draft_steps"]),
        "draft_seconds_per_prompt": _ratio(seconds["prefill"], values["prompts"]),
        "low_acceptance_windows": values["low_acceptance_windows"],
        "classes": {
            name: {
                "admitted_requests": values[f"admitted_{name}"],
                "unadmitted_requests": values[f"unadmitted_{name}"],
                "tokens_per_step": _ratio(values[f"tokens_{name}"], values[f"steps_{name}"]),
                "paused": values[f"pauses_{name}"] > values[f"resumes_{name}"],
                "decision": metrics.decision_text(
                    values[f"best_tokens_{name}"],
                    values[f"best_length_{name}"] / 1e3,
                    values[f"best_us_{name}"] / 1e6,
                    values[f"none_us_{name}"] / 1e6,
                )
                if values[f"best_us_{name}"] and values[f"none_us_{name}"]
                else None,
            }
            for name in CLASS_LABELS
            if values[f"admitted_{name}"] or values[f"unadmitted_{name}"] or values[f"steps_{name}"]
        },
        "parallel": {name: values[name] for name in _PARALLEL},
        "vllm": _vllm_figures(vllm),
    }


def _vllm_figures(vllm: Mapping[str, float]) -> dict[str, float | None]:
    outputs, first = vllm.get("outputs", 0), vllm.get("first_tokens", 0)
    return {
        "running": vllm.get("running"),
        "waiting": vllm.get("waiting"),
        "finished_requests": vllm.get("finished"),
        "generation_tokens": vllm.get("generation_tokens"),
        "seconds_to_first_token": _ratio(vllm.get("first_token_seconds", 0), first),
        "seconds_per_output": _ratio(vllm.get("output_seconds", 0), outputs),
        "tokens_per_output": _ratio(vllm.get("generation_tokens", 0) - first, outputs),
    }


def _ratio(value: float, of: float) -> float | None:
    return value / of if of else None
