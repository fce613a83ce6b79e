"""The twins of vLLM's kernels for batches and log-probabilities leave what the interpreted kernels do, to the bit."""

from types import SimpleNamespace

import pytest
import torch

from vllm_vidspec.devices import has_gpu

pytest.importorskip("vllm")
import vllm.model_executor.models.qwen3_vl as qwen3_vl
import vllm.v1.worker.gpu.block_table as block_table
import vllm.v1.worker.gpu.buffer_utils as buffer_utils
import vllm.v1.worker.gpu.input_batch as input_batch
import vllm.v1.worker.gpu.mm.rope as rope
import vllm.v1.worker.gpu.sample.gumbel as gumbel
import vllm.v1.worker.gpu.sample.logit_bias as logit_bias
import vllm.v1.worker.gpu.sample.logprob as logprob
import vllm.v1.worker.gpu.sample.min_p as min_p
import vllm.v1.worker.gpu.spec_decode.rejection_sampler as rejection_sampler

from tests.unit.engine.test_cpu_kernels import Draws
from vllm_vidspec.engine.compat.contract import MARK
from vllm_vidspec.engine.compat.cpu import twin_of
from vllm_vidspec.engine.cpu.kernels import Twin

pytestmark = pytest.mark.skipif(has_gpu(), reason="the twins replace interpreted kernels only")

NUM_ROWS, LENGTH = 7, 40  # persistent rows, and tokens of each


@pytest.fixture
def both(monkeypatch):
    """Return a function that calls another with the kernel and with its twin; both must leave and return the same."""

    def run(module, name, call, *tensors):
        """`call` gets copies of `tensors`, into which it may write; return what it left and returned, of the twin."""
        attribute = f"_{name}_kernel"
        kernel = getattr(module, attribute)
        kernel, found = getattr(kernel, MARK, kernel), []
        for impl in (kernel, Twin(twin_of(name), kernel)):
            monkeypatch.setattr(module, attribute, impl)
            copies = [tensor.clone() for tensor in tensors]
            returned = call(*copies)
            returned = returned if isinstance(returned, tuple) else (returned,)
            found.append([*copies, *(tensor.clone() for tensor in returned if tensor is not None)])
        for one, other in zip(*found, strict=True):
            assert one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
        return found[1]

    return run


class Batch:
    """A random batch: rows of the persistent state, tokens of each, some of them draft rows, some prefills."""

    def __init__(self, seed: int):
        self.draws = draws = Draws(seed)
        num_reqs = int(draws.ints(1, 6, 1))
        self.rows = torch.randperm(NUM_ROWS, generator=draws.generator)[:num_reqs].int()
        self.num_logits = draws.ints(1, 5, num_reqs)
        lengths = self.num_logits + draws.ints(0, 4, num_reqs)
        self.query_start_loc, self.cu_num_logits = (_cumulated(counts) for counts in (lengths, self.num_logits))
        self.num_tokens = int(lengths.sum())
        self.computed, self.prefill_len = draws.ints(0, 12, NUM_ROWS), draws.ints(1, 14, NUM_ROWS)
        self.seq_lens = self.computed[self.rows.long()] + lengths


def pointers(tensors) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def _cumulated(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()))


@pytest.fixture(params=range(12))
def batch(request) -> Batch:
    return Batch(request.param)


def test_positions_and_lengths(both, batch):
    """Catches: a request's tokens counted from another's start, lengths behind the batch left as they were."""
    both(
        input_batch,
        "prepare_pos_seq_lens",
        lambda *out: input_batch.prepare_pos_seq_lens(batch.rows, batch.query_start_loc, batch.computed, *out),
        torch.full((50,), -7),
        torch.full((NUM_ROWS,), -7, dtype=torch.int32),
    )


def test_rope_positions(both, batch):
    """Catches: an axis of another, a decode's position from the prompt's table, a delta of the wrong row."""
    listed, delta = batch.draws.ints(0, 99, NUM_ROWS * 3, LENGTH), batch.draws.ints(-9, 9, NUM_ROWS)
    parts = {"prefill_positions": SimpleNamespace(gpu=listed), "prefill_delta": SimpleNamespace(gpu=delta)}

    def call(positions):
        state = SimpleNamespace(num_dims=3, max_model_len=LENGTH, positions=positions, **parts)
        rope.RopeState.prepare_positions(state, batch.rows, batch.query_start_loc, batch.prefill_len, batch.computed)

    both(rope, "prepare_rope_positions", call, torch.full((3, 50), -7))


def test_sampled_and_draft_tokens(both, batch):
    """Catches: drafts of another row, a prompt's tail overwritten, a chunk of a prefill that gets drafts."""
    drafts, last = batch.draws.ints(100, 200, NUM_ROWS, 4).long(), batch.draws.ints(200, 300, NUM_ROWS, 1).long()
    total = int(batch.cu_num_logits[-1])
    both(
        input_batch,
        "combine_sampled_and_draft_tokens",
        lambda input_ids: input_batch.combine_sampled_and_draft_tokens(
            input_ids, batch.rows, last, batch.query_start_loc, batch.seq_lens, batch.prefill_len, drafts,
            batch.cu_num_logits, total,
        ),
        batch.draws.ints(0, 100, 50),
    )  # fmt: skip


