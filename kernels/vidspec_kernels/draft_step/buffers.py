"""Persistent memory of a draft step: what the target has committed, and what the draft's forwards read.

Made and checked once. Kernels take these whole, so that a launch checks nothing but the tensors of its own step.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from vidspec_kernels.arrays import Tensors, check


def _check_positions(positions: Tensor, device: torch.device, num_columns: int) -> None:
    assert positions.dtype == torch.int64 and positions.device == device, "positions: expected int64"
    assert positions.ndim == 2 and positions.shape[0] in (1, 3), "positions: expected 1 or 3 axes"
    assert positions.shape[1] >= num_columns, f"positions: expected at least {num_columns} columns"


@dataclass(frozen=True, eq=False)
class StepTables(Tensors):
    """What is known of requests, by persistent row (`req_state_idx`)."""

    # int32 [max_reqs], logical length of the committed text, the root included; >= 2 where it is read.
    num_tokens: Tensor
    text: Tensor  # int32 [max_reqs, max_len], the committed text, unit stride in its rows
    last_sampled: Tensor  # int64 [max_reqs, 1], the target's last token: the root
    num_dropped: Tensor  # int32 [max_reqs], visual tokens that the draft does not see
    pos_delta: Tensor  # int64 [max_reqs], rope position minus logical position
    block_table: Tensor  # int32 [max_reqs, max_blocks], unit stride in its rows
    # In and out, int64 [max_reqs + 1], last drafts' nodes with a valid KV entry: bit j - 1 is node j. Its last row is
    # the padding's. None: all committed text but the root has valid entries.
    fed: Tensor | None
    # int32 [max_reqs, K + 1], accepted nodes of the last trees from column 1 on; None: only chains are drafted.
    path: Tensor | None = None

    def __post_init__(self) -> None:
        n = self.max_reqs
        check(
            self.device, num_tokens=(self.num_tokens, torch.int32, n), num_dropped=(self.num_dropped, torch.int32, n),
            pos_delta=(self.pos_delta, torch.int64, n), fed=(self.fed, torch.int64, n + 1),
            text=(self.text, torch.int32, n, 0), last_sampled=(self.last_sampled, torch.int64, n, 1),
            block_table=(self.block_table, torch.int32, n, 0), path=(self.path, torch.int32, n, 0),
        )  # fmt: skip

    @functools.cached_property
    def max_reqs(self) -> int:
        """Persistent rows; also the index of the padding row."""
        return self.block_table.shape[0]


@dataclass(frozen=True, eq=False)
class StepBuffers(Tensors):
    """A step by batch row, and the inputs of its first forward, which feeds two tokens a request; `begin_step` writes.

    M is the most requests of a batch.
    """

    rows: Tensor  # int64 [M], persistent row; max_reqs of padding
    num_accepted: Tensor  # int32 [M], accepted drafts of the last step; -1: nothing was verified for this request
    temperature: Tensor  # float32 [M]
    seeds: Tensor  # int64 [M]
    root_slot: Tensor  # int32 [M], KV entries before the root, the last committed token
    root_pos: Tensor  # int64 [M], logical position of the root
    pos_delta: Tensor  # int64 [M], rope position minus logical position
    last_root: Tensor  # int32 [M], KV entry of the root of the step before
    batch_table: Tensor  # int32 [M, max_blocks], block tables
    level: Tensor  # int32 [1], 0 after `begin_step`: the roots; column of the proposal that is drawn next
    input_ids: Tensor  # int32 [2M], of each request the committed text's last two tokens
    positions: Tensor  # int64 [1 or 3, >= 2M] of any strides, rope positions, equal on every axis
    slot_mapping: Tensor  # int64 [2M], physical KV slots
    seq_lens: Tensor  # int32 [M], KV entries up to the root's own
    path: Tensor | None = None  # int32 [M, K + 1]; None: only chains are drafted

    def __post_init__(self) -> None:
        device, size = self.device, self.max_batch
        for name in ("rows", "seeds", "root_pos", "pos_delta"):
            check(device, **{name: (getattr(self, name), torch.int64, size)})
        for name in ("num_accepted", "root_slot", "last_root", "seq_lens"):
            check(device, **{name: (getattr(self, name), torch.int32, size)})
        check(
            device, temperature=(self.temperature, torch.float32, size), level=(self.level, torch.int32, 1),
            input_ids=(self.input_ids, torch.int32, 2 * size), slot_mapping=(self.slot_mapping, torch.int64, 2 * size),
            batch_table=(self.batch_table, torch.int32, size, 0), path=(self.path, torch.int32, size, 0),
        )  # fmt: skip
        _check_positions(self.positions, device, 2 * size)

    @classmethod
    def allocate(cls, max_batch: int, max_blocks: int, positions: Tensor, path_cols: int = 0) -> "StepBuffers":
        """Return buffers of zeros on the device of `positions`; `path_cols` is K + 1, 0 if only chains are drafted."""
        zeros = functools.partial(torch.zeros, device=positions.device)
        i32, i64 = functools.partial(zeros, dtype=torch.int32), functools.partial(zeros, dtype=torch.int64)
        return cls(
            rows=i64(max_batch), num_accepted=i32(max_batch), temperature=zeros(max_batch),
            seeds=i64(max_batch), root_slot=i32(max_batch), root_pos=i64(max_batch), pos_delta=i64(max_batch),
            last_root=i32(max_batch), batch_table=i32(max_batch, max_blocks), level=i32(1),
            input_ids=i32(2 * max_batch), positions=positions, slot_mapping=i64(2 * max_batch),
            seq_lens=i32(max_batch), path=i32(max_batch, path_cols) if path_cols else None,
        )  # fmt: skip

    @functools.cached_property
    def max_batch(self) -> int:
        return self.rows.shape[0]


@dataclass(frozen=True, eq=False)
class LevelBuffers(Tensors):
    """The inputs of a level's forward; `next_level` writes. Place f of batch row b, of F, is entry b * F + f.

    W is the most places of a request, 1 of chains; M the most requests.
    """

    logical_pos: Tensor  # int64 [M * W], which keys the noise of what is drawn after the place
    positions: Tensor  # int64 [1 or 3, >= M * W] of any strides, rope positions, equal on every axis
    slot_mapping: Tensor  # int64 [M * W], physical KV slots
    # int32 [M], KV entries that every place attends to: of a chain up to its own, of a tree up to the root.
    seq_lens: Tensor
    input_ids: Tensor | None = None  # int32 [M * W]; None: of chains, where `draw` writes them
    masks: Tensor | None = None  # int64 [M, W], of each place the nodes that it attends to; None: of chains

    def __post_init__(self) -> None:
        device, num_places = self.device, self.logical_pos.shape[0]
        assert (self.input_ids is None) == (self.masks is None), "input_ids, masks: both or neither"
        check(
            device, logical_pos=(self.logical_pos, torch.int64, 0), seq_lens=(self.seq_lens, torch.int32, 0),
            slot_mapping=(self.slot_mapping, torch.int64, num_places),
            input_ids=(self.input_ids, torch.int32, num_places),
            masks=(self.masks, torch.int64, self.seq_lens.shape[0], 0),
        )  # fmt: skip
        _check_positions(self.positions, device, num_places)

    @classmethod
    def allocate(cls, max_batch: int, positions: Tensor, width: int = 0) -> "LevelBuffers":
        """Return buffers of zeros on the device of `positions`, for `width` places a request; 0: for chains."""
        num_places, zeros = max_batch * max(width, 1), functools.partial(torch.zeros, device=positions.device)
        i32, i64 = functools.partial(zeros, dtype=torch.int32), functools.partial(zeros, dtype=torch.int64)
        return cls(
            logical_pos=i64(num_places), positions=positions, slot_mapping=i64(num_places), seq_lens=i32(max_batch),
            input_ids=i32(num_places) if width else None, masks=i64(max_batch, width) if width else None,
        )  # fmt: skip
