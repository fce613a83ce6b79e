"""Random steps and levels of drafting for `begin_step` and `next_level`, in buffers full of a sentinel."""

import torch

from vidspec_kernels import LevelBuffers, StepBuffers, StepTables, begin_step, next_level

SENTINEL = -(10**6)  # no position, length, token or slot
BLOCK_SIZE, MAX_POSITION, MAX_DRAFTS, NUM_NODES = 16, 4500, 7, 63


def fill(buffers):
    """Write a sentinel into every tensor, and return the buffers."""
    for tensor in vars(buffers).values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(SENTINEL)
    return buffers


def positions_of(num_axes, num_columns, device):
    """Return a position buffer as vLLM's: a slice of a longer one."""
    return torch.zeros(num_axes, num_columns + 3, dtype=torch.int64, device=device)[:, 2:]


def begin_case(
    device, num_reqs=5, num_picked=None, in_trees=False, max_blocks=8, num_axes=3, extra=2, heats=True, has_fed=True
):
    """A step of which `num_picked` draft (None: all); texts end past the block table, positions past the highest."""
    generator = torch.Generator().manual_seed(num_reqs + 1)
    max_reqs, longest = num_reqs + 5, BLOCK_SIZE * max_blocks + 3

    def ints(low, high, *shape, dtype=torch.int32):
        return torch.randint(low, high, shape, generator=generator, dtype=dtype).to(device)

    num_dropped, root_slot = ints(0, 3000, max_reqs), ints(1, longest, max_reqs)
    root_slot[::4] = longest - 1
    pos_delta = ints(-2000, 3000, max_reqs, dtype=torch.int64)
    pos_delta[::3] = MAX_POSITION
    tables = StepTables(
        num_tokens=root_slot + num_dropped + 1,
        text=ints(0, 1000, max_reqs, 3000 + longest + 9)[:, 1:],
        last_sampled=ints(0, 1000, max_reqs, 2, dtype=torch.int64)[:, :1],
        num_dropped=num_dropped,
        pos_delta=pos_delta,
        # Slices of a wider buffer: rows that do not lie together.
        block_table=ints(1, 1000, max_reqs, max_blocks + 7)[:, :max_blocks],
        fed=ints(0, 2**MAX_DRAFTS, max_reqs + 1, dtype=torch.int64) if has_fed else None,
        path=ints(0, MAX_DRAFTS + 1, max_reqs, MAX_DRAFTS + 1) if in_trees else None,
    )
    m = num_reqs if num_picked is None else num_picked
    picked, size = torch.randperm(num_reqs, generator=generator)[:m].sort().values.to(device), m + extra
    positions = positions_of(num_axes, 2 * (size + 3), device)
    return begin_step, {
        "batch_rows": torch.randperm(max_reqs, generator=generator)[:num_reqs].to(device),
        "picked": None if num_picked is None else picked,
        "num_sampled": ints(1, MAX_DRAFTS + 2, num_reqs),
        "is_verified": None if num_picked is None else ints(0, 2, m).bool(),
        "temperature": torch.rand(max_reqs, generator=generator).to(device) if heats else None,
        "seeds": ints(-(2**40), 2**40, max_reqs, dtype=torch.int64), "tables": tables,
        "out": fill(StepBuffers.allocate(size + 3, max_blocks, positions, MAX_DRAFTS + 1 if in_trees else 0)),
        "size": size, "block_size": BLOCK_SIZE, "max_position": MAX_POSITION, "max_drafts": MAX_DRAFTS,
    }  # fmt: skip


def level_case(device, size=3, frontier=2, max_blocks=8, num_axes=3, level=1, width=None, on_device=False):
    """A level of `size` rows, some padding; `frontier` places of each (0: chains), `width` those of the buffers."""
    generator = torch.Generator().manual_seed(size)
    max_batch, max_reqs = size + 3, size + 7
    width = width if width is not None else frontier + 2 if frontier else 0

    def ints(low, high, *shape, dtype=torch.int64):
        return torch.randint(low, high, shape, generator=generator, dtype=dtype).to(device)

    step = fill(StepBuffers.allocate(max_batch, max_blocks, positions_of(num_axes, 2 * max_batch, device)))
    step.rows.copy_(torch.randperm(max_reqs, generator=generator)[:max_batch])
    step.rows[ints(0, 4, max_batch) == 0] = max_reqs
    step.root_slot.copy_(ints(0, BLOCK_SIZE * max_blocks + 3, max_batch))
    step.root_pos.copy_(ints(0, 5000, max_batch))
    step.pos_delta.copy_(ints(-2000, 3000, max_batch))
    step.batch_table.copy_(ints(1, 1000, max_batch, max_blocks))
    step.batch_table[::2] = 2**31 - 1
    trees = {}
    if frontier:
        # Every node once, the same on any device; slices of wider buffers, as a policy's.
        order = ints(0, NUM_NODES, size, NUM_NODES).argsort(dim=1, stable=True)
        nodes = order[:, : frontier + 3] + 1
        nodes[ints(0, 4, *nodes.shape) == 0] = 0
        trees = {
            "nodes": nodes[:, :frontier], "tokens": ints(1, 1000, size + 1, frontier + 1)[:, :frontier],
            "ancestors": ints(1, 2**62, size + 2, NUM_NODES + 1),
        }  # fmt: skip
    return next_level, trees | {
        "step": step, "fed": ints(0, 2**62, max_reqs + 1), "size": size, "block_size": BLOCK_SIZE,
        "out": fill(LevelBuffers.allocate(max_batch, positions_of(num_axes, max_batch * max(width, 1), device), width)),
        "level": torch.tensor([level, 77], dtype=torch.int32, device=device)[:1] if on_device else level,
        "max_position": MAX_POSITION,
    }  # fmt: skip
