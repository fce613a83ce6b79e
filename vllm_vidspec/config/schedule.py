"""The schedule: what a step drafts by its number of requests, from a table and vLLM's own schedule; plain Python."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

NONE = "none"  # the shape of a step that drafts nothing

Shape = Literal["chain", "tree-static", "tree-2", "tree-3", "tree-4", "tree-adaptive", "none"]

# The least and the greatest depth of adaptive trees (SAGE, section 5.1).
ADAPTIVE_DEPTHS = (3, 8)

Cap = tuple[int, int, int]  # first batch size, last, most tokens per step: a row of vLLM's own schedule


class Plan(NamedTuple):
    """What a step drafts for each of its requests: at most `num_tokens`, 0 exactly where the shape is "none"."""

    shape: str
    num_tokens: int

    def depth(self, config: Any) -> int:
        """Return the most drafts that can follow each other in one step of a configuration; 1 where there are none."""
        if self.shape in ("chain", NONE):
            return max(1, self.num_tokens)
        if self.shape == "tree-adaptive":
            return min(self.num_tokens, ADAPTIVE_DEPTHS[1])
        return max(map(len, config.paths_of(self.shape)))


class PlanRow(NamedTuple):
    """The plan of the batch sizes `first` to `last`."""

    first: int
    last: int
    plan: Plan


def check_table(table: Sequence[tuple[int, int, str, int]], max_tokens: int) -> None:
    """Refuse a `draft_table` whose rows do not follow each other from batch size 1 on, or draft too many tokens."""
    end = 0
    for first, last, shape, num_tokens in table:
        if first != end + 1 or last < first:
            raise ValueError(f"draft_table: batch sizes must follow each other from 1 on, got {first} to {last}")
        end = last
        if num_tokens > max_tokens:
            raise ValueError(f"draft_table: {num_tokens} tokens a step, num_speculative_tokens is {max_tokens}")
        if (shape == NONE) != (num_tokens == 0):
            raise ValueError(f"draft_table: 0 tokens a step are the shape none, got {shape} with {num_tokens}")


def without_gaps(caps: Sequence[Cap]) -> tuple[Cap, ...]:
    """Return vLLM's schedule in order, each row up to the next: vLLM extends a row over the gap after it."""
    rows = sorted(caps)
    if not rows or rows[0][0] != 1:
        raise ValueError("batch sizes must begin at 1")
    for (first, last, _), (following, _, _) in zip(rows, [*rows[1:], (rows[-1][1] + 1, 0, 0)], strict=True):
        if not first <= last < following:
            raise ValueError(f"batch sizes must ascend, each in one row: {first} to {last} does not")
    ends = [row[0] - 1 for row in rows[1:]] + [rows[-1][1]]
    return tuple((first, end, num_tokens) for (first, _, num_tokens), end in zip(rows, ends, strict=True))


def capped(table: Sequence[tuple[int, int, str, int]], caps: Sequence[Cap] | None) -> tuple[PlanRow, ...]:
    """Return the plans of a table, each limited to what vLLM's schedule (without gaps, or None) allows; the last row
    holds beyond its end.
    """
    rows: list[PlanRow] = []
    caps = caps or [(1, 1, max(row[3] for row in table))]
    for last in sorted({row[1] for row in table} | {row[1] for row in caps}):
        _, _, shape, num_tokens = next((row for row in table if last <= row[1]), table[-1])
        num_tokens = min(num_tokens, next((row for row in caps if last <= row[1]), caps[-1])[2])
        plan = Plan(shape if num_tokens else NONE, num_tokens)
        first = rows.pop().first if rows and rows[-1].plan == plan else (rows[-1].last + 1 if rows else 1)
        rows.append(PlanRow(first, last, plan))
    return tuple(rows)
