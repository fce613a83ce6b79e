"""Patches of the CPU engine alone: its runner, and kernels that Triton's interpreter cannot run, or not in time."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from vllm_vidspec.engine.compat.contract import MARK, expect_parameters, put_in, replace, wrap


def cpu_model_runner(make: Callable) -> AbstractContextManager[None]:
    """Let `CPUWorker.init_device` build the runner that `make` returns.

    Why: it has no method for that to override. Until: it has `_make_model_runner`, as the GPU's worker does.
    """
    import vllm.v1.worker.cpu.model_runner as module

    return put_in(module, "CPUModelRunner", make)


def keep_caches_readable() -> None:
    """Let keys lie in the CPU's caches as a strided view describes them, for guidance and trees to read.

    Why: with AMX vLLM packs those in bf16, pairs of numbers to a word, and no argument of its engine says otherwise.
    Until: for good.
    """
    import vllm.v1.attention.backends.cpu_attn as backend

    def layout(original: Callable[..., str], *args, **kwargs) -> str:
        found = original(*args, **kwargs)
        return "vec" if found == "amx" else found

    wrap(backend, "_get_attn_isa", layout, "dtype", "block_size")


def repair_interpreter_kernels() -> None:
    """Replace the two sampling kernels that Triton's interpreter cannot run by torch versions.

    Why: its top-k/top-p and grammar-bitmask kernels raise `'int' object has no attribute 'to'` there.
    Until: the interpreter runs them.
    """
    import vllm.v1.sample.ops.topk_topp_sampler as topk_topp
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    expect_parameters(topk_topp.apply_top_k_top_p_pytorch, "logits", "k", "p", "allow_cpu_sync")

    def apply_top_k_top_p(logits, k, p, *_args, **_kwargs):
        return topk_topp.apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)

    replace(topk_topp, "apply_top_k_top_p_triton", lambda _: apply_top_k_top_p, "logits", "k", "p")
    names = ("logits", "input_batch", "grammar_req_ids", "grammar_bitmask")
    replace(StructuredOutputsWorker, "apply_grammar_bitmask", lambda _: _apply_grammar_bitmask, *names)


def replace_interpreted_kernels(twins: Callable[[str], tuple[Callable[[Any], Any], list[str]]]) -> None:
    """Replace interpreted kernels on the decode path, and one of Qwen3-VL's tower, by bit-equal numpy twins.

    Why: the interpreter runs one program at a time at some milliseconds each: one per logits row, or patch.
    Until: vLLM's CPU engine has kernels of its own for Model Runner V2.

    `twins` returns, of a kernel `_<name>_kernel`, what makes a twin of it and the names of the arguments that it reads.
    """
    import vllm.model_executor.models.qwen3_vl as qwen3_vl
    import vllm.v1.worker.gpu.block_table as block_table
    import vllm.v1.worker.gpu.buffer_utils as buffer_utils
    import vllm.v1.worker.gpu.input_batch as input_batch
    import vllm.v1.worker.gpu.mm.rope as rope
    import vllm.v1.worker.gpu.spec_decode.rejection_sampler as rejection_sampler
    from vllm.v1.worker.gpu.sample import bad_words, gumbel, logit_bias, logprob, min_p, penalties

    for module, names in (
        (gumbel, ("gumbel_sample", "temperature")),
        (logit_bias, ("bias",)),
        (min_p, ("min_p",)),
        (penalties, ("penalties",)),
        (bad_words, ("bad_words",)),
        (logprob, ("topk_log_softmax", "ranks")),
        (buffer_utils, ("apply_write",)),
        (block_table, ("gather_block_tables", "compute_slot_mappings")),
        (input_batch, ("prepare_pos_seq_lens", "combine_sampled_and_draft_tokens")),
        (input_batch, ("get_num_sampled_and_rejected", "post_update", "expand_idx_mapping")),
        (rejection_sampler, ("gather_draft_sampled", "flatten_sampled")),
        (rope, ("prepare_rope_positions",)),
        (qwen3_vl, ("bilinear_pos_embed",)),
    ):
        for name in names:
            kernel = getattr(module, f"_{name}_kernel")
            if hasattr(kernel, MARK):
                continue
            (make, reads), taken = twins(name), list(inspect.signature(kernel.fn).parameters)
            read = {it if it in taken else f"{it}_ptr" for it in reads}
            wanted = [*filter(read.__contains__, taken), *read.difference(taken)]  # in the kernel's order
            replace(module, f"_{name}_kernel", make, *wanted)


def _apply_grammar_bitmask(self, logits, input_batch, grammar_req_ids, grammar_bitmask) -> None:
    """Torch version of vLLM's grammar mask, in place on `[num_logits, vocab_size]` float logits.

    Bit v of row m of the `[num_masks, ceil(vocab_size / 32)]` int32 mask allows token v at m's logits row.
    """
    from vllm.v1.worker.gpu.structured_outputs import _build_grammar_mapping

    if not grammar_req_ids:
        return
    counts = (input_batch.cu_num_logits_np, input_batch.num_draft_tokens_per_req, self.num_bonus_tokens)
    mapping = _build_grammar_mapping(input_batch.req_ids, grammar_req_ids, *counts, self.mask_stride)
    mapping = torch.tensor(mapping)  # [num_masks], req_idx * mask_stride + position
    rows = input_batch.cu_num_logits[mapping // self.mask_stride] + mapping % self.mask_stride
    words = torch.from_numpy(grammar_bitmask.copy())
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1  # [num_masks, words, 32]
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))
