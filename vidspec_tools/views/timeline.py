"""How `vidspec bench timeline` shows itself: a picture, a Chrome trace and a table; no engine."""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from vidspec_tools.bench.timeline import LANES, shares
from vidspec_tools.views import figures
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools.tables import Columns, by_columns, number, percent
from vllm_vidspec.tools.user_files import check_output, writing

# Lane and kind -> what the legend says and the colour. The drafter polls while it waits: thousands of short waits that
# have no edges here, as nothing but edges would be seen.
STYLES: dict[tuple[str, str], tuple[str, str]] = {
    ("target", "prefill"): ("target prefill", "#332288"),
    ("target", "decode"): ("target step", "#88CCEE"),
    ("drafter", "vision"): ("draft vision", "#117733"),
    ("drafter", "prefill"): ("draft prefill", "#999933"),
    ("drafter", "draft"): ("draft forward", "#CC6677"),
    ("drafter", "wait"): ("drafter waits", "#EEEEEE"),
}
_GAP_S = 0.01  # between requests in the picture


def check_outputs(picture: str, trace: str | None, json_path: str | None) -> None:
    """Refuse, before anything runs, a file that could not be written afterwards."""
    figures.check_figure(picture, "--out")
    for path in (trace, None if json_path == "-" else json_path):
        if path is not None:
            check_output(path)


def in_a_row(requests: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the events of requests one after another, the idle time between them left out."""
    found, offset = [], 0.0
    for events in requests:
        found += [event | {name: event[name] + offset for name in ("start_s", "end_s")} for event in events]
        offset = max((event["end_s"] for event in found), default=offset) + _GAP_S
    return found


def draw(result: Mapping[str, Any], path: str) -> None:
    """Draw two lanes a mode over the same time axis, one mode below the other."""
    modes = {mode: in_a_row(found["events"]) for mode, found in result["modes"].items()}
    if not any(modes.values()):
        raise VidSpecError("there is no event to draw")
    end = max(event["end_s"] for events in modes.values() for event in events)
    with figures.panels(path, (11.0, 0.7 + 1.3 * len(modes)), len(modes), 1) as (figure, grid, legend):
        for panel, (mode, events) in zip(grid[:, 0], modes.items(), strict=True):
            legend |= _draw_lanes(panel, events)
            tokens = sum(len(ids) for ids in result["modes"][mode]["token_ids"])
            last = max((event["end_s"] for event in events), default=0.0)
            panel.set_title(f"{mode}: {tokens} tokens in {1e3 * last:.0f} ms", loc="left", fontsize=9)
            panel.set_xlim(0, 1e3 * end)
        grid[-1, 0].set_xlabel("ms")
        figure.suptitle("; ".join(filter(None, (result["family"], result["label"]))), fontsize=9)


def _draw_lanes(panel: Any, events: list[dict[str, Any]]) -> dict[str, Any]:
    """Draw one mode; return what was drawn by its words in the legend."""
    drawn = {}
    for (lane, kind), (words, color) in STYLES.items():
        spans = [
            (1e3 * event["start_s"], 1e3 * (event["end_s"] - event["start_s"]))
            for event in events
            if (event["lane"], event["kind"]) == (lane, kind)
        ]
        if spans:
            # The target above the drafter.
            place = (LANES[::-1].index(lane) + 0.1, 0.8)
            width = 0.0 if kind == "wait" else 0.3
            drawn[words] = panel.broken_barh(spans, place, facecolors=color, edgecolors="#444444", linewidth=width)
    panel.set_yticks([0.5, 1.5], LANES[::-1])
    panel.set_ylim(0, 2)
    panel.tick_params(axis="y", length=0)
    figures.tidy(panel, "x")
    return drawn


def trace(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Chrome trace: a process a mode, a thread a lane, microseconds."""
    found: list[dict[str, Any]] = []
    for pid, (mode, answers) in enumerate(result["modes"].items(), 1):
        found.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": mode}})
        for tid, lane in enumerate(LANES, 1):
            found.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}})
        for event in in_a_row(answers["events"]):
            start, end = (1e6 * event[name] for name in ("start_s", "end_s"))
            found.append(
                {
                    "ph": "X",
                    "name": event["kind"],
                    "cat": event["lane"],
                    "pid": pid,
                    "tid": LANES.index(event["lane"]) + 1,
                    "ts": start,
                    "dur": end - start,
                    "args": {name: event[name] for name in ("num_reqs", "num_tokens")},
                }
            )
    about = {name: result[name] for name in ("family", "inflate", "label", "provenance")}
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": about}


def write_trace(path: str, result: Mapping[str, Any]) -> None:
    """Write `trace`."""
    with writing(path):
        Path(path).write_text(json.dumps(trace(result)) + "\n")


def table(result: Mapping[str, Any]) -> Table:
    """Return, of each mode, the decode time of a request and the shares of it in which each lane works."""
    rows = []
    for mode, answers in result["modes"].items():
        found = [shares(events) for events in answers["events"]]
        middle = {name: statistics.median(one[name] for one in found) for name in found[0]}
        rows.append({"mode": mode, "num_speculative_tokens": answers["num_speculative_tokens"], **middle})
    columns: Columns = {
        "mode": lambda row: row["mode"],
        "K": lambda row: str(row["num_speculative_tokens"]),
        "decode\nms": lambda row: number(1e3 * row["decode_s"], 0),
        "target\nbusy": lambda row: percent(row["target"]),
        "drafter\nbusy": lambda row: percent(row["drafter"]),
    }
    return by_columns(columns, rows, title=f"{result['family']}: decode", caption=result["label"] or None)
