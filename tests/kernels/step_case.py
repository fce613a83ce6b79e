"""Random steps of drafting for the tests of `begin_step` and `next_level`, and what they must leave, by loops."""

from typing import Any

import torch

from vidspec_kernels import LevelBuffers, StepBuffers, StepTables

SENTINEL = -(10**6)  # no position, length, token or slot
BLOCK_SIZE, MAX_POSITION, MAX_DRAFTS = 16, 4500, 7


def fill(buffers: Any) -> Any:
    """Write a sentinel into every tensor, and return the buffers."""
    for tensor in vars(buffers).values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(SENTINEL)
    return buffers


def positions_of(num_axes: int, num_columns: int, device: torch.device) -> torch.Tensor:
    """Return a position buffer as vLLM's: a slice of a longer one."""
    return torch.zeros(num_axes, num_columns + 3, dtype=torch.int64, device=device)[:, 2:]


class StepCase:
    """A batch of `num_reqs` requests of which `num_picked` draft; None: all do.

    Some committed texts end past the block table, some positions past the highest.
    """

    def __init__(self, device, num_reqs, num_picked=None, in_trees=False, max_blocks=8, num_axes=3, seed=0, extra=2):
        generator = torch.Generator().manual_seed(seed)
        max_reqs, longest = num_reqs + 5, BLOCK_SIZE * max_blocks + 3

        def ints(low, high, *shape, dtype=torch.int32):
            return torch.randint(low, high, shape, generator=generator, dtype=dtype).to(device)

        num_dropped, root_slot = ints(0, 3000, max_reqs), ints(1, longest, max_reqs)
        root_slot[::4] = longest - 1
        pos_delta = ints(-2000, 3000, max_reqs, dtype=torch.int64)
        pos_delta[::3] = MAX_POSITION
        self.tables = StepTables(
            num_tokens=root_slot + num_dropped + 1,
            text=ints(0, 1000, max_reqs, 3000 + longest + 9)[:, 1:],
            last_sampled=ints(0, 1000, max_reqs, 2, dtype=torch.int64)[:, :1],
            num_dropped=num_dropped,
            pos_delta=pos_delta,
            # Slices of a wider buffer: rows that do not lie together.
            block_table=ints(1, 1000, max_reqs, max_blocks + 7)[:, :max_blocks],
            fed=ints(0, 2**MAX_DRAFTS, max_reqs + 1, dtype=torch.int64),
            path=ints(0, MAX_DRAFTS + 1, max_reqs, MAX_DRAFTS + 1) if in_trees else None,
        )
        m = num_reqs if num_picked is None else num_picked
        picked = torch.randperm(num_reqs, generator=generator)[:m].sort().values.to(device)
        self.step = {
            "batch_rows": torch.randperm(max_reqs, generator=generator)[:num_reqs].to(device),
            "picked": None if num_picked is None else picked,
            "num_sampled": ints(1, MAX_DRAFTS + 2, num_reqs),
            "is_verified": None if num_picked is None else ints(0, 2, m).bool(),
            "temperature": torch.rand(max_reqs, generator=generator).to(device),
            "seeds": ints(-(2**40), 2**40, max_reqs, dtype=torch.int64),
        }
        self.sizes = {"block_size": BLOCK_SIZE, "max_position": MAX_POSITION, "max_drafts": MAX_DRAFTS}
        self.num_reqs, self.size, self.max_batch = m, m + extra, m + extra + 3
        self.num_axes, self.device = num_axes, device

    def buffers(self) -> StepBuffers:
        """Return buffers full of sentinels, longer than the batch."""
        positions = positions_of(self.num_axes, 2 * self.max_batch, self.device)
        cols = 0 if self.tables.path is None else MAX_DRAFTS + 1
        return fill(StepBuffers.allocate(self.max_batch, self.tables.block_table.shape[1], positions, cols))

    def level(self, width: int) -> LevelBuffers:
        """Return a level's buffers full of sentinels; `width` 0: of chains."""
        positions = positions_of(self.num_axes, self.max_batch * max(width, 1), self.device)
        return fill(LevelBuffers.allocate(self.max_batch, positions, width))


def slot_of(table_row: torch.Tensor, entry: int) -> int:
    """Return the physical slot of a KV entry, -1 past the table."""
    block_idx = entry // BLOCK_SIZE
    return int(table_row[block_idx]) * BLOCK_SIZE + entry % BLOCK_SIZE if block_idx < len(table_row) else -1


def begin_by_hand(case: StepCase, out: StepBuffers) -> None:
    """`begin_step`, a request at a time; writes `fed` too. Block tables: as much as must be copied."""
    step, tables = case.step, case.tables
    out.level[0] = 0
    for b in range(case.size):
        pair = slice(2 * b, 2 * b + 2)
        if b >= case.num_reqs:
            out.rows[b], out.num_accepted[b] = len(tables.num_tokens), -1
            for name in ("temperature", "seeds", "root_slot", "root_pos", "pos_delta", "last_root", "seq_lens"):
                getattr(out, name)[b] = 0
            out.input_ids[pair], out.positions[:, pair], out.slot_mapping[pair] = 0, 0, -1
            continue
        i = b if step["picked"] is None else int(step["picked"][b])
        row = int(step["batch_rows"][i])
        length, accepted = int(tables.num_tokens[row]), int(step["num_sampled"][i]) - 1
        root = length - 1 - int(tables.num_dropped[row])
        is_verified = step["is_verified"] is None or bool(step["is_verified"][b])
        out.rows[b], out.num_accepted[b] = row, accepted if is_verified else -1
        out.temperature[b] = 0 if step["temperature"] is None else step["temperature"][row]
        out.seeds[b], out.pos_delta[b] = step["seeds"][row], tables.pos_delta[row]
        out.root_slot[b], out.root_pos[b], out.seq_lens[b] = root, length - 1, root + 1
        out.last_root[b] = root - 1 - (accepted if is_verified else 0)
        needed = (root + MAX_DRAFTS) // BLOCK_SIZE + 1
        out.batch_table[b, :needed] = tables.block_table[row, :needed]
        if out.path is not None:
            out.path[b] = tables.path[row]
        was_fed = accepted == 0
        if accepted:
            node = accepted if tables.path is None else int(tables.path[row, accepted])
            was_fed = bool(int(tables.fed[row]) >> max(node - 1, 0) & 1)
        tables.fed[row] = 0
        slots = [0 if was_fed else slot_of(tables.block_table[row], root - 1), slot_of(tables.block_table[row], root)]
        out.slot_mapping[pair] = torch.tensor(slots, device=out.device)
        for offset, token in enumerate((tables.text[row, length - 2], tables.last_sampled[row, 0])):
            position = length - 2 + offset + int(tables.pos_delta[row])
            out.input_ids[2 * b + offset] = token
            out.positions[:, 2 * b + offset] = min(position, MAX_POSITION)
