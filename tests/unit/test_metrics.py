"""The counter file: layout, sharing across processes, lifetime, and what Prometheus sees."""

import errno
import mmap
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import prometheus_client
import pytest

from vllm_vidspec import metrics
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import GAUGE_NAMES, NAMES, MetricsFile, difference, read_metrics, summarize
from vllm_vidspec.metrics.files import CounterFiles, sweep


@pytest.fixture
def file(tmp_path):
    return MetricsFile.create(tmp_path / "m")


def add_accepted(file: MetricsFile, counts: np.ndarray) -> None:
    file.add_all(metrics.slots_of(f"accepted_at_pos_{i}" for i in range(len(counts))), counts)


def printed_by(*lines: str) -> str:
    code = "\n".join(["import os, sys", "from vllm_vidspec.metrics import MetricsFile", *lines])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_add_set_values(file):
    assert file.values() == dict.fromkeys(NAMES, 0)
    file.add("drafts")
    file.add("drafts", 2**40)
    file.set("draft_pool_bytes", 7)
    add_accepted(file, np.arange(1, 65))
    values = read_metrics(file.path)
    assert values["drafts"] == 2**40 + 1
    assert values["draft_pool_bytes"] == 7
    assert [values[f"accepted_at_pos_{i}"] for i in range(64)] == list(range(1, 65))
    assert sum(values.values()) == 2**40 + 1 + 7 + sum(range(65))
    add_accepted(file, np.array([3, 2, 1]))
    assert [file.values()[f"accepted_at_pos_{i}"] for i in range(4)] == [4, 4, 4, 4]
    with pytest.raises(KeyError):
        file.add("draft")
    with pytest.raises(KeyError):
        metrics.slots_of(["drafts", "draft"])
    assert set(MetricsFile.create(file.path).values().values()) == {0}, "create replaces what was there"


def test_other_processes(file):
    """What another process writes is read here; the creator alone unlinks, at its exit; and the import is light."""
    heavy = ("torch", "vllm", "prometheus_client")
    add = f"for _ in range(1000): MetricsFile({str(file.path)!r}).add('drafts')"
    assert printed_by(add, f"print([name for name in {heavy} if name in sys.modules])") == "[]\n"
    assert file.values()["drafts"] == 1000
    assert os.path.exists(file.path), "only the creator unlinks"
    create, fork = "path = MetricsFile.create().path", "child = os.fork()"
    wait = "os.waitpid(child, 0) if child else sys.exit(0)"
    path, after_child = printed_by(create, fork, wait, "print(path, os.path.exists(path))").split()
    assert after_child == "True"
    assert not os.path.exists(path)


def test_values_that_belong_together_are_read_together(file, monkeypatch):
    """Catches: a scrape between "drafts" and their positions, after which a counter of the histogram falls."""
    num_tries = metrics.file._NUM_TRIES
    monkeypatch.setattr(metrics.file, "_NUM_TRIES", 10**5)  # a busy machine may keep the writer in between for long
    reader = MetricsFile(file.path)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            with file.at_once():
                file.add("drafts")
                time.sleep(0)
                file.add("accepted_tokens")
            time.sleep(1e-4)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            values = reader.values()
            assert values["drafts"] == values["accepted_tokens"]
    finally:
        stop.set()
        writer.join()
    monkeypatch.setattr(metrics.file, "_NUM_TRIES", num_tries)
    file._words[metrics.file._SEQUENCE] += 1  # a writer that died in between
    assert reader.values()["drafts"] == file.values()["drafts"]


