"""Logits in blocks of rows: the same drafts bit for bit, within stated memory."""

import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.drafting.fake_draft import candidates
from vllm_vidspec.engine.draft import score_blocks
from vllm_vidspec.engine.draft.chains import ChainDrafter
from vllm_vidspec.engine.draft.score_blocks import SCORE_BYTES
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
    """Copies to float32, as sampling parameters make vLLM do, then takes the best or the best few."""

    def draw_into(self, logits, temperature, seeds, pos, *, level, out_tokens, out_ids, is_processed):
        assert len(logits) == len(temperature) == len(seeds) == len(pos) == len(out_tokens) == len(out_ids)
        out_tokens[:, 0] = self._scores(logits, pos).argmax(-1)

    def candidates_into(
        self, logits, temperature, seeds, pos, *, log_probs, ids, width, first, with_log_probs, is_processed
    ):
        assert len(logits) == len(pos) == len(log_probs) == len(ids)
        found = candidates(self._scores(logits, pos), ids.shape[1], with_log_probs)
        log_probs.copy_(found[0])
        ids.copy_(found[1])

    @staticmethod
    def _scores(logits, pos):
        return torch.empty_like(logits, dtype=torch.float32).copy_(logits).add_(pos[:, None] % 3)


def draft(drafter, num_reqs: int, width: int, device: str, vocab_size: int, dtype: torch.dtype):
    """Return what one level of so many requests gives: a chain's tokens, or a tree's candidates."""
    num_rows, is_meta = num_reqs * width, device == "meta"

    def random(seed: int, *shape: int) -> torch.Tensor:
        generator = None if is_meta else torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    def product(h: torch.Tensor) -> torch.Tensor:
        # Row by row: what a product rounds may depend on how many rows it has.
        return h @ head if is_meta else torch.stack([(row[:, None] * head).sum(0) for row in h])

    head, hidden = random(0, HIDDEN_SIZE, vocab_size), random(1, num_rows, HIDDEN_SIZE)
    places, reqs = torch.arange(num_rows, device=device), torch.zeros(num_reqs, device=device)
    step = SimpleNamespace(rows=reqs, temperature=reqs, seeds=reqs, level=None)
    buffers = SimpleNamespace(
        step=step, max_num_reqs=num_reqs, token_ids=places.int(), drafts=torch.zeros(num_reqs, 2, device=device).long(),
        of=lambda num_reqs: (reqs, None),
    )  # fmt: skip
    forwards = SimpleNamespace(
        model=SimpleNamespace(vocab_size=vocab_size, device=device),
        buffers=buffers,
        logits=lambda block: product(hidden[block]),
        fed=lambda level: (places, places),
    )
    if drafter is ChainDrafter:
        ChainDrafter(forwards, Sampler(), None)._draw(num_reqs, 1, None)
        return (buffers.drafts[:, 0].clone(),)
    policy = mock.Mock(num_candidates=10, needs_log_probs=True, trims=False, max_frontier=width)
    policy.extend.return_value = None
    made = TreeDrafter(forwards, Sampler(), SimpleNamespace(is_on=True), "tree-static", policy, fills=False)
    made._frontiers[num_reqs, 0, 1] = (places.view(num_reqs, width), None)
    made._grow(num_reqs, 0, 1, None)
    _, *found = policy.extend.call_args.args
    return found


@pytest.mark.parametrize(("drafter", "width"), [(ChainDrafter, 1), (TreeDrafter, 1), (TreeDrafter, 3)])
@pytest.mark.parametrize("rows_per_block", [1, 2, 7, 20, 21, 22])
def test_blocks_change_nothing(monkeypatch, drafter, width, rows_per_block):
    """Catches: a block that ends a row early, rows or positions of the first block given to the next."""
    args = (drafter, 21 // width, width, "cpu", 50, torch.bfloat16)
    whole = draft(*args)
    monkeypatch.setattr(score_blocks, "SCORE_BYTES", rows_per_block * 4 * 50)
    assert all(torch.equal(a, b) for a, b in zip(draft(*args), whole, strict=True))


@pytest.mark.parametrize(("drafter", "width"), [(ChainDrafter, 1), (TreeDrafter, WIDTH)])
def test_memory_of_a_large_batch(monkeypatch, drafter, width):
    """1,024 requests, 152,064 tokens: at most three times the stated bytes at once, on meta tensors."""
    args = (drafter, NUM_REQS, width, "meta", VOCAB_SIZE, torch.bfloat16)
    with LiveBytes() as bounded:
        draft(*args)
    assert SCORE_BYTES <= bounded.peak <= 3 * SCORE_BYTES
    monkeypatch.setattr(score_blocks, "SCORE_BYTES", 2**40)
    with LiveBytes() as whole:
        draft(*args)
    assert whole.peak > 4 * NUM_REQS * width * VOCAB_SIZE
