"""`vidspec status`: figures from text that our own collector made, its rules one by one, its errors, its watching."""

import http.server
import json
import re
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest

from tools.common import ROOT, invoke, printed, refuses
from vllm_vidspec import metrics
from vllm_vidspec.tools import scrape, status, status_rules, views

prometheus_client = pytest.importorskip("prometheus_client")

# A chain of 4 that stands for 2.5 tokens a step, of which the fourth never does.
SOUND = {
    "drafts": 1000,
    "draft_tokens": 4000,
    "draft_depth": 4000,
    "accepted_tokens": 1800,
    "exact_tokens": 1800,
    "accepted_at_pos_0": 900,
    "accepted_at_pos_1": 600,
    "accepted_at_pos_2": 300,
    "prompts": 200,
    "guided_prompts": 190,
    "draft_steps": 500,
    "draft_forwards": 2000,
    "draft_prefill_us": 4_000_000,
    "draft_decode_us": 5_000_000,
    "guidance_us": 1_000_000,
    "draft_pool_blocks_total": 50,
    "draft_pool_blocks_used": 10,
    "draft_pool_bytes": 50 * 2**20,
    "draft_kv_bytes_per_token": 64,
}
VLLM = {"outputs": 1000, "output_seconds": 40.0, "generation_tokens": 3000, "first_tokens": 200, "running": 2}


class Server:
    """What a server's /metrics would say: our files under our collector, and vLLM's figures."""

    def __init__(self, folder, num_engines=1):
        self.files = {i: metrics.MetricsFile.create(folder / f"m{i}") for i in range(num_engines)}
        self.vllm = {}
        for file in self.files.values():
            file.set("speculation_on", 1)

    def count(self, engine=0, **values):
        for name, value in values.items():
            (self.files[engine].set if name in metrics.GAUGE_NAMES else self.files[engine].add)(name, value)

    def text(self):
        registry = prometheus_client.CollectorRegistry()
        registry.register(metrics.Collector(self.files, "m"))
        vllms = [f"{metric} {self.vllm[name]}\n" for metric, name in scrape.VLLM.items() if name in self.vllm]
        return prometheus_client.generate_latest(registry).decode() + "".join(vllms)

    def figures(self):
        return status.parse(self.text()).figures()


@pytest.fixture
def server(tmp_path):
    return Server(tmp_path)


@pytest.fixture
def sound(server):
    server.count(**SOUND)
    server.vllm = dict(VLLM)
    return server


def rules(figures, level=None):
    return {advice.rule: advice for advice in status_rules.advise(figures) if level in (None, advice.level)}


# --- figures ---


def test_figures_by_hand(sound):
    found = sound.figures()
    assert found["acceptance_length"] == 2.8 and found["acceptance_rate"] == 0.45
    assert found["accepted_by_position"] == [0.9, 0.6, 0.3]
    assert found["pool"] == {"blocks": 50, "used_blocks": 10, "bytes": 50 * 2**20, "used_bytes": 10 * 2**20}
    assert found["draft_seconds"] == {"prefill": 4.0, "decode": 5.0, "guidance": 1.0, "relevance": 0.0}
    assert (found["draft_seconds_per_step"], found["draft_seconds_per_prompt"]) == (0.01, 0.02)
    assert found["vllm"]["tokens_per_output"] == 2.8 and found["vllm"]["seconds_per_output"] == 0.04
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("pauses", [0, 1])
def test_a_class_says_why_it_is_drafted_for(sound, serving, pauses):
    """Catches: thousandths taken for tokens, microseconds for milliseconds, a paused class that seems drafted for."""
    counted = {"admitted": 7, "unadmitted": 3, "pauses": pauses, "best_tokens": 5, "best_length": 3400}
    counted |= {"best_us": 39500, "none_us": 17400, "steps": 10, "tokens": 25}
    sound.count(**{f"{name}_video_1k": value for name, value in counted.items()})
    line = "K = 5: 3.4 tokens / 39.5 ms = 86/s; K = 0: 1 / 17.4 ms = 57/s"
    assert sound.figures()["classes"] == {
        "video_1k": {
            "admitted_requests": 7,
            "unadmitted_requests": 3,
            "tokens_per_step": 2.5,
            "paused": bool(pauses),
            "decision": line,
        }
    }
    serving.texts = [sound.text()]
    assert f"video_1k: {line}" in invoke("status", "--server", serving.url).stdout


