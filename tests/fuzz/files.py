"""Targets without an engine: configurations, calibration files, counter files, media files of the tools."""

import functools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.running import Target, may_refuse
from tests.fuzz.values import JSON, NUMBERS, damaged
from vllm_vidspec.config import CALIBRATED_KEYS, PASS_THROUGH_KEYS, PRUNERS, VidSpecConfig, parse_config
from vllm_vidspec.config.fields import MAX_CORES, ParallelKnobs
from vllm_vidspec.config.spelling import KNOWN_KEYS
from vllm_vidspec.metrics import MetricsFile
from vllm_vidspec.tools import pairs, user_files

_VALID = {"model": "draft", "num_speculative_tokens": 25}
_WORDS = ("chain", "tree-static", "tree-adaptive", "auto", "none", "uv", "loose", "self", "cpu", "cuda:1", "all", "fp8")
_SMALL = st.one_of(st.sampled_from(_WORDS), st.lists(st.integers(-1, 9), max_size=5), st.booleans(), NUMBERS)
_ROWS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from(_WORDS), st.integers(-1, 30)).map(list), max_size=4
)
_CAPS = st.lists(st.lists(st.one_of(st.integers(0, 9), JSON), max_size=4), max_size=4)
_PATHS = st.lists(st.lists(st.integers(-1, 70), max_size=3), max_size=6)
_VALUES = st.one_of(_SMALL, _ROWS, _CAPS, _PATHS, JSON)
_KEYS = st.one_of(st.sampled_from([key for key in KNOWN_KEYS if key != "calibration"]), st.text(max_size=30))
_DRAFTERS = st.dictionaries(
    st.one_of(st.sampled_from([*ParallelKnobs.model_fields]), st.text(max_size=9)), _VALUES, max_size=4
)
# Nearly valid values, by a field's type or as strings have them, so that many are accepted and the limits are met.
_SOME = st.one_of(st.floats(0, 1), st.integers(1, 70), NUMBERS)
_NEARLY = {
    **{
        name: st.one_of(st.from_type(field.annotation), _SOME)
        for name, field in VidSpecConfig.model_fields.items()
        if name not in ("calibration", "model", "parallel")
    },
    "num_speculative_tokens": _SOME,
    "draft_shape": st.sampled_from(_WORDS),
    "draft_table": st.one_of(_ROWS, st.just([[1, 4, "chain", 3], [5, 9, "none", 0]])),
    "num_speculative_tokens_per_batch_size": st.one_of(_CAPS, st.just([[1, 4, 3], [6, 9, 0]])),
    "pruner": st.sampled_from([*PRUNERS, "window", "uvv", "x\ny"]),
    "tree_paths": st.one_of(st.just([[0], [1], [0, 0]]), _PATHS),
    "parallel": st.fixed_dictionaries(
        {"device": st.sampled_from(["cpu", "cuda", "cuda:1", "cuda:" + "9" * 5000, "cuda:-1", "cpu\n"])},
        optional={
            "cpu_cores": st.sampled_from(["1", "2-5,8", "5-2", "0-99999999999", "9" * 5000, "1-", "\u0663", "1\n"]),
            "tensor_parallel_size": _SOME,
        },
    ),
    "quantization": JSON,
}
_KNOBS = st.one_of(
    st.lists(st.sampled_from(sorted(_NEARLY)), max_size=3, unique=True).flatmap(
        lambda keys: st.fixed_dictionaries({key: _NEARLY[key] for key in keys})
    ),
    st.dictionaries(_KEYS, _VALUES, max_size=4),
    st.one_of(_DRAFTERS, JSON).map(lambda given: {"parallel": given}),
    st.dictionaries(st.one_of(st.just("calibration"), st.just(100_000).map("x".__mul__)), JSON, max_size=1),
)


def check_config(asked: dict[str, Any]) -> Iterator[None]:
    """An accepted configuration survives a round trip and is usable."""
    config, passed = parse_config({**_VALID, **asked})
    yield
    assert set(passed) <= PASS_THROUGH_KEYS
    again, _ = parse_config({"method": "vidspec", **json.loads(json.dumps(config.model_dump()))})
    assert again == config
    assert config.plan_for(1).num_tokens <= 64 and config.max_path >= 1 and "\n" not in config.summary()
    assert len(config.parallel.cores) <= 100 * MAX_CORES and 1 <= config.fly_window <= 64


