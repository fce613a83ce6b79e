"""Acceptance: how many tokens a step emits, from how often draft and target agree; plain Python.

A draft token at depth d is right with probability p_d once all before it are. All lengths have vLLM's definition: mean
tokens of a verify step, the target's own included.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from vllm_vidspec.config.static_tree import SPECVLM_PATHS, Path
from vllm_vidspec.errors import VidSpecError


@dataclass(frozen=True)
class Agreement:
    # P_1, p_2, ...; deeper tokens have the last one. One rate: the truncated geometric law of ParallelVLM's appendix
    # (eq. 12).
    rates: tuple[float, ...]
    # S: where the draft's best candidate is wrong the next best is right with probability s, where that is wrong the
    # one after it again, and so on. Only trees have such candidates.
    runner_up: float = 0.0
    source: str = "given"  # where the rates come from

    def at(self, depth: int, rank: int = 0) -> float:
        """Return the probability that a parent's candidate of this rank is the target's token."""
        best = self.rates[min(depth, len(self.rates)) - 1]
        return (1 - best) * self.runner_up * (1 - self.runner_up) ** (rank - 1) if rank else best

    def chain_length(self, num_tokens: int) -> float:
        """Return the mean tokens of a step over a chain of K drafts: 1 + p_1 + p_1 p_2 + ... (tau, eq. 12 with one)."""
        return 1 + sum(self._accepts((0,) * depth) for depth in range(1, num_tokens + 1))

    def tree_length(self, paths: Sequence[Path] = SPECVLM_PATHS) -> float:
        """Return the mean tokens of a step over a static tree, SpecVLM's by default: 1 and each node's chance."""
        return 1 + sum(map(self._accepts, paths))

    def _accepts(self, path: Path) -> float:
        """Return the probability that a node is accepted: the candidate of each rank on its path."""
        return math.prod(self.at(depth, rank) for depth, rank in enumerate(path, 1))


def agreement_of_positions(positions: Sequence[float], runner_up: float = 0.0) -> Agreement:
    """Return the agreement that acceptance rates by position say, of all drafts, as `vllm bench serve` prints them.

    Deeper ones fall as the last did.
    """
    if not positions or not all(0 < share <= 1 for share in positions):
        raise VidSpecError("--acceptance: each rate must be above 0 and at most 1")
    if any(deeper > share for share, deeper in pairwise(positions)):
        raise VidSpecError(
            "--acceptance: rates by position cannot rise: a draft token is accepted only if all before it are"
        )
    rates = tuple(share / before for before, share in pairwise([1.0, *positions]))
    return Agreement(rates, runner_up)


def bisect(rises: Callable[[float], float], wanted: float) -> float:
    """Return the argument in [0, 1] at which a rising function has a value; the nearer end where it never has."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) < wanted else (low, middle)
    return (low + high) / 2


def rate_of_chain(length: float, num_tokens: int) -> float:
    """Return the p whose chains of K drafts have a mean length: eq. 12, solved for p."""
    return bisect(lambda rate: Agreement((rate,)).chain_length(num_tokens), length)


def rate_of_tree(length: float, runner_up: float) -> float:
    """Return the p with which SpecVLM's tree has a mean length."""
    return bisect(lambda rate: Agreement((rate,), runner_up).tree_length(), length)


def rate_of_stream(length: float, counts_own_token: bool = True) -> float:
    """Return the p with which a stream has so many tokens from one rejection to the next (ParallelVLM's M).

    `counts_own_token`: whether the token that the target puts in place of the rejected one is among them.
    """
    return 1 - 1 / (length + (not counts_own_token))


# ---- what the papers publish, the target's own token counted ------------------------------

# SpecVLM, LLaVA-OneVision 72B with 7B, VideoDetailCaption: chains of 5 and the static tree, unpruned and at 0.9.
SPECVLM_CHAIN, SPECVLM_TREE = 2.79 + 1, 3.48 + 1
SPECVLM_FULL_CHAIN = 3.12 + 1
# SpecVLM, Qwen2.5-VL 32B with 7B, VideoDetailCaption, the static tree at 0.9.
SPECVLM_QWEN_TREE = 3.23 + 1
# SAGE, VideoDetailCaption, adaptive trees at 0.9: Qwen2.5-VL 72B with 7B, Qwen3-VL 235B-A22B with 8B.
SAGE_QWEN25, SAGE_QWEN3 = 5.18 + 1, 4.39 + 1
# ParallelVLM, LLaVA-OneVision 72B with 7B: tokens from one rejection to the next, by prune ratio.
STREAM_LENGTHS = {0.9: 6.82, 0.95: 6.53, 0.99: 5.74, 1.0: 4.53}
# ParallelVLM, 7B targets that draft for themselves at 0.9, VideoDetailCaption: the same.
SELF_STREAMS = {"llava-onevision": 14.8, "qwen2.5-vl": 14.4}

# s of the static tree that turns SpecVLM's chain into its tree.
RUNNER_UP = bisect(lambda s: Agreement((rate_of_chain(SPECVLM_CHAIN, 5),), s).tree_length(), SPECVLM_TREE)


@functools.cache
def default_agreement(family: str, prune_ratio: float, is_self: bool = False) -> Agreement:
    """Return how often a pair of a family agrees, as far as the papers tell: guided pruning, captions, temperature 0.

    It is one rate, backed out of published lengths at r = 0.9; the share of misses follows the prune ratio r as it does
    in LLaVA-OneVision's figures, on straight lines between them.
    """
    kind = "llava-onevision" if family == "llava-onevision" else "qwen2.5-vl"
    if is_self:
        rate, source = rate_of_stream(SELF_STREAMS[kind]), f"ParallelVLM table 1, {kind} 7B that drafts for itself"
    elif family == "llava-onevision":
        rate, source = rate_of_chain(SPECVLM_CHAIN, 5), "SpecVLM, LLaVA-OneVision 72B with 7B, chains"
    else:
        rate, source = rate_of_tree(SPECVLM_QWEN_TREE, RUNNER_UP), "SpecVLM table 1, Qwen2.5-VL 32B with 7B"
        if family == "qwen3-vl":
            rate = 1 - (1 - rate) * SAGE_QWEN25 / SAGE_QWEN3
            source = f"{source}, misses scaled by SAGE's lengths of Qwen2.5-VL and Qwen3-VL"
    misses = (1 - rate) * _misses_at(prune_ratio)
    return Agreement((1 - misses,), RUNNER_UP, f"published: {source}, backed out at a prune ratio of 0.9")


def _misses_at(prune_ratio: float) -> float:
    full = (1 - rate_of_chain(SPECVLM_FULL_CHAIN, 5)) / (1 - rate_of_chain(SPECVLM_CHAIN, 5))
    points = [(0.0, full), *((ratio, STREAM_LENGTHS[0.9] / length) for ratio, length in STREAM_LENGTHS.items())]
    for (low, before), (high, after) in pairwise(points):
        if prune_ratio <= high:
            return before + (after - before) * (prune_ratio - low) / (high - low)
    return points[-1][1]


def with_rate(agreement: Agreement, rate: float) -> Agreement:
    """Return the same with one rate at every depth, and runner-ups that are right less often in proportion."""
    return replace(agreement, rates=(rate,), runner_up=min(1.0, agreement.runner_up * rate / agreement.rates[0]))
