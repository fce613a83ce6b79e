"""Counters shared by the worker (one writer) and the API server (readers): an int64 map; stdlib and numpy only."""

import atexit
import hashlib
import mmap
import os
import tempfile
import threading
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vllm_vidspec.errors import VidSpecError

MAX_POSITIONS = 64  # the upper bound of `num_speculative_tokens`
GUIDANCE_FALLBACKS = ("cached", "memory", "unobserved", "error")
# Why a request whose scorer lets mismatches stand is verified strictly all the same.
STRICT_REASONS = ("cached", "memory", "error", "structured", "tools", "logprobs", "stop_strings")
KINDS = ("exact", "loosened", "shifted")  # why a draft token stands
SKIP_REASONS = ("pool_full", "too_long", "draft_error", "unsupported", "structured")

# The order is the file's layout: append only, and raise _VERSION when it changes.
NAMES: tuple[str, ...] = (
    "drafts",
    "draft_tokens",
    "accepted_tokens",
    *(f"accepted_at_pos_{position}" for position in range(MAX_POSITIONS)),
    *(f"skipped_{reason}" for reason in SKIP_REASONS),
    "draft_pool_blocks_total",
    "draft_pool_blocks_used",
    "draft_pool_bytes",
    "draft_kv_bytes_per_token",
    "prompts",
    "text_tokens",
    "visual_tokens_full",
    "visual_tokens_kept",
    "target_kv_bytes_per_token",
    "draft_prefill_us",
    "draft_decode_us",
    "guided_prompts",
    "reused_guidance",
    *(f"unguided_{reason}" for reason in GUIDANCE_FALLBACKS),
    "guidance_us",
    "draft_load_bytes",
    "draft_depth",
    "draft_forwards",
    "draft_steps",
    *(f"{kind}_tokens" for kind in KINDS),
    *(f"strict_{reason}" for reason in STRICT_REASONS),
    "relevance_prompts",
    "relevance_tokens",
    "relevance_reused",
    "relevance_us",
    "relevance_pool_bytes",
    "relevance_bytes_per_token",
    "draft_encoder_hits",
    "draft_encoder_misses",
    "draft_encoder_bytes",
    "draft_encoder_bytes_used",
)
_SLOT = {name: slot for slot, name in enumerate(NAMES)}
# Sizes and occupancy: they can fall, so a difference of two readings says nothing about them.
GAUGES = frozenset(
    {
        "draft_pool_blocks_total",
        "draft_pool_blocks_used",
        "draft_pool_bytes",
        "draft_kv_bytes_per_token",
        "target_kv_bytes_per_token",
        "draft_load_bytes",
        "draft_encoder_bytes",
        "draft_encoder_bytes_used",
        "relevance_pool_bytes",
        "relevance_bytes_per_token",
    }
)

# Of each of the last requests a digest of its id, and counts of its draft tokens by kind.
_NUM_REQUESTS = 4096

_MAGIC = int.from_bytes(b"vidspec\0", "little")
_VERSION = 5
_HEADER = 8  # int64 words: magic, version, number of slots, five spare
_REQUEST_WORDS = 1 + len(KINDS)
_NUM_WORDS = _HEADER + len(NAMES) + _NUM_REQUESTS * _REQUEST_WORDS
_NUM_BYTES = 8 * _NUM_WORDS


