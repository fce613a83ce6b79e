"""Patches of the CPU engine: its runner, and kernels of vLLM that Triton's interpreter cannot run, or not in time.

Imported on the CPU only.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator

import torch

from vllm_vidspec.engine.compat.contract import MARK, expect_parameters, replace
from vllm_vidspec.engine.cpu import batch_kernels, kernels, logits_kernels, logprob_kernels, vision_kernels

_TWINS = (batch_kernels, logits_kernels, vision_kernels)


@contextlib.contextmanager
def cpu_model_runner(runner_cls: type) -> Iterator[None]:
    """Make `CPUWorker.init_device` build our runner, a subclass of vLLM's.

    Why: it imports `CPUModelRunner` inside the function, with no method to override (the GPU worker has one).
    """
    import vllm.v1.worker.cpu.model_runner as module

    original = module.CPUModelRunner
    module.CPUModelRunner = runner_cls  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        module.CPUModelRunner = original  # type: ignore[misc]


def repair_interpreter_kernels() -> None:
    """Replace the two sampling kernels that Triton's interpreter cannot run by torch versions.

    Why: under the interpreter vLLM's top-k/top-p kernel and its grammar-bitmask kernel raise `'int' object has no
    attribute 'to'`. The first has a torch twin in vLLM itself; the second's specification is one masked fill.
    """
    import vllm.v1.sample.ops.topk_topp_sampler as topk_topp
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    expect_parameters(topk_topp.apply_top_k_top_p_pytorch, "logits", "k", "p", "allow_cpu_sync")

    def apply_top_k_top_p(logits, k, p, *_args, **_kwargs):
        return topk_topp.apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)

    replace(topk_topp, "apply_top_k_top_p_triton", lambda _: apply_top_k_top_p, "logits", "k", "p")
    names = ("logits", "input_batch", "grammar_req_ids", "grammar_bitmask")
    replace(StructuredOutputsWorker, "apply_grammar_bitmask", lambda _: _apply_grammar_bitmask, *names)


def speed_up_interpreter_kernels() -> None:
    """Replace interpreted kernels on the decode path by bit-equal numpy twins.

    Why: the interpreter runs one program at a time at some milliseconds each, and sampling launches one per logits row;
    at temperature > 0 that is most of a step.
    """
    import vllm.v1.worker.gpu.sample.bad_words as bad_words
    import vllm.v1.worker.gpu.sample.gumbel as gumbel
    import vllm.v1.worker.gpu.sample.logprob as logprob
    import vllm.v1.worker.gpu.sample.penalties as penalties
    import vllm.v1.worker.gpu.spec_decode.rejection_sampler as rejection_sampler

    replace(
        gumbel,
        "_gumbel_sample_kernel",
        kernels.GumbelTwin,
        *("local_argmax_ptr", "local_max_ptr", "logits_cache_ptr", "logits_ptr", "expanded_idx_mapping_ptr"),
        *("seeds_ptr", "pos_ptr", "temp_ptr", "vocab_size", "BLOCK_SIZE"),
        *("IS_DRAFTING", "APPLY_TEMPERATURE", "USE_FP64"),
    )
    for module, run, names in (
        (
            penalties,
            kernels.penalties,
            "logits_ptr expanded_idx_mapping_ptr token_ids_ptr expanded_local_pos_ptr repetition_penalty_ptr "
            "frequency_penalty_ptr presence_penalty_ptr prompt_bin_mask_ptr output_bin_counts_ptr vocab_size",
        ),
        (
            bad_words,
            kernels.bad_words,
            "logits_ptr expanded_idx_mapping_ptr bad_word_token_ids_ptr bad_word_offsets_ptr num_bad_words_ptr "
            "all_token_ids_ptr prompt_len_ptr total_len_ptr input_ids_ptr expanded_local_pos_ptr",
        ),
        (
            logprob,
            logprob_kernels.topk_log_softmax,
            "output_ptr logits_ptr topk_ids_ptr topk vocab_size BLOCK_SIZE",
        ),
        (logprob, logprob_kernels.ranks, "output_ptr logits_ptr token_ids_ptr vocab_size BLOCK_SIZE"),
        (
            rejection_sampler,
            logprob_kernels.flatten_sampled,
            "flat_sampled_ptr sampled_ptr num_sampled_ptr cu_num_logits_ptr",
        ),
    ):
        make = functools.partial(lambda run, _: kernels.Twin(run), run)
        replace(module, f"_{run.__name__}_kernel", make, *names.split())
    speed_up_batch_kernels()


def whole_twin(name: str) -> Callable | None:
    return next((getattr(module, name) for module in _TWINS if hasattr(module, name)), None)


def speed_up_batch_kernels() -> None:
    """Replace interpreted kernels by bit-equal numpy twins that take all of their arguments: those that every step of
    vLLM runs, those that change logits, and one of Qwen3-VL's tower, which runs a program per patch.
    """
    import vllm.model_executor.models.qwen3_vl as qwen3_vl
    import vllm.v1.worker.gpu.block_table as block_table
    import vllm.v1.worker.gpu.buffer_utils as buffer_utils
    import vllm.v1.worker.gpu.input_batch as input_batch
    import vllm.v1.worker.gpu.mm.rope as rope
    import vllm.v1.worker.gpu.sample.gumbel as gumbel
    import vllm.v1.worker.gpu.sample.logit_bias as logit_bias
    import vllm.v1.worker.gpu.sample.min_p as min_p
    import vllm.v1.worker.gpu.spec_decode.rejection_sampler as rejection_sampler

    for module, names in (
        (gumbel, ("temperature",)),
        (logit_bias, ("bias",)),
        (min_p, ("min_p",)),
        (buffer_utils, ("apply_write",)),
        (block_table, ("gather_block_tables", "compute_slot_mappings")),
        (input_batch, ("prepare_pos_seq_lens", "combine_sampled_and_draft_tokens")),
        (input_batch, ("get_num_sampled_and_rejected", "post_update", "expand_idx_mapping")),
        (rejection_sampler, ("gather_draft_sampled",)),
        (rope, ("prepare_rope_positions",)),
        (qwen3_vl, ("bilinear_pos_embed",)),
    ):
        for name in names:
            kernel = getattr(module, f"_{name}_kernel")
            if hasattr(kernel, MARK):
                continue
            run = whole_twin(name)
            assert run is not None, name
            taken = inspect.signature(kernel.fn).parameters
            wanted = [name if name in taken else f"{name}_ptr" for name in list(inspect.signature(run).parameters)[1:]]
            replace(module, f"_{name}_kernel", functools.partial(batch_kernels.WholeTwin, run), *wanted)


def _apply_grammar_bitmask(self, logits, input_batch, grammar_req_ids, grammar_bitmask) -> None:
    """Torch version of vLLM's grammar mask: bit v of row m allows token v at logits row (request, position) of m.

    `logits`, `[num_logits, vocab_size]` float, are masked in place; `grammar_bitmask` is int32 numpy
    `[num_masks, ceil(vocab_size / 32)]`, of the requests with a grammar in its order.
    """
    from vllm.v1.worker.gpu.structured_outputs import _build_grammar_mapping

    if not grammar_req_ids:
        return
    mapping = torch.tensor(
        _build_grammar_mapping(
            input_batch.req_ids,
            grammar_req_ids,
            input_batch.cu_num_logits_np,
            input_batch.num_draft_tokens_per_req,
            self.num_bonus_tokens,
            self.mask_stride,
        )
    )  # [num_masks], req_idx * mask_stride + position
    rows = input_batch.cu_num_logits[mapping // self.mask_stride] + mapping % self.mask_stride
    words = torch.from_numpy(grammar_bitmask.copy())
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1  # [num_masks, words, 32]
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))
