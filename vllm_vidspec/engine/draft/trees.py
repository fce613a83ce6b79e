"""Drafts trees: one forward per level over the frontiers of all requests, under a tree mask on the draft's paged KV."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_vidspec.drafting import DraftTree, TreePolicy
from vllm_vidspec.engine.draft.forwards import Forwards
from vllm_vidspec.engine.draft.graphs import DraftGraphs, Part, Run, part
from vllm_vidspec.engine.draft.noise import CoupledSampler, Processed
from vllm_vidspec.engine.draft.score_blocks import blocks

TakeTrees = Callable[[torch.Tensor, DraftTree], None]


class TreeDrafter:
    """Grows trees as a policy says.

    A graph holds a level: place its nodes, run the draft, find candidates, let the policy choose; or all of them, where
    the policy knows their number beforehand. Last, `take` gets their shapes by `[R]` rows, for the verification.
    """

    def __init__(
        self,
        forwards: Forwards,
        sample: CoupledSampler,
        graphs: DraftGraphs,
        shape: str,
        policy: TreePolicy,
        fills: bool,  # up to the budget, because vLLM will verify that many tokens anyway (async scheduling)
        take: TakeTrees | None = None,
    ):
        self._forwards, self._sample, self._graphs, self._take = forwards, sample, graphs, take
        self._buffers = forwards.buffers
        self._shape, self.policy, self.fills = shape, policy, fills
        policy.trims &= not graphs.is_on
        # Of a level: its nodes `[R, F]` and their tokens. A graph that was captured goes on writing there.
        self._frontiers: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        device, places = forwards.model.device, forwards.buffers.max_num_reqs * policy.max_frontier
        self._log_probs = torch.zeros(places, policy.num_candidates, dtype=torch.float32, device=device)
        self._token_ids = torch.zeros(places, policy.num_candidates, dtype=torch.int64, device=device)
        # Each view is cut once: making one costs as much as what runs on it, and the same ones serve every step.
        self._found = functools.cache(lambda low, high: (self._log_probs[low:high], self._token_ids[low:high]))
        self._fed = functools.cache(lambda level, low, high: tuple(part[low:high] for part in forwards.fed(level)))

    def draft(
        self, num_reqs: int, max_nodes: int, rows_np: np.ndarray, processed: Processed | None
    ) -> tuple[int, bool]:
        """Write trees of at most `max_nodes` nodes, and their tokens into the buffers' `drafts`; return the draft's
        forwards, and whether graphs ran all that can be captured. vLLM's processors, if needed, run between graphs.
        """
        policy, size = self.policy, (num_reqs, max_nodes)
        policy.prepare(max_nodes)
        num_levels = policy.num_levels(rows_np, max_nodes)
        if processed is None and policy.has_fixed_levels:
            return num_levels, self._run("tree", self._tree, *size)
        is_whole = True
        for level in range(num_levels):
            if processed is None:
                is_whole &= self._run("level", self._level, *size, level)
            else:
                is_whole &= self._feed(*size, level)
                self._grow(*size, level, processed)
            if level == 0:
                policy.send(rows_np)
        return num_levels, self._run("finish", self._finish, *size) and is_whole

    def parts(self, num_reqs: int, max_nodes: int, is_processed: bool) -> dict[Part, Run]:
        """Return the functions that can be captured, for so many requests and nodes, logits processed or not."""
        policy = self.policy
        policy.prepare(max_nodes)
        levels = range(policy.depth(max_nodes))
        found: list[tuple[Any, ...]]
        if is_processed:
            found = [("first", self._first), *(("nodes", self._nodes, level) for level in levels[1:])]
            for level in levels[1:]:  # which the launches between these graphs will write
                frontier = policy.frontier(level, num_reqs, max_nodes)
                self._frontiers.setdefault((num_reqs, max_nodes, level), frontier)
        elif policy.has_fixed_levels:
            found = [("tree", self._tree)]
        else:
            found = [("level", self._level, level) for level in levels]
        if is_processed or not policy.has_fixed_levels:
            found.append(("finish", self._finish))
        return dict(self._part(name, function, num_reqs, max_nodes, *at) for name, function, *at in found)

    def _part(
        self, name: str, function: Callable[..., None], num_reqs: int, max_nodes: int, level: int | None = None
    ) -> tuple[Part, Run]:
        """Return a part's key and what it runs; `level` of one that is a level."""
        size = (num_reqs, max_nodes) if level is None else (num_reqs, max_nodes, level)
        return part(name, num_reqs, level or 0, max_nodes, self._shape), functools.partial(function, *size)

    def _run(self, *which: Any) -> bool:
        return self._graphs.run(*self._part(*which))

    def _tree(self, num_reqs: int, max_nodes: int) -> None:
        for level in range(self.policy.depth(max_nodes)):
            self._level(num_reqs, max_nodes, level)
        self._finish(num_reqs, max_nodes)

    def _level(self, num_reqs: int, max_nodes: int, level: int) -> None:
        self._feed(num_reqs, max_nodes, level)
        self._grow(num_reqs, max_nodes, level, None)

    def _finish(self, num_reqs: int, max_nodes: int) -> None:
        """End the trees, and say what is proposed: unused columns are not scheduled, or as good a leaf as any."""
        tree, rows = self.policy.tree, self._buffers.step.rows[:num_reqs]
        self.policy.finish(self.fills, rows=rows, max_nodes=max_nodes)
        torch.clamp(tree.tokens[:num_reqs, 1:], min=0, out=self._buffers.drafts[:num_reqs])
        if self._take is not None:
            self._take(rows, tree)

    def _feed(self, num_reqs: int, max_nodes: int, level: int) -> bool:
        if level == 0:
            return self._run("first", self._first, num_reqs, max_nodes)
        return self._run("nodes", self._nodes, num_reqs, max_nodes, level)

    def _first(self, num_reqs: int, max_nodes: int) -> None:
        step = self._buffers.step
        self.policy.begin(step.rows[:num_reqs], step.num_accepted[:num_reqs], max_nodes)
        self._forwards.roots(num_reqs)

    def _nodes(self, num_reqs: int, max_nodes: int, level: int) -> None:
        nodes, tokens = self._frontiers[num_reqs, max_nodes, level]
        self._buffers.place(num_reqs, level, nodes, tokens, self.policy.tree.ancestors)
        self._forwards.nodes(num_reqs, nodes.shape[1])

    def _grow(self, num_reqs: int, max_nodes: int, level: int, processed: Processed | None) -> None:
        """Find candidates after each node of the frontier, and let the policy choose among them."""
        policy, model, step = self.policy, self._forwards.model, self._buffers.step
        width = self._frontiers[num_reqs, max_nodes, level][0].shape[1] if level else 1
        num_places = num_reqs * width
        # vLLM's processors know no padding: what was found after it stays what it was.
        for block in blocks(num_places if processed is None else processed.num_reqs * width, model.vocab_size):
            logits = self._forwards.logits(block)
            pos, input_ids = self._fed(min(level, 1), block.start, block.stop)
            if processed is not None:
                logits = processed(logits, block, pos, input_ids, width)
            log_probs, token_ids = self._found(block.start, block.stop)
            self._sample.candidates_into(
                logits,
                step.temperature,
                step.seeds,
                pos,
                log_probs=log_probs,
                ids=token_ids,
                width=width,
                first=block.start,
                with_log_probs=policy.needs_log_probs,
                is_processed=processed is not None,
            )
        rows, _ = self._buffers.of(num_reqs)
        frontier = policy.extend(level, *self._found(0, num_places), rows=rows, max_nodes=max_nodes)
        if frontier is not None:
            self._frontiers[num_reqs, max_nodes, level + 1] = frontier