def test_rows_of_logits(both, batch):
    """Catches: a request's rows counted from another's start, its index in the batch for its persistent row."""
    total = int(batch.cu_num_logits[-1])
    both(
        input_batch,
        "expand_idx_mapping",
        lambda: input_batch.expand_idx_mapping(batch.rows, total, batch.cu_num_logits, 5),
    )


def test_drafts_and_positions_of_rows(both, batch):
    """Catches: a placeholder of a step inside the prompt taken for a draft, positions of logits rows for tokens'."""
    expanded, local = input_batch.expand_idx_mapping(batch.rows, int(batch.cu_num_logits[-1]), batch.cu_num_logits, 5)
    places = torch.randperm(50, generator=batch.draws.generator)[: len(local)]
    input_ids, positions = batch.draws.ints(0, 100, 50), batch.draws.ints(0, 30, 50).long()
    _, drafts, _ = both(
        rejection_sampler,
        "gather_draft_sampled",
        lambda _: rejection_sampler.gather_draft_sampled(
            input_ids, positions, places, expanded, local, batch.prefill_len
        ),
        torch.empty(0),
    )
    assert (drafts >= -1).all()


def test_numbers_of_sampled_and_rejected(both, batch):
    """Catches: a chunk of a prefill that has sampled."""
    both(
        input_batch,
        "get_num_sampled_and_rejected",
        lambda num_sampled: input_batch.get_num_sampled_and_rejected(
            num_sampled, batch.seq_lens, batch.cu_num_logits, batch.rows, batch.prefill_len
        ),
        torch.minimum(batch.draws.ints(1, 6, len(batch.rows)), batch.num_logits),
    )


@pytest.mark.parametrize("has_counts", [True, False])
@pytest.mark.parametrize("has_queries", [True, False])
def test_what_a_step_gave(both, batch, has_counts, has_queries):
    """Rows that are left out (-1), requests that got nothing. Catches: a token twice in a text counted once."""
    num_reqs = len(batch.rows)
    rows = torch.where(batch.draws.ints(0, 5, num_reqs) == 0, -1, batch.rows)
    sampled, num_sampled = batch.draws.ints(0, 3, num_reqs, 5).long(), batch.draws.ints(0, 6, num_reqs)
    rejected = batch.draws.ints(0, 3, num_reqs)

    def call(computed, last, counts, texts, total_len):
        input_batch.post_update(
            rows, computed, last, counts if has_counts else None, sampled, num_sampled, rejected,
            batch.query_start_loc if has_queries else None, texts, total_len,
        )  # fmt: skip

    both(
        input_batch,
        "post_update",
        call,
        batch.computed,
        batch.draws.ints(0, 9, NUM_ROWS, 1).long(),
        batch.draws.ints(0, 3, NUM_ROWS, 3),
        batch.draws.ints(0, 9, NUM_ROWS, LENGTH),
        batch.draws.ints(0, LENGTH - 5, NUM_ROWS),
    )


def test_staged_writes(both, batch):
    """Catches: a piece at another's place, a row that begins anew."""
    lengths = batch.num_logits.tolist()
    contents, ends = batch.draws.ints(10, 99, sum(lengths)), batch.cu_num_logits[1:]
    starts = 3 * torch.arange(len(lengths), dtype=torch.int32)

    def call(values):
        kernel = buffer_utils._apply_write_kernel
        arguments = (values.stride(0), batch.rows, starts, contents, ends, None)
        kernel[(len(lengths),)](values, *arguments, BLOCK_SIZE=1024, MULTI_GROUP=False)

    both(buffer_utils, "apply_write", call, batch.draws.ints(0, 9, NUM_ROWS, LENGTH))


@pytest.mark.parametrize("name", ["gather_block_tables", "compute_slot_mappings"])
def test_block_tables(both, batch, name):
    """Two groups of other block sizes, one without slots; a row of padding, and one without blocks.

    Catches: a group's table read for another's, slots behind the batch left as they were, blocks past a request's.
    """
    tables = [batch.draws.ints(0, 1000, NUM_ROWS, width) for width in (12, 6)]
    positions = batch.draws.ints(0, LENGTH, 50).long()
    state = SimpleNamespace(
        num_kv_cache_groups=2,
        cp_size=1,
        cp_rank=0,
        cp_interleave=1,
        block_sizes_tensor=torch.tensor([4, 8], dtype=torch.int32),
        slot_mapping_enabled=torch.tensor([True, batch.num_tokens % 2 == 0]),
        dcp_sharded=torch.ones(2, dtype=torch.bool),
        num_blocks=SimpleNamespace(gpu=batch.draws.ints(0, 7, 2, NUM_ROWS)),
        block_table_strides=torch.tensor([12, 6]),
        block_table_ptrs=pointers(tables),
    )

    def slots(out):
        rows = torch.cat((batch.rows[:-1], torch.tensor([-1], dtype=torch.int32)))
        block_table.BlockTables.compute_slot_mappings(state, rows, batch.query_start_loc, positions, 50, out)

    def gather(*out):
        block_table.BlockTables.gather_block_tables(state, batch.rows, len(batch.rows) + 1, out, pointers(out))

    if name == "compute_slot_mappings":
        both(block_table, name, slots, torch.full((2, 50), -7))
    else:
        both(block_table, name, gather, *(torch.full_like(table, -7) for table in tables))


