"""What a draft tree is: its buffers, batched over requests, its candidates, and the policies that grow it level by
level; pure torch, touches no model and no vLLM.

Node 0 of a tree is the root, the last committed token; nodes 1 to K are drafts. Two orders hold in every tree:

- A parent comes before its children, so every prefix of the nodes is a tree: a scheduler may cut it anywhere.
- The greedy path comes first: nodes 1 to D are the rank-0 path of the request, D levels deep. It is the path that is
  usually accepted, and its KV then is already where the committed text wants it; a tree that is cut short degrades to
  the chain.
"""

from types import SimpleNamespace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vidspec_kernels.dispatch import array_module, as_array
from vllm_vidspec.config.paths import MAX_NODES

_INF_BITS = 0x7F800000


class DraftTree:
    """The trees of a batch, one batch row each; allocated once and filled in place, so that CUDA graphs can read it.

    A column past `num_nodes` holds a leaf under the root that nothing accepts: token -1, parent 0, depth 1, its own
    bit, log-probability -inf. Reading it is harmless.

    Args:
        max_num_reqs: Most requests of a batch.
        max_nodes: K, the most draft nodes of a tree, in [1, 64].
        device: Where the buffers live.

    Attributes:
        tokens: int64 [max_num_reqs, K + 1]. Policies leave column 0 alone; it starts as -1.
        parents: int32 [max_num_reqs, K + 1], index of the parent node, smaller than the node's own; root -1.
        depths: int32 [max_num_reqs, K + 1], edges up to the root.
        ancestors: int64 [max_num_reqs, K + 1]; bit j - 1 of node i is set iff node j is i or an ancestor of i. The
            root is every node's ancestor and has no bit.
        log_probs: float32 [max_num_reqs, K + 1], the draft's log-probability of the path to the node; root 0.
        num_nodes: int32 [max_num_reqs], draft nodes of the tree, set by `TreePolicy.finish`.
    """

    def __init__(self, max_num_reqs: int, max_nodes: int, device: torch.device | str):
        assert 1 <= max_nodes <= MAX_NODES, f"max_nodes must be in [1, {MAX_NODES}], got {max_nodes}"
        self.max_num_reqs = max_num_reqs
        self.max_nodes = max_nodes
        self.device = torch.device(device)
        # [K + 1] a tree without nodes: leaves under the root
        empty = dict(zip(("parents", "depths", "ancestors"), topology_tables([0] * max_nodes, device), strict=True))
        empty["tokens"] = torch.full((max_nodes + 1,), -1, dtype=torch.int64, device=device)
        empty["log_probs"] = torch.tensor([0.0] + [-torch.inf] * max_nodes, dtype=torch.float32, device=device)
        buffers = {name: values.repeat(max_num_reqs, 1) for name, values in empty.items()}
        self.tokens = buffers["tokens"]
        self.parents = buffers["parents"]
        self.depths = buffers["depths"]
        self.ancestors = buffers["ancestors"]
        self.log_probs = buffers["log_probs"]
        self.num_nodes = torch.zeros(max_num_reqs, dtype=torch.int32, device=self.device)
        self._empty = SimpleNamespace(**{name: as_array(values) for name, values in empty.items()})
        self._arrays = SimpleNamespace(
            **{name: as_array(values) for name, values in buffers.items()}, num_nodes=as_array(self.num_nodes)
        )
        # Keyword arguments of array constructors: numpy knows no devices but its own.
        self._on_device = {} if self.device.type == "cpu" else {"device": self.device}
        self._places = as_array(torch.arange(max_nodes, device=self.device))

    def clear(self, num_reqs: int) -> None:
        """Empty the trees of batch rows 0 to num_reqs - 1; the root's token stays."""
        here, empty = self._arrays, self._empty
        here.tokens[:num_reqs, 1:] = -1
        here.parents[:num_reqs] = empty.parents
        here.depths[:num_reqs] = empty.depths
        here.ancestors[:num_reqs] = empty.ancestors
        here.log_probs[:num_reqs] = empty.log_probs
        here.num_nodes[:num_reqs] = 0

    def append_leaves(
        self, num_reqs: int, max_nodes: int, log_probs: Tensor, token_ids: Tensor, parents: Tensor
    ) -> None:
        """Fill the trees of batch rows 0 to num_reqs - 1 up, with the most probable candidates as leaves.

        They are appended best first, of equal ones the lower index first, until a tree has `max_nodes` nodes or its
        candidates are used up.

        Args:
            num_reqs: R.
            max_nodes: At most K, at least what any of the trees has.
            log_probs: float32 [R, P, C], of the path to the candidate, <= 0; -inf or NaN = none.
            token_ids: int64 [R, P, C].
            parents: int64 [R, P], node index of each C candidates' parent.
        """
        xp, here = array_module(self.device), self._arrays
        num_candidates = log_probs.shape[2]
        total = log_probs.shape[1] * num_candidates
        scores = as_array(log_probs).reshape(num_reqs, total)
        # Keys that no two candidates share, so that every device takes the same: of numbers <= 0 the bits without the
        # sign rise as the number falls, and the index decides between equal ones.
        shift = total.bit_length()
        keys = xp.asarray(xp.abs(scores).view(xp.int32), dtype=xp.int64) << shift
        keys |= xp.arange(total, **self._on_device)
        # [R, M]; numpy would have to sort them all
        best = as_array(torch.as_tensor(keys).topk(min(total, self.max_nodes), dim=1, largest=False).values)
        num_nodes = here.num_nodes[:num_reqs, None]
        available = (best < _INF_BITS << shift).sum(1)[:, None]
        end = (num_nodes + available).clip(None, max_nodes)  # [R, 1]

        # [R, K]: which leaf each column gets. No scatter, whose targets would have to be counted.
        place = self._places - num_nodes
        is_new = (place >= 0) & (self._places < end)
        request = xp.arange(num_reqs, **self._on_device)[:, None]
        source = (best & ((1 << shift) - 1)).reshape(-1)[request * best.shape[1] + place.clip(0, best.shape[1] - 1)]
        source += request * total
        parent = as_array(parents).reshape(-1)[source // num_candidates]
        parent_column = request * (self.max_nodes + 1) + parent
        for buffer, leaves in (
            (here.tokens, as_array(token_ids).reshape(-1)[source]),
            (here.parents, xp.asarray(parent, dtype=xp.int32)),
            (here.depths, here.depths.reshape(-1)[parent_column] + 1),
            (here.ancestors, here.ancestors.reshape(-1)[parent_column] | self._empty.ancestors[1:]),
            (here.log_probs, scores.reshape(-1)[source]),
        ):
            buffer[:num_reqs, 1:] = xp.where(is_new, leaves, buffer[:num_reqs, 1:])
        here.num_nodes[:num_reqs] = end[:, 0]


class TreePolicy(Protocol):
    """Decides which nodes the trees of a batch get.

    The engine's drafter drives it, one step at a time:

        num_levels = policy.begin(rows, rows_np, max_nodes)
        frontier = the roots
        for level in range(num_levels):
            frontier = policy.extend(level, *candidates(draft_logits(frontier), policy.num_candidates))
        policy.finish(fill)

    "Row" is a request's persistent row (`req_state_idx`), R the batch size; batch row r of `tree` belongs to `rows[r]`.
    No method waits for work that the device was given in the same step. Nothing that a request gets depends on the
    others of its batch.

    Attributes:
        tree: The buffers.
        max_nodes: K, the most draft nodes of a tree.
        max_depth: The most levels of a tree, hence of draft forwards in a step.
        num_candidates: C, candidates that `extend` wants for each frontier node.
        max_frontier: The most nodes of a request that one draft forward feeds.
        needs_log_probs: Whether `extend` looks at the candidates' log-probabilities.
    """

    tree: DraftTree
    max_nodes: int
    max_depth: int
    num_candidates: int
    max_frontier: int
    needs_log_probs: bool

    def admit(self, rows_np: np.ndarray) -> None:
        """Forget what is known of these rows, `[n]` int64 on the host: requests that begin, or begin anew, on them."""

    def observe(self, rows: Tensor, num_accepted: Tensor) -> None:
        """Learn what became of the last trees.

        Args:
            rows: int64 [R], each row once.
            num_accepted: int32 [R], accepted draft tokens, without the target's own; -1 = the request had no verify
                step, its history stays.
        """

    def begin(self, rows: Tensor, rows_np: np.ndarray, max_nodes: int) -> int:
        """Start a step: empty the trees of batch rows 0 to R - 1.

        Args:
            rows: int64 [R]; it must keep its values until `finish`.
            rows_np: The same on the host.
            max_nodes: Draft nodes that each tree may have in this step; more than K counts as K.

        Returns:
            Draft forwards of this step, the root's included; >= 1.
        """

    def extend(self, level: int, log_probs: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """Append the chosen ones of a frontier's candidate children to `tree`.

        Args:
            level: 0 for children of the roots (F = 1), then one more each call, below the number `begin` returned.
            log_probs: float32 [R * F, C], of each frontier node's candidates, descending, <= 0; row-major over the
                frontier [R, F] that the previous call returned. What is given where it had no node is not used.
            token_ids: int64 [R * F, C], distinct in a row.

        Returns:
            nodes: int64 [R, F'], the nodes that the next forward feeds; 0 = no node at this place. Column 0 is the
                greedy node while the request's greedy path still grows.
            token_ids: int64 [R, F'], their tokens.
            None after the last level.
        """

    def finish(self, fill: bool) -> None:
        """End the step: set `tree.num_nodes`.

        Args:
            fill: Where a tree has fewer nodes than the step allows, append the most probable of the candidates that
                were not taken, as leaves, best first, as far as candidates reach. For async scheduling, which fixes
                the number of drafts. A topology that is fixed has nothing to append.
        """


def topology_tables(parents: list[int], device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tables of a tree that is given by its parents.

    Args:
        parents: [K], parent of nodes 1 to K, each smaller than its child.
        device: Where the tables live.

    Returns:
        parents: int32 [K + 1]; root -1.
        depths: int32 [K + 1].
        ancestors: int64 [K + 1], see `DraftTree`.
    """
    depths, words = [0], [0]
    for node, parent in enumerate(parents, start=1):
        depths.append(depths[parent] + 1)
        words.append(words[parent] | 1 << (node - 1))
    return (
        torch.tensor([-1, *parents], dtype=torch.int32, device=device),
        torch.tensor(depths, dtype=torch.int32, device=device),
        torch.tensor([_as_int64(word) for word in words], dtype=torch.int64, device=device),
    )


def _as_int64(word: int) -> int:
    """Return the signed number with the same 64 bits: node 64's bit is the sign."""
    return word - (1 << 64) if word >= 1 << 63 else word


def candidates(logits: Tensor, num_candidates: int, with_log_probs: bool = True) -> tuple[Tensor, Tensor]:
    """Return the most probable tokens of each row, best first.

    Rank 0 is `logits.argmax(-1)` also where values tie: the target takes the lowest id of a tie, top-k takes any, and a
    draft that equals the target must then agree with it.

    Args:
        logits: float [n, V]; noised for shared-noise sampling, any dtype.
        num_candidates: C, in [1, V].
        with_log_probs: Without, the softmax is spared.

    Returns:
        log_probs: float32 [n, C], log-softmax over all V tokens, descending; without: the logits.
        token_ids: int64 [n, C], distinct in a row.
    """
    logits = logits.float()
    values, ids = logits.topk(num_candidates, dim=-1)
    best = logits.argmax(dim=-1, keepdim=True)  # [n, 1]
    # The two change places; where top-k missed the best, the token it had put first goes. Tied values: none to swap.
    ids = torch.where(ids == best, ids[:, :1], ids)
    ids[:, :1] = best
    return (values - logits.logsumexp(dim=-1, keepdim=True) if with_log_probs else values), ids
