"""Tables of docs/notebook/planning.md and gpu-budget.md: what the planner says today, all of it modelled."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.planning import planner
from vllm_vidspec.planning.candidates import Question
from vllm_vidspec.planning.planner import Planner
from vllm_vidspec.planning.roofline import GPUS
from vllm_vidspec.planning.shapes import FP8, draft_shape, target_shape
from vllm_vidspec.tools.tables import fill, markdown

# Target, draft, cards, video tokens; a drafter's own cards.
PLANS = (
    ("Qwen2.5-VL-7B", "3B", 1, "h100", 25_000, 0),
    ("Qwen2.5-VL-7B", "3B", 1, "l40s", 25_000, 0),
    ("Qwen2.5-VL-7B", "self", 1, "h100", 25_000, 0),
    ("Qwen3-VL-8B", "2B", 1, "h100", 25_000, 0),
    ("Qwen3-VL-8B", "2B", 1, "h200", 25_000, 0),
    ("Qwen2.5-VL-32B-FP8", "Qwen2.5-VL-7B-w4a16", 1, "h100", 25_000, 0),
    ("Qwen2.5-VL-32B-FP8", "Qwen2.5-VL-7B-w4a16", 1, "h200", 25_000, 0),
    ("Qwen2.5-VL-32B", "7B", 2, "h200", 1000, 0),
    ("Qwen2.5-VL-72B", "7B", 4, "h100", 25_000, 0),
    ("Qwen2.5-VL-72B", "7B", 8, "h100", 25_000, 1),
    ("LLaVA-OneVision-7B", "0.5B", 1, "l40s", 10_000, 0),
    ("Qwen3-VL-235B-A22B", "8B", 8, "h200", 10_000, 0),
)
BATCHES = (1, 8, 16, 24)


def question(target: str, draft: str, ranks: int, gpu: str, video_tokens: int, draft_gpus: int = 0) -> Question:
    shape = target_shape(target)
    return Question(shape, draft_shape(draft, shape), GPUS[gpu], ranks, draft_gpus, video_tokens)


def _asked(one: Question) -> list[str]:
    """Return the first cells of a plan's rows."""
    more = f" + {one.draft_gpus}" * bool(one.draft_gpus)
    draft = "self" if one.is_self else one.draft.name.split(" ", 1)[1]
    return [f"{one.target.name}, {draft}", f"{one.ranks}{more} x {one.gpu.name}", f"{one.video_tokens:,}"]


def plans() -> str:
    """Return what plans come to: gains at one and at eight requests, and videos an hour of a full server by choice."""

    def cells(asked: Question) -> list[str]:
        planners = {choice: Planner(of) for choice, of in planner.choices(asked).items()}
        rows = list(planner.rows(planners, (1, 8)))
        (name, first) = next(iter(planners.items()))
        gains = []
        for batch in (1, 8):
            own = [row for row in rows if row["choice"] == name and row["batch"] == batch and not row["is_full"]]
            template = "{shape} {num_speculative_tokens}, r {prune_ratio:g}: {answer_speedup:x}, {speedup:x}"
            gains.append(fill(template, own[0]) if own else "no room")
        full = {row["choice"]: row["videos_per_hour_per_gpu"] for row in rows if row["is_full"]}
        shown = [full.get(choice) for choice in (planner.NOTHING, planner.DRAFT, planner.EYES, planner.SELF)]
        hours = ", ".join("-" if one is None else f"{one:,.0f}" for one in shown)
        return [*_asked(asked), *gains, hours, first.sentence(first.paying())]

    head = ["target, draft", "GPUs", "video tokens", "1 request", "8 requests", "full server, videos/h a GPU", "when"]
    return markdown(head, [cells(question(*one)) for one in PLANS], words=(0, 1, 3, 4, 5, 6))


def choices() -> str:
    """Return the gain of each choice by requests at a time: about new videos, and about one in the cache."""

    def lines() -> Iterator[list[str]]:
        for target in ("Qwen3-VL-8B", "Qwen2.5-VL-7B", "Qwen2.5-VL-32B-FP8"):
            for gpu in ("h100", "h200"):
                draft = {"Qwen3-VL-8B": "2B", "Qwen2.5-VL-7B": "3B"}.get(target, "Qwen2.5-VL-7B-w4a16")
                asked = question(target, draft, 1, gpu, 25_000)
                for choice, of in planner.choices(asked).items():
                    found = [Planner(of).fastest(batch) for batch in BATCHES]
                    gains = [f"{one.answer_speedup:.2f}x, {one.speedup:.2f}x" if one else "no room" for one in found]
                    yield [*_asked(asked)[:2], choice, *gains]

    head = ["target, draft", "GPUs", "choice", *(f"{batch} at a time" for batch in BATCHES)]
    return markdown(head, lines(), words=3)


