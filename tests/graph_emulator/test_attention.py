"""The CPU backend's attention as an entry: what is live at a replay, and what is the capture's."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm")
from vllm.forward_context import override_forward_context
from vllm.v1.attention.backends import cpu_attn

from tests.graph_emulator.attention import attention_as_on_a_gpu
from tests.graph_emulator.graphs import Graph, capture
from tests.graph_emulator.recorder import ReplayError
from vllm_vidspec.engine.kv_views import cache_views

HEADS, KV_HEADS, SIZE, BLOCK, MAX_LEN = 4, 2, 32, 32, 3 * 32


class Model:
    """One attention layer over a paged cache; requests have `width` query tokens each."""

    def __init__(self, num_reqs: int, width: int):
        config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
        with mock.patch.object(cpu_attn, "get_current_vllm_config", lambda: config):
            impl = cpu_attn.CPUAttentionBackendImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, "auto")
        self.layer = SimpleNamespace(impl=impl, isa="vec", _k_scale_float=1.0, _v_scale_float=1.0)
        self.layer.kv_cache = torch.randn(12, KV_HEADS, BLOCK, 2 * SIZE)
        self.num_reqs, self.width, num_tokens = num_reqs, width, num_reqs * width
        self.query, self.out = torch.randn(num_tokens, HEADS, SIZE), torch.zeros(num_tokens, HEADS, SIZE)
        self.key, self.value = torch.randn(2, num_tokens, KV_HEADS, SIZE)
        self.starts = torch.arange(num_reqs + 1, dtype=torch.int32) * width
        self.seq_lens = torch.zeros(num_reqs, dtype=torch.int32)
        self.table = torch.zeros(num_reqs, 3, dtype=torch.int32)
        self.slots = torch.full((num_tokens,), -1)

    def metadata(self):
        plan = cpu_attn.ops.cpu_attn_get_scheduler_metadata(
            self.num_reqs,
            HEADS,
            KV_HEADS,
            SIZE,
            seq_lens=self.seq_lens,
            dtype=torch.float32,
            query_start_loc=self.starts,
            causal=True,
            sliding_window_size=-1,
            isa="vec",
            enable_kv_split=True,
        )
        return cpu_attn.CPUAttentionMetadata(
            len(self.query), self.width, self.starts, MAX_LEN, self.seq_lens, self.table, self.slots, plan
        )

    def forward(self):
        context = SimpleNamespace(
            attn_metadata={"layer": self.metadata()},
            no_compile_layers={"layer": self.layer},
            slot_mapping={"layer": self.slots},
        )
        with override_forward_context(context):
            done = torch.ops.vllm.unified_kv_cache_update(self.key * 2, self.value, "layer")
            torch.ops.vllm.unified_attention_with_output(
                self.query, self.key, self.value, self.out, "layer", kv_cache_dummy_dep=done
            )

    def place(self, seq_lens, seed):
        """Give requests blocks and lengths; a length of 0 is padding."""
        blocks = 1 + torch.randperm(11, generator=torch.Generator().manual_seed(seed))
        slots = self.slots.view(self.num_reqs, self.width)
        for i, seq_len in enumerate(seq_lens):
            self.seq_lens[i] = seq_len
            self.table[i] = blocks[3 * i : 3 * i + 3] if seq_len else 10**6
            entries = torch.arange(seq_len - self.width, seq_len)
            slots[i] = self.table[i][entries // BLOCK] * BLOCK + entries % BLOCK if seq_len else -1

    def expected(self):
        """Return the output and the cache after a forward, by the text."""
        cache, out = self.layer.kv_cache.clone(), torch.zeros_like(self.out)
        keys, values = cache_views(cache, self.layer)  # [num_blocks, block_size, num_kv_heads, head_size]
        for token, slot in enumerate(self.slots.tolist()):
            if slot >= 0:
                keys[slot // BLOCK, slot % BLOCK] = 2 * self.key[token]
                values[slot // BLOCK, slot % BLOCK] = self.value[token]
        for i, seq_len in enumerate(self.seq_lens.tolist()):
            if not seq_len:
                continue
            k, v = (x[self.table[i].long()].flatten(0, 1).transpose(0, 1) for x in (keys, values))
            for place in range(self.width):
                token, seen = i * self.width + place, seq_len - self.width + place + 1
                q = self.query[token].view(KV_HEADS, -1, SIZE)
                weights = (q @ k[:, :seen].transpose(1, 2) * SIZE**-0.5).softmax(-1)
                out[token] = (weights @ v[:, :seen]).view(HEADS, SIZE)
        return out, cache


@pytest.fixture
def emulated():
    with attention_as_on_a_gpu():
        yield


@pytest.mark.parametrize("width", [1, 2])
def test_a_replay_attends_by_the_lengths_of_the_moment(emulated, width):
    """Captured on nothing but padding, replayed on ragged batches with padding anywhere, blocks handed out anew.

    Catches: a plan of the capture's lengths, a context of the moment, padding that reads a table or writes a slot.
    """
    model = Model(3, width)
    cache = model.layer.kv_cache.clone()
    graph = Graph()
    with capture(graph):
        model.forward()
    assert torch.equal(model.layer.kv_cache, cache), "padding wrote"
    for seed, seq_lens in enumerate(((40, 3, MAX_LEN), (7, 65, 0), (0, 0, 33), (0, 0, 0))):
        model.place(seq_lens, seed)
        model.query.normal_()
        out, cache = model.expected()
        graph.replay()
        torch.testing.assert_close(model.out, out)
        assert torch.equal(model.layer.kv_cache, cache)


def test_outside_a_capture_the_backend_runs_untouched(emulated):
    model = Model(3, 2)
    model.place((40, 3, MAX_LEN), 0)
    out, cache = model.expected()
    with torch.inference_mode():
        model.forward()
    torch.testing.assert_close(model.out, out)
    assert torch.equal(model.layer.kv_cache, cache)


def test_what_does_not_fit_the_launch_is_an_error(emulated):
    """Catches: a bound of one step's lengths that is frozen in a graph of all steps."""
    model = Model(3, 2)
    graph = Graph()
    with capture(graph), mock.patch(f"{__name__}.MAX_LEN", 50):
        model.forward()
    model.place((40, 3, 50), 0)
    graph.replay()
    model.place((40, 3, 51), 0)
    with pytest.raises(ReplayError, match="51 entries: captured were at most 2 and 50"):
        graph.replay()
