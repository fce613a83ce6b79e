"""begin_step and next_level: kernel, loop and reference against loops over requests and places."""

import dataclasses

import pytest
import torch

from tests.kernels.refusals import changes, double, first, first_two, int32, long, nothing, transposed
from tests.kernels.step_case import (
    BLOCK_SIZE,
    MAX_DRAFTS,
    MAX_POSITION,
    SENTINEL,
    StepCase,
    begin_by_hand,
    fill,
    positions_of,
    slot_of,
)
from vidspec_kernels import LevelBuffers, StepBuffers, StepTables, begin_step, next_level
from vidspec_kernels.draft_step.begin_step import _BLOCK as TABLE_BLOCK
from vidspec_kernels.draft_step.next_level import _BLOCK as PLACE_BLOCK


def fields(buffers) -> dict[str, torch.Tensor]:
    """Return the tensors by name."""
    found = {field.name: getattr(buffers, field.name) for field in dataclasses.fields(buffers)}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def same(one, other) -> bool:
    """Whether all tensors of two buffers are equal."""
    mine, theirs = fields(one), fields(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def begin(case: StepCase, impl: str) -> tuple[StepBuffers, torch.Tensor]:
    """Return the buffers that a step leaves, and `fed`; the case is as before."""
    out, fed = case.buffers(), case.tables.fed.clone()
    begin_step(**case.step, tables=case.tables, out=out, size=case.size, **case.sizes, impl=impl)
    left = case.tables.fed.clone()
    case.tables.fed.copy_(fed)
    return out, left


def check(case: StepCase, impl: str) -> None:
    """Assert that an implementation writes what the loop writes, and nothing else but more of a block table."""
    got, fed = begin(case, impl)
    expected = case.buffers()
    begin_by_hand(case, expected)
    assert torch.equal(fed, case.tables.fed)
    for name, tensor in fields(expected).items():
        left = getattr(got, name)
        if name == "batch_table":
            # More than is needed may be copied; what is, is the request's own.
            more = (tensor == SENTINEL) & (left != SENTINEL)
            rows = (
                case.step["batch_rows"] if case.step["picked"] is None else case.step["batch_rows"][case.step["picked"]]
            )
            own = torch.full_like(left, SENTINEL)
            own[: case.num_reqs] = case.tables.block_table[rows]
            assert torch.equal(left[more], own[more])
            left = torch.where(more, SENTINEL, left)
        assert torch.equal(left, tensor), name


@pytest.mark.parametrize("in_trees", [False, True])
@pytest.mark.parametrize(("num_reqs", "num_picked"), [(0, None), (1, None), (1, 1), (7, None), (9, 4), (20, 17)])
def test_begin_equals_the_loop(device, impl, in_trees, num_reqs, num_picked):
    """Catches: the batch row used for the persistent row, or a place of the batch for a place of those that draft; a
    missing token fed to the null block, or one that stands fed again; the node looked up in the wrong column of a path;
    `fed` kept, or cleared for a request that does not draft; padding that has a slot; later rows written."""
    case = StepCase(device, num_reqs, num_picked, in_trees, seed=num_reqs + 1)
    check(case, impl)
    if num_reqs == 20:
        out, _ = begin(case, impl)
        slots = out.slot_mapping[: 2 * case.num_reqs].view(-1, 2)
        assert (slots[:, 0] == 0).any() and (slots[:, 0] > 0).any() and (slots == -1).any()
        assert (out.positions == MAX_POSITION).any()


@pytest.mark.parametrize("num_axes", [1, 3])
@pytest.mark.parametrize("max_blocks", [0, 1, TABLE_BLOCK, TABLE_BLOCK + 1])
def test_block_tables(device, impl, max_blocks, num_axes):
    """Catches: columns of a wide table that no program copies, reads of an empty one, one axis skipped; a physical slot
    computed in 32 bits (a pool of 2**27 blocks of 16 and more); a temperature that is kept from the step before."""
    case = StepCase(device, 5, 3, max_blocks=max_blocks, num_axes=num_axes)
    check(case, impl)
    case.tables.block_table.fill_(2**31 - 1)
    case.step["temperature"] = None  # greedy drafts
    check(case, impl)
    out = begin(case, impl)[0]
    assert (out.temperature[: case.size] == 0).all() and (max_blocks == 0 or (out.slot_mapping > 2**34).any())


@pytest.mark.parametrize("drafted", [1, 5])
@pytest.mark.parametrize("accepted", [0, 1, 5])
def test_the_end_of_a_chain_is_missing(device, impl, drafted, accepted):
    """A chain of `drafted` feeds all but its last token, so that only a whole accepted chain leaves one to feed."""
    if accepted > drafted:
        return
    case = StepCase(device, 1)
    row = int(case.step["batch_rows"][0])
    case.tables.num_tokens[row] = case.tables.num_dropped[row] + 21  # the root is entry 20
    case.tables.fed[row] = (1 << (drafted - 1)) - 1
    case.step["num_sampled"][0] = accepted + 1
    out, fed = begin(case, impl)
    table = case.tables.block_table[row]
    previous = int(table[19 // BLOCK_SIZE]) * BLOCK_SIZE + 19 % BLOCK_SIZE
    assert out.slot_mapping[0] == (previous if accepted == drafted else 0)
    assert fed[row] == 0 and out.last_root[0] == 19 - accepted


@pytest.mark.parametrize(("name", "change"), changes(
    batch_rows=(int32,), picked=(int32,), num_sampled=(long, first_two), is_verified=(int32, first),
    temperature=(double, first_two), seeds=(int32, lambda t: t.repeat(2)[::2]), size=(lambda size: 1, lambda size: 99),
))  # fmt: skip
def test_begin_refuses(device, name, change):
    """Catches: a dropped dtype, stride or length check (the kernel would read or write through a wrong pointer)."""
    case = StepCase(device, 3, 2)
    arguments = case.step | case.sizes | {"tables": case.tables, "out": case.buffers(), "size": case.size}
    with pytest.raises(AssertionError, match=name):
        begin_step(**arguments | {name: change(arguments[name])})


@pytest.mark.parametrize(
    "make", [lambda device: StepCase(device, 4, in_trees=True).tables,
             lambda device: StepCase(device, 4, in_trees=True).buffers(), lambda device: LevelCase(4, 3, device).out()]
)  # fmt: skip
def test_buffers_refuse(device, make):
    """Catches: a table that is checked nowhere: launches check only what changes from step to step."""
    good = fields(make(device))
    kind = type(make(device))
    kind(**good)
    for name, tensor in good.items():
        is_positions, says_length = name == "positions", name in ("rows", "logical_pos")
        wrong = {"dtype": tensor.to(torch.float16)}
        wrong["stride"] = tensor[0] if is_positions else torch.stack((tensor, tensor), dim=-1)[..., 0]
        wrong["length"] = tensor[:, :1] if is_positions else tensor[:0]
        if says_length or (kind, name) in ((StepTables, "block_table"), (LevelBuffers, "seq_lens")):
            wrong.pop("length")  # it is what says the length
        if name in ("input_ids", "masks") and kind is LevelBuffers:
            wrong["nothing"] = None  # one without the other
        for what, value in wrong.items():
            if name in ("last_sampled", "level") and what == "stride":
                continue  # one column, one entry
            with pytest.raises(AssertionError):
                kind(**good | {name: value})


def test_buffers_of_another_shape(device):
    """Catches: tables of unequal widths, of which one would be read past its end."""
    case, other = StepCase(device, 3), StepCase(device, 3, in_trees=True, max_blocks=9)
    for out, message in ((other.buffers(), "other widths"), (StepCase(device, 3, in_trees=True).buffers(), "path")):
        with pytest.raises(AssertionError, match=message):
            begin_step(**case.step, tables=case.tables, out=out, size=3, **case.sizes)


def test_meta_buffers_are_the_same(device):
    """Catches: a warm-up of other strides than those of the step."""
    out = StepCase(device, 4, in_trees=True).buffers()
    for name, tensor in fields(out.as_meta()).items():
        real = getattr(out, name)
        assert tensor.is_meta and (tensor.shape, tensor.stride()) == (real.shape, real.stride()), name
    assert out.path.shape[1] == MAX_DRAFTS + 1


NUM_NODES = 63


# Batch rows and places of each, 0: chains. Around the places of one program, requests that two programs share.
SIZES = [(0, 0), (1, 0), (PLACE_BLOCK - 1, 0), (PLACE_BLOCK, 0), (PLACE_BLOCK + 1, 0)]


SIZES += [(0, 4), (1, 1), (1, 8), (PLACE_BLOCK, 1), (43, 3), (25, 10), (3, 63)]


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


@pytest.mark.parametrize("num_pos_axes", [1, 3])
@pytest.mark.parametrize(("size", "frontier"), SIZES)
def test_level_equals_the_loop(device, impl, size, frontier, num_pos_axes):
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


@pytest.mark.parametrize("max_blocks", [0, 1, 4])
@pytest.mark.parametrize("level", [1, 2, 9, 62])
@pytest.mark.parametrize("frontier", [0, 3])
def test_level_on_the_device(device, impl, frontier, level, max_blocks):
    """Catches: a level that is read as a number of the launch where the device says it; reads of an empty block table,
    or past a short one; a physical slot computed in 32 bits."""
    case = LevelCase(20, frontier, device, level=level, max_blocks=max_blocks)
    case.step.batch_table[::2] = 2**31 - 1
    got, fed = case.run(impl, level=torch.tensor([level, 77], dtype=torch.int32, device=device)[:1])
    expected, expected_fed = case.by_hand()
    assert same(got, expected) and torch.equal(fed, expected_fed)


def test_chains_in_buffers_of_trees(device, impl):
    """Catches: tokens of chains, which `draw` has written, replaced; places counted by the width of the buffers."""
    case = LevelCase(5, 0, device)
    out = LevelCase(5, 3, device).out()
    expected = case.by_hand()[0]
    case.run(impl, out=out)
    for name in ("logical_pos", "positions", "slot_mapping", "seq_lens"):
        assert torch.equal(getattr(out, name)[..., :8], getattr(expected, name)[..., :8]), name
    assert (out.input_ids == SENTINEL).all() and (out.masks == SENTINEL).all()


def test_the_last_node(device, impl):
    """Catches: the bit of node 64, which is the sign, lost or shifted out."""
    case = LevelCase(2, 1, device)
    case.step.rows[:2] = torch.tensor([3, case.max_reqs])
    case.trees["nodes"] = torch.tensor([[64], [64]], device=device)
    case.trees["ancestors"] = torch.full((2, 65), 5, device=device)
    fed = case.run(impl, fed=torch.zeros_like(case.fed))[1]
    assert fed[3] == -(2**63) and (fed != 0).sum() == 1


def test_positions_of_any_strides(device, impl):
    """Catches: ignored strides, by a transposed buffer."""
    case = LevelCase(20, 0, device)
    out = case.out()
    memory = torch.full((2 * len(out.logical_pos), 3), SENTINEL, device=device)
    values = {name: getattr(out, name) for name in ("logical_pos", "slot_mapping", "seq_lens")}
    case.run(impl, out=LevelBuffers(positions=memory[::2].T, **values))
    assert torch.equal(memory[::2].T, case.by_hand()[0].positions[:, : len(out.logical_pos)])
    assert (memory[1::2] == SENTINEL).all()


@pytest.mark.parametrize(("name", "change"), changes(
    fed=(int32,), nodes=(int32, first_two, nothing, transposed, lambda t: t[:, :1]), tokens=(int32, transposed),
    ancestors=(int32, first_two), level=(lambda level: 0, lambda level: torch.ones(1)), size=(lambda size: 99,),
))  # fmt: skip
def test_level_refuses(device, name, change):
    """Catches: a dropped dtype, stride or length check (the kernel would write through a wrong pointer)."""
    case = LevelCase(3, 2, device)
    given = case.trees | {"fed": case.fed, "level": 1, "size": 3}
    with pytest.raises(AssertionError, match=name):
        case.run("auto", **{name: change(given[name])})


def test_level_refuses_other_buffers(device):
    """Catches: trees written where there is no room for masks, or for their nodes."""
    case = LevelCase(3, 2, device)
    with pytest.raises(AssertionError, match="buffers of chains"):
        case.run("auto", out=LevelCase(3, 0, device).out())
    short = case.out()
    values = {name: getattr(short, name)[:5] for name in ("logical_pos", "slot_mapping", "input_ids")}
    with pytest.raises(AssertionError, match="no room"):
        kept = {name: getattr(short, name) for name in ("positions", "seq_lens", "masks")}
        case.run("auto", out=LevelBuffers(**values, **kept))
