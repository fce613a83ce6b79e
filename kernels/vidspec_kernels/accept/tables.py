"""Arguments of `accept`: the drafts' shapes, the rules by which mismatches are accepted, what is counted."""

from typing import Any, NamedTuple

from torch import Tensor

# Flags of `Looseness.rules`.
LOWEST = 1  # LVSpec eq. 9-10: the share of the drafts with the lowest scores
WINDOW = 2  # FLy: an unsure target, and the next drafts all match
SHIFT = 4  # LVSpec eq. 11: the target's token is drafted at another position
MAX_DRAFTS = 64  # a node's ancestors are the bits of one word
FLAGS = (LOWEST, WINDOW, SHIFT, 1e-4)  # and what a share is rounded up by: 0.7 of 10 is 7, though as float32 it is less


class TreeShapes(NamedTuple):
    """The shapes of the drafts by persistent row; a chain is a tree too.

    Node 0 is the root (the last committed token), drafts 1 to K follow with parents[i] < i, so that every prefix is a
    tree too. Parent and depth of a root, and nodes without a logits row, are ignored.
    """

    rows: Tensor  # int64 [R], persistent row (`req_state_idx`) of each request
    parents: Tensor  # int32 [max_reqs, >= K + 1], parent of each node; unit stride in its rows, all three of one stride
    depths: Tensor  # int32 [max_reqs, >= K + 1], depth of each node
    ancestors: Tensor  # int64 [max_reqs, >= K + 1]; bit j - 1 of node i: node j is i or above it. 0 for the root.


class Looseness(NamedTuple):
    """Which mismatches of a verify step may be accepted."""

    rows: Tensor  # int64 [R], persistent row of each request
    rules: Tensor  # int32 [max_reqs], sum of LOWEST, WINDOW and SHIFT; 0 accepts no mismatch
    shares: Tensor  # float32 [max_reqs], lambda of LOWEST, 0 to 1
    windows: Tensor  # int32 [max_reqs], W of WINDOW, >= 0; 0 leaves the entropy alone to decide
    scores: Tensor  # float32 [N], of each logits row's own draft (its visual relevance, eq. 8).
    # float32 [N], in nats, of what the target samples after each logits row's input: a node's judges its children.
    entropies: Tensor
    may_loosen: Tensor  # bool [N], whether the draft of a logits row may be accepted though it differs
    min_entropy: float  # Above it the target is unsure; compared in float32


class Tally(NamedTuple):
    """What a step adds to running totals, and what is kept of each request until its next step."""

    rows: Tensor  # int64 [R], persistent row of each request
    has_draft: Tensor  # bool [max_reqs], whether a request's drafts are real; those of others are not counted
    # int64 [>= 7 + K], added to. Of the requests with drafts: how many, their drafts, the accepted ones, the depth of
    # their deepest drafts, the accepted by kind (1, 2, 3), and the accepted at each depth.
    totals: Tensor
    # int32 [max_reqs, >= K + 1], unit stride in its rows, written: each request's accepted path, as `accept` returns it
    # of trees; of a chain each column's own index. None where all drafts are chains for good.
    path: Tensor | None = None
    # int32 [max_reqs], written: how many drafts are on the path; -1 of a request without rows. Comes and is missing
    # with `path`.
    num_accepted: Tensor | None = None
    # Launches that were checked and compiled before (see `dispatch.launch`), of a caller whose tables, those of shapes
    # and rules among them, are the same in every step. None: each is checked anew.
    known: dict[Any, Any] | None = None


NUM_SUMS = 7  # of `Tally.totals` before those by depth
