"""LevelInputs: where the tokens of one level of drafts stand, in persistent buffers that a forward reads."""

import torch

from vidspec_kernels import step
from vllm_vidspec.engine.draft.kv import DraftKV
from vllm_vidspec.engine.draft.model import DraftModel


class LevelInputs:
    """Positions, lengths and slots of a level: one token a request of a chain, a frontier of nodes of a tree.

    Args:
        model: The draft.
        kv: Its KV memory.
        max_num_reqs: Persistent rows.
        width: Most tokens of a request.

    Attributes:
        positions: `[num_axes, max_num_reqs * width]` int64 rope positions.
        logical_pos: `[max_num_reqs * width]` int64, the key of the noise.
        slot_mapping: `[max_num_reqs * width]` int64 physical slots, the null block's where there is no node.
        seq_lens: `[max_num_reqs]` int32 KV entries: of a chain with this level, of a tree those before it.
        fixed: What `step` takes beside a step's own rows, lengths, nodes and level.
    """

    def __init__(self, model: DraftModel, kv: DraftKV, max_num_reqs: int, width: int):
        device, num_rows = model.device, max_num_reqs * width
        self.positions = torch.zeros(model.num_axes, num_rows, dtype=torch.int64, device=device)
        self.logical_pos = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.slot_mapping = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.fixed = {
            "pos_delta": kv.pos_delta,
            "block_table": kv.block_tables,
            "block_size": kv.block_size,
            # Only drafts behind the end of the target's context reach it, and those are never committed.
            "max_position": model.num_positions - 1,
            "positions": self.positions,
            "logical_pos": self.logical_pos,
            "seq_lens": self.seq_lens,
            "slot_mapping": self.slot_mapping,
        }

    def place(
        self,
        idx_mapping: torch.Tensor,
        level: int,
        num_slots: torch.Tensor,
        num_tokens: torch.Tensor,
        nodes: torch.Tensor | None = None,
    ) -> None:
        """Write a level into the buffers; of a tree its `nodes` `[num_reqs, <= width]`, 0 for none."""
        step(idx_mapping, num_slots, num_tokens, nodes=nodes, level=level, **self.fixed)  # type: ignore[arg-type]
