"""How `vidspec status` shows itself: one table of figures, then what to change; no HTTP."""

from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_vidspec.tools.tables import number, percent

Figures = dict[str, Any]

# Label of a row -> a figure's text, None where the row has nothing to show; in this order.
_ROWS: dict[str, Callable[[Figures], str | None]] = {
    "speculation": lambda f: "on" if f["speculation"] == "on" else f"off ({f['speculation']})",
    "acceptance length": lambda f: number(f["acceptance_length"], 2),
    "accepted of drafted, per step": lambda f: _accepted(f),
    "steps that accept 1, 2, … or more": lambda f: _by_position(f["accepted_by_position"]),
    "verify steps": lambda f: f"{f['verify_steps']}",
    "low-acceptance windows": lambda f: f"{f['low_acceptance_windows']}",
    "prompts, of them guided": lambda f: f"{f['prompts']}, {f['guided_prompts']}",
    "skipped requests": lambda f: _by_reason(f["skipped_requests"]),
    "classes: tokens per step": lambda f: _by_class(f["classes"]),
    "unguided prompts": lambda f: _by_reason(f["unguided_prompts"]),
    "strict requests": lambda f: _by_reason(f["strict_requests"]),
    "draft pool, blocks": lambda f: _pool(f["pool"]),
    "draft pool, per rank": lambda f: f"{_mib(f['pool']['used_bytes'])} of {_mib(f['pool']['bytes'])}",
    "draft time (host)": lambda f: f"{sum(f['draft_seconds'].values()):.1f} s",
    "  its phases": lambda f: _shares(f["draft_seconds"]),
    "  per batch, per prompt": lambda f: f"{_ms(f['draft_seconds_per_step'])}, {_ms(f['draft_seconds_per_prompt'])}",
    # These two of a drafter with a process of its own alone.
    "drafter late, stale": lambda f: _parallel(f, "late_drafts", "stale_streams"),
    "drafter restarts": lambda f: _parallel(f, "drafter_restarts"),
    "vLLM running, waiting": lambda f: f"{_whole(f['vllm']['running'])}, {_whole(f['vllm']['waiting'])}",
    "vLLM first token": lambda f: _ms(f["vllm"]["seconds_to_first_token"]),
    "vLLM between outputs": lambda f: _ms(f["vllm"]["seconds_per_output"]),
    "vLLM tokens, per output": lambda f: (
        f"{_whole(f['vllm']['generation_tokens'])}, {number(f['vllm']['tokens_per_output'], 2)}"
    ),
}


def _by_class(classes: dict[str, Figures]) -> str | None:
    if not classes:
        return None
    return ", ".join(
        f"{name} {number(found['tokens_per_step'], 2)}"
        + (f" (rests, {found['unshown_requests']} not drafted for)" if found["rests"] else "")
        for name, found in classes.items()
    )


def show(result: dict[str, Any], console: Console) -> None:
    """Print what `status.result` returns."""
    console.print(table(result))
    lines = ["What to change:"] if result["advice"] else ["Nothing to change."]
    for item in result["advice"]:
        lines += [f"  [{item['level']}] {item['found']}", f"         -> {item['remedy']}"]
    console.print(escape("\n".join(lines)), highlight=False, soft_wrap=True)


def table(result: dict[str, Any]) -> Table:
    """Return the table: since the start, the last interval, and each engine where there are several."""
    columns = {"since start": result["since_start"]}
    if result["interval"] is not None:
        columns[f"last {result['interval_seconds']:.0f} s"] = result["interval"]
    columns |= {f"engine {engine}": figures for engine, figures in result["engines"].items()}
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), title=f"vidspec on {escape(result['server'])}")
    shown.add_column("", no_wrap=True)
    for head in columns:
        shown.add_column(head, overflow="fold")
    for label, text in _ROWS.items():
        texts = [text(figures) for figures in columns.values()]
        if any(one is not None for one in texts):
            shown.add_row(escape(label), *(escape(one or "-") for one in texts))
    return shown


def _accepted(figures: Figures) -> str:
    """Steps draft more or fewer tokens: of those that are not drafted none is accepted, and no rate is spoiled."""
    if figures["acceptance_rate"] is None:
        return "-"
    drafted = figures["draft_tokens_per_step"]
    accepted = figures["acceptance_rate"] * drafted
    return f"{number(accepted, 2)} of {number(drafted, 2)} ({percent(figures['acceptance_rate'])})"


def _by_reason(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in counts.items() if count) or "none"


def _pool(pool: dict[str, int]) -> str:
    share = pool["used_blocks"] / pool["blocks"] if pool["blocks"] else None
    return f"{pool['used_blocks']} of {pool['blocks']} ({percent(share)})"


def _by_position(shares: list[float]) -> str:
    return " ".join(f"{100 * share:.0f}" for share in shares) + " %" if shares else "-"


def _shares(seconds: dict[str, float]) -> str | None:
    total = sum(seconds.values())
    if not total:
        return None
    return ", ".join(f"{phase} {100 * value / total:.0f} %" for phase, value in seconds.items() if value)


def _parallel(figures: Figures, *names: str) -> str | None:
    counts = figures["parallel"]
    return ", ".join(str(counts[name]) for name in names) if any(counts.values()) else None


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