class MetricsFile:
    """One file of int64 counters: a single writer adds, any process reads.

    Each value is one aligned 8-byte word, so a reader sees the old or the new value and never a mixture. Two writers
    would lose counts: only rank 0's worker writes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Map an existing file; use `create` or `open`."""
        self.path = str(path)
        try:
            with open(self.path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), _NUM_BYTES)
        except (OSError, ValueError) as error:
            raise VidSpecError(f"metrics file {self.path}: cannot be mapped ({error})") from None
        self._words = np.frombuffer(self._map, dtype="<i8")  # [_NUM_WORDS]
        found = tuple(int(word) for word in self._words[:3])
        if found != (_MAGIC, _VERSION, len(NAMES)):
            raise VidSpecError(f"metrics file {self.path}: written by another version of vllm_vidspec")
        self._values, requests = np.split(self._words[_HEADER:], [len(NAMES)])
        self._requests = requests.reshape(_NUM_REQUESTS, _REQUEST_WORDS)
        self._next_request = 0

    @classmethod
    def create(cls, path: str | os.PathLike[str] | None = None) -> "MetricsFile":
        """Make a zeroed file and map it; the creating process unlinks it when it exits.

        Args:
            path: Where; default: a new file in the temporary directory.

        Returns:
            The mapped file.
        """
        if path is None:
            handle, path = tempfile.mkstemp(prefix="vidspec-metrics-", suffix=".i64")
            os.close(handle)
        words = np.zeros(_NUM_WORDS, dtype="<i8")
        words[:3] = (_MAGIC, _VERSION, len(NAMES))
        Path(path).unlink(missing_ok=True)
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(words.tobytes())
        atexit.register(_unlink, str(path), os.getpid())
        return cls(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "MetricsFile":
        """Map the file that another process created.

        Raises:
            VidSpecError: The file is missing, too short or of another layout.
        """
        return cls(path)

    def add(self, name: str, value: int = 1) -> None:
        """Add to one counter; `KeyError` for a name outside `NAMES`."""
        self._values[_SLOT[name]] += value

    def set(self, name: str, value: int) -> None:
        """Set one gauge; `KeyError` for a name outside `NAMES`."""
        self._values[_SLOT[name]] = value

    def add_accepted_per_position(self, counts: np.ndarray) -> None:
        """Add to the accepted counts of the first positions at once.

        Args:
            counts: `[n]` integers, n <= MAX_POSITIONS; `counts[i]` requests accepted their draft token i in this step.
        """
        first = _SLOT["accepted_at_pos_0"]
        self._values[first : first + len(counts)] += counts

    def begin_request(self, req_id: str, busy: Container[int]) -> int:
        """Return the slot of a new request, the oldest that is not `busy`; its counts begin at zero."""
        while self._next_request in busy:
            self._next_request = (self._next_request + 1) % _NUM_REQUESTS
        slot, self._next_request = self._next_request, (self._next_request + 1) % _NUM_REQUESTS
        self._requests[slot] = 0
        self._requests[slot, 0] = _digest(req_id)
        return slot

    def add_to_requests(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Add `[n, len(KINDS)]` counts to the requests in `[n]` distinct slots."""
        self._requests[slots, 1:] += counts

    def request(self, req_id: str) -> dict[str, int] | None:
        """Return a request's draft tokens that stood, by kind; None if it is too long ago."""
        slots = np.flatnonzero(self._requests[:, 0] == _digest(req_id))
        return dict(zip(KINDS, self._requests[slots[-1], 1:].tolist(), strict=True)) if len(slots) else None

    def values(self) -> dict[str, int]:
        """Return every counter and gauge by name."""
        return dict(zip(NAMES, self._values.tolist(), strict=True))


def _digest(req_id: str) -> int:
    """Return a request id as a number; never 0, which marks a free slot."""
    digest = hashlib.blake2b(req_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


def path_for(instance_id: str) -> Path:
    """Return where the engine with this `VllmConfig.instance_id` keeps its counters.

    Derived, not stored: vLLM hashes `additional_config` into its compile cache, where a random path would miss each
    time.
    """
    return Path(tempfile.gettempdir()) / f"vidspec-{os.getuid()}-{instance_id}.i64"


def read_metrics(path: str | os.PathLike[str]) -> dict[str, int]:
    """Return a snapshot of the file's values.

    Raises:
        VidSpecError: The file is missing or of another layout.
    """
    return MetricsFile.open(path).values()


def difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Return what the counters gained between two snapshots; gauges keep their later value."""
    return {name: after[name] if name in GAUGES else after[name] - before[name] for name in NAMES}


def summarize(values: dict[str, int]) -> dict[str, float | int | None]:
    """Turn counters into the figures that this project reports.

    Args:
        values: A snapshot, or the `difference` of two.

    Returns:
        `acceptance_length` (mean tokens a verify step emits, the target's own included) and `acceptance_rate`
        (accepted / drafted), None where nothing was drafted; `num_drafts`; `draft_kv_bytes` that the draft's prompts
        took and `full_draft_kv_bytes` that they would take unpruned.
    """
    drafts, drafted, accepted = values["drafts"], values["draft_tokens"], values["accepted_tokens"]
    token_bytes, text = values["draft_kv_bytes_per_token"], values["text_tokens"]
    return {
        "acceptance_length": 1 + accepted / drafts if drafts else None,
        "acceptance_rate": accepted / drafted if drafted else None,
        "num_drafts": drafts,
        "draft_kv_bytes": (text + values["visual_tokens_kept"]) * token_bytes,
        "full_draft_kv_bytes": (text + values["visual_tokens_full"]) * token_bytes,
    }


def register_collector(path: str | os.PathLike[str]) -> None:
    """Expose the file on prometheus_client's default registry, which vLLM serves on /metrics; idempotent per file."""
    from prometheus_client import REGISTRY

    with _register_lock:
        previous = _registered.get("collector")
        if previous is not None and previous.path == str(path):
            return
        if previous is not None:  # a later engine of the same process takes the earlier one's place
            REGISTRY.unregister(previous)
        _registered["collector"] = _Collector(str(path))
        REGISTRY.register(_registered["collector"])


_registered: dict[str, Any] = {}
_register_lock = threading.Lock()

_COUNTERS = (
    ("vidspec:drafts", "drafts", "Verify steps that had draft tokens."),
    ("vidspec:draft_tokens", "draft_tokens", "Draft tokens verified by the target."),
    ("vidspec:accepted_tokens", "accepted_tokens", "Draft tokens that stand."),
    ("vidspec:draft_depth", "draft_depth", "Depth of the drafts verified: what could stand at most."),
    ("vidspec:draft_steps", "draft_steps", "Batches drafted for."),
    ("vidspec:draft_forwards", "draft_forwards", "Forwards of the draft model in them."),
    ("vidspec:prompts", "prompts", "Prompts that the draft has prefilled."),
    ("vidspec:text_tokens", "text_tokens", "Text tokens of the prompts that the draft has prefilled."),
    ("vidspec:draft_encoder_hits", "draft_encoder_hits", "Images and videos that the draft's tower had looked at."),
    ("vidspec:draft_encoder_misses", "draft_encoder_misses", "Images and videos that it looked at."),
    ("vidspec:guided_prompts", "guided_prompts", "Prompts pruned by the target's guidance."),
    (
        "vidspec:reused_guidance",
        "reused_guidance",
        "Guided prompts with scores of an earlier prompt's (cached prefix).",
    ),
    ("vidspec:relevance_prompts", "relevance_prompts", "Prompts whose video's hidden states are kept."),
    ("vidspec:relevance_tokens", "relevance_tokens", "Image and video tokens of these prompts."),
    (
        "vidspec:relevance_reused",
        "relevance_reused",
        "Images and videos among them whose states an earlier prompt left (cached prefix).",
    ),
)
_SECONDS = (
    ("vidspec:draft_prefill_seconds", "draft_prefill_us", "Time spent on draft prefills."),
    ("vidspec:draft_decode_seconds", "draft_decode_us", "Time spent on proposing draft tokens."),
    ("vidspec:guidance_seconds", "guidance_us", "Time spent on measuring guidance in the target's prefill."),
    ("vidspec:relevance_seconds", "relevance_us", "Host time spent on keeping hidden states and measuring relevance."),
)
_GAUGES = (
    ("vidspec:draft_pool_bytes", "draft_pool_bytes", "Size of the draft's KV pool in bytes per rank."),
    ("vidspec:draft_kv_bytes_per_token", "draft_kv_bytes_per_token", "Draft KV bytes of one token per rank."),
    ("vidspec:target_kv_bytes_per_token", "target_kv_bytes_per_token", "Target KV bytes of one token per rank."),
    ("vidspec:draft_load_bytes", "draft_load_bytes", "Memory per rank that loading the draft took."),
    ("vidspec:draft_encoder_bytes", "draft_encoder_bytes", "Memory per rank for the draft's vision embeddings."),
    ("vidspec:draft_encoder_bytes_used", "draft_encoder_bytes_used", "How much of it holds some."),
    ("vidspec:relevance_pool_bytes", "relevance_pool_bytes", "Memory per rank for the video's hidden states."),
    (
        "vidspec:relevance_bytes_per_token",
        "relevance_bytes_per_token",
        "Bytes per rank of one video token's hidden state.",
    ),
)


class _Collector:
    """A prometheus_client custom collector that reads the file at every scrape."""

    def __init__(self, path: str) -> None:
        self.path = path

    def describe(self) -> Iterator[Any]:
        """Return nothing: registering must not read the file."""
        return iter(())

    def collect(self) -> Iterator[Any]:
        """Yield the metric families; nothing where the file is gone (the engine has stopped)."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        try:
            values = read_metrics(self.path)
        except VidSpecError:
            return
        for metric, name, text in _COUNTERS:
            yield CounterMetricFamily(metric, text, value=values[name])
        for metric, name, text in _SECONDS:
            yield CounterMetricFamily(metric, text, value=values[name] / 1e6)
        for metric, name, text in _GAUGES:
            yield GaugeMetricFamily(metric, text, value=values[name])
        yield _labelled(
            CounterMetricFamily(
                "vidspec:accepted_tokens_per_position", "Draft tokens that stand, by position.", labels=["position"]
            ),
            {str(i): values[f"accepted_at_pos_{i}"] for i in range(_num_positions(values))},
        )
        yield _labelled(
            CounterMetricFamily("vidspec:standing_tokens", "Draft tokens that stand, by why.", labels=["kind"]),
            {kind: values[f"{kind}_tokens"] for kind in KINDS},
        )
        yield _labelled(
            CounterMetricFamily(
                "vidspec:strict_requests", "Requests verified strictly though their scorer is loose.", labels=["reason"]
            ),
            {reason: values[f"strict_{reason}"] for reason in STRICT_REASONS},
        )
        yield _labelled(
            CounterMetricFamily("vidspec:skipped_requests", "Requests run without speculation.", labels=["reason"]),
            {reason: values[f"skipped_{reason}"] for reason in SKIP_REASONS},
        )
        yield _labelled(
            CounterMetricFamily(
                "vidspec:unguided_prompts", "Prompts pruned uniformly for want of guidance.", labels=["reason"]
            ),
            {reason: values[f"unguided_{reason}"] for reason in GUIDANCE_FALLBACKS},
        )
        yield _labelled(
            CounterMetricFamily("vidspec:visual_tokens", "Image and video tokens of drafted prompts.", labels=["kind"]),
            {kind: values[f"visual_tokens_{kind}"] for kind in ("full", "kept")},
        )
        yield _labelled(
            GaugeMetricFamily("vidspec:draft_pool_blocks", "Blocks of the draft's KV pool.", labels=["state"]),
            {state: values[f"draft_pool_blocks_{state}"] for state in ("used", "total")},
        )


def _labelled(family: Any, values: dict[str, int]) -> Any:
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def _num_positions(values: dict[str, int]) -> int:
    """Return how many leading positions to show: up to the last that ever stood, at least one."""
    return max((i + 1 for i in range(MAX_POSITIONS) if values[f"accepted_at_pos_{i}"]), default=1)


def _unlink(path: str, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child inherits the exit handler but not the file
        Path(path).unlink(missing_ok=True)
