"""Counters shared by the worker (one writer) and the API server (readers): an int64 map; stdlib and numpy only."""

import atexit
import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import stat
import tempfile
import threading
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import IO, Any

import numpy as np

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.names import CLASS_LABELS, PRUNERS

MAX_POSITIONS = 64  # the upper bound of `num_speculative_tokens`
GUIDANCE_FALLBACKS = ("cached", "memory", "unobserved", "error", "no_text")
# Why a request whose scorer lets mismatches stand is verified strictly all the same.
STRICT_REASONS = ("cached", "memory", "error", "structured", "tools", "logprobs", "stop_strings")


class Kind(IntEnum):
    """Why an output token stands; the scorers' kernels write these numbers."""

    OWN = 0  # the target's own: what it samples after the last draft that stands
    EXACT = 1  # a draft that is what the target samples
    LOOSENED = 2
    SHIFTED = 3  # a draft whose expected token stands elsewhere among the step's drafts


KINDS = tuple(kind.name.lower() for kind in Kind if kind)  # of draft tokens
SKIP_REASONS = ("pool_full", "too_long", "draft_error", "unsupported", "structured")

# What each counter and gauge says: the one list of them, which the file and Prometheus share.
_COUNTERS = {
    "drafts": "Verify steps that had draft tokens.",
    "draft_tokens": "Draft tokens verified by the target.",
    "accepted_tokens": "Draft tokens that stand.",
    "low_acceptance_windows": "Runs of 128 verify steps with drafts in which fewer than half a draft token stood per "
    "step.",
    "draft_depth": "Depth of the drafts verified: what could stand at most.",
    "draft_steps": "Batches drafted for.",
    "draft_forwards": "Forwards of the draft model while drafting.",
    "draft_eager_steps": "Batches drafted for without CUDA graphs though cudagraph_mode is not NONE.",
    "undrafted_steps": "Steps for which drafts do not pay, or that an operator or failures let go without.",
    "stream_tokens": "Tokens that a drafter with a process of its own has drawn.",
    "late_drafts": "Steps of requests whose stream was not ahead of the target, so that nothing was verified.",
    "stale_streams": "Steps of requests whose stream said something else than the target had committed by then.",
    "window_snapshots": "Steps whose windows were cut from a copy of the streams, as old as the host is ahead.",
    "streams_to_come": "Steps of requests whose stream in a drafter of its own had not begun.",
    "draft_failures": "Exceptions on the draft's side.",
    "cooldowns": "Times that speculation was switched off for a while because the draft failed too often.",
    "waiting_drafts": "Times that a request had outgrown the draft's KV pool and waited for room.",
    "resumed_drafts": "Times that a request was drafted for again because the pool had room.",
    "released_resting": "Resting requests whose draft KV was given up, as others needed the room.",
    "drafter_restarts": "Starts of the drafter's process after its first.",
    "prompts": "Prompts that the draft has prefilled.",
    "text_tokens": "Text tokens of the prompts that the draft has prefilled.",
    "draft_encoder_hits": "Images and videos whose embeddings the draft's tower had made before.",
    "draft_encoder_misses": "Images and videos that the draft's tower looked at.",
    "draft_encoder_oversized": "Calls of the draft's tower beyond a step's budget, for what cannot be cut further.",
    "draft_pixel_copies": "Images and videos whose pixels were copied to the device again for the draft's tower.",
    "visual_tokens_full": "Image and video tokens of the prompts that the draft has prefilled.",
    "visual_tokens_kept": "Image and video tokens that the draft was shown.",
    "guided_prompts": "Prompts pruned by the target's guidance.",
    "reused_guidance": "Guided prompts with the scores of an earlier prompt (cached prefix).",
    "relevance_prompts": "Prompts whose video's hidden states are kept.",
    "relevance_tokens": "Image and video tokens whose hidden states are kept.",
    "relevance_reused": "Images and videos whose hidden states an earlier prompt left (cached prefix).",
    # Microseconds here, seconds there.
    "draft_prefill_us": "Time spent on draft prefills.",
    "draft_decode_us": "Time spent on proposing draft tokens.",
    "guidance_us": "Time spent on measuring guidance in the target's prefill.",
    "relevance_us": "Host time spent on keeping hidden states and measuring relevance.",
}
# Sizes and occupancy: they can fall, so a difference of two readings says nothing about them.
GAUGES = {
    "draft_pool_blocks_total": "Blocks of the draft's KV pool.",
    "draft_pool_blocks_used": "Blocks of the draft's KV pool in use.",
    "draft_pool_bytes": "Size of the draft's KV pool in bytes per rank.",
    "draft_kv_bytes_per_token": "Draft KV bytes of one token per rank.",
    "target_kv_bytes_per_token": "Target KV bytes of one token per rank.",
    "speculation_on": "Whether drafts are asked for: 0 while speculation is switched off or cools down.",
    "tokens_in_use": "Draft tokens of each request that the last step was planned with (adaptive_tokens).",
    "target_load_bytes": "Memory per rank that the target's weights take.",
    "draft_load_bytes": "Memory per rank that loading the draft took.",
    "draft_encoder_bytes": "Memory per rank for the draft's vision embeddings.",
    "draft_encoder_bytes_used": "Memory per rank that holds vision embeddings of the draft.",
    "relevance_pool_bytes": "Memory per rank for the video's hidden states.",
    "relevance_bytes_per_token": "Bytes per rank of one video token's hidden state.",
    "relevance_held_bytes": "How much of that memory is held for requests, and not only kept for later ones.",
    "held_requests": "Requests of which our side holds a prompt, scores, states or a rule.",
}
# name -> what it says, its label, the values of that and what their counters are called
BY_LABEL: dict[str, tuple[str, str, tuple[str, ...] | range, str]] = {
    "accepted_tokens_per_position": (
        *("Draft tokens that stand, by position.", "position"),
        *(range(MAX_POSITIONS), "accepted_at_pos_{}"),
    ),
    "standing_tokens": ("Draft tokens that stand, by why.", "kind", KINDS, "{}_tokens"),
    "strict_requests": (
        *("Requests verified strictly though their scorer is loose.", "reason"),
        *(STRICT_REASONS, "strict_{}"),
    ),
    "skipped_requests": ("Requests run without speculation.", "reason", SKIP_REASONS, "skipped_{}"),
    "auto_requests": ("Requests that pruner auto has learned from.", "pruner", PRUNERS, "auto_requests_{}"),
    "auto_verify_steps": (
        "Verify steps of the requests that pruner auto has learned from.",
        "pruner",
        PRUNERS,
        "auto_verify_steps_{}",
    ),
    "auto_tokens": (
        "Tokens that the verify steps emitted which pruner auto has learned from.",
        "pruner",
        PRUNERS,
        "auto_tokens_{}",
    ),
    **{
        metric: (text, "class", CLASS_LABELS, name)
        for metric, text, name in (
            ("class_shown_requests", "Requests shown to the draft, by modality and visual tokens.", "shown_{}"),
            ("class_unshown_requests", "Requests not shown to the draft, as their class does not pay.", "unshown_{}"),
            ("class_verify_steps", "Verify steps with drafts, of requests that have ended.", "steps_{}"),
            ("class_verify_tokens", "Tokens of verify steps with drafts, of requests that have ended.", "tokens_{}"),
            ("class_rests", "Times that drafting for a class was found not to pay.", "rests_{}"),
            ("class_resumes", "Times that drafting for a class was found to pay again.", "resumes_{}"),
        )
    },
    "unguided_prompts": ("Prompts pruned uniformly for want of guidance.", "reason", GUIDANCE_FALLBACKS, "unguided_{}"),
}
# The order is the file's layout: raise _VERSION when it changes.
NAMES: tuple[str, ...] = (
    *_COUNTERS,
    *GAUGES,
    *(name.format(value) for _, _, values, name in BY_LABEL.values() for value in values),
)
_SLOT = {name: slot for slot, name in enumerate(NAMES)}