def test_figures():
    """A difference keeps gauges; what is summed up is by hand, and nothing of nothing."""
    gained = difference(dict.fromkeys(NAMES, 5), dict.fromkeys(NAMES, 9))
    assert all(value == (9 if name in GAUGE_NAMES else 4) for name, value in gained.items())
    nothing = dict.fromkeys(NAMES, 0)
    drafts = {"drafts": 10, "draft_tokens": 50, "accepted_tokens": 25}
    tokens = {"text_tokens": 20, "visual_tokens_full": 200, "visual_tokens_kept": 20, "draft_kv_bytes_per_token": 8}
    found = summarize(nothing | drafts | tokens)
    assert (found["acceptance_length"], found["acceptance_rate"], found["num_drafts"]) == (3.5, 0.5, 10)
    assert (found["draft_kv_bytes"], found["full_draft_kv_bytes"]) == (320, 1760)
    empty = summarize(nothing)
    assert empty["acceptance_length"] is empty["acceptance_rate"] is None


@pytest.fixture
def sample():
    """Reads one sample of the registry that vLLM serves."""

    def read(name, engine=0, **labels):
        labels |= {"model_name": "m", "engine": str(engine)}
        return prometheus_client.REGISTRY.get_sample_value(f"vidspec:{name}", labels)

    yield read
    if collector := metrics.prometheus._registered.pop("collector", None):
        prometheus_client.REGISTRY.unregister(collector)


def test_what_prometheus_sees(file, tmp_path, sample):
    other = MetricsFile.create(tmp_path / "other")
    collector = metrics.register_collector({0: file, 1: other}, "m")
    file.add("drafts", 4)
    file.add("accepted_tokens", 3)
    add_accepted(file, np.array([2, 1]))
    file.add("skipped_pool_full", 3)
    file.add("draft_prefill_us", 1_500_000)
    file.set("draft_pool_blocks_used", 5)
    other.add("drafts", 2)
    assert sample("drafts_total") == 4 and sample("drafts_total", engine=1) == 2
    assert sample("accepted_tokens_per_position_total", position="1") == 1
    assert sample("accepted_tokens_per_position_total", position="2") is None
    assert sample("skipped_requests_total", reason="pool_full") == 3
    assert sample("draft_pool_blocks_used") == 5
    assert sample("visual_tokens_kept_total") == 0
    assert sample("draft_prefill_seconds_total") == 1.5
    file.add("drafts")
    assert sample("drafts_total") == 5
    names = {family.name for family in collector.collect()}
    assert not any("spec_decode" in name for name in names), "vllm bench serve matches its own counters by substring"
    metrics.register_collector({0: other}, "m")
    assert sample("drafts_total") == 2 and sample("drafts_total", engine=1) is None, "the new engines replace the old"


def test_values_of_one_label_add_up_to_something(file):
    """Catches: "full" beside "kept", "used" beside "total", whose sum means nothing; a counter that is on no scrape."""
    for slot, name in enumerate(NAMES):
        file.set(name, 10**6 * (slot + 1))  # whole seconds where it is a time
    wholes = {"kind": len(metrics.KINDS), "position": metrics.MAX_POSITIONS, "reason": None, "le": None}
    wholes |= {"pruner": None, "class": None}
    seen = []
    for family in metrics.Collector({0: file}, "m").collect():
        own = {label for sample in family.samples for label in sample.labels} - {"model_name", "engine"}
        assert own <= wholes.keys(), family.name
        for label in own & {"kind", "position"}:
            assert len(family.samples) == wholes[label], family.name
        if "le" not in own:
            seen += [sample.value * (10**6 if "_seconds" in family.name else 1) for sample in family.samples]
    assert sorted(seen) == sorted(file.values().values())


