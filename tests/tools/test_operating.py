"""What an operator is given: dashboard, alert rules and the page of log lines, held against the metrics and sources."""

import ast
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.common import ROOT
from vllm_vidspec import metrics
from vllm_vidspec.tools import scrape

yaml = pytest.importorskip("yaml")
prometheus_client = pytest.importorskip("prometheus_client")

GRAFANA = ROOT / "docs" / "grafana"
PAGE = ROOT / "docs" / "operate.md"
RECORDED = Path(__file__).with_name("recorded_metrics.txt")
# Added by Prometheus when it scrapes.
SCRAPED_LABELS = {"instance", "job"}

DASHBOARD = json.loads((GRAFANA / "vidspec.json").read_text())
RULES = yaml.safe_load((GRAFANA / "alerts.yml").read_text())["groups"][0]["rules"]
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
QUERIES = [target["expr"] for target in TARGETS]
EXPRESSIONS = QUERIES + [rule["expr"] for rule in RULES]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The labels and their values of every sample: ours of today, vLLM's as a real server showed them."""
    from prometheus_client.parser import text_string_to_metric_families as parse

    file = metrics.MetricsFile.create(tmp_path_factory.mktemp("m") / "m")
    registry = prometheus_client.CollectorRegistry()
    registry.register(metrics.Collector({0: file}, "m"))
    text = prometheus_client.generate_latest(registry).decode()
    vllms = "".join(line for line in RECORDED.read_text().splitlines(keepends=True) if "vidspec:" not in line)
    found = {}
    for family in (*parse(text), *parse(vllms)):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def test_dashboard_is_one_that_grafana_takes():
    """Catches: panels that lie on each other or beside the grid, ids used twice, another source than the variable."""
    found = DASHBOARD
    assert [variable["type"] for variable in found["templating"]["list"]] == ["datasource"]
    taken, ids = set(), [panel["id"] for panel in found["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in found["panels"]:
        place = panel["gridPos"]
        across, down = (range(place[start], place[start] + place[size]) for start, size in ("xw", "yh"))
        cells = set(itertools.product(across, down))
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}" and target["legendFormat"], panel["title"]


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_metrics_and_labels_of_an_expression_exist(shown, expr):
    """Catches: a metric or a label that no server has, a value that no counter has, brackets that do not close."""
    selectors = re.findall(r"((?:vidspec|vllm):\w+)(?:\{([^}]*)\})?", expr)
    assert selectors and all(expr.count(a) == expr.count(b) for a, b in ("()", "[]", "{}"))
    for metric, matchers in selectors:
        assert metric in shown, metric
        for label, kind, value in re.findall(r'(\w+)(=~?)"([^"]*)"', matchers):
            for one in value.split("|") if kind == "=~" else [value]:
                assert one in shown[metric].get(label, ()), f"{metric}: no {label} {one!r}"
        assert not metric.endswith(("_total", "_bucket")) or re.search(
            rf"(rate|increase)\({re.escape(metric)}(\{{[^}}]*\}})?\[", expr
        ), f"{metric} is a counter: its value alone says nothing"
    for metric, by in re.findall(r"sum by \(([^)]*)\) \((?:rate|increase)\(((?:vidspec|vllm):\w+)", expr):
        labels, name = {label.strip() for label in metric.split(",")}, by
        assert labels <= shown[name].keys() | SCRAPED_LABELS, f"{name}: {labels}"
    assert set(re.findall(r"\{\{(\w+)\}\}", expr)) == set(), "a legend's braces in an expression"


def test_labels_of_a_legend_are_there():
    """Catches: a legend with a label that the expression has added away."""
    for target in TARGETS:
        grouped = re.match(r".*?(?:sum|max|min) by \(([^)]*)\)", target["expr"])
        labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert labels <= set(grouped.group(1).split(", ")), target["legendFormat"]


# What no panel needs to show, by why.
LEFT_OUT = {
    "0, or a line of the log says so": ("window_snapshots_total", "cooling_down", "measured_sizes"),
    "0 when nothing runs, as the soak tests": ("held_requests", "relevance_held_bytes"),
    "as large or as many as it is": ("draft_encoder_oversized_total", "draft_pixel_copies_total"),
    "shown by another metric": (
        *("streams_to_come_total", "class_admitted_requests_total", "released_paused_total", "stream_tokens_total"),
        *("reused_guidance_total", "relevance_prompts_total", "relevance_tokens_total", "relevance_reused_total"),
    ),
    "their sum is vLLM's own, of the requests that have ended": ("drafted_requests_total", "undrafted_requests_total"),
    "`vidspec status` prints them by owner": ("target_kv_bytes", "draft_pixel_bytes", "observed_bytes"),
    "`vidspec status` prints them by class": (
        *("class_verify_steps_total", "class_verify_tokens_total", "class_best_tokens"),
        *("class_best_length_thousandths", "class_best_step_microseconds", "class_undrafted_step_microseconds"),
    ),
    "for benchmarks, or of the last step alone": ("draft_forwards_total", "tokens_in_use", "text_tokens_total"),
    "a constant of the models": (
        *("target_load_bytes", "draft_load_bytes", "relevance_bytes_per_token"),
        *("draft_kv_bytes_per_token", "target_kv_bytes_per_token"),
    ),
}


def test_every_metric_of_ours_is_shown_or_left_out(tmp_path):
    """Catches: a new metric that the dashboard forgets."""
    file = metrics.MetricsFile.create(tmp_path / "m")
    families = list(metrics.Collector({0: file}, "m").collect())
    ours = {family.name.removeprefix("vidspec:") + "_total" * (family.type == "counter") for family in families}
    used = {
        re.sub(r"_(bucket|sum|count)$", "", name) for query in QUERIES for name in re.findall(r"vidspec:(\w+)", query)
    }
    left_out = {name for names in LEFT_OUT.values() for name in names}
    assert used | left_out == ours and not used & left_out


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_to_do(rule):
    assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("info", "warning") and set(rule["annotations"]) == {"summary", "description"}
    page = PAGE.read_text()
    heads = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}  # as usual renderers make them
    (anchor,) = re.findall(r"docs/operate\.md#([\w-]+)", rule["annotations"]["description"])
    assert anchor in anchors and f"`{rule['alert']}`" in page


