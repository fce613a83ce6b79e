"""next_level: literal facts, kernel and reference against oracles at awkward sizes, layouts and block boundaries."""

import pytest
import torch

from tests.kernels.impls import branch
from tests.kernels.step_case import BLOCK_SIZE, MAX_POSITION, SENTINEL, fill, positions_of, slot_of
from vidspec_kernels import LevelBuffers, StepBuffers, next_level
from vidspec_kernels.draft_step.next_level import _BLOCK

IMPLS = ["triton", "torch", "numba"]
NUM_NODES = 63
# Batch rows and places of each, 0: chains. Around the places of one program, requests that two programs share.
SIZES = [(0, 0), (1, 0), (_BLOCK - 1, 0), (_BLOCK, 0), (_BLOCK + 1, 0)]
SIZES += [(0, 4), (1, 1), (1, 8), (_BLOCK, 1), (43, 3), (25, 10), (3, 63)]


class LevelCase:
    """A level of `size` batch rows, some of them padding, some with entries past their block tables; `frontier` is the
    number of places of each, 0: chains."""

    def __init__(self, size, frontier, device, max_blocks=8, num_axes=3, seed=0, level=1):
        generator = torch.Generator().manual_seed(seed)
        self.size, self.frontier, self.device, self.num_axes = size, frontier, device, num_axes
        self.max_batch, self.max_reqs = size + 3, size + 7
        self.level, self.width = level, frontier + 2 if frontier else 0

        def ints(low, high, *shape, dtype=torch.int64):
            return torch.randint(low, high, shape, generator=generator, dtype=dtype).to(device)

        positions = positions_of(num_axes, 2 * self.max_batch, device)
        self.step = fill(StepBuffers.allocate(self.max_batch, max_blocks, positions))
        self.step.rows.copy_(torch.randperm(self.max_reqs, generator=generator)[: self.max_batch])
        self.step.rows[ints(0, 4, self.max_batch) == 0] = self.max_reqs
        self.step.root_slot.copy_(ints(0, BLOCK_SIZE * max_blocks + 3, self.max_batch))
        self.step.root_pos.copy_(ints(0, 5000, self.max_batch))
        self.step.pos_delta.copy_(ints(-2000, 3000, self.max_batch))
        self.step.batch_table.copy_(ints(1, 1000, self.max_batch, max_blocks))
        self.fed = ints(0, 2**62, self.max_reqs + 1)
        self.trees = {}
        if frontier:
            # Every node once; slices of wider buffers, as a policy's.
            nodes = ints(0, NUM_NODES, size, NUM_NODES).argsort(1)[:, : frontier + 3] + 1
            nodes[ints(0, 4, *nodes.shape) == 0] = 0
            self.trees = {
                "nodes": nodes[:, :frontier],
                "tokens": ints(1, 1000, size + 1, frontier + 1)[:, :frontier],
                "ancestors": ints(1, 2**62, size + 2, NUM_NODES + 1),
            }

    def out(self) -> LevelBuffers:
        """Return buffers full of sentinels."""
        positions = positions_of(self.num_axes, self.max_batch * max(self.width, 1), self.device)
        return fill(LevelBuffers.allocate(self.max_batch, positions, self.width))

    def run(self, impl, **changes) -> tuple[LevelBuffers, torch.Tensor]:
        """Return the buffers that the level leaves, and `fed`."""
        arguments = {"out": self.out(), "fed": self.fed.clone(), "size": self.size, "level": self.level}
        sizes = {"block_size": BLOCK_SIZE, "max_position": MAX_POSITION}
        arguments |= self.trees | sizes | changes
        next_level(self.step, **arguments, impl=impl)
        return arguments["out"], arguments["fed"]

    def by_hand(self) -> tuple[LevelBuffers, torch.Tensor]:
        """The same, a place at a time."""
        out, fed, step = self.out(), self.fed.clone(), self.step
        for b in range(self.size):
            is_real, root, row = step.rows[b] < self.max_reqs, int(step.root_slot[b]), int(step.rows[b])
            out.seq_lens[b] = root + 1 + (0 if self.trees else self.level) if is_real else 0
            for f in range(max(self.frontier, 1)):
                idx = b * max(self.frontier, 1) + f
                node = int(self.trees["nodes"][b, f]) if self.trees else self.level
                logical = int(step.root_pos[b]) + self.level if is_real else 0
                position = min(logical + int(step.pos_delta[b]), MAX_POSITION) if is_real else 0
                out.logical_pos[idx], out.positions[:, idx] = logical, position
                slot = slot_of(step.batch_table[b], root + node) if node else 0
                out.slot_mapping[idx] = slot if is_real else -1
                is_node = bool(is_real) and node > 0
                if self.trees:
                    out.input_ids[idx] = self.trees["tokens"][b, f] * is_node
                    out.masks[b, f] = self.trees["ancestors"][b, node] * is_node
                if is_node:
                    fed[row] |= 1 << (node - 1)
        return out, fed