def test_figures_of_nothing(server):
    found = server.figures()
    nothing = ("acceptance_length", "acceptance_rate", "draft_tokens_per_step", "draft_seconds_per_step")
    assert [found[name] for name in nothing] == [None] * len(nothing)
    assert found["accepted_by_position"] == [] and found["vllm"]["running"] is None


def test_engines_are_added_up_and_shown_each(tmp_path):
    """Catches: sizes per token that are added up, a counter of the first engine only."""
    server = Server(tmp_path, num_engines=2)
    server.count(0, **SOUND)
    server.count(1, drafts=1000, draft_kv_bytes_per_token=64, skipped_pool_full=3)
    reading = status.parse(server.text())
    both = reading.figures()
    assert both["acceptance_length"] == 1.9 and both["skipped_requests"]["pool_full"] == 3
    assert scrape.together(reading.engines.values())["draft_kv_bytes_per_token"] == 64
    shown = status.result("s", reading)["engines"]
    assert [shown[engine]["acceptance_length"] for engine in ("0", "1")] == [2.8, 1.0]


def test_an_interval_is_what_was_gained(sound):
    before = status.parse(sound.text(), at=100.0)
    sound.count(drafts=100, draft_tokens=400, accepted_tokens=300, draft_pool_blocks_used=20)
    sound.vllm |= {"generation_tokens": 3400, "running": 5}
    gained = status.parse(sound.text(), at=110.0).since(before)
    found = gained.figures()
    assert gained.at == 10.0 and found["acceptance_length"] == 4.0 and found["verify_steps"] == 100
    assert found["pool"]["used_blocks"] == 20, "a gauge keeps its value"
    assert (found["vllm"]["running"], found["vllm"]["generation_tokens"]) == (5, 400)


def test_a_server_started_anew_has_gained_nothing(sound, tmp_path):
    (tmp_path / "new").mkdir()
    before, after = status.parse(sound.text()), status.parse(Server(tmp_path / "new").text())
    assert after.since(before) is None


# --- rules ---


CASES = {
    "few_accepted": {"accepted_tokens": -1400},
    "last_positions": {},
    **{f"skipped_{reason}": {f"skipped_{reason}": 9} for reason in metrics.SKIP_REASONS},
    **{f"unguided_{reason}": {f"unguided_{reason}": 9} for reason in metrics.GUIDANCE_FALLBACKS},
    **{f"strict_{reason}": {f"strict_{reason}": 9} for reason in ("cached", "memory", "error")},
    "full_pool": {"draft_pool_blocks_used": 49},
    "drafter_restarts": {"drafter_restarts": 1},
    "late_drafts": {"late_drafts": 500},
    "stale_streams": {"stale_streams": 500},
    "eager_steps": {"draft_eager_steps": 50},
    "switched_off": {"speculation_on": 0},
}


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_speaks_when_it_should_and_not_before(sound, rule):
    if rule != "last_positions":
        sound.count(draft_tokens=-1000, draft_depth=-1000)
        assert rule not in rules(sound.figures())
    sound.count(**CASES[rule])
    found = rules(sound.figures())[rule]
    assert found.remedy and "docs/metrics.md" not in found.remedy, "every reason of today has its own remedy"


@pytest.mark.parametrize("counted", [SOUND, {}, {"undrafted_steps": 9}])
@pytest.mark.parametrize(
    ("off", "shown", "words", "remedy"),
    [
        ({"speculation_on": 0}, "off (operator)", "an operator", "null"),
        ({"speculation_on": 0, "cooling_down": 1, "draft_failures": 8}, "off (cool-down)", "8 times", "after a minute"),
    ],
)
def test_a_server_that_does_not_draft_is_not_healthy(server, serving, counted, off, shown, words, remedy):
    """Catches: a server whose drafting is off that is called sound, or without requests; the wrong reason."""
    server.count(**counted)
    server.count(draft_tokens=-server.figures()["verify_steps"], draft_depth=-server.figures()["verify_steps"])
    serving.texts = [server.text()]
    assert invoke("status", "--server", serving.url).exit_code == (1 if counted == {"undrafted_steps": 9} else 0)
    server.count(**off)
    serving.texts = [server.text()]
    result = invoke("status", "--server", serving.url)
    assert result.exit_code == 1 and shown in result.stdout
    assert set(rules(server.figures())) == {"switched_off"}
    found = rules(server.figures())["switched_off"]
    assert words in found.found and remedy in found.remedy and found.level == "warn"


