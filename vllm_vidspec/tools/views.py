"""How `vidspec demo`, `doctor`, `status`, `calibrate` and `plan` show their results; no engine, no HTTP."""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from vllm_vidspec.tools.tables import Columns, by_columns, fill, folding, number, percent

if TYPE_CHECKING:
    from vllm_vidspec.doctor import Check

Figures = dict[str, Any]


def checks_table(checks: "Sequence[Check]") -> Table:
    """Return the table of `vidspec doctor`."""
    colors = {"ok": "green", "warn": "yellow", "fail": "red"}
    names = {"check": "name", "status": "status", "found": "detail", "what to do": "remedy"}
    columns: Columns = {head: f"{{{name}}}" for head, name in names.items()}
    rows = [vars(check) for check in checks]
    return folding(by_columns(columns, rows, 4, lambda row: colors[row["status"]], title="vidspec doctor"))


# ---- vidspec demo ----------------------------------------------------------------------------------------------------

# Words, vanilla's figure and ours.
_DEMO = (
    ("acceptance length (tokens per verify step)", "1.00", "{acceptance_length:.2f}"),
    ("acceptance rate", "-", "{acceptance_rate:p}"),
    ("identical answers", "", "{same}"),
    ("draft KV, full video", "-", "{full_draft_kv_bytes:KiB}"),
    ("draft KV, kept", "-", "{draft_kv_bytes:KiB}"),
    ("output tokens", "{vanilla[output_tokens]}", "{vidspec[output_tokens]}"),
    ("time to first token (s)", "{vanilla[ttft_s]:.2f}", "{vidspec[ttft_s]:.2f}"),
    ("decode (s)", "{vanilla[decode_s]:.2f}", "{vidspec[decode_s]:.2f}"),
    ("server start (s)", "{vanilla[server_start_s]:.2f}", "{vidspec[server_start_s]:.2f}"),
)


def demo_table(result: Figures) -> Table:
    rows = [[fill(text, result | {"same": "yes" if result["identical"] else "NO"}) for text in row] for row in _DEMO]
    columns: Columns = {"": itemgetter(0), "vanilla vLLM": itemgetter(1), "vLLM + vidspec": itemgetter(2)}
    title = f"{result['family']}: one video, one question, two servers"
    style = lambda row: "red" if row[2] == "NO" else None  # noqa: E731
    return by_columns(columns, rows, style=style, title=title, box=box.HEAVY_HEAD, padding=(0, 1))


class DemoView:
    """Shows the events of `demo.run`: a spinner until a server's answer begins, then the answer as it streams."""

    def __init__(self, bars: Progress, console: Console) -> None:
        self._bars, self._console = bars, console

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        if event == "server":
            self._name = fields["name"]
            self._task = self._bars.add_task(f"starting vllm serve ({self._name})", total=None, note="")
            if self._bars.disable:
                self._bars.console.print(f"starting vllm serve ({self._name})")
        elif event == "ready":
            self._bars.update(self._task, description=f"asking ({self._name})")
            self._console.print(f"[bold]{self._name}[/bold], ready after {fields['seconds']:.0f} s:")
        elif event == "text":
            self._bars.stop()  # a live bar would overwrite the answer that streams
            self._console.print(fields["delta"], end="", markup=False, highlight=False)
        elif event == "answered":
            self._bars.remove_task(self._task)
            self._bars.start()
            self._console.print("\n")


# ---- vidspec status --------------------------------------------------------------------------------------------------

# Label of a row -> a template of the figures, or a function that returns None where there is nothing to show.
_STATUS: dict[str, str | Callable[[Figures], str | None]] = {
    "speculation": lambda f: "on" if f["speculation"] == "on" else f"off ({f['speculation']})",
    "acceptance length": "{acceptance_length:.2f}",
    "accepted of drafted, per step": lambda f: _accepted(f),
    "steps that accept 1, 2, … or more": lambda f: _by_position(f["accepted_by_position"]),
    "verify steps": "{verify_steps}",
    "low-acceptance windows": "{low_acceptance_windows}",
    "prompts, of them guided": "{prompts}, {guided_prompts}",
    "skipped requests": lambda f: _by_reason(f["skipped_requests"]),
    "classes: tokens per step": lambda f: _by_class(f["classes"]),
    "unguided prompts": lambda f: _by_reason(f["unguided_prompts"]),
    "strict requests": lambda f: _by_reason(f["strict_requests"]),
    "draft pool, blocks": lambda f: _pool(f["pool"]),
    "draft pool, per rank": "{pool[used_bytes]:MiB} of {pool[bytes]:MiB}",
    "memory per rank": lambda f: _memory(f["memory"]),
    "draft time (host)": lambda f: f"{sum(f['draft_seconds'].values()):.1f} s",
    "  its phases": lambda f: _shares(f["draft_seconds"]),
    "  per batch, per prompt": "{draft_seconds_per_step:ms}, {draft_seconds_per_prompt:ms}",
    # Of a drafter with a process of its own alone.
    "drafter late, stale": lambda f: _parallel(f, "{late_drafts}, {stale_streams}"),
    "drafter restarts": lambda f: _parallel(f, "{drafter_restarts}"),
    "vLLM running, waiting": "{vllm[running]:.0f}, {vllm[waiting]:.0f}",
    "vLLM first token": "{vllm[seconds_to_first_token]:ms}",
    "vLLM between outputs": "{vllm[seconds_per_output]:ms}",
    "vLLM tokens, per output": "{vllm[generation_tokens]:.0f}, {vllm[tokens_per_output]:.2f}",
}


