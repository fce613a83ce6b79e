"""Logits in blocks of rows: the same drafts bit for bit, within stated memory."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_vidspec.engine.draft import score_blocks
from vllm_vidspec.engine.draft.chains import ChainDrafter
from vllm_vidspec.engine.draft.score_blocks import SCORE_BYTES, in_blocks
from vllm_vidspec.engine.draft.trees import TreeDrafter

NUM_REQS, WIDTH, VOCAB_SIZE, HIDDEN_SIZE = 1024, 8, 152_064, 16


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that live at a time, and what one operation holds inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inside = 0
        if func is torch.ops.aten.logsumexp.default:  # the exponentials
            inside = args[0].numel() * args[0].element_size()
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self.now + inside)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._seen:
            return
        self._seen.add(storage._cdata)
        self.now += storage.nbytes()
        weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())

    def _drop(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.now -= num_bytes


class Sampler:
    """Copies to float32, as sampling parameters make vLLM do, then takes the best or gives the scores."""

    def __call__(self, logits, rows, rows_np, pos, input_ids):
        assert len(logits) == len(rows) == len(rows_np) == len(pos) == len(input_ids)
        return self.scores(logits, rows, rows_np, pos, input_ids).argmax(-1)

    def scores(self, logits, rows, rows_np, pos, input_ids):
        assert len(logits) == len(rows) == len(rows_np) == len(pos) == len(input_ids)
        return torch.empty_like(logits, dtype=torch.float32).copy_(logits).add_((rows + pos + input_ids)[:, None] % 3)


def draft(drafter, num_reqs: int, width: int, device: str, vocab_size: int, dtype: torch.dtype, is_plain: bool = False):
    """Return what one level of so many requests gives: a chain's tokens, or a tree's candidates."""
    num_rows, is_meta = num_reqs * width, device == "meta"

    def random(seed: int, *shape: int) -> torch.Tensor:
        generator = None if is_meta else torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    def product(h: torch.Tensor) -> torch.Tensor:
        # Row by row: what a product rounds may depend on how many rows it has.
        return h @ head if is_meta else torch.stack([(row[:, None] * head).sum(0) for row in h])

    head, hidden = random(0, HIDDEN_SIZE, vocab_size), random(1, num_rows, HIDDEN_SIZE)
    rows = torch.arange(num_rows, device=device)
    made = object.__new__(drafter)
    made._sample = Sampler()
    model = SimpleNamespace(compute_logits=product, vocab_size=vocab_size)
    made._roots = SimpleNamespace(model=model, inputs=SimpleNamespace(logical_pos=rows))
    made.policy = SimpleNamespace(num_candidates=10, needs_log_probs=True)
    message = SimpleNamespace(idx_mapping=torch.arange(num_reqs, device=device), idx_mapping_np=np.arange(num_reqs))
    if drafter is ChainDrafter:
        return (made._choose(hidden, message, rows * 7),)
    return made._candidates(hidden, message, rows, rows * 7, is_plain)


@pytest.mark.parametrize(("drafter", "width"), [(ChainDrafter, 1), (TreeDrafter, 1), (TreeDrafter, 3)])
@pytest.mark.parametrize("rows_per_block", [1, 2, 7, 20, 21, 22])
def test_blocks_change_nothing(monkeypatch, drafter, width, rows_per_block):
    """Catches: a block that ends a row early, rows or positions of the first block given to the next."""
    args = (drafter, 21 // width, width, "cpu", 50, torch.bfloat16)
    whole = draft(*args)
    monkeypatch.setattr(score_blocks, "SCORE_BYTES", rows_per_block * 4 * 50)
    assert all(torch.equal(a, b) for a, b in zip(draft(*args), whole, strict=True))


def test_blocks_cover_every_row_once(monkeypatch):
    """Catches: an empty block, a row twice, a vocabulary too large for one block."""
    monkeypatch.setattr(score_blocks, "SCORE_BYTES", 100)
    blocks: list[range] = []
    for num_rows, vocab_size, expected in ((1, 1000, 1), (3, 1000, 3), (5, 5, 1), (6, 5, 2)):
        blocks.clear()

        def remember(block: slice) -> torch.Tensor:
            blocks.append(range(block.start, block.stop))
            return torch.arange(block.start, block.stop)

        assert in_blocks(remember, num_rows, vocab_size).tolist() == list(range(num_rows))
        assert len(blocks) == expected


@pytest.mark.parametrize(
    ("drafter", "width", "is_plain"),
    [(ChainDrafter, 1, False), (TreeDrafter, WIDTH, False), (TreeDrafter, WIDTH, True)],
)
def test_memory_of_a_large_batch(monkeypatch, drafter, width, is_plain):
    """1,024 requests, 152,064 tokens: at most three times the stated bytes at once; in one piece it would be gigabytes.

    Counted on meta tensors, which have sizes and no memory. Catches: scores of a whole batch, blocks kept alive.
    """
    args = (drafter, NUM_REQS, width, "meta", VOCAB_SIZE, torch.bfloat16, is_plain)
    with LiveBytes() as bounded:
        draft(*args)
    assert SCORE_BYTES <= bounded.peak <= 3 * SCORE_BYTES
    monkeypatch.setattr(score_blocks, "SCORE_BYTES", 2**40)
    with LiveBytes() as whole:
        draft(*args)
    assert whole.peak > 4 * NUM_REQS * width * VOCAB_SIZE
