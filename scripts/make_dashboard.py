"""Write docs/grafana/vidspec.json, the Grafana dashboard, from the panels below; `--check` only says if it is current.

The panels are data, so that a test can hold their queries against the metrics that a server shows.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parents[1] / "docs" / "grafana" / "vidspec.json"

SCHEMA_VERSION = 41  # Grafana 12's; it opens older ones, and older Grafana opens what it knows of this one
WIDTH, HEIGHT, COLUMNS = 8, 8, 3  # Grafana's grid is 24 wide

# Every server in a Prometheus by itself, its engines added up.
BY = "by (instance, model_name)"
BY_POSITION = "by (position, instance, model_name)"
WHO = "{{model_name}} {{instance}}"


@dataclass(frozen=True)
class Panel:
    """One panel: a time series for each query. `unit` is Grafana's name of one; a query is PromQL and its legend."""

    title: str
    description: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    stacked: bool = False
    at_most: float | None = None


def per_second(metric: str, by: str = BY) -> str:
    """Return the PromQL of a counter's gain per second."""
    return f"sum {by} (rate({metric}[$__rate_interval]))"


def mean(total: str, count: str, by: str = BY) -> str:
    """Return the PromQL of a mean over the interval; nothing where nothing was counted."""
    return f"{per_second(total, by)} / ({per_second(count, by)} > 0)"


