"""Planted mistakes of `accept`: each is told from the real thing where it matters, and only there."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.kernels.accept_requests import Request, accept_with, chain, changed, check
from tests.kernels.impls import IMPLS_AND_LOOP
from tests.kernels.test_accept import TEN, TREE, WRONG, pair
from vidspec_kernels import LOWEST, SHIFT, WINDOW, TreeShapes

IMPLS = IMPLS_AND_LOOP


def first_child_only(run, **arguments):
    """Of siblings with the same token only the first is followed, as a walk without going back would."""
    draft, bounds, trees = arguments["draft_tokens"].clone(), arguments["cu_num_logits"].tolist(), arguments["trees"]
    for (start, end), row in zip(pairwise(bounds), trees.rows.tolist(), strict=True):
        seen = set()
        for node in range(1, end - start):
            edge = (int(trees.parents[row, node]), int(draft[start + node]))
            if edge in seen:
                draft[start + node] = -1
            seen.add(edge)
    return run(**arguments | {"draft_tokens": draft})


def taken_for_a_chain(run, **arguments):
    """Each node hangs on the one before."""
    trees = arguments["trees"]
    node = torch.arange(trees.depths.shape[1], device=trees.rows.device).expand_as(trees.depths)
    return run(**arguments | {"trees": TreeShapes(trees.rows, (node - 1).int(), node.int(), (1 << node) - 1)})


def cut_ignored(run, **arguments):
    """Every request is given all K + 1 rows of its tree: the next request's rows are taken for the nodes cut off."""
    results, device = [], arguments["target_tokens"].device
    for req_idx, start in enumerate(arguments["cu_num_logits"][:-1].tolist()):
        end = min(start + arguments["max_drafts"] + 1, len(arguments["target_tokens"]))
        window = torch.tensor([start, end], dtype=torch.int32, device=device)
        trees = arguments["trees"]._replace(rows=arguments["trees"].rows[req_idx : req_idx + 1])
        results.append(run(**arguments | {"cu_num_logits": window, "trees": trees})[:3])
    return (*(torch.cat(parts) for parts in zip(*results, strict=True)), None)


def let_through(run, arguments, mask, kind=2):
    """Accept matches and the drafts of this mask, bool [N], as of this kind."""
    loose = arguments["looseness"]
    arguments = changed(
        arguments, "looseness", rules=torch.full_like(loose.rules, WINDOW), windows=torch.zeros_like(loose.windows),
        entropies=torch.ones_like(loose.entropies), may_loosen=mask & loose.may_loosen,
    )  # fmt: skip
    sampled, num_sampled, path, kinds = run(**arguments)
    return sampled, num_sampled, path, torch.where(kinds == 2, kind, kinds)


def with_looseness(**changes):
    """Some fields of the looseness replaced by functions of it."""

    def mutant(run, **arguments):
        loose = arguments["looseness"]
        return run(**changed(arguments, "looseness", **{name: new(loose) for name, new in changes.items()}))

    return mutant


# A draft is ranked by its parent's row, the state that predicts it instead of the one that reads it; any mismatch may
# be accepted; the nearest whole number of three drafts instead of the floor.
parents_score = with_looseness(scores=lambda loose: loose.scores.roll(1))
may_loosen_ignored = with_looseness(may_loosen=lambda loose: torch.ones_like(loose.may_loosen))
rounded_share = with_looseness(shares=lambda loose: (loose.shares * 3).round() / 3)


def targets_token_emitted(run, **arguments):
    """A mismatch that stands emits what the target sampled there: the drafts below it have not read that token."""
    sampled, num_sampled, path, kinds = run(**arguments)
    column = torch.arange(sampled.shape[1], device=sampled.device)
    row = (arguments["cu_num_logits"][:-1, None] + column).clamp(max=len(arguments["target_tokens"]) - 1)
    return torch.where(kinds > 1, arguments["target_tokens"][row], sampled), num_sampled, path, kinds


def one_ranking_for_all_branches(run, **arguments):
    """The lowest scores of the request, not of each branch."""
    loose, bounds = arguments["looseness"], arguments["cu_num_logits"].tolist()
    mask = torch.zeros_like(loose.may_loosen)
    for row, (start, end) in zip(loose.rows.tolist(), pairwise(bounds), strict=True):
        num_loose = math.floor(float(loose.shares[row]) * (end - start - 1) + 1e-4)
        mask[start + 1 + loose.scores[start + 1 : end].argsort(stable=True)[:num_loose]] = True
    return let_through(run, arguments, mask)


def shift_among_the_targets_tokens(run, **arguments):
    """A draft is let through if the target samples it at another position, instead of the target's token if drafted."""
    drafts, bounds = arguments["draft_tokens"], arguments["cu_num_logits"].tolist()
    masks = [torch.isin(drafts[a:b], arguments["target_tokens"][a:b]) for a, b in pairwise(bounds)]
    return let_through(run, arguments, torch.cat(masks), kind=3)


