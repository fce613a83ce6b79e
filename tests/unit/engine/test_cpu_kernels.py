"""The twins of vLLM's kernels leave what the interpreted kernels do, to the bit; CPU engine only."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.models import qwen3_vl
from vllm.v1.worker.gpu import block_table, buffer_utils, input_batch
from vllm.v1.worker.gpu.mm import rope
from vllm.v1.worker.gpu.sample import bad_words, gumbel, logit_bias, logprob
from vllm.v1.worker.gpu.sample import min_p as min_p_module
from vllm.v1.worker.gpu.sample import penalties as penalties_module
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from vllm_vidspec.devices import has_gpu
from vllm_vidspec.engine.compat.contract import MARK
from vllm_vidspec.engine.cpu import kernels
from vllm_vidspec.engine.cpu.install import twin_of

pytestmark = pytest.mark.skipif(has_gpu(), reason="the twins replace interpreted kernels only")

NUM_ROWS, LENGTH = 7, 40  # persistent rows, and tokens of each
VOCAB_SIZES = (1, 5, 97, 1023, 1024, 1025, 8193)


class Batch:
    """A random batch: rows of the persistent state, tokens of each, some of them draft rows, some prefills."""

    def __init__(self, seed: int):
        self.generator, self.seed = torch.Generator().manual_seed(seed), seed
        num_reqs = int(self.ints(1, 6, 1))
        self.rows = torch.randperm(NUM_ROWS, generator=self.generator)[:num_reqs].int()
        self.num_logits = self.ints(1, 6, num_reqs)
        if seed % 2:  # nothing was drafted for the last request: its only row is the last of the batch
            self.num_logits[-1] = 1
        lengths = self.num_logits + self.ints(0, 4, num_reqs)
        bounds = (torch.nn.functional.pad(counts.cumsum(0).int(), (1, 0)) for counts in (lengths, self.num_logits))
        self.query_start_loc, self.cu_num_logits = bounds
        self.num_tokens, self.total = int(lengths.sum()), int(self.num_logits.sum())
        self.computed, self.prefill_len = self.ints(0, 12, NUM_ROWS), self.ints(1, 14, NUM_ROWS)
        self.seq_lens = self.computed[self.rows.long()] + lengths
        self.vocab_size = VOCAB_SIZES[seed % len(VOCAB_SIZES)]
        self.req_idx = self.rows.long().repeat_interleave(self.num_logits)  # by row of logits
        self.local_pos = torch.cat([torch.arange(int(count), dtype=torch.int32) for count in self.num_logits])

    def ints(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def choose(self, *values: float) -> torch.Tensor:
        """Return one of the values for each persistent row."""
        return torch.tensor(values)[self.ints(0, len(values), NUM_ROWS).long()]


def pointers(tensors) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


# By kernel its module and what makes, of a batch, a call of vLLM's function and the tensors that it gets copies of.
CASES: dict[str, tuple] = {}


def kernel(module):
    def register(make: Callable[[Batch], tuple]) -> None:
        CASES[make.__name__.removesuffix("_case")] = module, make

    return register


@kernel(input_batch)
def prepare_pos_seq_lens(b):
    """Catches: a request's tokens counted from another's start, lengths behind the batch left as they were."""
    call = lambda *out: input_batch.prepare_pos_seq_lens(b.rows, b.query_start_loc, b.computed, *out)  # noqa: E731
    return call, torch.full((50,), -7), torch.full((NUM_ROWS,), -7, dtype=torch.int32)


@kernel(rope)
def prepare_rope_positions(b):
    """Catches: an axis of another, a decode's position from the prompt's table, a delta of the wrong row."""
    tables = {"prefill_positions": b.ints(0, 99, NUM_ROWS * 3, LENGTH), "prefill_delta": b.ints(-9, 9, NUM_ROWS)}
    parts = {name: SimpleNamespace(gpu=table) for name, table in tables.items()}

    def call(positions):
        state = SimpleNamespace(num_dims=3, max_model_len=LENGTH, positions=positions, **parts)
        rope.RopeState.prepare_positions(state, b.rows, b.query_start_loc, b.prefill_len, b.computed)

    return call, torch.full((3, 50), -7)


@kernel(input_batch)
def combine_sampled_and_draft_tokens(b):
    """Catches: drafts of another row, a prompt's tail overwritten, a chunk of a prefill that gets drafts."""
    drafts, last = b.ints(100, 200, NUM_ROWS, 5).long(), b.ints(200, 300, NUM_ROWS, 1).long()
    rest = b.rows, last, b.query_start_loc, b.seq_lens, b.prefill_len, drafts, b.cu_num_logits, b.total
    return lambda input_ids: input_batch.combine_sampled_and_draft_tokens(input_ids, *rest), b.ints(0, 100, 50)


