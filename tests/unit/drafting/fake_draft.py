"""What the tests of the policies share: a fake draft, what drives a step, and checks of any tree."""

import numpy as np
import torch
from hypothesis import settings

from vidspec_kernels import candidates_reference

quick = settings(max_examples=60, deadline=None)


class FakeDraft:
    """Candidates that are a function of the path; log-probabilities in sixteenths, so that sums are exact and many
    tie."""

    def __init__(self, seed, num_candidates, sureness=2.0):
        self.seed, self.num_candidates, self.sureness = seed, num_candidates, sureness
        self._known = {}

    def __call__(self, path):
        """Return `[C]` float32 log-probabilities, descending, and `[C]` distinct token ids."""
        if path not in self._known:
            rng = np.random.default_rng([self.seed, *path])
            gaps = rng.geometric(1 / (1 + 4 * self.sureness * rng.random()), self.num_candidates) - 1
            log_probs = -(np.cumsum(gaps) + rng.integers(0, 6)) / 16
            self._known[path] = log_probs.astype(np.float32), rng.permutation(3 * self.num_candidates)[: len(gaps)]
        return self._known[path]


def candidates(logits, num_candidates, with_log_probs=True):
    """Return the best tokens of each row, `[n, C]` log-probabilities (or logits) and ids."""
    log_probs = torch.empty(len(logits), num_candidates, device=logits.device)
    ids = torch.empty(log_probs.shape, dtype=torch.int64, device=logits.device)
    candidates_reference(logits, log_probs=log_probs, ids=ids, with_log_probs=with_log_probs)
    return log_probs, ids


def paths_of(tree, row, num_nodes):
    """Return the token path of the first nodes, the root's empty one first."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    paths = [()]
    for node in range(1, num_nodes + 1):
        assert 0 <= parents[node] < node
        paths.append((*paths[parents[node]], tokens[node]))
    return paths


def drive(policy, rows, candidates_of, max_nodes=64, fill=False):
    """Drive one step after which nothing was verified; return its number of draft forwards.

    `candidates_of(level, nodes [R, F])` returns log-probabilities and token ids of the nodes' candidates, `[R * F, C]`.
    """
    device = policy.tree.device
    rows_np = np.array(rows)
    rows = torch.tensor(rows, device=device)
    num_levels = policy.num_levels(rows_np, max_nodes)
    assert 1 <= num_levels <= policy.depth(max_nodes) <= policy.max_depth
    policy.begin(rows, torch.full((len(rows),), -1, dtype=torch.int32, device=device), max_nodes)
    frontier = torch.zeros(len(rows), 1, dtype=torch.int64, device=device)
    for level in range(num_levels):
        result = policy.extend(level, *candidates_of(level, frontier), rows=rows, max_nodes=max_nodes)
        if level == 0:
            policy.send(rows_np)
        assert (result is None) == (level + 1 == policy.depth(max_nodes))
        if result is not None and level + 1 < num_levels:
            frontier, tokens = result
            assert frontier.dtype == tokens.dtype == torch.int64
            assert frontier.shape == tokens.shape and frontier.shape[0] == len(rows)
            width = policy.frontier(level + 1, len(rows), max_nodes)[0].shape[1]
            assert frontier.shape[1] == width or (policy.trims and 1 <= frontier.shape[1] <= width)
            assert width <= policy.max_frontier
            at_nodes = policy.tree.tokens[: len(rows)].gather(1, frontier)
            assert torch.equal(tokens[frontier > 0], at_nodes[frontier > 0])
            assert policy.tree.depths[: len(rows)].gather(1, frontier)[frontier > 0].eq(level + 1).all()
    policy.finish(fill, rows=rows, max_nodes=max_nodes)
    return num_levels


def candidates_of(policy, drafts, fed):
    """Return what `drive` asks for the nodes of these drafts, garbage elsewhere; `fed` gets `[num_levels][R]` paths."""

    def candidates_of_level(level, frontier):
        log_probs = torch.full((*frontier.shape, policy.num_candidates), float("nan"))
        token_ids = torch.full((*frontier.shape, policy.num_candidates), -7)
        fed.append([])
        for row, draft in enumerate(drafts):
            columns = {node: column for column, node in enumerate(frontier[row].tolist()) if node > 0 or level == 0}
            assert len(columns) == (frontier[row] > 0).sum() + (level == 0), "a node is fed twice"
            paths = paths_of(policy.tree, row, max(columns, default=0))
            fed[-1].append([paths[node] for node in columns])
            for node, column in columns.items():
                own_log_probs, own_tokens = draft(paths[node])
                log_probs[row, column] = torch.from_numpy(own_log_probs)
                token_ids[row, column] = torch.from_numpy(own_tokens)
        return log_probs.flatten(0, 1), token_ids.flatten(0, 1)

    return candidates_of_level


def grow(policy, drafts, rows, max_nodes=64, fill=False):
    """Drive one step with fake drafts; return the frontiers that were fed, `[num_levels][R]` lists of paths."""
    fed = []
    drive(policy, rows, candidates_of(policy, drafts, fed), max_nodes, fill)
    return fed


def check_tree(tree, row):
    """Assert everything that holds of any tree: order, depths, masks, siblings, and what lies past the nodes."""
    num_nodes = int(tree.num_nodes[row])
    parents, depths = tree.parents[row].tolist(), tree.depths[row].tolist()
    words = [word % 2**64 for word in tree.ancestors[row].tolist()]
    assert 0 <= num_nodes <= tree.max_nodes
    assert (parents[0], depths[0], words[0]) == (-1, 0, 0)
    for node in range(1, num_nodes + 1):
        assert 0 <= parents[node] < node, "every prefix must be a tree"
        above, at = set(), node
        while at > 0:
            above.add(at)
            at = parents[at]
        assert depths[node] == len(above)
        assert {bit + 1 for bit in range(64) if words[node] >> bit & 1} == above
    paths = paths_of(tree, row, num_nodes)
    assert len(set(paths)) == num_nodes + 1, "siblings with one token"
    for node in range(num_nodes + 1, tree.max_nodes + 1):
        assert (tree.tokens[row, node], parents[node], depths[node], words[node]) == (-1, 0, 1, 1 << (node - 1))


def check_greedy_first(tree, row, draft, depth):
    """Assert that nodes 1 to depth are the draft's own best path."""
    path = ()
    for node in range(1, depth + 1):
        path = (*path, int(draft(path)[1][0]))
        assert node <= tree.num_nodes[row], "the greedy path is cut short"
        assert paths_of(tree, row, node)[node] == path, "the greedy path does not come first"