def test_metrics_page_lists_every_family(file):
    """Catches: a metric that nobody is told of, and one on the page that is gone."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
    listed = set(re.findall(r"^\| `vidspec:(\w+)`", page, re.MULTILINE))
    families = metrics.Collector({0: file}, "m").collect()
    shown = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert listed == {name.removeprefix("vidspec:") for name in shown}


def test_histogram_of_acceptance_lengths(file, sample):
    """Of 10 steps 4 accept nothing, 3 one token, 3 four; the sum over the count is the acceptance length."""
    file.add("drafts", 10)
    file.add("accepted_tokens", 3 * 1 + 3 * 4)
    add_accepted(file, np.array([6, 3, 3, 3]))
    metrics.register_collector({0: file}, "m")
    assert [sample("acceptance_length_bucket", le=f"{n}.0") for n in range(1, 7)] == [4, 7, 7, 7, 10, 10]
    assert sample("acceptance_length_bucket", le="+Inf") == sample("acceptance_length_count") == 10
    mean = sample("acceptance_length_sum") / sample("acceptance_length_count")
    assert mean == summarize(file.values())["acceptance_length"] == 2.5


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_leftovers_are_swept_and_held_files_stay(folder):
    """Catches: files of killed servers that pile up; a sweep that takes what somebody still writes to."""
    running = CounterFiles.create("running", [0, 1])
    CounterFiles.create("killed", [0])  # and nothing holds it any more
    CounterFiles.create("outlived", [0])
    worker = MetricsFile(metrics.path_for("outlived"))
    (folder / "another.i64").touch()
    mine = CounterFiles.create("mine", [0])
    held = [("running", 0), ("running", 1), ("outlived", 0), ("mine", 0)]
    kept = {metrics.path_for(*name).name for name in held}
    assert {path.name for path in folder.iterdir()} == kept | {"another.i64"}
    assert running.refusal() is mine.refusal() is None
    del worker
    assert sweep() == [metrics.path_for("outlived")]


def plant(path: Path, kind: str, victim: Path) -> None:
    """Put something in the counter file's place, as another user could have before."""
    if kind == "pipe":
        os.mkfifo(path, mode=0o600)
    elif kind == "folder":
        path.mkdir()
    elif kind.startswith("link"):
        path.symlink_to(victim if kind == "link" else path.parent / "absent")
    elif kind != "nothing":
        path.write_bytes(b"" if kind == "empty" else victim.read_bytes())
        path.chmod(0o644 if kind == "open to others" else 0o600)


@pytest.mark.parametrize(
    "kind",
    ["nothing", "empty", "foreign", "link", "link to nothing", "pipe", "folder", "open to others", "another user's"],
)
def test_what_is_no_file_of_ours_is_one_line(tmp_path, monkeypatch, kind):
    """Catches: counters written through a link, a wait for a pipe, numbers that another user may change."""
    victim, path = Path(MetricsFile.create(tmp_path / "victim").path), tmp_path / "m"
    if kind == "foreign":
        victim.write_bytes(b"\0" * 8 * 200)
    before = victim.read_bytes()
    plant(path, kind, victim)
    if kind == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for use in (MetricsFile, read_metrics):
        with pytest.raises(VidSpecError, match="metrics file") as error:
            use(path)
        assert "\n" not in str(error.value) and victim.read_bytes() == before


@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "open to others"])
def test_a_new_file_takes_the_place_of_what_was_planted(tmp_path, kind):
    """Catches: zeros written through a link to a file of the user's own; counters that others can read."""
    victim, path = tmp_path / "victim", tmp_path / "m"
    victim.write_bytes(b"precious")
    plant(path, kind, victim)
    created = MetricsFile.create(path)
    created.add("drafts")
    assert victim.read_bytes() == b"precious" and not path.is_symlink()
    assert os.stat(path).st_mode & 0o777 == 0o600 and read_metrics(path)["drafts"] == 1


@pytest.mark.parametrize("why", ["in no directory", "a folder is there", "the disk is full"])
def test_a_file_that_cannot_be_is_one_line(tmp_path, monkeypatch, why):
    """Catches: a trace of many lines, half a file that stays."""
    path = tmp_path / "m"
    if why == "the disk is full":
        monkeypatch.setattr(mmap, "mmap", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    elif why == "a folder is there":
        path.mkdir()
    with pytest.raises(VidSpecError, match=r"metrics file|takes no file") as error:
        MetricsFile.create(path / "below" if why == "in no directory" else path)
    assert "\n" not in str(error.value) and not any(one.is_file() for one in tmp_path.iterdir())