def quantile(q: float, metric: str) -> str:
    """Return the PromQL of a quantile of a histogram."""
    return f"histogram_quantile({q}, {per_second(metric, 'by (le, instance, model_name)')})"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Acceptance": (
        Panel(
            "Acceptance length",
            "Tokens that a verify step emits, the target's own included. Below 1.5 drafting costs more than it gains.",
            "none",
            (
                (f"1 + {mean('vidspec:accepted_tokens_total', 'vidspec:drafts_total')}", f"mean {WHO}"),
                (quantile(0.9, "vidspec:acceptance_length_bucket"), f"90th percentile {WHO}"),
            ),
        ),
        Panel(
            "Acceptance rate",
            "Draft tokens that stand, of those verified; and of the depth that could stand. Of a tree's nodes most "
            "must fail: look at the depth there.",
            "percentunit",
            (
                (mean("vidspec:accepted_tokens_total", "vidspec:draft_tokens_total"), f"of tokens {WHO}"),
                (mean("vidspec:accepted_tokens_total", "vidspec:draft_depth_total"), f"of depth {WHO}"),
            ),
            at_most=1,
        ),
        Panel(
            "Accepted by position",
            "Verify steps in which the draft token at this position, counted from 0, stands. Positions at the bottom "
            "are not worth drafting: lower num_speculative_tokens.",
            "percentunit",
            (
                (
                    f"{per_second('vidspec:accepted_tokens_per_position_total', BY_POSITION)}"
                    f" / on (instance, model_name) group_left () ({per_second('vidspec:drafts_total')} > 0)",
                    f"{{{{position}}}} {WHO}",
                ),
            ),
            at_most=1,
        ),
        Panel(
            "Verify steps",
            "Verify steps that had draft tokens, one per request and step; batches drafted for; batches of a size at "
            "which nothing is drafted.",
            "ops",
            (
                (per_second("vidspec:drafts_total"), f"verify steps {WHO}"),
                (per_second("vidspec:draft_steps_total"), f"batches drafted for {WHO}"),
                (per_second("vidspec:undrafted_steps_total"), f"batches not drafted for {WHO}"),
                (per_second("vidspec:draft_eager_steps_total"), f"batches without CUDA graphs {WHO}"),
            ),
        ),
        Panel(
            "Speculation is on",
            "1 while drafts are asked for; 0 while it is switched off, or cools down after too many failures.",
            "none",
            (
                (f"min {BY} (vidspec:speculation_on)", f"on {WHO}"),
                (f"sum {BY} (increase(vidspec:cooldowns_total[$__rate_interval]))", f"cool-downs {WHO}"),
                (f"sum {BY} (increase(vidspec:draft_failures_total[$__rate_interval]))", f"failures {WHO}"),
                (f"sum {BY} (increase(vidspec:class_rests_total[$__rate_interval]))", f"classes come to rest {WHO}"),
                (f"sum {BY} (increase(vidspec:class_resumes_total[$__rate_interval]))", f"classes come back {WHO}"),
                (f"sum {BY} (increase(vidspec:class_unshown_requests_total[$__rate_interval]))", f"not shown {WHO}"),
            ),
        ),
        Panel(
            "Acceptance length by pruner",
            "pruner auto: tokens that a verify step emits, by the pruner that the request was given.",
            "none",
            (
                (
                    mean(
                        "vidspec:auto_tokens_total",
                        "vidspec:auto_verify_steps_total",
                        "by (pruner, instance, model_name)",
                    ),
                    f"{{{{pruner}}}} {WHO}",
                ),
                (
                    per_second("vidspec:auto_requests_total", "by (pruner, instance, model_name)"),
                    f"{{{{pruner}}}}, requests a second {WHO}",
                ),
            ),
        ),
        Panel(
            "Low-acceptance windows",
            "Runs of 128 verify steps in which fewer than half a draft token stood per step. Sound pairs stay at 0.",
            "none",
            ((f"sum {BY} (increase(vidspec:low_acceptance_windows_total[$__rate_interval]))", WHO),),
        ),
        Panel(
            "Why draft tokens stand",
            "exact: what the target samples. loosened and shifted: only where the scorer lets mismatches stand.",
            "ops",
            ((per_second("vidspec:standing_tokens_total", "by (kind, instance, model_name)"), f"{{{{kind}}}} {WHO}"),),
            stacked=True,
        ),
    ),
    "Requests": (
        Panel(
            "Skipped requests by reason",
            "Requests that run without speculation. Their answers are right; they are as slow as without vidspec.",
            "ops",
            (
                (
                    per_second("vidspec:skipped_requests_total", "by (reason, instance, model_name)"),
                    f"{{{{reason}}}} {WHO}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Drafts that waited for room",
            "Requests that had outgrown the draft's KV pool, and those that were drafted for again.",
            "ops",
            (
                (per_second("vidspec:waiting_drafts_total"), f"waited {WHO}"),
                (per_second("vidspec:resumed_drafts_total"), f"went on {WHO}"),
            ),
        ),
        Panel(
            "Unguided prompts by reason",
            "Prompts pruned uniformly for want of guidance: their drafts are accepted less often.",
            "ops",
            (
                (
                    per_second("vidspec:unguided_prompts_total", "by (reason, instance, model_name)"),
                    f"{{{{reason}}}} {WHO}",
                ),
                (per_second("vidspec:guided_prompts_total"), f"guided {WHO}"),
                (per_second("vidspec:prompts_total"), f"all prompts {WHO}"),
            ),
        ),
        Panel(
            "Strict requests by reason",
            "Requests verified strictly though the scorer is loose.",
            "ops",
            (
                (
                    per_second("vidspec:strict_requests_total", "by (reason, instance, model_name)"),
                    f"{{{{reason}}}} {WHO}",
                ),
            ),
            stacked=True,
        ),
    ),
    "Cost": (
        Panel(
            "Draft seconds per second, by phase",
            "Host time. On a GPU the device's own time is not in it.",
            "percentunit",
            tuple(
                (per_second(f"vidspec:{name}_seconds_total"), f"{name.replace('_', ' ')} {WHO}")
                for name in ("draft_prefill", "draft_decode", "guidance", "relevance")
            ),
            stacked=True,
        ),
        Panel(
            "Draft pool in use",
            "Blocks of the draft's KV pool in use. At the top requests are skipped: pool_full.",
            "percentunit",
            ((f"sum {BY} (vidspec:draft_pool_blocks_used) / sum {BY} (vidspec:draft_pool_blocks)", WHO),),
            at_most=1,
        ),
        Panel(
            "Memory per rank",
            "What the draft holds beside its weights; the largest engine's.",
            "bytes",
            (
                (f"max {BY} (vidspec:draft_pool_bytes)", f"draft KV pool {WHO}"),
                (f"max {BY} (vidspec:draft_encoder_bytes)", f"vision embeddings {WHO}"),
                (f"max {BY} (vidspec:draft_encoder_used_bytes)", f"vision embeddings in use {WHO}"),
                (f"max {BY} (vidspec:relevance_pool_bytes)", f"hidden states {WHO}"),
            ),
        ),
        Panel(
            "Image and video tokens that the draft sees",
            "Of those in the prompts: what pruning leaves.",
            "percentunit",
            ((mean("vidspec:visual_tokens_kept_total", "vidspec:visual_tokens_total"), WHO),),
            at_most=1,
        ),
        Panel(
            "Vision embeddings at hand",
            "Images and videos that the draft's tower did not have to look at again.",
            "percentunit",
            (
                (
                    f"{per_second('vidspec:draft_encoder_hits_total')}"
                    f" / (({per_second('vidspec:draft_encoder_hits_total')}"
                    f" + {per_second('vidspec:draft_encoder_misses_total')}) > 0)",
                    WHO,
                ),
            ),
            at_most=1,
        ),
        Panel(
            "Parallel drafting: late and stale",
            "Steps of requests. Late: the stream was not ahead of the target, so nothing was verified. Stale: it said "
            "something else than was committed by then.",
            "ops",
            (
                (per_second("vidspec:late_drafts_total"), f"late {WHO}"),
                (per_second("vidspec:stale_streams_total"), f"stale {WHO}"),
            ),
        ),
        Panel(
            "Parallel drafting: restarts in the last hour",
            "Starts of the drafter's process after its first. The log says why it ended.",
            "none",
            ((f"sum {BY} (increase(vidspec:drafter_restarts_total[1h]))", WHO),),
        ),
    ),
    "vLLM": (
        Panel(
            "Time to first token",
            "vLLM's own.",
            "s",
            (
                (quantile(0.5, "vllm:time_to_first_token_seconds_bucket"), f"median {WHO}"),
                (quantile(0.95, "vllm:time_to_first_token_seconds_bucket"), f"95th percentile {WHO}"),
            ),
        ),
        Panel(
            "Time between outputs, and per token",
            "vLLM's own inter-token latency is between two outputs of a request; an output of a verify step holds "
            "several tokens. Below it the time per token of finished requests.",
            "s",
            (
                (quantile(0.5, "vllm:inter_token_latency_seconds_bucket"), f"outputs, median {WHO}"),
                (quantile(0.95, "vllm:inter_token_latency_seconds_bucket"), f"outputs, 95th percentile {WHO}"),
                (quantile(0.5, "vllm:request_time_per_output_token_seconds_bucket"), f"per token, median {WHO}"),
            ),
        ),
        Panel(
            "Requests, and tokens per second",
            "vLLM's own.",
            "none",
            (
                (f"sum {BY} (vllm:num_requests_running)", f"running {WHO}"),
                (f"sum {BY} (vllm:num_requests_waiting)", f"waiting {WHO}"),
                (per_second("vllm:generation_tokens_total"), f"tokens per second {WHO}"),
            ),
        ),
    ),
}

# Metrics of ours that no panel shows, and why.
LEFT_OUT = {
    "window_snapshots_total": "0, or every window of a device that cannot read streams: a line of the log says so",
    "draft_encoder_oversized_total": "what cannot be cut into parts is as large as it is",
    "draft_pixel_copies_total": "costs the host's link alone",
    "streams_to_come_total": "the draft's prefills, which are shown",
    "draft_forwards_total": "for benchmarks: forwards per batch follow from the configuration",
    "held_requests": "0 when nothing runs, as the soak tests: for whom requests leak",
    "relevance_held_bytes": "the same of hidden states",
    "tokens_in_use": "of the last step alone",
    "class_shown_requests_total": "those that are not shown are",
    "class_verify_steps_total": "`vidspec status` divides them by class",
    "class_verify_tokens_total": "`vidspec status` divides them by class",
    "released_resting_total": "a detail of a full pool, which is shown",
    "target_load_bytes": "a constant of the models",
    "text_tokens_total": "the draft sees all of the text",
    "stream_tokens_total": "a stream that is cut shows as stale, and costs the drafter alone",
    "reused_guidance_total": "a part of the guided prompts, as good as the others",
    "relevance_prompts_total": "the requests of a loose scorer; those that could not be are in strict_requests",
    "relevance_tokens_total": "the size of these requests",
    "relevance_reused_total": "saves work, changes nothing",
    "relevance_bytes_per_token": "a constant of the models",
    "draft_kv_bytes_per_token": "a constant of the models",
    "target_kv_bytes_per_token": "a constant of the models",
    "draft_load_bytes": "a constant of the models",
}


def panels() -> list[Panel]:
    """Return all panels in their order."""
    return [panel for row in ROWS.values() for panel in row]


def render() -> str:
    """Return the dashboard's text."""
    shown: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        shown.append(
            {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": _place(0, y, 24, 1)},
        )
        y += 1
        for i, panel in enumerate(row):
            place = _place(WIDTH * (i % COLUMNS), y + HEIGHT * (i // COLUMNS), WIDTH, HEIGHT)
            shown.append(_panel(panel) | {"gridPos": place})
        y += HEIGHT * -(-len(row) // COLUMNS)
    for number, one in enumerate(shown, start=1):
        one["id"] = number
    dashboard = {
        "uid": "vidspec",
        "title": "vidspec: speculative decoding for video",
        "description": "What each panel means and when to act: docs/operating.md of vllm_vidspec.",
        "tags": ["vllm", "vidspec"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_DATASOURCE]},
        "annotations": {"list": []},
        "panels": shown,
    }
    return json.dumps(dashboard, indent=1) + "\n"


_DATASOURCE = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _place(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def _panel(panel: Panel) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "custom": {
            "drawStyle": "line",
            "fillOpacity": 20 if panel.stacked else 0,
            "showPoints": "never",
            "stacking": stacking,
        },
    }
    if panel.at_most is not None:
        defaults["max"] = panel.at_most
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": _SOURCE, "expr": expr, "legendFormat": legend, "range": True}
            for i, (expr, legend) in enumerate(panel.queries)
        ],
    }


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    text = render()
    if parser.parse_args().check:
        if PATH.read_text() != text:
            print(f"{PATH} is not current: run scripts/make_dashboard.py", file=sys.stderr)
            return 1
        return 0
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