@pytest.mark.parametrize("vocab_size", [1, 97, 1023, 1024, 1025, 8193])
def test_log_probabilities_and_ranks(both, vocab_size):
    """Ties, masked tokens, a masked token asked for. Catches: a sum added up in another order, a rank from 0."""
    draws = Draws(vocab_size)
    logits = (3 * draws.normal(9, vocab_size)).round(decimals=1)
    logits[:, 1::5] = -torch.inf
    ids = draws.ints(0, vocab_size, 9, 4).long()
    ids[0, 0] = min(1, vocab_size - 1)
    tokens = ids[:, 0].contiguous()
    both(logprob, "topk_log_softmax", lambda values: logprob.compute_token_logprobs(values, ids), logits)
    both(logprob, "ranks", lambda values: logprob.compute_topk_scores(values, 0, tokens).selected_token_ranks, logits)


def test_flattened_samples(both, batch):
    """Catches: a request's tokens at the next one's rows, rows without a token touched."""
    num_reqs = len(batch.rows)
    sampled = batch.draws.ints(1, 99, num_reqs, 5).long()
    num_sampled = torch.minimum(batch.draws.ints(0, 6, num_reqs), batch.num_logits)

    def call(flat):
        kernel = rejection_sampler._flatten_sampled_kernel
        kernel[(num_reqs,)](flat, sampled, sampled.stride(0), num_sampled, batch.cu_num_logits, num_warps=1)

    both(rejection_sampler, "flatten_sampled", call, torch.zeros(int(batch.cu_num_logits[-1]), dtype=torch.int64))


@pytest.mark.parametrize("vocab_size", [5, 1023, 1025, 8193])
@pytest.mark.parametrize("seed", range(3))
def test_temperature_and_min_p(both, vocab_size, seed):
    """Catches: rows at T = 0 and 1 that are divided, a threshold of another row's largest, -inf that becomes NaN."""
    draws = Draws(seed)
    logits, rows = 4 * draws.normal(9, vocab_size), draws.ints(0, NUM_ROWS, 9)
    logits[logits < -6] = -torch.inf
    heat = torch.tensor([0.0, 1.0, 0.3, 0.7, 1.7, 1.0, 0.9])
    share = torch.tensor([0.0, 0.05, 0.5, 0.0, 1.0, 0.2, 0.01])
    both(gumbel, "temperature", lambda logits: gumbel.apply_temperature(logits, rows, heat), logits)
    both(min_p, "min_p", lambda logits: min_p.apply_min_p(logits, rows, share), logits)


@pytest.mark.parametrize("checks_masked", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_biases(both, seed, checks_masked):
    """Catches: ids of another row, a bias on what is not allowed that revives it, stop tokens banned too long."""
    draws, vocab_size = Draws(seed), 97
    logits, rows = draws.normal(9, vocab_size), draws.ints(0, NUM_ROWS, 9)
    listed = torch.stack([torch.randperm(vocab_size, generator=draws.generator)[:8] for _ in range(NUM_ROWS)]).int()
    counts = [draws.ints(0, 9, NUM_ROWS) for _ in range(3)]
    call = lambda logits: logit_bias.apply_logit_bias(  # noqa: E731
        logits, rows, draws_pos, counts[0], listed, counts[1], listed.flip(0), bias, min_lens, counts[2],
        restore, listed.flip(1), checks_masked,
    )  # fmt: skip
    draws_pos, min_lens = draws.ints(0, 20, 9).long(), draws.ints(0, 20, NUM_ROWS)
    bias, restore = draws.normal(NUM_ROWS, 8), draws.ints(0, 2, NUM_ROWS).bool()
    both(logit_bias, "bias", call, logits)


@pytest.mark.parametrize(("frames", "height", "width"), [(1, 4, 6), (2, 8, 2), (1, 2, 12)])
@pytest.mark.parametrize("merge", [1, 2])
def test_position_embeddings(both, frames, height, width, merge):
    """Catches: rows for columns, patches in another order than the merger's, the grid's last row passed."""
    table = Draws(frames).normal(7 * 7, 24)
    both(
        qwen3_vl,
        "bilinear_pos_embed",
        lambda: qwen3_vl.triton_pos_embed_interpolate(table, frames, height, width, 7, merge, torch.float32),
    )