def test_one_engine_of_two_that_is_off_is_told(tmp_path):
    """Catches: gauges of several engines that are added up, so that one that is off hides behind one that is on."""
    server = Server(tmp_path, num_engines=2)
    server.count(1, speculation_on=0, cooling_down=1)
    found = status.result("s", status.parse(server.text()))
    assert [found["engines"][engine]["speculation"] for engine in "01"] == ["on", "cool-down"]
    assert found["since_start"]["speculation"] == "cool-down"


def test_one_request_in_hundreds_is_an_accident(sound):
    """Catches: advice about a single skipped request, and an exception that is passed over because it came once."""
    one = dict.fromkeys(("skipped_pool_full", "skipped_too_long", "skipped_draft_error", "unguided_cached"), 1)
    sound.count(draft_tokens=-1000, draft_depth=-1000, **one)
    assert set(rules(sound.figures())) == {"skipped_draft_error"}
    sound.count(skipped_pool_full=2)
    assert set(rules(sound.figures())) == {"skipped_draft_error", "skipped_pool_full"}


def test_every_rule_has_a_case():
    """Catches: a rule that no case above makes speak."""
    spoken = set()
    for case in CASES.values():
        values = dict.fromkeys(metrics.NAMES, 0) | SOUND
        values |= {name: values[name] + value for name, value in case.items()}
        figures = status.figures(values, VLLM)
        spoken |= {rule for rule in status_rules.RULES if list(rule(figures))}
    assert set(status_rules.RULES) - spoken == {status_rules.nothing_drafted}, "which has cases of its own below"


def test_the_number_of_draft_tokens_is_computed(sound):
    assert rules(sound.figures())["last_positions"].remedy == "lower num_speculative_tokens to 3"
    sound.count(accepted_at_pos_2=-285)  # stands in 1.5 % of the steps
    assert rules(sound.figures())["last_positions"].remedy == "lower num_speculative_tokens to 2"
    sound.count(draft_tokens=6000)  # a tree of 10 nodes and depth 4: its nodes are no chain
    assert "last_positions" not in rules(sound.figures())


def test_a_reason_nobody_knows_yet_is_shown(sound):
    figures = sound.figures()
    figures["skipped_requests"]["new_reason"] = 50
    assert "docs/metrics.md" in rules(figures)["skipped_new_reason"].remedy


@pytest.mark.parametrize(
    ("counted", "tokens", "words", "level"),
    [
        ({}, 0, "no request", "info"),
        ({"undrafted_steps": 9, "prompts": 3}, 90, "drafts do not pay, or are switched off", "warn"),
        ({"skipped_too_long": 4}, 90, "all 4 requests were skipped", "warn"),
        ({"late_drafts": 9, "prompts": 3}, 90, "never ahead", "warn"),
        ({"prompts": 3}, 6, "nothing was drafted", "warn"),
    ],
)
def test_why_nothing_is_drafted(server, counted, tokens, words, level):
    server.count(**counted)
    server.vllm = {"generation_tokens": tokens}
    found = rules(server.figures())["nothing_drafted"]
    assert words in found.found and found.level == level


def test_knobs_in_the_advice_exist():
    """Catches: a remedy that names a knob which is called otherwise by now."""
    knobs = (ROOT / "docs" / "configuration.md").read_text()
    source = (ROOT / "vllm_vidspec" / "tools" / "status_rules.py").read_text()
    named = r"\b((?:draft|state|parallel|num_spec|prune)_[a-z_]+)\b"
    words = set(re.findall(rf"(?:raise|lower|or|for a|look at) \(?{named}", source))
    assert words == {"draft_kv_bytes", "prune_ratio", "state_bytes"}
    assert all(f"`{word}`" in knobs for word in words)


# --- the command ---