# Of each of the last requests a digest of its id, and counts of its draft tokens by kind.
_NUM_REQUESTS = 4096

_MAGIC = int.from_bytes(b"vidspec\0", "little")
_VERSION = 12
_HEADER = 8  # int64 words: magic, version, number of slots, sequence, four spare
_SEQUENCE = 3  # odd while a writer is between values that belong together
_NUM_TRIES = 50  # of a reader that meets such a writer; one that died there must not keep it
_REFUSAL_BYTES = 1024
_REQUEST_WORDS = 1 + len(KINDS)
_NUM_WORDS = _HEADER + _REFUSAL_BYTES // 8 + len(NAMES) + _NUM_REQUESTS * _REQUEST_WORDS
_NUM_BYTES = 8 * _NUM_WORDS


class MetricsFile:
    """One file of int64 counters: a single writer adds, any process reads.

    Each value is one aligned 8-byte word, so a reader sees the old or the new value and never a mixture. Two writers
    would lose counts: an engine has a file of its own, and only its tensor-parallel rank 0 counts.

    Whoever has the file mapped holds a shared lock on it, which the system takes back when the process ends, however
    it ends: a file that nobody holds is a leftover. Once mapped, the file may be deleted: the mapping stays.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Map the file that another process created.

        Raises:
            VidSpecError: The file is missing, too short, of another layout, or not this user's alone.
        """
        self.path = str(path)
        try:
            self._held = _open_own(self.path)
            self._map = mmap.mmap(self._held.fileno(), _NUM_BYTES)
        except (OSError, ValueError) as error:
            raise VidSpecError(f"metrics file {self.path}: cannot be mapped ({error})") from None
        with contextlib.suppress(OSError):  # a file system without locks: its leftovers stay
            fcntl.flock(self._held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self._words = np.frombuffer(self._map, dtype="<i8")  # [_NUM_WORDS]
        found = tuple(int(word) for word in self._words[:3])
        if found != (_MAGIC, _VERSION, len(NAMES)):
            raise VidSpecError(f"metrics file {self.path}: written by another version of vllm_vidspec")
        text_end = _HEADER + _REFUSAL_BYTES // 8
        self._refusal = self._words[_HEADER:text_end].view(np.uint8)  # [_REFUSAL_BYTES] UTF-8, zeros behind it
        self._values, requests = np.split(self._words[text_end:], [len(NAMES)])
        self._requests = requests.reshape(_NUM_REQUESTS, _REQUEST_WORDS)
        self._next_request = 0

    @classmethod
    def create(cls, path: str | os.PathLike[str] | None = None) -> "MetricsFile":
        """Make a zeroed file and map it; the creating process unlinks it when it exits.

        Args:
            path: Where; default: a new file in the temporary directory.

        Returns:
            The mapped file.

        Raises:
            VidSpecError: The folder is full, read-only or absent.
        """
        words = np.zeros(_NUM_WORDS, dtype="<i8")
        words[:3] = (_MAGIC, _VERSION, len(NAMES))
        folder = tempfile.gettempdir() if path is None else os.path.dirname(path)
        try:
            handle, made = tempfile.mkstemp(prefix="vidspec-metrics-", suffix=".i64", dir=folder)
        except OSError as error:
            raise VidSpecError(f"metrics file: {folder} takes no file ({error.strerror})") from None
        # From here on the file goes with this process, whatever fails; it gets its name once it is whole and held.
        atexit.register(_unlink, made if path is None else str(path), os.getpid())
        try:
            with open(handle, "wb") as file:
                file.write(words.tobytes())
            created = cls(made)
            if path is not None:
                os.replace(made, path)
                created.path = str(path)
        except (OSError, VidSpecError) as error:
            _unlink(made, os.getpid())
            raise VidSpecError(f"metrics file: {folder} takes no file ({error})") from None
        return created

    def add(self, name: str, value: int = 1) -> None:
        """Add to one counter; `KeyError` for a name outside `NAMES`."""
        self._values[_SLOT[name]] += value

    def set(self, name: str, value: int) -> None:
        """Set one gauge; `KeyError` for a name outside `NAMES`."""
        self._values[_SLOT[name]] = value

    def add_all(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Add `[n]` integers to the counters in `[n]` distinct `slots_of` them; readers see all of it or nothing."""
        with self.at_once():
            self._values[slots] += counts

    def begin_request(self, req_id: str, busy: Container[int]) -> int:
        """Return the slot of a new request, the oldest that is not `busy`; its counts begin at zero.

        An earlier request of the same id is forgotten: a client may use one twice.
        """
        while self._next_request in busy:
            self._next_request = (self._next_request + 1) % _NUM_REQUESTS
        slot, self._next_request = self._next_request, (self._next_request + 1) % _NUM_REQUESTS
        digest, ids = _digest(req_id), self._requests[:, 0]
        self._requests[slot] = 0
        ids[ids == digest] = 0
        ids[slot] = digest
        return slot

    def add_to_requests(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Add `[n, len(KINDS)]` counts to the requests in `[n]` distinct slots."""
        self._requests[slots, 1:] += counts

    def request(self, req_id: str) -> dict[str, int] | None:
        """Return a request's draft tokens that stood, by kind; None if it is too long ago."""
        slots = np.flatnonzero(self._requests[:, 0] == _digest(req_id))
        return dict(zip(KINDS, self._requests[slots[-1], 1:].tolist(), strict=True)) if len(slots) else None

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Let readers see all of what the block writes, or nothing of it."""
        self._words[_SEQUENCE] += 1
        try:
            yield
        finally:
            self._words[_SEQUENCE] += 1

    def value(self, name: str) -> int:
        """Return one counter or gauge; `KeyError` for a name outside `NAMES`."""
        return int(self._values[_SLOT[name]])

    def values(self) -> dict[str, int]:
        """Return every counter and gauge by name, none of them from the middle of an `at_once`."""
        for _ in range(_NUM_TRIES):
            sequence = int(self._words[_SEQUENCE])
            values = self._values.tolist()
            if sequence % 2 == 0 and sequence == int(self._words[_SEQUENCE]):
                break
            time.sleep(1e-4)
        return dict(zip(NAMES, values, strict=True))

    def refuse(self, reason: str) -> None:
        """Leave the one line that says why the engine does not start; any of its processes may."""
        text = reason.encode()[: _REFUSAL_BYTES - 1]
        self._refusal[:] = 0
        self._refusal[: len(text)] = np.frombuffer(text, dtype=np.uint8)

    def refusal(self) -> str | None:
        """Return what `refuse` left, or None."""
        return self._refusal.tobytes().rstrip(b"\0").decode(errors="ignore") or None


def slots_of(names: Iterable[str]) -> np.ndarray:
    """Return `[n]` places of counters in a file, for `MetricsFile.add_all`; `KeyError` for a name outside `NAMES`."""
    return np.array([_SLOT[name] for name in names])


def _open_own(path: str) -> IO[bytes]:
    """Open a file to read and write it that this user alone can have made, or changed since.

    The temporary directory is everybody's and a file's name there can be guessed: what another user has put in its
    place, a link of his included, is not opened. Nothing here waits, as for the other end of a pipe.

    Raises:
        OSError: It is another's, a link, no file, or open to others.
    """
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "r+b", buffering=0)
    found = os.fstat(file.fileno())
    if (
        stat.S_ISREG(found.st_mode)
        and found.st_uid == os.geteuid()
        and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    ):
        return file
    file.close()
    raise PermissionError(errno.EPERM, "it is not a file of this user's alone")


def _digest(req_id: str) -> int:
    """Return a request id as a number; never 0, which marks a free slot."""
    digest = hashlib.blake2b(req_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


def path_for(instance_id: str, engine: int = 0) -> Path:
    """Return where one engine of the server with this `VllmConfig.instance_id` keeps its counters.

    Derived, not stored: vLLM hashes `additional_config` into its compile cache, where a random path would miss each
    time.

    Args:
        instance_id: Of the server.
        engine: The data-parallel engine's index, 0 where there is one engine.
    """
    return Path(tempfile.gettempdir()) / f"vidspec-{os.getuid()}-{instance_id}-{engine}.i64"


def read_metrics(path: str | os.PathLike[str]) -> dict[str, int]:
    """Return a snapshot of the file's values.

    Raises:
        VidSpecError: The file is missing or of another layout.
    """
    return MetricsFile(path).values()


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


def register_collector(files: Mapping[int, MetricsFile], model_name: str) -> Any:
    """Expose the files on prometheus_client's default registry, which vLLM serves on /metrics.

    Args:
        files: By index of the engine.
        model_name: As vLLM labels its own metrics.

    Returns:
        The collector, for another registry.
    """
    from prometheus_client import REGISTRY

    with _register_lock:
        previous = _registered.pop("collector", None)
        if previous is not None:  # a later engine of the same process takes the earlier one's place
            REGISTRY.unregister(previous)
        collector = _registered["collector"] = _Collector(files, model_name)
        REGISTRY.register(collector)
    return collector


_registered: dict[str, Any] = {}
_register_lock = threading.Lock()

# Upper bounds of the histogram: every length of the usual chains and trees, then ever fewer.
_LENGTHS = (*range(1, 13), 16, 24, 32, 48, 64)


class _Collector:
    """A prometheus_client custom collector that reads the files at every scrape."""

    def __init__(self, files: Mapping[int, MetricsFile], model_name: str) -> None:
        self._files = files
        self._model_name = model_name

    def describe(self) -> Iterator[Any]:
        """Return nothing: registering must not read the files."""
        return iter(())

    def collect(self) -> Iterator[Any]:
        """Yield the metric families."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        engines = {(self._model_name, str(engine)): file.values() for engine, file in self._files.items()}
        labels = ["model_name", "engine"]
        for kind, texts in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, GAUGES)):
            for name, text in texts.items():
                family = kind(f"vidspec:{exposed(name)}", text, labels=labels)
                for engine, values in engines.items():
                    family.add_metric(engine, values[name] / (1e6 if name.endswith("_us") else 1))
                yield family
        # Leading positions up to the last that ever stood, at least one.
        stood = (i for i in range(MAX_POSITIONS) for values in engines.values() if values[f"accepted_at_pos_{i}"])
        num_positions = 1 + max(stood, default=0)
        for metric, (text, label, all_values, name) in BY_LABEL.items():
            family = CounterMetricFamily(f"vidspec:{metric}", text, labels=[*labels, label])
            shown = all_values[: num_positions if label == "position" else None]
            for engine, values in engines.items():
                for value in shown:
                    family.add_metric((*engine, str(value)), values[name.format(value)])
            yield family
        lengths = HistogramMetricFamily(
            "vidspec:acceptance_length", "Tokens that a verify step emits, the target's own included.", labels=labels
        )
        for engine, values in engines.items():
            # A step emits more than n tokens where its draft token n - 1, counted from 0, stands.
            bounds = [(f"{n:.1f}", values["drafts"] - values[f"accepted_at_pos_{n - 1}"]) for n in _LENGTHS]
            total = values["drafts"]
            lengths.add_metric(engine, [*bounds, ("+Inf", total)], total + values["accepted_tokens"])
        yield lengths


# By Prometheus' conventions a unit comes last, and "total" ends counters alone.
_EXPOSED = {
    "visual_tokens_full": "visual_tokens",
    "draft_pool_blocks_total": "draft_pool_blocks",
    "draft_encoder_bytes_used": "draft_encoder_used_bytes",
}


def exposed(name: str) -> str:
    """Return the name that a counter or gauge without a label of its own has on /metrics, after `vidspec:`."""
    if name.endswith("_us"):
        return f"{name[:-3]}_seconds"
    return _EXPOSED.get(name, name)


def _unlink(path: str, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child inherits the exit handler but not the file
        with contextlib.suppress(OSError):  # gone, or never ours
            os.unlink(path)
