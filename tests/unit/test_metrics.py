"""The counter file: layout, sharing across processes, lifetime, and what Prometheus sees."""

import errno
import mmap
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import pytest

from vllm_vidspec import metrics
from vllm_vidspec.counter_files import CounterFiles, sweep
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import GAUGES, NAMES, MetricsFile, difference, read_metrics, summarize


def _add_many(path: str, times: int) -> None:
    file = MetricsFile.open(path)
    for _ in range(times):
        file.add("drafts")


def test_add_set_values(tmp_path):
    file = MetricsFile.create(tmp_path / "m")
    assert file.values() == dict.fromkeys(NAMES, 0)
    file.add("drafts")
    file.add("drafts", 2**40)
    file.set("draft_pool_bytes", 7)
    file.add_accepted_per_position(np.array([3, 2, 1]))
    values = read_metrics(file.path)
    assert values["drafts"] == 2**40 + 1
    assert values["draft_pool_bytes"] == 7
    assert [values[f"accepted_at_pos_{i}"] for i in range(4)] == [3, 2, 1, 0]
    assert sum(values.values()) == 2**40 + 1 + 7 + 6


def test_every_position_has_a_slot(tmp_path):
    file = MetricsFile.create(tmp_path / "m")
    file.add_accepted_per_position(np.arange(1, 65))
    assert file.values()["accepted_at_pos_63"] == 64
    assert file.values()["skipped_pool_full"] == 0


def test_requests_by_id(tmp_path):
    """The newest request of an id counts, wherever in the ring its slot is; slots of busy requests are left alone.

    Catches: a look-up that takes the highest slot, an earlier request's counts, a slot taken from a running request.
    """
    file = MetricsFile.create(tmp_path / "m")
    counts = np.array([[3, 2, 1]])
    last = metrics._NUM_REQUESTS - 1
    for i in range(last):
        assert file.begin_request(f"request-{i}", ()) == i
    assert file.begin_request("twice", ()) == last
    file.add_to_requests(np.array([last]), counts)
    assert file.request("twice") == {"exact": 3, "loosened": 2, "shifted": 1}
    assert file.begin_request("twice", {0, 1}) == 2  # around the ring
    assert file.request("twice") == {"exact": 0, "loosened": 0, "shifted": 0}
    file.add_to_requests(np.array([2]), 2 * counts)
    assert MetricsFile.open(file.path).request("twice") == {"exact": 6, "loosened": 4, "shifted": 2}
    assert file.request("request-0") is not None and file.request("request-2") is None


def test_create_replaces_what_was_there(tmp_path):
    MetricsFile.create(tmp_path / "m").add("drafts")
    assert MetricsFile.create(tmp_path / "m").values()["drafts"] == 0


def test_path_depends_on_the_engine_only():
    assert metrics.path_for("abcde") == metrics.path_for("abcde") != metrics.path_for("abcdf")
    assert metrics.path_for("abcde", 0) == metrics.path_for("abcde") != metrics.path_for("abcde", 1)


def test_unknown_name_is_an_error(tmp_path):
    file = MetricsFile.create(tmp_path / "m")
    with pytest.raises(KeyError):
        file.add("draft")


def test_reader_in_this_process_sees_a_writer_in_another(tmp_path):
    file = MetricsFile.create(tmp_path / "m")
    writer = multiprocessing.get_context("spawn").Process(target=_add_many, args=(file.path, 1000))
    writer.start()
    writer.join()
    assert writer.exitcode == 0
    assert file.values()["drafts"] == 1000
    assert os.path.exists(file.path), "only the creator unlinks"


@pytest.mark.parametrize("content", [b"", b"short", b"\0" * 8 * 200])
def test_foreign_files_are_refused(tmp_path, content):
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(VidSpecError, match="metrics file"):
        MetricsFile.open(tmp_path / "m")


def test_missing_file_is_one_line(tmp_path):
    with pytest.raises(VidSpecError) as caught:
        read_metrics(tmp_path / "absent")
    assert "\n" not in str(caught.value)


def test_creator_unlinks_at_exit_and_a_forked_child_does_not():
    code = (
        "import os, sys\n"
        "from vllm_vidspec.metrics import MetricsFile\n"
        "path = MetricsFile.create().path\n"
        "child = os.fork()\n"
        "if child == 0: sys.exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print(path, os.path.exists(path))\n"
    )
    path, after_child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert after_child == "True"
    assert not os.path.exists(path)


