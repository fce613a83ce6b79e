"""tree_accept: literal trees, kernel and reference against a recursive walk, chains, truncation, planted mistakes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from vidspec_kernels.accept_chain import accept_chain
from vidspec_kernels.tree_accept import tree_accept, tree_accept_reference


def tables(trees, max_drafts, device, seed=0):
    """Persistent tables with the trees (lists of parents, the root's -1) in shuffled rows, garbage where none is."""
    max_reqs = len(trees) + 3
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(max_reqs, generator=generator)[: len(trees)]
    parents, depths, ancestors = torch.randint(-99, 99, (3, max_reqs, max_drafts + 3), generator=generator)
    ancestors *= parents > 0  # among them zeros, which no match contradicts
    ancestors[:, 0] = 0
    for row, tree in zip(rows.tolist(), trees, strict=True):
        above = [[]]
        for node, parent in list(enumerate(tree))[1:]:
            above.append([*above[parent], node])
            parents[row, node] = parent
            depths[row, node] = len(above[node])
            word = sum(1 << (other - 1) for other in above[node])
            ancestors[row, node] = word - (1 << 64) if word >> 63 else word
    return rows.to(device), parents.int().to(device), depths.int().to(device), ancestors.to(device)


def pack(requests, max_drafts, device):
    """The wrapper's arguments for (parents, target tokens, input tokens); rows may be fewer than the tree's nodes."""
    bounds = [0]
    for tree, target, fed in requests:
        assert len(target) == len(fed) <= len(tree)
        bounds.append(bounds[-1] + len(target))
    return (
        torch.tensor([t for _, target, _ in requests for t in target], dtype=torch.int64, device=device),
        torch.tensor([t for _, _, fed in requests for t in fed], dtype=torch.int64, device=device),
        torch.tensor(bounds, dtype=torch.int32, device=device),
        *tables([tree for tree, _, _ in requests], max_drafts, device, seed=len(requests)),
        max_drafts,
    )


def walk(tree, target, fed):
    """The nodes of the longest path that stands: all matching children explored, the deepest end, first in order."""
    if not target:
        return []

    def ends(node, path):
        yield path
        for child in range(node + 1, len(target)):
            if tree[child] == node and fed[child] == target[node] and fed[child] >= 0:
                yield from ends(child, [*path, child])

    return min(ends(0, [0]), key=lambda path: (-len(path), path[-1]))


def check(accept, requests, max_drafts, device):
    """Assert that `accept` gives what the walk gives."""
    sampled, num_sampled, path = accept(*pack(requests, max_drafts, device))
    assert sampled.dtype == torch.int64 and num_sampled.dtype == path.dtype == torch.int32
    assert sampled.shape == path.shape == (len(requests), max_drafts + 1)
    paths = [walk(*request) for request in requests]
    assert num_sampled.tolist() == [len(nodes) for nodes in paths]
    assert path.tolist() == [nodes + list(range(len(nodes), max_drafts + 1)) for nodes in paths]
    emitted = [[request[1][node] for node in nodes] for request, nodes in zip(requests, paths, strict=True)]
    assert sampled.tolist() == [tokens + [0] * (max_drafts + 1 - len(tokens)) for tokens in emitted]


def accept_with(impl):
    return lambda *arguments: tree_accept(*arguments, impl=impl)


def random_requests(num_reqs, max_drafts, seed=0):
    """Trees of every shape between a star and a chain, of 0 to K + 1 rows, over three tokens: most drafts stand."""
    generator = torch.Generator().manual_seed(seed)

    def ints(low, high, size=1):
        return torch.randint(low, high, (size,), generator=generator).tolist()

    requests = []
    for reach in ints(1, 5, num_reqs):
        # A node hangs on one of the last `reach` nodes, on any for 4.
        tree = [-1] + [ints(0 if reach == 4 else max(0, i - reach), i)[0] for i in range(1, max_drafts + 1)]
        target = ints(0, 3, max_drafts + 1)
        fed = [7] + [target[tree[i]] for i in range(1, max_drafts + 1)]
        for i, flip in enumerate(ints(0, max(2, 20 // reach), max_drafts + 1)):
            if i and not flip:
                fed[i] = ints(-1, 3)[0]
        # Most requests are whole, some are cut to their first rows, some of those have a tree as small.
        num_rows = (ints(0, max_drafts + 2) + [max_drafts + 1] * 2)[ints(0, 3)[0]]
        num_nodes = (max(num_rows, 1), max_drafts + 1)[ints(0, 2)[0]]
        requests.append((tree[:num_nodes], target[:num_rows], fed[:num_rows]))
    return requests


#        0
#      1   2        siblings 1 and 2; 3 hangs on 1, 4 and 5 on 2, 6 on 5
#      3  4 5
#           6
TREE = [-1, 0, 0, 1, 2, 2, 5]
LITERAL = [
    # targets of nodes 0..6, input tokens, accepted nodes
    ([5, 6, 7, 8, 9, 1, 2], [3, 5, 4, 6, 0, 0, 0], [0, 1, 3]),  # down the first branch
    ([5, 6, 7, 8, 9, 1, 2], [3, 4, 5, 6, 0, 7, 1], [0, 2, 5, 6]),  # down the second, to the deepest
    ([5, 6, 7, 8, 9, 1, 2], [3, 4, 5, 6, 0, 0, 1], [0, 2]),  # a match below a mismatch does not count
    ([5, 6, 7, 8, 9, 1, 2], [3, 4, 4, 6, 7, 7, 1], [0]),  # nothing stands
    ([5, 6, 7, 8, 9, 1, 2], [3, 5, 5, 6, 0, 0, 0], [0, 1, 3]),  # twin siblings: the first has the continuation
    ([5, 6, 7, 8, 9, 1, 2], [3, 5, 5, 0, 0, 7, 1], [0, 2, 5, 6]),  # twin siblings: the later one has it
    ([5, 6, 7, 8, 9, 1, 2], [3, 5, 5, 6, 7, 7, 0], [0, 1, 3]),  # equally deep: the lowest node
    ([-1, 6, 7, 8, 9, 1, 2], [3, -1, -1, 6, 7, 7, 1], [0]),  # an invalid draft, though the sample is as wrong
    ([0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0], [0, 2, 5, 6]),  # token id 0 is a token
    ([5, 6, 7, 8, 9, 1], [3, 4, 5, 6, 0, 7], [0, 2, 5]),  # cut before node 6
    ([5, 6, 7], [3, 5, 5], [0, 1]),  # cut after level 1
    ([5], [3], [0]),  # the root alone
    ([], [], []),  # not even that
]


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize(("target", "fed", "nodes"), LITERAL)
def test_hand_computed_trees(device, impl, target, fed, nodes):
    """Catches: a draft compared with the target at itself or at its predecessor, ancestors ignored, the first matching
    child followed for good, ties broken upwards, -1 accepted, the next request's rows taken for nodes."""
    neighbour = (TREE, [9] * 7, [9] * 7)
    assert walk(TREE, target, fed) == nodes
    requests = [neighbour, (TREE, target, fed), neighbour]
    check(accept_with(impl), requests, 6, device)
    sampled, num_sampled, path = tree_accept(*pack(requests, 6, device), impl=impl)
    depth = len(nodes)
    assert num_sampled.tolist() == [4, depth, 4]
    assert path[1].tolist() == nodes + list(range(depth, 7))
    assert sampled[1].tolist() == [target[node] for node in nodes] + [0] * (7 - depth)


@pytest.mark.parametrize("max_drafts", [1, 2, 3, 7, 8, 25, 63, 64])
@pytest.mark.parametrize("num_reqs", [0, 1, 40])
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_equals_the_walk(device, impl, num_reqs, max_drafts):
    """Catches: a width K + 1 at, below or above a power of two handled wrongly; wrong ragged bounds; batch rows taken
    for persistent rows; garbage of nodes without a row read."""
    check(accept_with(impl), random_requests(num_reqs, max_drafts, seed=max_drafts), max_drafts, device)


def test_random_trees_are_worth_checking():
    """Catches: random requests that never branch, never go deep, or never have several longest paths."""
    requests = random_requests(300, 25)
    paths = [walk(*request) for request in requests]
    assert len({len(nodes) for nodes in paths}) > 15
    assert sum(nodes != list(range(len(nodes))) for nodes in paths) > 100
    assert {len(target) for _, target, _ in requests} >= {0, 1, 26}


def test_kernel_equals_reference_at_a_real_size(device):
    """Catches: a kernel and a reference that differ in anything, at 300 requests of up to 26 rows."""
    arguments = pack(random_requests(300, 25), 25, device)
    got, expected = tree_accept(*arguments, impl="triton"), tree_accept_reference(*arguments)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("max_drafts", [1, 25, 64])
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_a_chain_is_a_tree(device, impl, max_drafts):
    """Catches: any difference from accept_chain where each node hangs on the one before; bit 63 taken for a sign."""
    chain = list(range(-1, max_drafts))
    whole = (chain, [4] * (max_drafts + 1), [4] * (max_drafts + 1))
    requests = [whole] + [(chain, *rest) for tree, *rest in random_requests(60, max_drafts, seed=1)]
    arguments = pack(requests, max_drafts, device)
    sampled, num_sampled, path = tree_accept(*arguments, impl=impl)
    expected = accept_chain(*arguments[:3], max_drafts, impl=impl)
    assert torch.equal(sampled, expected[0]) and torch.equal(num_sampled, expected[1])
    assert num_sampled[0] == max_drafts + 1
    assert path.tolist() == [list(range(max_drafts + 1))] * len(requests)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_surplus_rows(device, impl):
    """Catches: a write past the row, or nodes past the tables' width, when a request has more rows than K + 1."""
    arguments = pack([(TREE, [4] * 7, [4] * 7)], 6, device)
    _, num_sampled, path = tree_accept(*arguments[:-1], 2, impl=impl)
    assert num_sampled.tolist() == [2] and path.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_mutation_first_child_only(device, impl):
    """Mutation: of siblings with the same token only the first is followed, as a walk without going back would. Seen
    to fail: the continuation hangs on the later one."""

    def first_child(target, draft, bounds, rows, parents, *rest):
        draft, bound_list = draft.clone(), bounds.tolist()
        for req_idx, row in enumerate(rows.tolist()):
            seen = set()
            for node in range(1, bound_list[req_idx + 1] - bound_list[req_idx]):
                edge = (int(parents[row, node]), int(draft[bound_list[req_idx] + node]))
                if edge in seen:
                    draft[bound_list[req_idx] + node] = -1
                seen.add(edge)
        return tree_accept(target, draft, bounds, rows, parents, *rest, impl=impl)

    target, fed, _ = LITERAL[5]
    check(first_child, [(TREE, *LITERAL[1][:2])], 6, device)  # where siblings differ nothing is lost
    check(accept_with(impl), [(TREE, target, fed)], 6, device)
    with pytest.raises(AssertionError):
        check(first_child, [(TREE, target, fed)], 6, device)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_mutation_the_tree_is_taken_for_a_chain(device, impl):
    """Mutation: each node hangs on the one before. Seen to fail on a branch; on a chain it is right."""

    def chain(target, draft, bounds, rows, parents, depths, ancestors, max_drafts):
        tables_of_chain = tables([list(range(-1, max_drafts))] * len(rows), max_drafts, device)
        return tree_accept(target, draft, bounds, *tables_of_chain, max_drafts, impl=impl)

    check(chain, [([-1, 0, 1], [5, 6, 7], [3, 5, 6])], 2, device)
    for target, fed in (([5, 6, 7], [3, 5, 5]), ([5, 6, 7], [3, 4, 5])):
        check(accept_with(impl), [([-1, 0, 0], target, fed)], 2, device)
    with pytest.raises(AssertionError):
        check(chain, [([-1, 0, 0], [5, 6, 7], [3, 4, 5])], 2, device)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_mutation_truncation_is_ignored(device, impl):
    """Mutation: every request is given all K + 1 rows of its tree. Seen to fail: the next request's rows are taken for
    the nodes that the scheduler cut."""

    def whole(target, draft, bounds, rows, *rest):
        results = []
        for req_idx, start in enumerate(bounds[:-1].tolist()):
            end = min(start + rest[-1] + 1, len(target))
            window = torch.tensor([start, end], dtype=torch.int32, device=device)
            results.append(tree_accept(target, draft, window, rows[req_idx : req_idx + 1], *rest, impl=impl))
        return tuple(torch.cat(parts) for parts in zip(*results, strict=True))

    full = (TREE, [9] * 7, [9] * 7)
    cut = (TREE, [5, 6, 9], [3, 4, 5])  # nodes 4 and 5 hang on node 2, whose target is the neighbour's 9
    check(whole, [full, full], 6, device)
    check(accept_with(impl), [cut, full], 6, device)
    with pytest.raises(AssertionError):
        check(whole, [cut, full], 6, device)


@pytest.mark.parametrize("impl", ["auto", "triton", "torch"])
def test_dispatch(device, branches, impl):
    """Catches: a forced branch that silently runs the other, and a wrong automatic choice."""
    ran = branches("tree_accept")
    tree_accept(*pack([(TREE, [5], [1])], 6, device), impl=impl)
    automatic = "triton" if device.type == "cuda" else "torch"
    assert ran == [automatic if impl == "auto" else impl]


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda t: t.int(), "target_tokens"),
        (0, lambda t: t.repeat(2)[::2], "target_tokens: expected stride 1"),
        (1, lambda t: t.int(), "draft_tokens"),
        (1, lambda t: t[:1], "target rows"),
        (2, lambda t: t.long(), "cu_num_logits"),
        (2, lambda t: t[:0], "cu_num_logits"),
        (3, lambda t: t.int(), "rows"),
        (3, lambda t: t[:0], "rows"),
        (3, lambda t: t.repeat(2), "rows"),
        (4, lambda t: t.long(), "parents"),
        (4, lambda t: t.T.contiguous().T, "parents"),
        (5, lambda t: t[:, :6], "depths"),
        (5, lambda t: t[:1], "depths"),
        (6, lambda t: t.int(), "ancestors"),
        (6, lambda t: t[0], "ancestors"),
        (7, lambda t: 0, "max_drafts"),
        (7, lambda t: 65, "max_drafts"),
    ],
)
def test_wrapper_refuses(device, index, change, message):
    """Catches: a dropped dtype, stride or shape check (the kernel would read through a wrong pointer)."""
    arguments = list(pack([(TREE, [4] * 7, [4] * 7)], 6, device))
    arguments[index] = change(arguments[index])
    with pytest.raises(AssertionError, match=message):
        tree_accept(*arguments)


def test_unknown_impl(device):
    """Catches: a typo in `impl` that runs something."""
    with pytest.raises(ValueError, match="auto, triton or torch"):
        tree_accept(*pack([(TREE, [5], [1])], 6, device), impl="cpu")


COMPILE = """
import importlib
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

kernel = importlib.import_module("vidspec_kernels.tree_accept")._tree_accept_kernel
wide = {"target_tokens_ptr", "draft_tokens_ptr", "rows_ptr", "ancestors_ptr", "sampled_ptr"}
types = {name: "*i64" if name in wide else "*i32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
for block in (2, 32, 128):
    source = ASTSource(kernel, types | {"BLOCK": "constexpr"}, {"BLOCK": block})
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
"""


@pytest.mark.skipif(
    not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").exists(), reason="this Triton has no ptxas"
)
def test_kernel_compiles_for_hopper(tmp_path):
    """Catches: what the interpreter forgives and the compiler does not."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