# ---- what fits -------------------------------------------------------------------------------------------------------

# Target, draft, ranks: the rows of docs/notebook/gpu-budget.md; sizes of cards in GB.
BUDGETS = (
    *(("Qwen2.5-VL-7B", "3B", ranks) for ranks in (1, 2, 4)),
    *(("Qwen2.5-VL-32B", "3B", ranks) for ranks in (1, 2, 4, 8)),
    *(("Qwen2.5-VL-72B", "3B", ranks) for ranks in (2, 4, 8)),
    *(("Qwen2.5-VL-32B", "7B", ranks) for ranks in (1, 2, 4, 8)),
    *(("Qwen2.5-VL-72B", "7B", ranks) for ranks in (2, 4, 8)),
    *(("LLaVA-OneVision-7B", "0.5B", ranks) for ranks in (1, 2, 4)),
    *(("LLaVA-OneVision-72B", "0.5B", ranks) for ranks in (2, 4, 8)),
    *(("Qwen3-VL-8B", "2B", ranks) for ranks in (1, 2, 4, 8)),
    *(("Qwen3-VL-32B", "4B", ranks) for ranks in (1, 2, 4, 8)),
    *(("Qwen3-VL-30B-A3B", "4B", ranks) for ranks in (1, 2, 4, 8)),
    *(("Qwen3-VL-235B-A22B", "8B", ranks) for ranks in (4, 8)),
)
SIZES = (24, 48, 80, 96, 141)


def _fitting(asked: Question) -> dict[str, int]:
    """Return how many requests fit by choice, at a prune ratio of 0.9; nothing of what cannot be."""
    try:
        most = Planner(replace(asked, draft_gpus=1)).most_requests()
    except VidSpecError:  # weights alone do not fit
        return {}
    found = {planner.NOTHING: most}
    if asked.may_be_sequential:
        for choice, of in planner.choices(asked).items():
            fullest = Planner(of).fullest()
            found[choice] = fullest.batch if fullest else 0
    return found


def _with_memory(asked: Question, size: float) -> Question:
    return replace(asked, gpu=replace(asked.gpu, memory_bytes=1e9 * size), prune_ratios=(0.9,))


def budget() -> str:
    def cell(asked: Question) -> str:
        found = _fitting(asked)
        if not found.get(planner.NOTHING):
            return "-"
        return f"{found.get(planner.DRAFT, '-')} of {found[planner.NOTHING]}"

    rows = []
    for target, draft, ranks in BUDGETS:
        asked = question(target, draft, ranks, "h100", 25_000)
        cells = [cell(_with_memory(asked, size)) for size in SIZES]
        rows.append([f"{asked.target.name}, {draft}", str(ranks), *cells])
    return markdown(["target, draft (modelled)", "TP", *(f"{size} GB" for size in SIZES)], rows)


def budget_choices() -> str:
    """Return requests that fit without a draft, with one, with one that has no tower, and with the target's own."""
    fp8 = lambda asked: replace(asked, draft=asked.draft.quantised(FP8))  # noqa: E731
    same = lambda asked: asked  # noqa: E731
    sets: tuple[tuple[str, str, Callable[[Question], Question], int], ...] = (
        ("Qwen2.5-VL-32B-FP8", "7B", fp8, 80),
        ("Qwen2.5-VL-32B-FP8", "Qwen2.5-VL-7B-w4a16", same, 80),
        ("Qwen3-VL-8B", "2B", same, 80),
        ("Qwen2.5-VL-7B", "3B", same, 48),
    )
    rows = []
    for target, draft, of, size in sets:
        asked = of(_with_memory(question(target, draft, 1, "h100", 25_000), size))
        found = _fitting(asked)
        shown = [str(found[choice]) for choice in (planner.NOTHING, planner.DRAFT, planner.EYES, planner.SELF)]
        rows.append([f"{asked.target.name}, {asked.draft.name.split(' ', 1)[1]}", f"{size} GB", *shown])
    head = ["target, draft (modelled)", "GPU", "vanilla", "with the draft", "without its tower", "`self`"]
    return markdown(head, rows, words=2)


SECTIONS: dict[str, Callable[[], str]] = {
    "plans": plans,
    "plan-choices": choices,
    "budget": budget,
    "budget-choices": budget_choices,
}
