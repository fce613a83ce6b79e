"""Forced acceptance: with made-up weights no draft agrees with its target, so coins decide which drafts are accepted.

For benchmarks only, and outside the package: it hooks a running engine's verifier before its scorer, and no option of a
server enables it. The engine's times are then real, its answers mean nothing.
"""

import itertools
import statistics
import time
from typing import Any

import torch

_NUM_COINS = 1 << 20


def expected_length(rate: float, depth: int) -> float:
    """Return the mean tokens of a step of `depth` drafts accepted at `rate` each, the target's own included."""
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
    can_be_accepted: torch.Tensor,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[N]` target's tokens and `[N]` drafts for the scorer, which then accepts the drafts whose coin is set.

    Of siblings only the first can be accepted, which in our trees is the draft's own choice. After a rejected draft the
    target's token is another one, so that a comparison of texts shows the difference.

    Args:
        coins: `[N]` bool, of each logits row's own draft.
        target_tokens: `[N]` int64, what the target samples after each row.
        drafts: `[N]` int32, each row's input token.
        nodes: `[N]` each row's node in its request's draft, 0 for the root.
        parents: `[N]` node of each row's parent; of a root any.
        can_be_accepted: `[N]` bool; others are no drafts.
        vocab_size: Of the target.
    """
    num_rows = len(drafts)
    row = torch.arange(num_rows, device=drafts.device)
    is_draft = (nodes > 0) & can_be_accepted
    parent_row = torch.where(is_draft, row - nodes + parents, row)
    first_child = torch.full_like(row, num_rows)
    first_child.scatter_reduce_(0, parent_row, torch.where(is_draft, row, num_rows), "amin")
    accepted = is_draft & coins & (first_child[parent_row] == row)
    child = first_child.clamp(max=num_rows - 1)
    forced = (drafts[child] + ~accepted[child]) % vocab_size
    return torch.where(first_child < num_rows, forced, target_tokens), torch.where((nodes > 0) & ~accepted, -1, drafts)


class ForcedAcceptance:
    """Replaces a verifier's `_judge`, so that its scorer accepts by coins.

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
        can_be_accepted = self._has_draft[rows] & (part.drafts >= self._least_token)
        targets, drafts = force(coins, target_tokens, part.drafts, nodes, parents, can_be_accepted, logits.shape[1])
        self._host_s.append(time.perf_counter() - begun)
        return self._judge(part._replace(drafts=drafts), targets, logits)

    def take_host_ms(self) -> float | None:
        """Return the median host time of forcing a step since the last call, which the step would not take."""
        times, self._host_s = self._host_s, []
        return round(1e3 * statistics.median(times), 4) if times else None


def unconditional_rates(rate: float, depth: int) -> list[float]:
    """Return the acceptance rates of a chain's first, second, … draft, as vLLM's own `synthetic` takes them."""
    return list(itertools.accumulate([rate] * depth, lambda left, right: left * right))
