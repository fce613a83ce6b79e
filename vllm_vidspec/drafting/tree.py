"""What a draft tree is: its buffers, batched over requests, and the policies that grow it; touches no model, no vLLM.

Node 0 of a tree is the root, the last committed token; nodes 1 to K are drafts. In every tree a parent comes before its
children, so every prefix of the nodes is a tree: a scheduler may cut it anywhere. And the greedy path comes first:
nodes 1 to D are the rank-0 path of the request, D levels deep. It is the path that is usually accepted, and its KV then
is already where the committed text wants it; a tree that is cut short degrades to the chain.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vidspec_kernels import TreeTables, TreeTemplate
from vllm_vidspec.config.static_tree import MAX_NODES


class DraftTree(TreeTables):
    """The trees of a batch, one batch row each; allocated once and filled in place, so that CUDA graphs can read it.

    A column past `num_nodes` holds a leaf under the root that is never accepted: token -1, parent 0, depth 1, its own
    bit, log-probability -inf. Reading it is harmless. K is `max_nodes`, the most draft nodes of a tree, in [1, 64].

    Attributes:
        tokens: int64 [max_num_reqs, K + 1]. Policies leave column 0 alone; it starts as -1.
        parents: int32 [max_num_reqs, K + 1], index of the parent node, smaller than the node's own; root -1.
        depths: int32 [max_num_reqs, K + 1], edges up to the root.
        ancestors: int64 [max_num_reqs, K + 1]; bit j - 1 of node i is set iff node j is i or an ancestor of i. The
            root is every node's ancestor and has no bit.
        log_probs: float32 [max_num_reqs, K + 1], the draft's log-probability of the path to the node; root 0.
        num_nodes: int32 [max_num_reqs], draft nodes of the tree; it holds after `TreePolicy.finish`.
        empty: [K + 1] a tree without nodes.
    """

    def __init__(self, max_num_reqs: int, max_nodes: int, device: torch.device | str):
        assert 1 <= max_nodes <= MAX_NODES, f"max_nodes must be in [1, {MAX_NODES}], got {max_nodes}"
        self.max_num_reqs, self.max_nodes = max_num_reqs, max_nodes
        log_probs = torch.tensor([0.0] + [-torch.inf] * max_nodes, dtype=torch.float32, device=device)
        self.empty = TreeTemplate(*topology_tables([0] * max_nodes, device), log_probs)
        tokens = torch.full((max_num_reqs, max_nodes + 1), -1, dtype=torch.int64, device=device)
        num_nodes = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        parents, depths, ancestors, log_probs = (table.repeat(max_num_reqs, 1) for table in self.empty.tensors)
        super().__init__(tokens, parents, depths, ancestors, log_probs, num_nodes)


class TreePolicy(Protocol):
    """Decides which nodes the trees of a batch get; what a policy has no use for, it leaves as it is here.

    The engine's drafter drives it, one step at a time:

        num_levels = policy.num_levels(rows_np, max_nodes)
        policy.begin(rows, num_accepted, max_nodes)
        frontier = the roots
        for level in range(num_levels):
            log_probs, ids = the best `policy.num_candidates` tokens of each frontier node (kernel `candidates`)
            frontier = policy.extend(level, log_probs, ids, rows=rows, max_nodes=max_nodes)
            if level == 0:
                policy.send(rows_np)
        policy.finish(fill, rows=rows, max_nodes=max_nodes)

    `rows` are int64 [R] persistent rows (`req_state_idx`), each once; batch row r of `tree` belongs to `rows[r]`. They
    may end with rows `max_num_reqs`, one past the last: padding, whose trees are garbage and harm no other. `rows_np`
    are the rows on the host, without padding. `max_nodes` is how many draft nodes each tree may have in this step; more
    than K counts as K. No method waits for device work of the same step. Requests' trees do not depend on each other.

    `begin`, `extend` and `finish` can be captured in CUDA graphs, one by one or together, once `prepare` was called for
    their `max_nodes`: what they launch depends on R, `level`, `max_nodes` and `fill` alone, nothing is copied
    between host and device, and what one passes to the next is at a fixed address.
    """

    tree: DraftTree  # The buffers
    num_candidates: int  # C, candidates that `extend` wants for each frontier node
    max_frontier: int  # The most nodes of a request that one draft forward feeds
    needs_log_probs: bool  # Whether `extend` looks at the candidates' log-probabilities
    has_fixed_levels: bool  # Whether `num_levels` follows from `max_nodes` alone: all levels fit one graph
    trims: bool  # Whether `extend` may return fewer columns than `frontier`: on the CPU, where counting costs no wait

    def reset_rows(self, rows_np: np.ndarray) -> None:
        """Clear the state of these rows, `[n]` int64 on the host, for requests that start or resume on them."""
        return

    def prepare(self, max_nodes: int) -> None:
        """Upload the tables of this budget; else the first such step does so, with a host-device synchronisation."""
        return

    def warm_up(self, fill: bool) -> None:
        """Compile and load what steps launch on CUDA; `fill` as they will give it to `finish`."""

    def depth(self, max_nodes: int) -> int:
        """Return the most that `num_levels` says under this budget; >= 1."""

    def num_levels(self, rows_np: np.ndarray, max_nodes: int) -> int:
        """Return the draft forwards of the step that begins, the root's included, in [1, depth(max_nodes)]."""

    def begin(self, rows: Tensor, num_accepted: Tensor, max_nodes: int) -> None:
        """Start a step: update state by the last acceptance, and empty the trees of batch rows 0 to R - 1.

        `num_accepted` are int32 [R] accepted draft tokens, without the target's own; -1 where none were verified.
        """

    def extend(
        self, level: int, log_probs: Tensor, token_ids: Tensor, *, rows: Tensor, max_nodes: int
    ) -> tuple[Tensor, Tensor] | None:
        """Append the chosen ones of a frontier's candidate children to `tree`.

        Args:
            level: 0 for children of the roots (F = 1), then one more each call, below `num_levels`.
            log_probs: float32 [R * F, C], of each frontier node's candidates, descending, <= 0; row-major over the
                frontier [R, F] that the previous call returned. Entries where it had no node are not used.
            token_ids: int64 [R * F, C], distinct in a row.

        Returns:
            int64 [R, F'] nodes that the next forward feeds, 0 = none at this place, and their tokens; None where
            `depth(max_nodes)` is reached. Column 0 is the greedy node while the request's greedy path still grows. F'
            is that of `frontier`, or fewer with `trims`. Both are views of buffers that the next call overwrites.
        """

    def frontier(self, level: int, num_reqs: int, max_nodes: int) -> tuple[Tensor, Tensor]:
        """Return where `extend` will have written the nodes and tokens that a level from 1 on feeds, untrimmed."""

    def send(self, rows_np: np.ndarray) -> None:
        """Start the copy that the next step's `num_levels` needs on the host, after level 0; never captured."""
        return

    def finish(self, fill: bool, *, rows: Tensor, max_nodes: int) -> None:
        """End the step: set `tree.num_nodes`.

        `fill` appends, where a tree has fewer nodes than the step allows, the most probable candidates that were not
        taken, as leaves, best first: for async scheduling, which fixes the number of drafts. A fixed topology has none.
        """
        return


def topology_tables(parents: list[int], device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tables of a tree that is given by the parents of its nodes 1 to K, each smaller than its child.

    They are int32 [K + 1] parents, the root's -1; int32 [K + 1] depths; int64 [K + 1] ancestors, see `DraftTree`.
    """
    depths, words = [0], [0]
    for node, parent in enumerate(parents, start=1):
        depths.append(depths[parent] + 1)
        words.append(words[parent] | 1 << (node - 1))
    return (
        torch.tensor([-1, *parents], dtype=torch.int32, device=device),
        torch.tensor(depths, dtype=torch.int32, device=device),
        # Node 64's bit is the sign.
        torch.from_numpy(np.array(words, dtype=np.uint64).view(np.int64)).to(device),
    )