def _dumped(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except ValueError:  # Python writes no number of more than 4300 digits
        return b"[1, 2"


_CALIBRATION = st.one_of(
    st.fixed_dictionaries({}, optional={key: _NEARLY[key] for key in ("lambda_r", "guidance_layers", "uv_layer")}).map(
        lambda knobs: {"config": knobs}
    ),
    st.dictionaries(st.sampled_from([*sorted(CALIBRATED_KEYS), "prune_ratio"]), _VALUES, max_size=4).map(
        lambda knobs: {"config": knobs}
    ),
    JSON.map(lambda value: {"config": value}),
    JSON,
)
_BYTES = st.one_of(
    _CALIBRATION.map(_dumped),
    st.binary(max_size=300),
    st.sampled_from([b"[", b'{"config":', b'{"config": [', b"9"]).map(lambda part: part * 50_000),
    st.sampled_from([b'{"config": {"lambda_r": 1e999}}', b'{"config": {"lambda_r": NaN}}', b"\xef\xbb\xbf{}"]),
)
_PLACES = ("folder", "/dev/null", "/dev/zero", "missing", "pipe", "link", "a\nb", "a\0b", "")


def check_calibration(content: bytes | str) -> Iterator[None]:
    """A file, or a path that is none: values are in range, and nothing blocks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pair.json")
        if isinstance(content, bytes):
            path.write_bytes(content)
            given: str = str(path)
        else:
            given = str(path) if content in ("folder", "missing", "pipe", "link") else content
            {"folder": path.mkdir, "pipe": functools.partial(os.mkfifo, path)}.get(content, bool)()
            if content == "link":
                path.symlink_to(path)
        config, _ = parse_config({**_VALID, "calibration": given})
    yield
    assert 0 <= config.lambda_r <= 1


@functools.cache
def _whole_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return Path(MetricsFile.create(Path(folder, "m")).path).read_bytes()


_NOISE = st.binary(min_size=64, max_size=64).map(
    lambda noise: _whole_file()[:24] + (noise * (len(_whole_file()) // 64 + 1))[: len(_whole_file()) - 24]
)
_COUNTER_FILES = st.one_of(_NOISE, st.deferred(lambda: damaged(_whole_file(), most_changed=4, within=64)))


def check_counters(content: bytes) -> Iterator[None]:
    """Our own file can be read whatever its numbers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m")
        path.touch(mode=0o600)
        path.write_bytes(content)
        file = MetricsFile(path)
        yield
        assert all(isinstance(value, int) for value in file.values().values())
        refusal = file.refusal()
        assert refusal is None or len(refusal) <= 1024
        file.refuse("x\ny" * 1000)


_HEADERS = [b"\xff\xd8\xff\xe0\0\x10JFIF\0", b"\x89PNG\r\n\x1a\n", b"\0\0\0 ftypisom", b""]
MEDIA = st.tuples(
    st.sampled_from([".mp4", ".jpg", ".png", ""]),
    st.one_of(
        st.deferred(lambda: damaged(pairs.sample_video().read_bytes(), most_changed=30)), st.sampled_from(_HEADERS)
    ),
)


def check_media(given: tuple[str, bytes]) -> Iterator[None]:
    """`vidspec demo --video` and its like read frames."""
    suffix, content = given
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "media" + suffix)
        path.write_bytes(content)
        frames = user_files.read_video(path)
    yield
    assert frames.ndim == 4 and len(frames) > 0


TARGETS = {
    "speculative config": Target(_KNOBS, may_refuse(check_config)),
    "calibration file": Target(st.one_of(_BYTES, st.sampled_from(_PLACES)), may_refuse(check_calibration)),
    "counter file": Target(_COUNTER_FILES, may_refuse(check_counters), 100),
    "media file of a tool": Target(MEDIA, may_refuse(check_media), 40),
}
