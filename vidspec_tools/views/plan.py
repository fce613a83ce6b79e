"""How `vidspec plan` shows itself: its tables and the text below them; no engine."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from vidspec_tools.views.figures import times
from vllm_vidspec.tools.tables import Columns, by_columns, number


def show(result: Mapping[str, Any], console: Console) -> None:
    for table in (plan_table(result), memory_table(result)):
        console.print(table)
    for line in (result["when"], *result["notes"]):
        console.print(line, highlight=False)


def plan_table(result: Mapping[str, Any]) -> Table:
    """Return what to do by batch size, times in ms; "answer" has the draft's prefill."""
    columns: Columns = {
        "batch": lambda row: str(row["batch"]),
        "drafts": _drafts,
        "r": lambda row: number(row["prune_ratio"], 2),
        "decode": lambda row: times(row["speedup"]),
        "answer": lambda row: times(row["answer_speedup"]),
        "tau": lambda row: number(row["acceptance_length"], 2),
        "T_t": lambda row: number(row["t_target_ms"], 1),
        "T_t^K": lambda row: number(row["t_verify_ms"], 1),
        "T_d": lambda row: number(row["t_draft_ms"], 1),
        "p min": lambda row: number(row["break_even_agreement"], 2),
    }
    title = f"{result['target']} with {result['draft']} on {result['tp']} {result['gpu']} (modelled)"
    times_of = "ms; T_d: all forwards of a step, of a drafter on +N GPUs one"
    caption = f"{result['video_tokens']} video tokens; below p min drafts do not pay; {times_of}"
    return by_columns(columns, result["rows"], 2, title=title, caption=caption)


def memory_table(result: Mapping[str, Any]) -> Table:
    """Return what the memory of one of the target's GPUs holds, and of one of the drafter's own."""
    columns: Columns = {
        "batch": lambda row: str(row["batch"]),
        "weights": lambda row: _two(row["memory"], "weights"),
        "KV": lambda row: _two(row["memory"], "kv"),
        "pictures": lambda row: f"{row['memory']['draft_media'] / 1e9:.1f}",
        "left": lambda row: f"{row['memory']['left'] / 1e9:.1f}",
        "fits": lambda row: "yes" if row["fits"] else "no",
        "left on the drafter's": lambda row: (
            f"{row['drafter_memory']['left'] / 1e9:.1f}" if row["drafter_memory"] else "-"
        ),
    }
    return by_columns(columns, result["rows"], caption="GB of a GPU, target + draft (modelled)")


def _drafts(row: Mapping[str, Any]) -> str:
    if not row["fits"]:
        return "does not fit"
    if row["shape"] == "none":
        return "do not"
    words = f"{row['shape']} {row['num_speculative_tokens']}"
    return f"{words} +{row['draft_gpus']}" if row["draft_gpus"] else words


def _two(memory: Mapping[str, float], kind: str) -> str:
    return " + ".join(f"{memory[f'{role}_{kind}'] / 1e9:.1f}" for role in ("target", "draft"))