def test_alerts_fire_when_they_should(tmp_path):
    """Prometheus' own test of rules, on series in which each fires once, and on a sound server's."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs Prometheus' promtool")
    cases = Path(__file__).with_name("alerts_cases.yml").read_text()
    assert {rule["alert"] for rule in RULES} == set(re.findall(r'alertname="(\w+)"', cases))
    (tmp_path / "alerts.yml").write_text((GRAFANA / "alerts.yml").read_text())
    (tmp_path / "cases.yml").write_text(cases)
    run = subprocess.run([promtool, "test", "rules", "cases.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_what_status_reads_of_vllm_is_what_a_server_showed():
    (figures,) = scrape.vllms(RECORDED.read_text()).values()
    assert set(figures) == set(scrape.VLLM.values())
    assert figures["generation_tokens"] > figures["outputs"] > figures["first_tokens"] > 0


# --- log lines ---


def log_lines():
    """Every text that our sources log, with … for what is filled in; and what a listener loses, which it logs too."""
    for path in sorted((ROOT / "vllm_vidspec").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                owner, level = node.func.value, node.func.attr.removesuffix("_once")
                if isinstance(owner, ast.Name) and owner.id == "logger" and level != "debug":
                    assert isinstance(node.args[0], ast.Constant), f"{path.name}: {ast.unparse(node)}"
                    text = re.sub(r"%(\.\d+)?[a-z]", "…", node.args[0].value)
                    if text != "vidspec: …":
                        yield path.name, text
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "loss":
                yield path.name, f"vidspec: {node.value.value}"


def test_every_log_line_is_explained_once():
    """Catches: a line that the page does not have, and a row whose line is gone. A row may end where it is plain."""
    rows = re.findall(r"^\| `((?:vidspec|kernels|…)[^`]*)` \|", PAGE.read_text(), re.MULTILINE)
    texts = dict.fromkeys(text for _, text in log_lines())
    assert len(texts) > 20 and len(set(rows)) == len(rows)
    for text in texts:
        assert text.startswith("vidspec"), text
        assert len([row for row in rows if text.startswith(row)]) == 1, text
    for row in rows:
        assert len(row) >= 20 and any(text.startswith(row) for text in texts), row