@kernel(input_batch)
def expand_idx_mapping(b):
    """Catches: a request's rows counted from another's start, its index in the batch for its persistent row."""
    return (lambda: input_batch.expand_idx_mapping(b.rows, b.total, b.cu_num_logits, 6),)


@kernel(rejection_sampler)
def gather_draft_sampled(b):
    """Catches: a placeholder of a step inside the prompt taken for a draft, positions of logits rows for tokens'."""
    places = torch.randperm(50, generator=b.generator)[: b.total]
    of_tokens, of_logits = (b.ints(0, 100, 50), b.ints(0, 30, 50).long()), (places, b.req_idx.int(), b.local_pos)
    return (lambda: rejection_sampler.gather_draft_sampled(*of_tokens, *of_logits, b.prefill_len),)


@kernel(input_batch)
def get_num_sampled_and_rejected(b):
    """Catches: a chunk of a prefill that has sampled."""
    num_sampled, rest = torch.minimum(b.ints(1, 6, len(b.rows)), b.num_logits), (b.seq_lens, b.cu_num_logits, b.rows)
    return lambda counts: input_batch.get_num_sampled_and_rejected(counts, *rest, b.prefill_len), num_sampled


@kernel(input_batch)
def post_update(b):
    """Rows that are left out (-1), requests that got nothing. Catches: a token twice in a text counted once."""
    num_reqs = len(b.rows)
    rows = torch.where(b.ints(0, 5, num_reqs) == 0, -1, b.rows)
    sampled, num_sampled, rejected = b.ints(0, 3, num_reqs, 5).long(), b.ints(0, 6, num_reqs), b.ints(0, 3, num_reqs)

    def call(computed, last, counts, texts, total_len):
        input_batch.post_update(
            rows, computed, last, counts if b.seed % 2 else None, sampled, num_sampled, rejected,
            b.query_start_loc if b.seed % 3 else None, texts, total_len,
        )  # fmt: skip

    texts = b.ints(0, 9, NUM_ROWS, 1).long(), b.ints(0, 3, NUM_ROWS, 3), b.ints(0, 9, NUM_ROWS, LENGTH)
    return call, b.computed, *texts, b.ints(0, LENGTH - 5, NUM_ROWS)


@kernel(buffer_utils)
def apply_write(b):
    """Catches: a piece at another's place, a row that begins anew."""
    contents, starts = b.ints(10, 99, b.total), 3 * torch.arange(len(b.rows), dtype=torch.int32)

    def call(values):
        rest = (values.stride(0), b.rows, starts, contents, b.cu_num_logits[1:], None)
        buffer_utils._apply_write_kernel[(len(b.rows),)](values, *rest, BLOCK_SIZE=1024, MULTI_GROUP=False)

    return call, b.ints(0, 9, NUM_ROWS, LENGTH)


def block_tables(b, tables):
    """Two groups of other block sizes, one without slots."""
    return SimpleNamespace(
        num_kv_cache_groups=2,
        cp_size=1,
        cp_rank=0,
        cp_interleave=1,
        block_sizes_tensor=torch.tensor([4, 8], dtype=torch.int32),
        slot_mapping_enabled=torch.tensor([True, b.num_tokens % 2 == 0]),
        dcp_sharded=torch.ones(2, dtype=torch.bool),
        num_blocks=SimpleNamespace(gpu=b.ints(0, 7, 2, NUM_ROWS)),
        block_table_strides=torch.tensor([12, 6]),
        block_table_ptrs=pointers(tables),
        kept=tables,
    )


