"""The adaptive tree (SAGE): deep and narrow where the draft is sure, shallow and wide where it is not; pure torch."""

import math

import numpy as np
import torch
from torch import Tensor

from vidspec_kernels.dispatch import array_module, as_array
from vidspec_kernels.tree_grow import TreeGrowBuffers, tree_grow
from vllm_vidspec.config import TreeKnobs
from vllm_vidspec.drafting.tree import DraftTree

# Stands for less (-inf, NaN): its exp vanishes beside 1, and so does the product of both.
_LEAST_LOGIT = -80.0


def confidence(log_probs: Tensor, top_k: int) -> Tensor:
    """Return how sure the draft is: alpha = 1 - H / log k of its top-k probabilities, renormalised (SAGE eq. 7-9).

    It bounds the best token's share from below: p_1 >= e^-H = k^(alpha - 1). (The paper's lemma 4.3 claims
    p_1 >= 1 / k + alpha (k - 1) / k, which two equally likely tokens contradict.)

    Args:
        log_probs: float32 [n, C >= k], descending.
        top_k: k >= 2.

    Returns:
        float32 [n], in [0, 1]: 0 where all k are equally likely, and for a row without probabilities (NaN); 1 where
        one token has everything.
    """
    xp = array_module(log_probs.device)
    logits = as_array(log_probs)[:, :top_k]
    logits = logits - logits[:, :1]
    logits = xp.where(logits > _LEAST_LOGIT, logits, _LEAST_LOGIT)
    weights = xp.exp(logits)
    total = weights.sum(1)
    entropy = xp.log(total) - (weights * logits).sum(1) / total
    return torch.as_tensor((1.0 - entropy / math.log(top_k)).clip(0.0, 1.0))


def log_thresholds(knobs: TreeKnobs) -> Tensor:
    """Return what a path's log-probability must exceed: log(threshold * l / D) (SAGE, section 3.2).

    Returns:
        float32 [depth_max + 1, depth_max], by depth D and level l - 1; the row of D = 0 lets nothing pass.
    """
    levels = torch.arange(1, knobs.depth_max + 1, dtype=torch.float64)
    depths = torch.arange(0, knobs.depth_max + 1, dtype=torch.float64)
    return (knobs.threshold * levels / depths[:, None]).log().float()


def width_bounds(knobs: TreeKnobs, num_candidates: int) -> Tensor:
    """Return the log-probability that a parent's path needs for its child of a rank to be allowed (SAGE eq. 12).

    A child is allowed iff its rank is below W_l = max(1, round(W / l * (0.5 + P_parent))), halves rounded up, and on
    the first level W_1 = W. That is: rank 0 always, rank c >= 1 iff P_parent >= (c + 0.5) l / W - 0.5.

    Returns:
        float32 [width_max + 1, depth_max, C], by width W, level l - 1 and rank; -inf = always, inf = never.
    """
    widths = torch.arange(0, knobs.width_max + 1, dtype=torch.float64)[:, None, None]
    levels = torch.arange(1, knobs.depth_max + 1, dtype=torch.float64)[:, None]
    ranks = torch.arange(num_candidates, dtype=torch.float64)
    bounds = ((ranks + 0.5) * levels / widths - 0.5).clamp(min=0.0).log()  # [width_max + 1, depth_max, C]
    bounds[:, 0] = torch.where(ranks < widths[:, 0], -torch.inf, torch.inf)
    bounds[:, :, 0] = -torch.inf
    return bounds.float()