def test_import_is_light():
    code = (
        "import sys, vllm_vidspec.metrics\n"
        "print([m for m in ('torch', 'vllm', 'prometheus_client') if m in sys.modules])\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_difference_keeps_gauges():
    before, after = dict.fromkeys(NAMES, 5), dict.fromkeys(NAMES, 9)
    gained = difference(before, after)
    assert all(value == (9 if name in GAUGES else 4) for name, value in gained.items())


def test_summarize():
    values = dict.fromkeys(NAMES, 0) | {
        "drafts": 10,
        "draft_tokens": 50,
        "accepted_tokens": 25,
        "text_tokens": 20,
        "visual_tokens_full": 200,
        "visual_tokens_kept": 20,
        "draft_kv_bytes_per_token": 8,
    }
    assert summarize(values) == {
        "acceptance_length": 3.5,
        "acceptance_rate": 0.5,
        "num_drafts": 10,
        "draft_kv_bytes": 320,
        "full_draft_kv_bytes": 1760,
    }
    empty = summarize(dict.fromkeys(NAMES, 0))
    assert empty["acceptance_length"] is None
    assert empty["acceptance_rate"] is None


@pytest.fixture
def scrape():
    prometheus_client = pytest.importorskip("prometheus_client")
    yield lambda: prometheus_client.generate_latest(prometheus_client.REGISTRY).decode()
    if collector := metrics._registered.pop("collector", None):
        prometheus_client.REGISTRY.unregister(collector)


def test_prometheus_text(tmp_path, scrape):
    files = {engine: MetricsFile.create(tmp_path / f"m{engine}") for engine in (0, 1)}
    file, other = files.values()
    metrics.register_collector(files, "m")
    file.add("drafts", 4)
    file.add("accepted_tokens", 3)
    file.add_accepted_per_position(np.array([2, 1]))
    file.add("skipped_pool_full", 3)
    file.add("draft_prefill_us", 1_500_000)
    file.set("draft_pool_blocks_used", 5)
    other.add("drafts", 2)
    # An engine that ran in this process has left vLLM's own metrics in the registry.
    text = "\n".join(line for line in scrape().splitlines() if "vidspec:" in line)
    engine = 'model_name="m",engine="0"'
    for line in (
        f"vidspec:drafts_total{{{engine}}} 4.0",
        'vidspec:drafts_total{engine="1",model_name="m"} 2.0',
        f'vidspec:accepted_tokens_per_position_total{{{engine},position="1"}} 1.0',
        f'vidspec:skipped_requests_total{{{engine},reason="pool_full"}} 3.0',
        f"vidspec:draft_pool_blocks_used{{{engine}}} 5.0",
        f"vidspec:visual_tokens_kept_total{{{engine}}} 0.0",
        f"vidspec:draft_prefill_seconds_total{{{engine}}} 1.5",
    ):
        assert sum(_same(line, found) for found in text.splitlines()) == 1, line
    assert 'position="2"' not in text
    assert "spec_decode" not in text, "vllm bench serve matches vllm's own counters by substring"
    file.add("drafts")
    assert f"vidspec:drafts_total{{{_sorted(engine)}}} 5.0" in scrape()


def _sorted(labels: str) -> str:
    return ",".join(sorted(labels.split(",")))


def _same(line: str, other: str) -> bool:
    """Return whether two samples are the same but for the order of labels, which is not the same in all releases."""
    (name, labels), (other_name, other_labels) = (text.partition("{")[::2] for text in (line, other))
    parts = [[*sorted(text.partition("}")[0].split(",")), text.partition("}")[2]] for text in (labels, other_labels)]
    return name == other_name and parts[0] == parts[1]


def test_values_of_one_label_add_up_to_something(tmp_path):
    """Catches: "full" beside "kept", "used" beside "total", whose sum means nothing."""
    prometheus_client = pytest.importorskip("prometheus_client")
    file = MetricsFile.create(tmp_path / "m")
    for name in NAMES:
        file.set(name, 1)
    registry = prometheus_client.CollectorRegistry()
    registry.register(metrics._Collector({0: file}, "m"))
    wholes = {"kind": len(metrics.KINDS), "position": metrics.MAX_POSITIONS, "reason": None, "le": None}
    for family in registry.collect():
        own = {label for sample in family.samples for label in sample.labels} - {"model_name", "engine"}
        assert own <= wholes.keys(), family.name
        for label in own & {"kind"}:
            assert len(family.samples) == wholes[label], family.name


def test_histogram_of_acceptance_lengths(tmp_path):
    """Of 10 steps 4 accept nothing, 3 one token, 3 four; the sum over the count is the acceptance length."""
    prometheus_client = pytest.importorskip("prometheus_client")
    file = MetricsFile.create(tmp_path / "m")
    file.add("drafts", 10)
    file.add("accepted_tokens", 3 * 1 + 3 * 4)
    file.add_accepted_per_position(np.array([6, 3, 3, 3]))
    registry = prometheus_client.CollectorRegistry()
    registry.register(metrics._Collector({0: file}, "m"))
    labels = {"model_name": "m", "engine": "0"}

    def read(suffix, **more):
        return registry.get_sample_value(f"vidspec:acceptance_length_{suffix}", labels | more)

    assert [read("bucket", le=str(n)) for n in range(1, 7)] == [4, 7, 7, 7, 10, 10]
    assert read("bucket", le="+Inf") == read("count") == 10
    assert read("sum") / read("count") == summarize(file.values())["acceptance_length"] == 2.5


def test_a_second_engine_replaces_the_first(tmp_path, scrape):
    first, second = MetricsFile.create(tmp_path / "a"), MetricsFile.create(tmp_path / "b")
    metrics.register_collector({0: first}, "m")
    metrics.register_collector({0: second}, "m")
    second.add("drafts", 2)
    assert len([line for line in scrape().splitlines() if line.startswith("vidspec:drafts_total")]) == 1
    assert "vidspec:drafts_total" in scrape() and "} 2.0" in scrape()


def test_a_deleted_file_is_read_and_written_as_before(tmp_path, scrape):
    """Catches: counters that vanish, and a server that stops, when somebody tidies the temporary directory."""
    file = MetricsFile.create(tmp_path / "m")
    worker = MetricsFile.open(tmp_path / "m")
    metrics.register_collector({0: file}, "m")
    os.unlink(file.path)
    worker.add("drafts", 3)
    worker.add_to_requests(np.array([worker.begin_request("r", set())]), np.array([[2, 0, 0]]))
    assert file.values()["drafts"] == 3 and file.request("r")["exact"] == 2
    assert _same('vidspec:drafts_total{model_name="m",engine="0"} 3.0', _line(scrape(), "vidspec:drafts_total{"))


def _line(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


def test_values_that_belong_together_are_read_together(tmp_path):
    """Catches: a scrape between "drafts" and their positions, after which a counter of the histogram falls."""
    file, reader = MetricsFile.create(tmp_path / "m"), MetricsFile.open(tmp_path / "m")
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
    file._words[metrics._SEQUENCE] += 1  # a writer that died in between
    assert reader.values()["drafts"] == file.values()["drafts"]


def test_a_refusal_is_left_for_the_server(tmp_path):
    file, worker = MetricsFile.create(tmp_path / "m"), MetricsFile.open(tmp_path / "m")
    assert file.refusal() is None
    worker.refuse("ä" * 10_000)
    assert 400 < len(file.refusal()) < 1000 and set(file.refusal()) == {"ä"}
    worker.refuse("one line")
    assert file.refusal() == "one line"
    assert set(file.values().values()) == {0}


@pytest.mark.parametrize("failure", ["absent", "full"])
def test_a_directory_that_takes_no_file_is_one_line(tmp_path, monkeypatch, failure):
    """Catches: a trace of many lines, and half a file that stays."""
    path = tmp_path / "m"
    if failure == "absent":
        path = tmp_path / "absent" / "m"
    else:

        def full(*_args):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(VidSpecError, match="metrics file") as caught:
        MetricsFile.create(path)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


_SERVER = """
import sys, time
from vllm_vidspec.counter_files import CounterFiles
files = CounterFiles.create(sys.argv[1], [0, 1])
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A temporary directory of the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_leftovers_are_swept_and_held_files_stay(folder):
    """Catches: files of killed servers that pile up; a sweep that takes a running server's."""
    servers = []
    for name in ("killed", "running"):
        server = subprocess.Popen([sys.executable, "-c", _SERVER, name], stdout=subprocess.PIPE, text=True)
        assert server.stdout.readline() == "ready\n"
        servers.append(server)
    (folder / "another.i64").touch()
    try:
        servers[0].kill()
        servers[0].wait()
        assert len(list(folder.iterdir())) == 5
        mine = CounterFiles.create("mine", [0])
        kept = {path.name for path in folder.iterdir()}
        names = {metrics.path_for(name, engine).name for name, engine in (("running", 0), ("running", 1), ("mine", 0))}
        assert kept == names | {"another.i64"}
        assert mine.refusal() is None and mine.request("r") is None
    finally:
        for server in servers:
            server.kill()
            server.wait()
            server.stdout.close()


def test_a_writer_keeps_the_file_of_a_server_that_was_killed(folder):
    """The engine may outlive its API server by a while: what it writes to must not be taken for a leftover."""
    CounterFiles.create("a", [0])  # and nothing holds it any more
    worker = MetricsFile.open(metrics.path_for("a"))
    assert sweep() == []
    del worker
    assert sweep() == [metrics.path_for("a")]
