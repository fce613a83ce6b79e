"""DraftBuffers: all that a draft step hands from one launch to the next, at fixed addresses, by batch row."""

from functools import cache

import torch

from vidspec_kernels import LevelBuffers, StepBuffers, next_level
from vllm_vidspec.engine.draft.kv import DraftKV
from vllm_vidspec.engine.draft.model import DraftModel, Layout


class DraftBuffers:
    """Buffers of a step, made once. A step of R requests, padding included, uses their first R rows.

    A padding row has the persistent row `max_num_reqs`, slot -1, which no kernel writes, and no KV entry to look at: it
    touches nothing. `begin_step` says where padding begins; nothing later needs to know.

    Args:
        max_num_reqs: Persistent rows, M below.
        tree_width: Most nodes of a request in a forward; 0 where drafts are chains.
        max_drafts: K.

    Attributes:
        step: What `begin_step` writes, the first forward's inputs among it.
        level: What `next_level` writes: inputs of the other forwards.
        token_ids: `[M * W]` int32 tokens of every forward but the first: of chains what was drawn last.
        drafts: `[M, K]` int64 the proposal.
        hidden_states: `[M * W, hidden_size]` of the last forward, of the first one its roots'.
        layout: `(num_reqs, width) -> Layout` of a forward; made once each.
        of: `num_reqs -> (rows, drafts)`: the persistent rows and the proposal of so many requests; made once each.
    """

    def __init__(self, model: DraftModel, kv: DraftKV, max_num_reqs: int, tree_width: int, max_drafts: int):
        device, num_places = model.device, max_num_reqs * max(tree_width, 1)
        positions = torch.zeros(model.num_axes, max(2 * max_num_reqs, num_places), dtype=torch.int64, device=device)
        self.max_num_reqs = max_num_reqs
        self.step = StepBuffers.allocate(max_num_reqs, kv.max_blocks, positions, max_drafts + 1 if tree_width else 0)
        self.level = LevelBuffers.allocate(max_num_reqs, positions, tree_width)
        token_ids = self.level.input_ids  # None: of chains
        self.token_ids = torch.zeros(max_num_reqs, dtype=torch.int32, device=device) if token_ids is None else token_ids
        self.drafts = torch.zeros(max_num_reqs, max_drafts, dtype=torch.int64, device=device)
        self.hidden_states = torch.zeros(num_places, model.hidden_size, dtype=model.dtype, device=device)
        self.layout = cache(lambda num_reqs, width: Layout.uniform(num_reqs, width, device))
        self.of = cache(lambda num_reqs: (self.step.rows[:num_reqs], self.drafts[:num_reqs]))
        self._fed, self._block_size = kv.fed, kv.block_size
        # Only drafts behind the end of the target's context reach it, and those are never committed.
        self._max_position = model.num_positions - 1

    def place(self, num_reqs: int, level: int | None = None, *tree: torch.Tensor) -> None:
        """Say where the next forward's tokens stand: of chains what was drawn last, whose level the device knows, of
        trees a level's nodes `[R, F]` int64, 0 for none, with tokens `[R, F]` and ancestors `[M, K + 1]` (`DraftTree`).
        """
        next_level(
            self.step,
            self.level,
            self._fed,
            *tree,
            size=num_reqs,
            level=self.step.level if level is None else level,
            block_size=self._block_size,
            max_position=self._max_position,
        )