class AdaptiveTree:
    """A `TreePolicy` that grows each request's tree to its confidence and history (SAGE, section 3; METHODS 2).

    From confidence alpha a tree gets its depth D = floor(D_min + alpha (D_r - D_min)) (eq. 10) and its first width
    W = floor(W_min + (1 - alpha) (W_max - W_min)) (eq. 11); deeper levels get narrower (eq. 12), and less probable
    paths must pass a threshold that rises with the level. D_r starts at D_max and follows the request's acceptance
    lengths.

    Why it pays: with chance p that a level stands, falling by gamma a level, E[tau] = sum_l p^l gamma^(l (l - 1) / 2),
    and at costs c_d and c_t of a draft and a target forward the best depth is floor(log(c_t / c_d) / log(1 / p) - 1):
    it grows with confidence.

    Where the paper leaves it open, or ours differs:

    - The rank-0 path always reaches depth D: thresholds do not bind it, and its nodes are reserved in the budget. A
      draft that equals its target then has D tokens accepted in every step.
    - D and W are whole numbers, rounded down. Before its first measurement a request has alpha 0.5.
    - Trees grow by levels, not depth first, since a level is one draft forward. Within one, better paths come first,
      and at most `max_frontier` = W_max nodes go on to the next (the paper bounds the number of nodes only).
    - With lookahead, step t's plan for t + 1 is made in `finish`: the host then knows the batch's largest depth
      without waiting for the device. History that `observe` adds takes effect with the plan that follows it.
    - Without lookahead the root's distribution shapes its own tree, and every step takes D_max draft forwards.

    Args:
        max_num_reqs: Most requests of a batch, and persistent rows.
        max_nodes: K = N_max, the most draft nodes of a tree, in [1, 64].
        device: Where the tensors live.
        knobs: All but its `paths` and `fill`.
    """

    def __init__(self, max_num_reqs: int, max_nodes: int, device: torch.device | str, knobs: TreeKnobs | None = None):
        self.knobs = knobs = knobs or TreeKnobs()
        self.tree = tree = DraftTree(max_num_reqs, max_nodes, device)
        self.max_nodes = max_nodes
        self.max_depth = min(knobs.depth_max, max_nodes)
        self.num_candidates = max(knobs.width_max, knobs.entropy_top_k)
        self.max_frontier = knobs.width_max
        self.needs_log_probs = True
        device = tree.device

        # State by persistent row; the depth and the width are the plan of the row's next tree.
        self.confidence = torch.zeros(max_num_reqs, device=device)
        self.max_depths = torch.zeros(max_num_reqs, device=device)  # D_r, float32 as alpha
        # [max_num_reqs, knobs.history] acceptance lengths, the newest last; -1 = none yet
        self._history = torch.zeros(max_num_reqs, knobs.history, dtype=torch.int64, device=device)
        self._depths = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self._widths = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self._host_depths = _HostCopy(max_num_reqs, device)

        # State of a step by batch row.
        self._growth = TreeGrowBuffers(
            tree.tokens, tree.parents, tree.depths, tree.ancestors, tree.log_probs, self._depths, self._widths,
            log_thresholds(knobs).to(device), width_bounds(knobs, self.num_candidates).to(device),
            max_parents=1 + (self.max_depth - 1) * self.max_frontier,
        )  # fmt: skip
        self._roots = torch.zeros(max_num_reqs, 1, dtype=torch.int64, device=device)
        self._root_log_probs = torch.zeros(max_num_reqs, 1, device=device)
        self.admit(np.arange(max_num_reqs))

    def admit(self, rows_np: np.ndarray) -> None:
        """Start these rows with confidence 0.5 and no history; see `TreePolicy`."""
        knobs, alpha = self.knobs, 0.5
        rows_np = np.asarray(rows_np, dtype=np.int64)
        rows = torch.from_numpy(rows_np).to(self.tree.device, non_blocking=True)
        depth = int(knobs.depth_min + alpha * (knobs.depth_max - knobs.depth_min))
        width = int(knobs.width_min + (1.0 - alpha) * (knobs.width_max - knobs.width_min))
        self.confidence.index_fill_(0, rows, alpha)
        self.max_depths.index_fill_(0, rows, knobs.depth_max)
        self._history.index_fill_(0, rows, -1)
        self._depths.index_fill_(0, rows, depth)
        self._widths.index_fill_(0, rows, width)
        self._host_depths.read()[rows_np] = depth

    def observe(self, rows: Tensor, num_accepted: Tensor) -> None:
        """Move the maximum depths by the mean of the last acceptance lengths (SAGE, section 3.3); see `TreePolicy`."""
        knobs = self.knobs
        if knobs.history == 0:
            return
        xp, rows, num_accepted = array_module(self.tree.device), as_array(rows), as_array(num_accepted)
        history, max_depths = as_array(self._history), as_array(self.max_depths)
        is_told = num_accepted >= 0  # [R]
        past = history[rows]  # [R, window]
        now = xp.where(is_told[:, None], xp.concatenate((past[:, 1:], num_accepted[:, None]), 1), past)
        history[rows] = now
        is_known = now >= 0
        total, count = (now * is_known).sum(1), is_known.sum(1)
        is_high, is_low = total > knobs.history_high * count, total < knobs.history_low * count
        change = (is_high * 1 - is_low * 1) * is_told
        max_depths[rows] = (max_depths[rows] + change).clip(knobs.depth_min, knobs.depth_max)

    def begin(self, rows: Tensor, rows_np: np.ndarray, max_nodes: int) -> int:
        """Start a step; see `TreePolicy`. With lookahead as many forwards as the deepest planned tree needs."""
        self._num_reqs, self._rows, self._rows_np = len(rows_np), rows, rows_np
        self._budget = budget = max(0, min(max_nodes, self.max_nodes))
        self.tree.clear(self._num_reqs)
        low, high = self.knobs.depth_min, self.knobs.depth_max
        if self.knobs.lookahead and self._num_reqs > 0:
            # Clipped, because the device's word sizes the host's loops: no draft may lead them astray.
            planned = self._host_depths.read()[rows_np].clip(low, high)
            low, high = int(planned.min()), int(planned.max())
        self._num_levels = max(1, min(high, budget))
        self._max_others = budget - min(low, budget)
        self._num_parents = 0
        self._frontier = (self._roots[: self._num_reqs], self._root_log_probs[: self._num_reqs])
        return self._num_levels

    def extend(self, level: int, log_probs: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """Grow one level; see `TreePolicy`."""
        if level == 0:
            self._plan(confidence(log_probs, self.knobs.entropy_top_k))
            if self.knobs.lookahead:
                # Sent while the deeper levels are still to come, so that the next step finds it there.
                self._host_depths.send(self._rows_np, self._planned[0])
            else:
                self._adopt()
        num_frontier = self._frontier[0].shape[1]
        nodes, tokens, path_log_probs = tree_grow(
            self._growth, self._rows, *self._frontier, log_probs, token_ids,
            level=level, budget=self._budget, first_parent=self._num_parents,
            num_next=min(self.max_frontier, num_frontier * self.num_candidates, 1 + self._max_others),
        )  # fmt: skip
        self._num_parents += num_frontier
        self._frontier = (nodes, path_log_probs)
        return (nodes, tokens) if level + 1 < self._num_levels else None

    def finish(self, fill: bool) -> None:
        """End the step; with lookahead, its roots' plan is the next one's from here on; see `TreePolicy`."""
        num_reqs, growth = self._num_reqs, self._growth
        as_array(self.tree.num_nodes)[:num_reqs] = as_array(growth.next_free)[:num_reqs] - 1
        if fill:
            leftover = (growth.leftover_log_probs, growth.leftover_tokens, growth.leftover_parents)
            used = (part[:num_reqs, : self._num_parents] for part in leftover)
            self.tree.append_leaves(num_reqs, self._budget, *used)
        if self.knobs.lookahead:
            self._adopt()

    def _plan(self, confidences: Tensor) -> None:
        """Turn the confidence of this step's roots into depths and widths (SAGE eq. 10, 11).

        Both are at least their minimum, so truncation rounds down.
        """
        knobs, xp = self.knobs, array_module(self.tree.device)
        alpha, rows = as_array(confidences), as_array(self._rows)
        reach = as_array(self.max_depths)[rows] - knobs.depth_min
        depths = xp.asarray(knobs.depth_min + alpha * reach, dtype=xp.int64)
        widths = xp.asarray(knobs.width_min + (1.0 - alpha) * (knobs.width_max - knobs.width_min), dtype=xp.int64)
        self._alpha, self._planned = alpha, (torch.as_tensor(depths), torch.as_tensor(widths))

    def _adopt(self) -> None:
        """Let the plan shape trees: the rows' depths and widths are read on every level."""
        rows, (depths, widths) = as_array(self._rows), self._planned
        as_array(self.confidence)[rows] = self._alpha
        as_array(self._depths)[rows] = as_array(depths)
        as_array(self._widths)[rows] = as_array(widths)


class _HostCopy:
    """Planned depths on the host: sent after a step's first forward, read at the start of the next step's draft.

    Reading waits for the copy. It cannot be left out: how many forwards a step has is a decision of the host, which all
    tensor-parallel ranks must take alike, so none may act on what happens to have arrived. It leaves no device idle:
    behind the copy wait the deeper levels of that draft and the target's whole forward.

    Args:
        max_num_reqs: Rows.
        device: Where the depths come from; from CUDA through pinned memory and an event.
    """

    def __init__(self, max_num_reqs: int, device: torch.device):
        on_gpu = device.type == "cuda"
        self._values = np.zeros(max_num_reqs, dtype=np.int64)
        self._staged = torch.zeros(max_num_reqs, dtype=torch.int64, pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None
        self._rows_np: np.ndarray | None = None  # whose values are on the way

    def send(self, rows_np: np.ndarray, values: Tensor) -> None:
        """Start to copy `values`, int64 [R], to the rows given; what was sent before must have been read."""
        self._staged[: len(rows_np)].copy_(values, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        self._rows_np = rows_np.copy()

    def read(self) -> np.ndarray:
        """Return all values, int64 [max_num_reqs]; it may be written to."""
        if self._rows_np is not None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._values[self._rows_np] = self._staged[: len(self._rows_np)].numpy()
            self._rows_np = None
        return self._values