def show_status(result: dict[str, Any], console: Console) -> None:
    """Print what `status.result` returns: the figures, then what to change."""
    console.print(status_table(result))
    reasons = {name: found["decision"] for name, found in result["since_start"]["classes"].items()}
    lines = [f"{name}: {reason}" for name, reason in reasons.items() if reason]  # by class, as expected by now
    lines += ["What to change:"] if result["advice"] else ["Nothing to change."]
    for item in result["advice"]:
        lines += [f"  [{item['level']}] {item['found']}", f"         -> {item['remedy']}"]
    console.print(escape("\n".join(lines)), highlight=False, soft_wrap=True)


def status_table(result: dict[str, Any]) -> Table:
    """Return the table: since the start, the last interval, and each engine where there are several."""
    parts = {"since start": result["since_start"]}
    if result["interval"] is not None:
        parts[f"last {result['interval_seconds']:.0f} s"] = result["interval"]
    parts |= {f"engine {engine}": figures for engine, figures in result["engines"].items()}
    rows = []
    for label, show in _STATUS.items():
        texts = [fill(show, figures) if isinstance(show, str) else show(figures) for figures in parts.values()]
        if any(text is not None for text in texts):
            rows.append([label, *(text or "-" for text in texts)])
    columns: Columns = {head: itemgetter(index) for index, head in enumerate(("", *parts))}
    title = f"vidspec on {escape(result['server'])}"
    return folding(by_columns(columns, rows, len(columns), title=title, padding=(0, 2, 0, 0)), first=1)


def _by_class(classes: dict[str, Figures]) -> str | None:
    if not classes:
        return None
    return ", ".join(
        f"{name} {number(found['tokens_per_step'], 2)}"
        + (f" (paused, {found['unadmitted_requests']} not drafted for)" if found["paused"] else "")
        for name, found in classes.items()
    )


def _accepted(figures: Figures) -> str:
    """Steps draft more or fewer tokens: of those that are not drafted none is accepted, and no rate is spoiled."""
    rate, drafted = figures["acceptance_rate"], figures["draft_tokens_per_step"]
    return "-" if rate is None else f"{rate * drafted:.2f} of {drafted:.2f} ({percent(rate)})"


def _by_reason(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in counts.items() if count) or "none"


def _pool(pool: dict[str, int]) -> str:
    share = pool["used_blocks"] / pool["blocks"] if pool["blocks"] else None
    return f"{pool['used_blocks']} of {pool['blocks']} ({percent(share)})"


def _memory(memory: dict[str, int]) -> str | None:
    return ", ".join(f"{owner} {fill('{size:MiB}', {'size': size})}" for owner, size in memory.items() if size) or None


def _by_position(shares: list[float]) -> str:
    return " ".join(f"{100 * share:.0f}" for share in shares) + " %" if shares else "-"


def _shares(seconds: dict[str, float]) -> str | None:
    total = sum(seconds.values())
    return ", ".join(f"{phase} {100 * value / total:.0f} %" for phase, value in seconds.items() if value) or None


def _parallel(figures: Figures, template: str) -> str | None:
    counts = figures["parallel"]
    return fill(template, counts) if any(counts.values()) else None


# ---- vidspec calibrate -----------------------------------------------------------------------------------------------


def layers_name(layers: str | Sequence[int] | None) -> str:
    """Return a layer set in a few characters: "all", "2", "0-3", "0, 2"."""
    if layers is None or isinstance(layers, str):
        return layers or "-"
    if len(layers) > 1 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}-{layers[-1]}"
    return ", ".join(map(str, layers))


def calibration_table(result: dict[str, Any]) -> Table:
    """Return the measurements, the chosen one marked."""
    settings: Columns = {"layers": lambda row: layers_name(row["guidance_layers"]), "lambda": "{lambda_r:.1f}"}
    columns: Columns = {
        **({"uv layer": "{uv_layer}"} if result["pruner"] == "uv" else settings),
        "accept\nlength": "{acceptance_length:.3f}",
        "accept\nrate": "{acceptance_rate:p}",
        "verify\nsteps": "{num_drafts}",
        "s": "{seconds:.1f}",
        "": lambda row: "*" if row["chosen"] else "",
    }
    on = fill("prune {prune_ratio:g}, K {num_speculative_tokens}, {prompts} videos; * is chosen", result)
    style = lambda row: "bold green" if row["chosen"] else None  # noqa: E731
    title = f"Calibration of {result['pruner']}"
    return by_columns(columns, result["measurements"], 0, style, title=title, caption=on, padding=(0, 1))