def first_of_the_longest(run, **arguments):
    """Of equally deep paths the first, however many mismatches it has."""
    # What stands is given tokens that match: then the paths differ in depth alone.
    trees, tokens = arguments["trees"], arguments["draft_tokens"]
    expected = arguments["target_tokens"][trees.parents[int(trees.rows[0]), 1:21].long()]
    told = arguments | {"draft_tokens": torch.cat([tokens[:1], expected.int()])}  # share 1 lets all through
    sampled, num_sampled, path, kinds = run(**told)
    nodes = path[0, 1:].long()
    is_draft = torch.arange(20, device=tokens.device) < num_sampled[0] - 1
    sampled[0, :-1] = torch.where(is_draft, tokens[nodes], sampled[0, :-1])
    kinds[0, :-1] = torch.where(is_draft & (tokens[nodes] != expected[nodes - 1]), 2, kinds[0, :-1])
    return sampled, num_sampled, path, kinds


RANKED, RIGHT = chain([5, 6, 7, 8], [9, 6, 7], LOWEST, 0.4), chain([5, 6, 7, 8], [5, 6, 7])
SWAPPED = chain([5, 6, 7, 8], [6, 5, 7])  # each is the other's
BRANCHES = Request([-1, 0, 0, 1, 2], [5] * 5, [7, 9, 9, 9, 9], LOWEST, 0.5, scores=[0, 1, 3, 2, 4])
ALL = dict(rule=LOWEST, share=1.0)
TARGETS, FULL = [5, 6, 7, 8, 9, 1, 2], Request(TREE, [9] * 7, [9] * 7)
STRICT_TREES, CHAINS, TREES = (dict(in_trees=i, is_loose=j) for i, j in ((True, False), (False, True), (True, True)))
# A mutant, how its requests are verified, and requests for which it is harmless and harmful.
MUTATIONS = {
    # The continuation hangs on the later twin; where siblings differ nothing is lost.
    "first child": (first_child_only, STRICT_TREES, [Request(TREE, TARGETS, [3, 4, 5, 6, 0, 7, 1])],
                    [Request(TREE, TARGETS, [3, 5, 5, 0, 0, 7, 1])]),
    "chain": (taken_for_a_chain, STRICT_TREES, [Request([-1, 0, 1], [5, 6, 7], [3, 5, 6])],
              [Request([-1, 0, 0], [5, 6, 7], [3, 4, 5])]),
    # Nodes 4 and 5 hang on node 2, whose target is the neighbour's 9.
    "cut": (cut_ignored, STRICT_TREES, [FULL, FULL], [Request(TREE, [5, 6, 9], [3, 4, 5]), FULL]),
    "the parent's score": (parents_score, CHAINS, [replace(RANKED, scores=[0.1, 0.2, 0.3, 0.4])],
                           [replace(RANKED, scores=[0.9, 0.1, 0.3, 0.4])]),
    **{f"the target's token, rule {rule}": (targets_token_emitted, CHAINS, [replace(RIGHT, rule=rule, share=share)],
                                            [chain([5, 6, 7, 8], [5, 7, 6], rule, share)])
       for rule, share in ((LOWEST, 0.7), (SHIFT, 0.0))},
    **{f"may not, rule {rule}": (may_loosen_ignored, CHAINS, [replace(SWAPPED, rule=rule, share=share)],
                                 [replace(SWAPPED, rule=rule, share=share, may=[True, False, True, True])])
       for rule, share in ((LOWEST, 0.7), (WINDOW, 0.0), (SHIFT, 0.0))},
    # One branch has most of the lowest scores; a chain is one branch.
    "one ranking": (one_ranking_for_all_branches, TREES,
                    [Request([-1, 0, 1, 2, 3], [5] * 5, [7, 9, 9, 9, 9], LOWEST, 0.5)], [BRANCHES]),
    # 0.9 of 3 drafts; for 2/3 it is right.
    "rounded": (rounded_share, CHAINS, [chain(TEN[:4], WRONG[:3], LOWEST, 0.7)],
                [chain(TEN[:4], WRONG[:3], LOWEST, 0.9)]),
    "shift, let through": (shift_among_the_targets_tokens, CHAINS, [replace(SWAPPED, rule=SHIFT)],
                           [chain([5, 6, 7, 8], [9, 5, 7], SHIFT)]),
    "shift, held back": (shift_among_the_targets_tokens, CHAINS, [replace(SWAPPED, rule=SHIFT)],
                         [chain([5, 6, 7, 8], [7, 6, 9], SHIFT)]),
    "the first": (first_of_the_longest, TREES, [pair([4], [5, 6], **ALL)], [pair([5, 6], [4], **ALL)]),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations(device, impl, name):
    """The check tells a mutant from the real thing on some requests, and passes it on others."""
    mutant, mode, harmless, harmful = MUTATIONS[name]
    run = accept_with(impl)
    check(run, harmful, device, **mode)
    check(lambda **arguments: mutant(run, **arguments), harmless, device, **mode)
    with pytest.raises(AssertionError):
        check(lambda **arguments: mutant(run, **arguments), harmful, device, **mode)
