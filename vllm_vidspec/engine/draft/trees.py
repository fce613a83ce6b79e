"""Drafts trees: one forward per level over the frontiers of all requests, under a tree mask on the draft's paged KV."""

import functools

import torch

from vllm_vidspec.drafting import TreePolicy
from vllm_vidspec.engine.draft.forwards import Forwards
from vllm_vidspec.engine.draft.graphs import DraftGraphs, Part, Run, part
from vllm_vidspec.engine.draft.noise import CoupledSampler, Processed
from vllm_vidspec.engine.draft.score_blocks import blocks


class TreeDrafter:
    """Grows trees as a policy says.

    Node i of a tree has KV entry root + i, whatever its depth: the same layout as on the target's side.

    A graph holds a level: place its nodes, run the draft, find candidates, let the policy choose. Levels of which a
    policy knows beforehand how many there are, are one graph.

    Args:
        forwards: The draft's, with the step's buffers.
        sample: The draft's sampler.
        graphs: What runs the parts of a step.
        policy: What shapes the trees.
        fills: Whether every tree is filled up to the budget, because vLLM will verify that many tokens anyway (async
            scheduling).
    """

    def __init__(
        self, forwards: Forwards, sample: CoupledSampler, graphs: DraftGraphs, policy: TreePolicy, fills: bool
    ):
        self._forwards = forwards
        self._buffers = forwards.buffers
        self._sample = sample
        self._graphs = graphs
        self.policy = policy
        self._fills = fills
        policy.trims = not graphs.is_on
        device, places = forwards.model.device, forwards.buffers.max_num_reqs * policy.max_frontier
        self._log_probs = torch.zeros(places, policy.num_candidates, dtype=torch.float32, device=device)
        self._token_ids = torch.zeros(places, policy.num_candidates, dtype=torch.int64, device=device)

    def draft(self, num_reqs: int, max_nodes: int, num_levels: int, processed: Processed | None) -> bool:
        """Write trees of at most `max_nodes` nodes, and their tokens into the buffers' `drafts`.

        Args:
            num_reqs: R, padding included.
            max_nodes: In [0, K].
            num_levels: Forwards of this step, the roots' included, as the policy says.
            processed: What vLLM's processors need, if the logits of any request need them; they run between graphs.

        Returns:
            Whether graphs ran all that can be captured.
        """
        if processed is None and self.policy.is_static:
            key = part("tree", num_reqs, max_drafts=max_nodes)
            return self._graphs.run(key, functools.partial(self._tree, num_reqs, max_nodes, num_levels))
        is_whole = True
        for level in range(num_levels):
            if processed is None:
                key = part("level", num_reqs, level, max_nodes)
                is_whole &= self._graphs.run(key, functools.partial(self._level, num_reqs, max_nodes, level))
            else:
                self._begin(num_reqs, max_nodes, level)
                is_whole &= self._feed(num_reqs, max_nodes, level)
                self._grow(num_reqs, max_nodes, level, processed)
            if level == 0:
                self.policy.send()
        key = part("finish", num_reqs, num_levels, max_nodes)
        return self._graphs.run(key, functools.partial(self._finish, num_reqs, max_nodes, num_levels)) and is_whole

    def parts(self, num_reqs: int, max_nodes: int) -> dict[Part, Run]:
        """Return the functions that can be captured, for so many requests and nodes."""
        run, levels = functools.partial, range(self.policy.most_levels(max_nodes))
        parts: dict[Part, Run] = {self._key(num_reqs, max_nodes, level): run(self._nodes, num_reqs, max_nodes, level) for level in levels[1:]}
        parts[self._key(num_reqs, max_nodes, 0)] = run(self._forwards.roots, num_reqs)
        if self.policy.is_static:
            return parts | {part("tree", num_reqs, max_drafts=max_nodes): run(self._tree, num_reqs, max_nodes, len(levels))}
        for level in levels:
            parts[part("level", num_reqs, level, max_nodes)] = run(self._level, num_reqs, max_nodes, level)
            parts[part("finish", num_reqs, level + 1, max_nodes)] = run(self._finish, num_reqs, max_nodes, level + 1)
        return parts

    # ---- what graphs hold ------------------------------------------------------------------------------------------

    def _tree(self, num_reqs: int, max_nodes: int, num_levels: int) -> None:
        for level in range(num_levels):
            self._level(num_reqs, max_nodes, level)
        self._finish(num_reqs, max_nodes, num_levels)

    def _level(self, num_reqs: int, max_nodes: int, level: int) -> None:
        self._begin(num_reqs, max_nodes, level)
        self._feed(num_reqs, max_nodes, level)
        self._grow(num_reqs, max_nodes, level, None)

    def _finish(self, num_reqs: int, max_nodes: int, num_levels: int) -> None:
        """End the trees, and say what is proposed: an unused column is never scheduled, or verified as a leaf that is
        as good as any.
        """
        self.policy.finish(num_reqs, max_nodes, num_levels, self._fills)
        torch.clamp(self.policy.tree.tokens[:num_reqs, 1:], min=0, out=self._buffers.drafts[:num_reqs])

    # ---- the steps of a level --------------------------------------------------------------------------------------

    def _begin(self, num_reqs: int, max_nodes: int, level: int) -> None:
        if level == 0:
            self.policy.begin(self._buffers.step.rows[:num_reqs], self._buffers.step.num_accepted[:num_reqs], max_nodes)

    def _key(self, num_reqs: int, max_nodes: int, level: int) -> Part:
        return part("nodes", num_reqs, level, max_nodes) if level else part("roots", num_reqs)

    def _feed(self, num_reqs: int, max_nodes: int, level: int) -> bool:
        run = functools.partial
        function = run(self._nodes, num_reqs, max_nodes, level) if level else run(self._forwards.roots, num_reqs)
        return self._graphs.run(self._key(num_reqs, max_nodes, level), function)

    def _nodes(self, num_reqs: int, max_nodes: int, level: int) -> None:
        """Feed the frontier that the level before has left."""
        policy = self.policy
        width = policy.width(level, max_nodes)
        self._buffers.place(
            num_reqs,
            level,
            policy.frontier_nodes[:num_reqs, :width],
            policy.frontier_tokens[:num_reqs, :width],
            policy.tree.ancestors,
        )
        self._forwards.nodes(num_reqs, width)

    def _grow(self, num_reqs: int, max_nodes: int, level: int, processed: Processed | None) -> None:
        """Find candidates after each node of the frontier, and let the policy choose among them."""
        policy, model = self.policy, self._forwards.model
        width = policy.width(level, max_nodes) if level else 1
        num_places = num_reqs * width
        for block in blocks(num_places, model.vocab_size):
            self._sample.candidates(
                self._forwards.logits(block),
                self._buffers,
                block,
                width,
                (self._log_probs[block], self._token_ids[block]),
                policy.needs_log_probs,
                processed,
            )
        policy.extend(level, max_nodes, self._log_probs[:num_places], self._token_ids[:num_places])