def same(one: LevelBuffers, other: LevelBuffers) -> bool:
    """Whether all tensors are equal."""
    names = ("logical_pos", "positions", "slot_mapping", "seq_lens", "input_ids", "masks")
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_pos_axes", [1, 3])
@pytest.mark.parametrize(("size", "frontier"), SIZES)
def test_equals_the_loop(device, impl, size, frontier, num_pos_axes):
    """Catches: a missing tail mask (what lies behind must keep the sentinel), a wrong grid, one axis skipped, a request
    that spans two programs handled wrongly, padding that has a slot, a length, a mask or a bit, a node that is counted
    where there is none, bits that replace those of earlier levels."""
    case = LevelCase(size, frontier, device, num_axes=num_pos_axes, seed=size, level=2)
    got, fed = case.run(impl)
    expected, expected_fed = case.by_hand()
    assert same(got, expected) and torch.equal(fed, expected_fed)
    if size >= 20:
        slots = got.slot_mapping[got.slot_mapping != SENTINEL]
        assert (slots == -1).any() and (slots > 0).any() and (slots == 0).any() == bool(frontier)
        assert (got.positions == MAX_POSITION).any() and (got.seq_lens == 0).any()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("level", [1, 2, 9, 62])
@pytest.mark.parametrize("frontier", [0, 3])
def test_level_on_the_device(device, impl, frontier, level):
    """Catches: a level that is read as a number of the launch where the device says it."""
    case = LevelCase(20, frontier, device, level=level)
    got, fed = case.run(impl, level=torch.tensor([level, 77], dtype=torch.int32, device=device)[:1])
    expected, expected_fed = case.by_hand()
    assert same(got, expected) and torch.equal(fed, expected_fed)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("max_blocks", [0, 1, 4])
@pytest.mark.parametrize("frontier", [0, 5])
def test_short_tables(device, impl, frontier, max_blocks):
    """Catches: reads of an empty block table, or past a short one."""
    case = LevelCase(33, frontier, device, max_blocks=max_blocks)
    assert same(case.run(impl)[0], case.by_hand()[0])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("frontier", [0, 2])
def test_addresses_beyond_int32(device, impl, frontier):
    """Catches: a physical slot computed in 32 bits."""
    case = LevelCase(9, frontier, device)
    case.step.batch_table.fill_(2**31 - 1)
    got, _ = case.run(impl)
    assert same(got, case.by_hand()[0]) and (got.slot_mapping > 2**34).any()