def calibration_words(result: dict[str, Any]) -> str:
    """Return the choice in one or two sentences."""
    knobs = ", ".join(
        f"{name} {layers_name(value) if name == 'guidance_layers' else format(value, 'g')}"
        for name, value in result["config"].items()
    )
    text = f"{knobs}: {result['acceptance_length']:.3f} tokens per verify step."
    uniform = [row["acceptance_length"] for row in result["measurements"] if row["lambda_r"] == 0.0]
    if result["config"].get("lambda_r") == 0.0:
        return text + " At lambda_r 0 the tokens are chosen evenly: on these videos guidance gains nothing."
    return text + (f" Without guidance (lambda_r 0): {uniform[0]:.3f}." if uniform else "")


def eyes_words(result: dict[str, Any]) -> str:
    """Return what came out in a few sentences."""
    eyes = result["eyes"]
    kind, r2 = max(eyes["r2"].items(), key=lambda item: item[1])
    text = (
        f"{kind} map, fitted to {eyes['tokens']} tokens of {eyes['videos']} videos: R2 {r2:.3f} on {eyes['held_out']} "
        f"others.\nTokens per verify step on {eyes['asked']} of these: {eyes['mapped']['acceptance_length']:.2f}, with "
        f"the draft's own tower {eyes['own']['acceptance_length']:.2f} ({eyes['share']:.0%})."
    )
    if "draft_vision" in result["config"]:
        return text
    return f"{text}\nThat is too little: the draft keeps its own tower, unless draft_vision names the map."


# ---- vidspec plan ----------------------------------------------------------------------------------------------------

# What each choice comes to, by requests at a time.
_ANSWERS: Columns = {
    "requests": lambda row: f"{row['batch']} full" if row["is_full"] else f"{row['batch']}",
    "choice": "{choice}",
    "drafts": lambda row: _drafts(row),
    "first\ntoken": "{ttft_ms:,.0f}",
    "whole\nanswer": "{answer_ms:,.0f}",
    "new\nvideo": "{answer_speedup:x}",
    "in\ncache": "{speedup:x}",
    "videos/h\n(a GPU)": lambda row: _videos(row),
}
# A step of what was asked about.
_STEPS: Columns = {
    "requests": "{batch}",
    "drafts": lambda row: _drafts(row),
    "r": "{prune_ratio:.2f}",
    "tau": "{acceptance_length:.2f}",
    "T_t": "{t_target_ms:.1f}",
    "T_t^K": "{t_verify_ms:.1f}",
    "T_d": "{t_draft_ms:.1f}",
    "forwards": lambda row: f"{row['draft_forwards'] or 'beside'}",
}
# What the memory of one of the target's GPUs holds on a full server; what is left of one of a parallel drafter's own.
_MEMORY: dict[str, Any] = {
    "choice": "{choice}",
    "requests": "{batch}",
    "weights": "{memory[target_weights]:GB}",
    "draft's": "{memory[draft_weights]:GB}",
    "KV": "{memory[target_kv]:GB}",
    "its KV": "{memory[draft_kv]:GB}",
    "pictures": "{memory[draft_media]:GB}",
    "left": "{memory[left]:GB}",
}
_DRAFTERS: dict[str, Any] = {"drafter's": lambda row: fill("{left:GB}", row["drafter_memory"] or {"left": None})}
_LEGEND = (
    "Gains: answers an hour over those of nothing, about new videos, and about one in the prefix cache (decode alone). "
    "eyes: the draft without its tower, over the target's visual embeddings; self: the target drafts over its own KV "
    "cache; N x tp M: N servers without drafts. r: share of the video not drafted from; tau: tokens of a step; T_t: a "
    "step of vanilla; T_t^K: one that verifies; T_d: one draft forward."
)


def show_plan(result: Figures, console: Console) -> None:
    title = fill("{target} with {draft} on {tp} x {gpu} (modelled)", result)
    asked = fill(
        "{video_tokens:,} video tokens, {text_tokens} of text, answers of {answer_tokens}; times in ms", result
    )
    rows = result["rows"]
    console.print(by_columns(_ANSWERS, rows, 3, title=title, caption=asked))
    if drafting := [row for row in rows if row["choice"] == result["choice"]]:
        console.print(by_columns(_STEPS, drafting, 2, caption=f"a step of {result['choice']}, ms"))
    held = [row for row in rows if row["is_full"] or not row["fits"]]
    columns = _MEMORY | _DRAFTERS if any(row["drafter_memory"] for row in held) else _MEMORY
    console.print(by_columns(columns, held, caption="GB of a GPU; drafter's: left of its own"))
    for line in (result["when"], *result["notes"], _LEGEND):
        console.print(line, highlight=False)
    if result["serve"]:
        console.print(f"\n{result['serve']}", highlight=False, soft_wrap=True)


def _videos(row: Figures) -> str:
    return fill("{videos_per_hour:.0f}" + " ({videos_per_hour_per_gpu:.0f})" * (row["gpus"] > 1), row)


def _drafts(row: Figures) -> str:
    if not row["fits"]:
        return "does not fit"
    if row["shape"] == "none":
        return ""
    words = f"{row['shape']} {row['num_speculative_tokens']}"
    return f"{words} +{row['draft_gpus']}" if row["draft_gpus"] else words
