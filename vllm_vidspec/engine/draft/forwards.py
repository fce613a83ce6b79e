"""Forwards: the draft's forwards of a decode step, on the step's buffers; every one of them can be captured."""

import contextlib
from collections.abc import Iterator

import torch

from vidspec_kernels import LevelBuffers, StepBuffers, kv_compact
from vllm_vidspec.engine.draft.buffers import DraftBuffers
from vllm_vidspec.engine.draft.kv import DraftKV
from vllm_vidspec.engine.draft.model import DraftModel, Layout
from vllm_vidspec.engine.tree_attention import TreeAttention, TreeStep


class Forwards:
    """Runs the draft over what the buffers say, and leaves hidden states there.

    Args:
        model: The draft.
        kv: Its KV memory.
        buffers: Of the step.
        attention: Of the draft's layers, for trees; None where drafts are chains.
    """

    def __init__(self, model: DraftModel, kv: DraftKV, buffers: DraftBuffers, attention: TreeAttention | None):
        self.model = model
        self.buffers = buffers
        self._kv = kv
        self._attention = attention
        self._in_order = torch.arange(buffers.max_num_reqs, device=model.device)

    def roots(self, num_reqs: int) -> None:
        """Feed the committed text's last two tokens of each request, the second of which is the root (`begin_step`).

        So the batch has one shape whatever was accepted, and the host need not know. Before it, the accepted nodes of
        trees move together behind the last step's root.
        """
        step = self.buffers.step
        if self._kv.caches is not None:
            assert step.path is not None
            moved = (step.last_root[:num_reqs], step.path[:num_reqs], step.num_accepted[:num_reqs])
            kv_compact(self._kv.caches, step.batch_table, self._in_order[:num_reqs], *moved)
        self._run(num_reqs, 2, step.input_ids, step)

    def tokens(self, num_reqs: int) -> None:
        """Feed one token of each request: a level of chains."""
        self._run(num_reqs, 1, self.buffers.token_ids, self.buffers.level)

    def nodes(self, num_reqs: int, width: int) -> None:
        """Feed `width` nodes of each request: a level of trees."""
        self._run(num_reqs, width, self.buffers.token_ids, self.buffers.level, in_tree=True)

    def fed(self, level: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logical positions and tokens of the last forward's places: of its roots on level 0."""
        step, buffers = self.buffers.step, self.buffers
        return (buffers.level.logical_pos, buffers.token_ids) if level else (step.root_pos, step.input_ids[1::2])

    def logits(self, places: slice) -> torch.Tensor:
        """Return `[n, vocab_size]` logits of `n` places of the last forward, of the first one its roots."""
        return self.model.compute_logits(self.buffers.hidden_states[places])

    def _run(
        self, num_reqs: int, width: int, input_ids: torch.Tensor, at: StepBuffers | LevelBuffers, in_tree: bool = False
    ) -> None:
        """Run `width` tokens of each request, placed as `at` says, in as few forwards as the draft's budget allows."""
        buffers, model = self.buffers, self.model
        per_forward = max(1, model.max_num_tokens // width)  # requests; usually all of them
        for low in range(0, num_reqs, per_forward):
            high = min(low + per_forward, num_reqs)
            places, layout = slice(low * width, high * width), buffers.layout(high - low, width)
            seq_lens = at.seq_lens[low:high]
            with self._masked(low, high, layout) if in_tree else contextlib.nullcontext():
                hidden = model.forward(
                    model.embed(input_ids[places], [], None),
                    at.positions[:, places],
                    layout,
                    seq_lens=seq_lens + width if in_tree else seq_lens,
                    block_table=buffers.step.batch_table[low:high],
                    slot_mapping=at.slot_mapping[places],
                )
            if at is buffers.step:
                buffers.hidden_states[low:high] = hidden[1::2]
            else:
                buffers.hidden_states[places] = hidden

    @contextlib.contextmanager
    def _masked(self, low: int, high: int, layout: Layout) -> Iterator[None]:
        """Let the attention layers see the trees of batch rows `low` to `high`."""
        level = self.buffers.level
        assert self._attention is not None and level.masks is not None
        self._attention.step = TreeStep(
            rows=self._in_order[: high - low],
            query_start=layout.query_start_loc[:-1],
            num_queries=layout.num_queries,
            prefix_lens=level.seq_lens[low:high],
            masks=level.masks[low:high],
            max_queries=layout.max_queries,
            is_whole_batch=True,
        )
        try:
            yield
        finally:
            self._attention.step = None