@pytest.mark.parametrize("impl", IMPLS)
def test_chains_in_buffers_of_trees(device, impl):
    """Catches: tokens of chains, which `draw` has written, replaced; places counted by the width of the buffers."""
    case = LevelCase(5, 0, device)
    out = LevelCase(5, 3, device).out()
    expected = case.by_hand()[0]
    case.run(impl, out=out)
    for name in ("logical_pos", "positions", "slot_mapping", "seq_lens"):
        assert torch.equal(getattr(out, name)[..., :8], getattr(expected, name)[..., :8]), name
    assert (out.input_ids == SENTINEL).all() and (out.masks == SENTINEL).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_the_last_node(device, impl):
    """Catches: the bit of node 64, which is the sign, lost or shifted out."""
    case = LevelCase(2, 1, device)
    case.step.rows[:2] = torch.tensor([3, case.max_reqs])
    case.trees["nodes"] = torch.tensor([[64], [64]], device=device)
    case.trees["ancestors"] = torch.full((2, 65), 5, device=device)
    fed = case.run(impl, fed=torch.zeros_like(case.fed))[1]
    assert fed[3] == -(2**63) and (fed != 0).sum() == 1


@pytest.mark.parametrize("impl", IMPLS)
def test_positions_of_any_strides(device, impl):
    """Catches: ignored strides, by a transposed buffer."""
    case = LevelCase(20, 0, device)
    out = case.out()
    memory = torch.full((2 * len(out.logical_pos), 3), SENTINEL, device=device)
    values = {name: getattr(out, name) for name in ("logical_pos", "slot_mapping", "seq_lens")}
    case.run(impl, out=LevelBuffers(positions=memory[::2].T, **values))
    assert torch.equal(memory[::2].T, case.by_hand()[0].positions[:, : len(out.logical_pos)])
    assert (memory[1::2] == SENTINEL).all()


@pytest.mark.parametrize("frontier", [0, 2])
def test_dispatch(device, branches, frontier):
    """Catches: a forced branch that silently runs the other, and a wrong automatic choice."""
    ran = branches("next_level")
    impls = ("auto", "triton", "numba", "torch")
    for impl in impls:
        LevelCase(3, frontier, device).run(impl)
    assert ran == [branch(impl, device) for impl in impls]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("fed", lambda t: t.int()),
        ("nodes", lambda t: t.int()),
        ("nodes", lambda t: t[:2]),
        ("nodes", lambda t: None),
        ("nodes", lambda t: t.T.contiguous().T),
        ("nodes", lambda t: t[:, :1]),
        ("tokens", lambda t: t.int()),
        ("tokens", lambda t: t.T.contiguous().T),
        ("ancestors", lambda t: t.int()),
        ("ancestors", lambda t: t[:2]),
        ("level", lambda level: 0),
        ("level", lambda level: torch.ones(1)),
        ("size", lambda size: 99),
    ],
)
def test_wrapper_refuses(device, name, change):
    """Catches: a dropped dtype, stride or length check (the kernel would write through a wrong pointer)."""
    case = LevelCase(3, 2, device)
    given = case.trees | {"fed": case.fed, "level": 1, "size": 3}
    with pytest.raises(AssertionError, match=name):
        case.run("auto", **{name: change(given[name])})


def test_wrapper_refuses_other_buffers(device):
    """Catches: trees written where there is no room for masks, or for their nodes."""
    case = LevelCase(3, 2, device)
    with pytest.raises(AssertionError, match="buffers of chains"):
        case.run("auto", out=LevelCase(3, 0, device).out())
    short = case.out()
    values = {name: getattr(short, name)[:5] for name in ("logical_pos", "slot_mapping", "input_ids")}
    with pytest.raises(AssertionError, match="no room"):
        kept = {name: getattr(short, name) for name in ("positions", "seq_lens", "masks")}
        case.run("auto", out=LevelBuffers(**values, **kept))


@pytest.mark.parametrize("name", ["logical_pos", "positions", "slot_mapping", "seq_lens", "input_ids", "masks"])
def test_buffers_refuse(device, name):
    """Catches: an output that is checked nowhere."""
    out = LevelCase(4, 3, device).out()
    good = {key: value for key, value in vars(out).items() if isinstance(value, torch.Tensor)}
    tensor = good[name]
    wrong = [tensor.to(torch.float16), None]
    wrong += [tensor[:, :5]] if name == "positions" else [torch.stack((tensor, tensor), dim=-1)[..., 0]]
    for value in wrong:
        with pytest.raises((AssertionError, AttributeError)):
            LevelBuffers(**good | {name: value})