@pytest.fixture
def serving():
    """Serves the texts that it is given one after the other, the last one for ever; an int is an HTTP status."""
    held = SimpleNamespace(texts=[])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            answer = held.texts.pop(0) if len(held.texts) > 1 else held.texts[0]
            self.send_response(answer if isinstance(answer, int) else 200)
            self.end_headers()
            self.wfile.write(b"" if isinstance(answer, int) else answer.encode())
            held.path = self.path

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        held.url = f"http://127.0.0.1:{listener.server_address[1]}"
        yield held
        listener.shutdown()
        thread.join()


def test_what_is_printed(sound, serving, tmp_path):
    serving.texts = [sound.text()]
    result = invoke("status", "--server", serving.url + "/v1/")
    assert result.exit_code == 1 and serving.path == "/metrics"
    for words in ("2.80", "1.80 of 4.00 (45.0 %)", "90 60 30 %", "10 of 50 (20.0 %)", "10.0 MiB of 50.0 MiB"):
        assert words in result.stdout
    assert "lower num_speculative_tokens to 3" in result.stdout
    assert "engine 0" not in result.stdout, "one engine is no column of its own"
    found = printed("status", "--server", serving.url, status=1)
    assert set(found) == {"server", "since_start", "interval", "interval_seconds", "engines", "advice"}
    assert found["since_start"] == sound.figures()

    sound.count(draft_tokens=-1000, draft_depth=-1000)
    serving.texts = [sound.text()]
    result = invoke("status", "--server", serving.url)
    assert result.exit_code == 0 and "Nothing to change." in result.stdout
    (tmp_path / "two").mkdir()
    serving.texts = [Server(tmp_path / "two", num_engines=2).text()]
    heads = invoke("status", "--server", serving.url).stdout.splitlines()[2]
    assert all(words in heads for words in ("since start", "engine 0", "engine 1"))


def test_the_page_shows_what_is_printed(sound):
    """Catches: a sample of the docs with other rows, or in another order, than the program has."""
    page = (ROOT / "docs" / "operate.md").read_text()
    (sample,) = re.findall(r"─\n(.*?)\n\n", page, re.DOTALL)
    labels = [line[5:39].strip() for line in sample.splitlines() if line[5:39].strip()]
    shown = views.status_table(status.result("s", status.parse(sound.text()))).columns[0].cells
    assert labels == [str(label).strip() for label in shown]


@pytest.mark.parametrize("as_json", [False, True])
def test_watching(sound, serving, monkeypatch, as_json):
    """The advice is about the interval; Ctrl-C ends it. Catches: figures since the start under the interval's head."""
    first = sound.text()
    sound.count(drafts=200, draft_tokens=200, draft_depth=200, accepted_tokens=20, accepted_at_pos_0=20)
    serving.texts = [first, sound.text()]
    sleep = mock.Mock(side_effect=[None, KeyboardInterrupt])
    monkeypatch.setattr(status, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    result = invoke("status", "--server", serving.url, "--watch", "5", *(["--json", "-"] if as_json else []))
    assert result.exit_code == 130
    if as_json:
        one, two = map(json.loads, result.stdout.splitlines())
        assert one["interval"] is None and two["interval"]["acceptance_length"] == 1.1
        assert [advice["rule"] for advice in two["advice"]] == ["few_accepted"]
    else:
        assert result.stdout.count("since start") == 2 and "1.10" in result.stdout


def test_errors_are_one_line(sound, serving, tmp_path):
    refuses("no server answers", "status", "--server", "127.0.0.1:1")
    refuses("is no address", "status", "--server", "ftp://x")
    refuses("is no address", "status", "--server", "")
    refuses("no server answers", "status", "--server", "http://127.0.0.1:port")
    for text, words in (
        (404, "answers 404"),
        ("vllm:num_requests_running 3.0\n", "no counters of vidspec"),
        ("up 1\n", "no metrics of vLLM's"),
        ("<html>{", "no Prometheus text"),
    ):
        serving.texts = [text]
        refuses(words, "status", "--server", serving.url)
    serving.texts = [sound.text()]
    refuses("only '-'", "status", "--server", serving.url, "--watch", "1", "--json", str(tmp_path / "f"))
