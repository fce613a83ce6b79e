"""Forced acceptance: with made-up weights no draft agrees with its target, so coins say which drafts stand.

For benchmarks only, and outside the package: it stands between a running engine's verifier and its scorer, and nothing
that is served can be told to use it. What an engine then takes is real, what it answers means nothing.
"""

import itertools
import statistics
import time
from typing import Any

import torch

_NUM_COINS = 1 << 20


def expected_length(rate: float, depth: int) -> float:
    """Return the mean tokens of a step whose first `depth` drafts stand with `rate` each, the target's own included."""
    return 1 + sum(rate**k for k in range(1, depth + 1))


def rate_for(length: float, depth: int) -> float:
    """Return at which rate of each draft a step has `length` tokens in the mean, the target's own included.

    Raises:
        ValueError: No rate gives so many, or so few.
    """
    if not 1 <= length <= depth + 1:
        raise ValueError(f"{depth} drafts in a row give 1 to {depth + 1} tokens a step, not {length}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_length(middle, depth) < length else (low, middle)
    return (low + high) / 2


def force(
    coins: torch.Tensor,
    target_tokens: torch.Tensor,
    drafts: torch.Tensor,
    nodes: torch.Tensor,
    parents: torch.Tensor,
    may_stand: torch.Tensor,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the scorer is told: `[N]` target's tokens and `[N]` drafts, of which those stand whose coins say so.

    Of siblings only the first may stand, which in our trees is the draft's own choice. After a draft that does not
    stand the target says another token, so that whoever compares texts sees the difference.

    Args:
        coins: `[N]` bool, of each logits row's own draft.
        target_tokens: `[N]` int64, what the target samples after each row.
        drafts: `[N]` int32, each row's input token.
        nodes: `[N]` each row's node in its request's draft, 0 for the root.
        parents: `[N]` node of each row's parent; of a root any.
        may_stand: `[N]` bool; others are no drafts.
        vocab_size: Of the target.
    """
    num_rows = len(drafts)
    row = torch.arange(num_rows, device=drafts.device)
    is_draft = (nodes > 0) & may_stand
    parent_row = torch.where(is_draft, row - nodes + parents, row)
    first_child = torch.full_like(row, num_rows)
    first_child.scatter_reduce_(0, parent_row, torch.where(is_draft, row, num_rows), "amin")
    stands = is_draft & coins & (first_child[parent_row] == row)
    child = first_child.clamp(max=num_rows - 1)
    said = (drafts[child] + ~stands[child]) % vocab_size
    return torch.where(first_child < num_rows, said, target_tokens), torch.where((nodes > 0) & ~stands, -1, drafts)


class ForcedAcceptance:
    """Stands in the place of a verifier's `_judge`, and lets its scorer decide by coins.

    Args:
        verifier: Of a running engine.
        has_draft: `[max_num_reqs]` bool, which rows' drafts are real.
        rate: Of each draft in a row.
        least_token: Smaller ones are no drafts: what pads a window of parallel drafting is 0.
        seed: Of the coins; they lie on the device beforehand, the same on every device.
    """

    def __init__(self, verifier: Any, has_draft: torch.Tensor, rate: float, least_token: int = 0, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self._coins = (torch.rand(_NUM_COINS, generator=generator) < rate).to(has_draft.device)
        self._has_draft, self._least_token, self._next = has_draft, least_token, 0
        self._host_s: list[float] = []
        self._judge, verifier._judge = verifier._judge, self._forced

    def _forced(self, part: Any, target_tokens: torch.Tensor, logits: torch.Tensor) -> Any:
        begun, num_rows = time.perf_counter(), len(target_tokens)
        if self._next + num_rows > _NUM_COINS:
            self._next = 0
        coins = self._coins[self._next : self._next + num_rows]
        self._next += num_rows
        nodes, rows = part.nodes.long(), part.expanded_idx_mapping
        parents = nodes - 1 if part.shapes is None else part.shapes.parents[rows, nodes].long()
        may_stand = self._has_draft[rows] & (part.drafts >= self._least_token)
        targets, drafts = force(coins, target_tokens, part.drafts, nodes, parents, may_stand, logits.shape[1])
        self._host_s.append(time.perf_counter() - begun)
        return self._judge(part._replace(drafts=drafts), targets, logits)

    def take_host_ms(self) -> float | None:
        """Return the median host time of forcing a step since the last call, which the step would not take."""
        times, self._host_s = self._host_s, []
        return round(1e3 * statistics.median(times), 4) if times else None


def unconditional_rates(rate: float, depth: int) -> list[float]:
    """Return how often the first, second, … draft of a chain stands: how vLLM's own `synthetic` is told the same."""
    return list(itertools.accumulate([rate] * depth, lambda left, right: left * right))
