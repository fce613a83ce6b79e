"""How much of the KV memory the draft takes: figures of real pairs, their bounds, and what the log says of them."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.unit.engine.fakes import make_knobs, staged
from tests.unit.engine.test_score_blocks import LiveBytes
from vllm_vidspec.engine.draft import memory
from vllm_vidspec.engine.draft.forwards import DraftBuffers
from vllm_vidspec.engine.draft.kv import DraftKV
from vllm_vidspec.engine.draft.memory import DraftMemory, max_slots_per_request
from vllm_vidspec.engine.runner import VidSpecModelRunner
from vllm_vidspec.engine.verify.verifier import CoupledVerifier
from vllm_vidspec.errors import VidSpecError

GIB = 1 << 30
BLOCK = 16
# KV bytes of a token, over all layers (2 x layers x KV heads x 128 x 2 bytes).
QWEN25_32B, QWEN25_7B = 2 * 64 * 8 * 128 * 2, 2 * 28 * 4 * 128 * 2


@pytest.fixture
def plan(monkeypatch):
    """Return `(target, draft, max_model_len, available_bytes, **knobs) -> DraftMemory`, without a video to remember."""
    monkeypatch.setattr(memory, "kv_bytes_per_token", lambda config: config.kv_bytes)

    def made(target, draft, max_model_len, available, max_num_seqs=256, tables=False, shown=(), **knobs):
        multimodal = SimpleNamespace(get_limit_per_prompt=lambda modality: int(modality in shown)) if shown else None
        vllm_config = SimpleNamespace(
            kv_bytes=target,
            model_config=SimpleNamespace(max_model_len=max_model_len, multimodal_config=multimodal),
            scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        )
        model = SimpleNamespace(
            block_size=BLOCK, bytes_per_block=BLOCK * draft, config=SimpleNamespace(kv_bytes=draft), hidden_size=0,
            dtype=torch.bfloat16, device=torch.device("cpu"),
        )  # fmt: skip
        if not tables:
            monkeypatch.setattr(memory, "table_bytes", lambda *_: 0)
        return DraftMemory.plan(make_knobs(**knobs).current, vllm_config, model, available)

    return made


def by_share(target, draft, available, share=0.15):  # a tenth is kept, and a twentieth is for text
    return int(available * share * draft / (target + share * draft))


def test_a_pool_has_the_room_of_what_is_served(plan):
    """Catches: room for a fifth of every image where videos fill the cache, of which the draft sees a tenth."""
    for shown, share in ((("image", "video"), 0.15), (("video",), 0.15), (("image",), 0.25)):
        made = plan(QWEN25_32B, QWEN25_7B, 128_000, 45 * GIB, shown=shown)
        assert made.pool_bytes == by_share(QWEN25_32B, QWEN25_7B, 45 * GIB - made.vision_bytes, share)


def test_the_least_of_a_pool_and_its_bound(plan):
    """By hand, of a pair whose draft is small beside its target: the share falls below what one request needs."""
    target, draft = 100 * 1024, 1024
    available = 2 * GIB
    share = by_share(target, draft, available)
    assert share < 8192 * draft
    # 8,192 tokens and the null block.
    assert plan(target, draft, 16_384, available).pool_bytes == (8192 + BLOCK) * draft
    # A context of 2,048 has no longer request: 2,048 + 1 + K tokens, K = 3, in whole blocks.
    assert plan(target, draft, 2048, available // 8).pool_bytes == (2048 + 2 * BLOCK) * draft
    # The kept share of a long context is more: 0.15 x (131,072 + 1 + 3).
    assert plan(target, draft, 131_072, available).pool_bytes == (19_664 + BLOCK) * draft
    # A tenth of the KV memory is less than that.
    assert plan(target, draft, 131_072, available // 12).pool_bytes == available // 120
    # A draft that is shown everything keeps everything.
    everything = plan(target, draft, 131_072, available, prune_ratio=0.0).pool_bytes
    assert everything == max(by_share(target, draft, available, 1.0), (131_088 + BLOCK) * draft)


def test_what_is_asked_for_is_given(plan):
    """The knob knows no least, and no pool is larger than all requests at their longest."""
    target, draft, available = QWEN25_32B, QWEN25_7B, 10 * GIB
    assert plan(target, draft, 128_000, available, draft_kv_bytes=5_000_000).pool_bytes == 5_000_000
    small = plan(target, draft, 1000, available, max_num_seqs=2, draft_kv_bytes=5 * GIB).pool_bytes
    assert small == (2 * -(-1004 // BLOCK) + 1) * BLOCK * draft
    for knobs, message in (
        ({"draft_kv_bytes": BLOCK * draft}, "holds nothing; one block takes"),
        ({"draft_kv_bytes": 20 * GIB}, "leaves nothing of the"),
    ):
        with pytest.raises(VidSpecError, match=message):
            plan(target, draft, 1_000_000, available, **knobs)


@pytest.mark.parametrize(
    ("knobs", "width"),
    [
        ({}, 0),
        ({"draft_shape": "tree-static", "num_speculative_tokens": 25}, 4),
        ({"draft_shape": "tree-adaptive", "num_speculative_tokens": 64}, 10),
    ],
)
def test_tables_that_no_profile_has_seen_are_taken_out_as_well(plan, monkeypatch, knobs, width):
    """The bound, against the tensors of the real buffers, for sizes at which they count."""
    staged(monkeypatch)
    rows, max_model_len, hidden = 64, 65_536, 2048
    model = SimpleNamespace(
        block_size=BLOCK, hidden_size=hidden, dtype=torch.bfloat16, device=torch.device("cpu"), num_axes=3,
        num_positions=max_model_len,
    )  # fmt: skip
    config = make_knobs(**knobs).current
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len), scheduler_config=SimpleNamespace(max_num_seqs=rows)
    )
    bound = memory.table_bytes(config, vllm_config, model)
    slots = max_slots_per_request(max_model_len, config.num_speculative_tokens)
    kv = DraftKV(80, BLOCK, rows, slots, model.device)
    buffers = DraftBuffers(model, kv, rows, width, config.num_speculative_tokens)
    found = {id(kv.block_tables): kv.block_tables}
    for part in (vars(buffers), vars(buffers.step), vars(buffers.level)):
        found |= {id(value): value for value in part.values() if isinstance(value, torch.Tensor)}
    taken = sum(tensor.nbytes for tensor in found.values())
    assert 0.97 * taken < bound < taken
    whole = plan(QWEN25_32B, QWEN25_7B, max_model_len, 10 * GIB, max_num_seqs=1024, tables=True)
    assert whole.num_bytes == whole.pool_bytes + 1024 * 2 * 4 * -(-(65_536 + 4) // BLOCK)


@pytest.mark.parametrize(
    ("num_reqs", "num_drafts", "num_tokens", "rows"), [(1024, 5, 8192, 6144), (256, 25, 2048, 2048), (4, 5, 2048, 24)]
)
def test_the_profile_has_the_logits_of_a_verify_step(monkeypatch, num_reqs, num_drafts, num_tokens, rows):
    """K + 1 rows of each request, at most a step's tokens, and the chunk in which parameters apply; none on a CPU."""
    vocab_size, profiled = 152_064, []
    monkeypatch.setattr(GPUModelRunner, "_dummy_sampler_run", lambda self, hidden_states: profiled.append("vLLM's own"))
    runner = object.__new__(VidSpecModelRunner)
    runner.max_num_reqs, runner.num_speculative_steps, runner.max_num_tokens = num_reqs, num_drafts, num_tokens
    runner.model = SimpleNamespace(
        compute_logits=lambda hidden: (
            profiled.append(hidden.shape) or hidden.new_empty(len(hidden), vocab_size, dtype=torch.bfloat16)
        )
    )
    runner.rejection_sampler = object.__new__(CoupledVerifier)
    hidden_states = torch.empty(num_reqs, 64, device="meta")
    with LiveBytes() as live:
        runner._dummy_sampler_run(hidden_states)
    assert profiled == ["vLLM's own", (rows, 64)]
    assert live.peak == (2 * rows + 2 * 4 * min(rows, 2**30 // (4 * vocab_size))) * vocab_size
    runner._dummy_sampler_run(torch.empty(num_reqs, 64))
    assert profiled[2:] == ["vLLM's own"]