@kernel(block_table)
def gather_block_tables(b):
    """A row without blocks. Catches: a group's table read for another's, blocks past a request's."""
    tables = [b.ints(0, 1000, NUM_ROWS, width) for width in (12, 6)]
    state, gather = block_tables(b, tables), block_table.BlockTables.gather_block_tables
    call = lambda *out: gather(state, b.rows, len(b.rows) + 1, out, pointers(out)) and None  # noqa: E731
    return call, *(torch.full_like(table, -7) for table in tables)


@kernel(block_table)
def compute_slot_mappings(b):
    """A row of padding. Catches: slots behind the batch left as they were."""
    state = block_tables(b, [b.ints(0, 1000, NUM_ROWS, width) for width in (12, 6)])
    rows, positions = torch.cat((b.rows[:-1], torch.tensor([-1]).int())), b.ints(0, LENGTH, 50).long()
    map_slots = block_table.BlockTables.compute_slot_mappings
    return lambda out: map_slots(state, rows, b.query_start_loc, positions, 50, out), torch.full((2, 50), -7)


def tied_logits(b):
    """Ties, masked tokens, a masked token asked for."""
    logits, ids = (3 * b.normal(9, b.vocab_size)).round(decimals=1), b.ints(0, b.vocab_size, 9, 4).long()
    logits[:, 1::5], ids[0, 0] = -torch.inf, min(1, b.vocab_size - 1)
    return logits, ids


@kernel(logprob)
def topk_log_softmax(b):
    """Catches: a sum added up in another order."""
    logits, ids = tied_logits(b)
    return lambda values: logprob.compute_token_logprobs(values, ids), logits


@kernel(logprob)
def ranks(b):
    """Catches: a rank from 0."""
    logits, ids = tied_logits(b)
    tokens = ids[:, 0].contiguous()
    return lambda values: logprob.compute_topk_scores(values, 0, tokens).selected_token_ranks, logits


@kernel(rejection_sampler)
def flatten_sampled(b):
    """Catches: a request's tokens at the next one's rows, rows without a token touched."""
    num_reqs = len(b.rows)
    sampled, num_sampled = b.ints(1, 99, num_reqs, 5).long(), torch.minimum(b.ints(0, 6, num_reqs), b.num_logits)

    def call(flat):
        launch = rejection_sampler._flatten_sampled_kernel[(num_reqs,)]
        launch(flat, sampled, sampled.stride(0), num_sampled, b.cu_num_logits, num_warps=1)

    return call, torch.zeros(b.total, dtype=torch.int64)


def rare_logits(b):
    logits = 4 * b.normal(9, b.vocab_size)
    return logits.masked_fill(logits < -6, -torch.inf), b.ints(0, NUM_ROWS, 9)


@kernel(gumbel)
def temperature(b):
    """Catches: rows at T = 0 and 1 that are divided."""
    logits, rows = rare_logits(b)
    heat = b.choose(0.0, 1.0, 0.3, 0.7, 1.7)
    return lambda values: gumbel.apply_temperature(values, rows, heat), logits


@kernel(min_p_module)
def min_p(b):
    """Catches: a threshold of another row's largest, -inf that becomes NaN."""
    logits, rows = rare_logits(b)
    share = b.choose(0.0, 0.05, 0.5, 1.0, 0.2, 0.01)
    return lambda values: min_p_module.apply_min_p(values, rows, share), logits


@kernel(logit_bias)
def bias(b):
    """Catches: ids of another row, a bias on what is not allowed that revives it, stop tokens banned too long."""
    listed = torch.stack([torch.randperm(97, generator=b.generator)[:8] for _ in range(NUM_ROWS)]).int()
    rows, pos, min_lens = b.ints(0, NUM_ROWS, 9), b.ints(0, 20, 9).long(), b.ints(0, 20, NUM_ROWS)
    counts, biases = b.ints(0, 9, 3, NUM_ROWS), b.normal(NUM_ROWS, 8)
    stops = counts[2], b.ints(0, 2, NUM_ROWS).bool(), listed.flip(1)
    rest = rows, pos, counts[0], listed, counts[1], listed.flip(0), biases, min_lens, *stops, bool(b.seed % 2)
    return lambda logits: logit_bias.apply_logit_bias(logits, *rest), b.normal(9, 97)


