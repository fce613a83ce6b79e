"""The counter file: layout, sharing across processes, lifetime, and what Prometheus sees."""

import multiprocessing
import os
import subprocess
import sys

import numpy as np
import pytest

from vllm_vidspec import metrics
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
    file = MetricsFile.create(tmp_path / "m")
    metrics.register_collector(file.path)
    metrics.register_collector(file.path)  # idempotent
    file.add("drafts", 4)
    file.add_accepted_per_position(np.array([2, 1]))
    file.add("skipped_pool_full", 3)
    file.add("draft_prefill_us", 1_500_000)
    file.set("draft_pool_blocks_used", 5)
    # An engine that ran in this process has left vLLM's own metrics in the registry.
    text = "\n".join(line for line in scrape().splitlines() if "vidspec:" in line)
    for line in (
        "vidspec:drafts_total 4.0",
        'vidspec:accepted_tokens_per_position_total{position="1"} 1.0',
        'vidspec:skipped_requests_total{reason="pool_full"} 3.0',
        'vidspec:draft_pool_blocks{state="used"} 5.0',
        'vidspec:visual_tokens_total{kind="kept"} 0.0',
        "vidspec:draft_prefill_seconds_total 1.5",
    ):
        assert text.splitlines().count(line) == 1, line
    assert 'position="2"' not in text
    assert "spec_decode" not in text, "vllm bench serve matches vllm's own counters by substring"
    file.add("drafts")
    assert "vidspec:drafts_total 5.0" in scrape()


def test_a_second_engine_replaces_the_first(tmp_path, scrape):
    first, second = MetricsFile.create(tmp_path / "a"), MetricsFile.create(tmp_path / "b")
    metrics.register_collector(first.path)
    metrics.register_collector(second.path)
    second.add("drafts", 2)
    assert "vidspec:drafts_total 2.0" in scrape()


def test_a_scrape_after_the_engine_is_gone_is_empty(tmp_path, scrape):
    file = MetricsFile.create(tmp_path / "m")
    metrics.register_collector(file.path)
    os.unlink(file.path)
    assert "vidspec:" not in scrape()
