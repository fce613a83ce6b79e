"""Tables of docs/gpu-budget.md: what fits on a card, and what a step's parts take as they were and as they are."""

from collections.abc import Callable

from vidspec_tools import planning
from vidspec_tools.planning import budget
from vidspec_tools.planning.candidates import CHAIN, PARALLEL, TREE

# The pairs of docs/models.md, and those of the papers.
PAIRS = (
    *(("Qwen2.5-VL-7B", "3B"), ("Qwen2.5-VL-32B", "3B"), ("Qwen2.5-VL-72B", "3B")),
    *(("Qwen2.5-VL-32B", "7B"), ("Qwen2.5-VL-72B", "7B")),
    *(("LLaVA-OneVision-7B", "0.5B"), ("LLaVA-OneVision-72B", "0.5B")),
    *(("Qwen3-VL-8B", "2B"), ("Qwen3-VL-32B", "4B"), ("Qwen3-VL-30B-A3B", "4B"), ("Qwen3-VL-235B-A22B", "8B")),
)
CARDS_GB = (24, 48, 80, 96, 141)
RANKS = (1, 2, 4, 8)
SETTINGS = (("h200", 1, "Qwen2.5-VL-32B", "7B"), ("h200", 1, "Qwen2.5-VL-7B", "3B"),
            ("l40s", 4, "Qwen2.5-VL-32B", "7B"), ("l40s", 1, "Qwen2.5-VL-7B", "3B"))  # fmt: skip
SHAPES = {CHAIN: "chain of 5", TREE: "static tree of 25", PARALLEL: "in parallel"}


def fits_text() -> str:
    """Return the table of what fits, a row for each pair and number of ranks at which any card holds a request."""
    lines = [
        "| target, draft (modelled) | TP | " + " | ".join(f"{size} GB" for size in CARDS_GB) + " |",
        "| --- | ---: | " + " | ".join("---:" for _ in CARDS_GB) + " |",
    ]
    for target_name, draft_name in PAIRS:
        target = planning.target_shape(target_name)
        draft = planning.draft_shape(draft_name, target)
        for ranks in RANKS:
            if not target.is_shared_by(ranks):
                continue
            found = [budget.fit(target, draft, ranks, 1e9 * size) for size in CARDS_GB]
            if any(one.vanilla for one in found):
                lines.append(f"| {target.name}, {draft_name} | {ranks} | " + " | ".join(map(_fit, found)) + " |")
    return "\n".join(lines)


def _fit(one: budget.Fit) -> str:
    if not one.vanilla:
        return "-"
    return f"- of {one.vanilla}" if one.drafted is None else f"{one.drafted} of {one.vanilla}"


def settings() -> list[budget.Setting]:
    """Return the settings of the page's tables of steps."""
    found = []
    for gpu, ranks, target_name, draft_name in SETTINGS:
        target = planning.target_shape(target_name)
        found.append(budget.Setting(target, planning.draft_shape(draft_name, target), gpu, ranks))
    return found


def steps_text() -> str:
    """Return a table of parts for each setting, before and after."""
    return "\n\n".join(map(_steps, settings()))


def _steps(setting: budget.Setting) -> str:
    columns = [
        (shape, words, ways) for shape in SHAPES for words, ways in (("before", budget.BEFORE), ("after", budget.AFTER))
    ]
    found = [budget.parts(setting, shape, ways) for shape, _, ways in columns]
    vanilla = budget.vanilla_seconds(setting)
    name = f"{setting.target.name} with {setting.draft.name.split()[-1]}, {setting.ranks} x {setting.gpu}"
    lines = [
        f"**{name}**; vanilla's step {1e3 * vanilla:.2f} ms (modelled).",
        "",
        "| ms, modelled | " + " | ".join(f"{SHAPES[shape]}, {words}" for shape, words, _ in columns) + " |",
        "| --- | " + " | ".join("---:" for _ in columns) + " |",
    ]
    for part in budget.PARTS:
        lines.append(f"| {part} | " + " | ".join(f"{1e3 * one[part]:.2f}" for one in found) + " |")
    step = [sum(one.values()) for one in found]
    tokens = [budget.tokens(setting, shape, ways) for shape, _, ways in columns]
    for words, values in (
        ("**a step**", [f"{1e3 * one:.2f}" for one in step]),
        ("tokens of a step", [f"{one:.2f}" for one in tokens]),
        ("**ms a token**", [f"{1e3 * one / number:.2f}" for one, number in zip(step, tokens, strict=True)]),
        ("of vanilla's speed", [f"{vanilla * number / one:.2f}x" for one, number in zip(step, tokens, strict=True)]),
    ):
        lines.append(f"| {words} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def changes_text() -> str:
    """Return what each change comes to, one on top of the other, in ms a token."""
    lines = [
        "| ms a token (modelled) | " + " | ".join(name for name, _ in budget.changes()) + " |",
        "| --- | " + " | ".join("---:" for _ in budget.changes()) + " |",
    ]
    for setting in settings():
        for shape, words in SHAPES.items():
            cells = []
            for _, ways in budget.changes():
                step = sum(budget.parts(setting, shape, ways).values())
                cells.append(f"{1e3 * step / budget.tokens(setting, shape, ways):.2f}")
            name = f"{setting.target.name} with {setting.draft.name.split()[-1]}, {setting.ranks} x {setting.gpu}"
            lines.append(f"| {name}: {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def formulas_text() -> str:
    """Return the formula of each part, and what is assumed in them."""
    lines = ["| part | formula (modelled) |", "| --- | --- |"]
    lines += [f"| {part} | {formula} |" for part, formula in budget.PARTS.items()]
    one = budget.SAMPLING
    return "\n".join(
        [
            *lines,
            "",
            f"Assumed beside [the planner's](planning.md#the-model) rates: {one.logit_bytes} bytes moved for a logit "
            f"that sampling parameters change, {one.laid_out_bytes} more where a path is laid out for it; "
            f"{1e6 * one.eager_launch_s:.0f} µs of the host for each of {one.launches} launches outside of graphs, and "
            f"of {one.path_launches} more for paths. Tiles have at most {budget.MAX_TILE} rows. Windows were "
            f"{budget.STALE_STEPS} steps old. Layers of an fp8 draft have a byte a weight, embedding and head two.",
        ]
    )


SECTIONS: dict[str, Callable[[], str]] = {
    "fits": fits_text,
    "formulas": formulas_text,
    "steps": steps_text,
    "changes": changes_text,
}