@kernel(qwen3_vl)
def bilinear_pos_embed(b):
    """Catches: rows for columns, patches in another order than the merger's, the grid's last row passed."""
    table, (frames, height, width) = b.normal(7 * 7, 24), [(1, 4, 6), (2, 8, 2), (1, 2, 12)][b.seed % 3]
    interpolate = qwen3_vl.triton_pos_embed_interpolate
    return (lambda: interpolate(table, frames, height, width, 7, 1 + b.seed % 2, torch.float32),)


@kernel(gumbel)
def gumbel_sample(b):
    """Catches: a wrong rotation, a lost seed half, a missing draft salt, float64 creeping into the logarithm."""
    rows, heat = torch.tensor([0, 1, 2, 3, 3, 1, 0]), torch.tensor([0.0, 1.0, 0.7, 1.0])
    seeds, pos = torch.tensor([5, -3, 2**40 + 7, 2**62]), torch.arange(7) * 100_003 + 3
    call = lambda logits: gumbel.gumbel_sample(logits, rows, heat, seeds, pos, False, bool(b.seed % 2))  # noqa: E731
    return call, 3 * b.normal(7, b.vocab_size)


@kernel(bad_words)
def bad_words_case(b):
    """Words whose beginnings stand in the committed text, in the drafts, or across both; texts shorter than some."""
    lengths, num_words = b.ints(1, 5, NUM_ROWS, 5), b.ints(0, 6, NUM_ROWS)
    offsets = torch.cat((torch.zeros(NUM_ROWS, 1, dtype=torch.int32), lengths.cumsum(1).int()), 1)
    prompt_len = b.ints(1, 4, NUM_ROWS)
    total_len = prompt_len + b.ints(0, 7, NUM_ROWS)
    # As wide as the longest text: one token further is outside.
    texts, words = b.ints(0, 2, NUM_ROWS, int(total_len.max())), b.ints(0, 2, NUM_ROWS, 20)
    drafts, most = b.ints(0, 2, b.total), int(num_words[b.req_idx].max())
    rest = b.req_idx, words, offsets, num_words, texts, prompt_len, total_len, drafts, b.local_pos, most
    return lambda logits: bad_words.apply_bad_words(logits, *rest), b.normal(b.total, 3)


@kernel(penalties_module)
def penalties_case(b):
    """Drafts outside the vocabulary, logits of -inf; each draft counted once, along its own row, in float32."""
    asked = b.choose(1.0, 1.0, 1.3, 0.8, 1.1), b.choose(0.0, 0.0, 0.4, -0.3), b.choose(0.0, 0.0, 0.6, 0.1)
    drafts, counts = b.ints(-1, b.vocab_size + 2, b.total), b.ints(0, 3, NUM_ROWS, b.vocab_size)
    mask = b.ints(-(2**31), 2**31 - 1, NUM_ROWS, -(-b.vocab_size // 32))
    logits = 3 * b.normal(b.total, b.vocab_size)
    logits[:, 0] = -torch.inf
    apply = penalties_module.apply_penalties
    return lambda values: apply(values, b.req_idx, drafts, b.local_pos, *asked, mask, counts), logits


@pytest.mark.parametrize("name", CASES)
def test_a_twin_leaves_what_its_kernel_does(monkeypatch, name):
    """Catches what the case says."""
    (module, make), attribute = CASES[name], f"_{name}_kernel"
    original = getattr(module, attribute)
    original, num_changed = getattr(original, MARK, original), 0
    for seed in range(14):
        call, *tensors = make(Batch(seed))
        found = []
        for impl in (original, kernels.Twin(twin_of(name), original)):
            monkeypatch.setattr(module, attribute, impl)
            copies = [tensor.clone() for tensor in tensors]
            returned = call(*copies)
            returned = returned if isinstance(returned, tuple) else (returned,)
            found.append([*copies, *(tensor.clone() for tensor in returned if tensor is not None)])
        for one, other in zip(*found, strict=True):
            assert one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num()), seed
        num_changed += not tensors or not all(map(torch.equal, tensors, found[0])) or len(found[0]) > len(tensors)
    assert num_changed > 5, "the kernel does nothing"
