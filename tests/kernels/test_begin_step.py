"""begin_step: literal facts, kernel and reference against a loop over requests."""

import dataclasses

import pytest
import torch

from tests.kernels.impls import branch
from tests.kernels.step_case import BLOCK_SIZE, MAX_DRAFTS, MAX_POSITION, SENTINEL, StepCase, begin_by_hand
from vidspec_kernels import StepBuffers, StepTables, begin_step
from vidspec_kernels.draft_step.begin_step import _BLOCK

IMPLS = ["triton", "torch", "numba"]


def fields(buffers) -> dict[str, torch.Tensor]:
    """Return the tensors by name."""
    found = {field.name: getattr(buffers, field.name) for field in dataclasses.fields(buffers)}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def run(case: StepCase, impl: str) -> tuple[StepBuffers, torch.Tensor]:
    """Return the buffers that a step leaves, and `fed`; the case is as before."""
    out, fed = case.buffers(), case.tables.fed.clone()
    begin_step(**case.step, tables=case.tables, out=out, size=case.size, **case.sizes, impl=impl)
    left = case.tables.fed.clone()
    case.tables.fed.copy_(fed)
    return out, left


def check(case: StepCase, impl: str) -> None:
    """Assert that an implementation writes what the loop writes, and nothing else but more of a block table."""
    got, fed = run(case, impl)
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


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("in_trees", [False, True])
@pytest.mark.parametrize(("num_reqs", "num_picked"), [(0, None), (1, None), (1, 1), (7, None), (9, 4), (20, 17)])
def test_equals_the_loop(device, impl, in_trees, num_reqs, num_picked):
    """Catches: the batch row used for the persistent row, or a place of the batch for a place of those that draft; a
    missing token fed to the null block, or one that stands fed again; the node looked up in the wrong column of a path;
    `fed` kept, or cleared for a request that does not draft; padding that has a slot; later rows written."""
    case = StepCase(device, num_reqs, num_picked, in_trees, seed=num_reqs + 1)
    check(case, impl)
    if num_reqs == 20:
        out, _ = run(case, impl)
        slots = out.slot_mapping[: 2 * case.num_reqs].view(-1, 2)
        assert (slots[:, 0] == 0).any() and (slots[:, 0] > 0).any() and (slots == -1).any()
        assert (out.positions == MAX_POSITION).any()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_axes", [1, 3])
@pytest.mark.parametrize("max_blocks", [0, 1, _BLOCK, _BLOCK + 1])
def test_block_tables(device, impl, max_blocks, num_axes):
    """Catches: columns of a wide table that no program copies, reads of an empty one, one axis skipped."""
    check(StepCase(device, 5, 3, max_blocks=max_blocks, num_axes=num_axes), impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_greedy_drafts_have_no_temperature(device, impl):
    """Catches: a temperature that is kept from the step before."""
    case = StepCase(device, 6)
    case.step["temperature"] = None
    check(case, impl)
    assert (run(case, impl)[0].temperature[: case.size] == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
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
    out, fed = run(case, impl)
    table = case.tables.block_table[row]
    previous = int(table[19 // BLOCK_SIZE]) * BLOCK_SIZE + 19 % BLOCK_SIZE
    assert out.slot_mapping[0] == (previous if accepted == drafted else 0)
    assert fed[row] == 0 and out.last_root[0] == 19 - accepted


@pytest.mark.parametrize("impl", IMPLS)
def test_addresses_beyond_int32(device, impl):
    """Catches: a physical slot computed in 32 bits (a pool of 2**27 blocks of 16 and more)."""
    case = StepCase(device, 2)
    case.tables.block_table.fill_(2**31 - 1)
    check(case, impl)
    assert (run(case, impl)[0].slot_mapping > 2**34).any()


def test_dispatch(device, branches):
    """Catches: a forced branch that silently runs the other, and a wrong automatic choice."""
    ran = branches("begin_step")
    impls = ("auto", "triton", "numba", "torch")
    for impl in impls:
        run(StepCase(device, 3), impl)
    assert ran == [branch(impl, device) for impl in impls]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("batch_rows", lambda t: t.int()),
        ("picked", lambda t: t.int()),
        ("num_sampled", lambda t: t.long()),
        ("num_sampled", lambda t: t[:2]),
        ("is_told", lambda t: t.int()),
        ("is_told", lambda t: t[:1]),
        ("temperature", lambda t: t.double()),
        ("temperature", lambda t: t[:2]),
        ("seeds", lambda t: t.int()),
        ("seeds", lambda t: t.repeat(2)[::2]),
        ("size", lambda size: 1),
        ("size", lambda size: 99),
    ],
)
def test_wrapper_refuses(device, name, change):
    """Catches: a dropped dtype, stride or length check (the kernel would read or write through a wrong pointer)."""
    case = StepCase(device, 3, 2)
    arguments = case.step | case.sizes | {"tables": case.tables, "out": case.buffers(), "size": case.size}
    with pytest.raises(AssertionError, match=name):
        begin_step(**arguments | {name: change(arguments[name])})


@pytest.mark.parametrize("make", [lambda case: case.tables, StepCase.buffers])
def test_buffers_refuse(device, make):
    """Catches: a table that is checked nowhere: launches check only what changes from step to step."""
    good = fields(make(StepCase(device, 4, in_trees=True)))
    kind = type(make(StepCase(device, 4)))
    kind(**good)
    for name, tensor in good.items():
        wrong = {"dtype": tensor.to(torch.float16)}
        wrong["stride"] = torch.stack((tensor, tensor), dim=-1)[..., 0] if name != "positions" else tensor[0]
        wrong["length"] = tensor[:0] if name != "positions" else tensor[:, :1]
        if (kind is StepTables and name == "block_table") or name == "rows":
            wrong.pop("length")  # it is what says the length
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
