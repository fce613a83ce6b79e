"""Patches of a loaded target and its runner's parts: attention, positions, hidden states, noise, connector, stages.

Each sits on one object, so that the draft's and every other engine's stay untouched; `_RowSums` alone sits on a module,
and does nothing but while a layer observes.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed import parallel_state

from vllm_vidspec.engine.compat.contract import NEEDED_VLLM, expect_parameters, put_in, wrap
from vllm_vidspec.errors import VidSpecError

_ATTENTION_FORWARD = ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")
_ONE_STAGE = SimpleNamespace(world_size=1, rank_in_group=0, is_first_rank=True, is_last_rank=True)


class _RowSums:
    """Takes the log-sum-exp of its rows from FlashAttention, which computes it in any case and is not asked for it.

    Why: guidance would have to find it again, in a pass over all keys. The call's results stay what they are: versions
    2 and 3 only hand one tensor more back. Version 4 would be compiled once more for it, and is left alone.
    Until: vLLM's attention layer returns the sums to those that ask.
    """

    def __init__(self) -> None:
        self._heard: list[torch.Tensor] | None = None

    def install(self, backend: Any) -> None:
        """Patch the name that vLLM's FlashAttention calls, in its module."""
        wrap(backend, "flash_attn_varlen_func", self._call, "q", "max_seqlen_q", "return_softmax_lse", "fa_version")

    def _call(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        has_own = kwargs.get("return_softmax_lse") or kwargs.get("fa_version") not in (2, 3)
        # Of single rows version 2 folds heads into rows, and the sums come back in an order of their own.
        if self._heard is None or has_own or kwargs.get("max_seqlen_q", 1) <= 1:
            return original(*args, **kwargs)
        out, lse = original(*args, **kwargs, return_softmax_lse=True)
        self._heard.append(lse)
        return out

    @contextlib.contextmanager
    def observed(self) -> Iterator[list[torch.Tensor]]:
        """Observe the calls made meanwhile: yields the list that their `[num_heads, num_rows]` sums go to."""
        observed: list[torch.Tensor] = []
        self._heard = observed
        try:
            yield observed
        finally:
            self._heard = None


_row_sums = _RowSums()


def observe_attention(layer: Any, observer: Callable) -> Callable[[bool], None]:
    """Let `observer(layer, query, kv_cache, attn_metadata, lse)` be called after each forward of a target's attention
    layer; return what switches it on and off. It is off, and the layer as it was: a decode step observes nothing.

    Why: fused attention keeps its weights to itself; q and the paged keys meet here and nowhere else. The wrapper runs
    inside vLLM's opaque attention operator, hence under torch.compile and piecewise graphs too. Until: for good.

    `lse` is float32 `[num_heads, num_tokens]`, the log-sum-exp of each row, None where the backend returns none.
    """
    impl, original = layer.impl, layer.impl.forward
    expect_parameters(original, *_ATTENTION_FORWARD)
    if layer.get_attn_backend().get_name() == "FLASH_ATTN":
        _row_sums.install(sys.modules[type(layer.impl).__module__])

    @functools.wraps(original)
    def forward(attn_layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs):
        with _row_sums.observed() as observed:
            result = original(attn_layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)
        observer(attn_layer, query, kv_cache, attn_metadata, observed[0] if len(observed) == 1 else None)
        return result

    def switch(is_on: bool) -> None:
        impl.forward = forward if is_on else original

    return switch


def intercept_attention(layer: Any, interceptor: Callable) -> None:
    """Run `interceptor(original, layer, query, key, value, kv_cache, attn_metadata, output, ...)` as a layer's forward.

    Why: vLLM's backends know no tree masks (upstream removed tree attention, #42121). As with `observe_attention` only
    this layer object changes. What the interceptor does not compute itself it leaves to `original`.
    Until: a backend of vLLM's takes a tree's mask, and splits keys for as many rows as a chain has.
    """
    original = layer.impl.forward
    expect_parameters(original, *_ATTENTION_FORWARD)
    backend = layer.get_attn_backend()
    if backend.forward_includes_kv_cache_update:
        raise VidSpecError(
            f"tree drafts need an attention backend with a separate cache update, not {backend.get_name()}"
        )
    layer.impl.forward = functools.wraps(original)(functools.partial(interceptor, original))


def keep_block_table(builder: Any) -> None:
    """Let the metadata that a builder makes say its `block_table`, as every other backend's does.

    Why: FlashInfer's keeps it in the form of each kernel that it plans, if at all; its cache is paged as the others'.
    Until: FlashInfer's metadata has it.
    """

    def keep(build, common_prefix_len, common_attn_metadata, *args, **kwargs):
        metadata = build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        metadata.block_table = common_attn_metadata.block_table_tensor
        return metadata

    wrap(builder, "build", keep, "common_prefix_len", "common_attn_metadata")


def adjust_positions(model_state: Any, adjust: Callable, dummy: Callable) -> None:
    """Choose the positions that the target's forward sees.

    Why: tree nodes need the position of their depth, and the positions in the batch must stay: slots, the sampler and
    vLLM's own bookkeeping read them. Dummy runs are covered too, so that captured graphs see the same buffer.
    Until: vLLM lets a method choose the positions of a forward.

    `adjust` turns `(input_batch, positions)`, `[num_tokens]` or `[num_axes, num_tokens]`, into those to use, before
    every forward; `dummy` gives as many of a forward that is captured, where the model has 1-D positions.
    """

    def prepare(prepare_inputs, input_batch, req_states):
        inputs = prepare_inputs(input_batch, req_states)
        return {**inputs, "positions": adjust(input_batch, inputs.get("positions", input_batch.positions))}

    def prepare_dummy(prepare_dummy_inputs, num_reqs, num_tokens):
        inputs = prepare_dummy_inputs(num_reqs, num_tokens)
        return inputs if "positions" in inputs else {**inputs, "positions": dummy(num_tokens)}

    wrap(model_state, "prepare_inputs", prepare, "input_batch", "req_states")
    wrap(model_state, "prepare_dummy_inputs", prepare_dummy, "num_reqs", "num_tokens")


def observe_attention_metadata(model_state: Any, observe: Callable) -> None:
    """Call `observe(input_batch, metadata_by_layer, for_capture)` once the attention metadata of a forward is there.

    Why: a whole forward that is captured calls our layers once, and must then do what every replay needs. Nothing else
    distinguishes it from other dummy runs. It is called before every forward that attends: run, captured or replayed.
    Until: vLLM lets a method add to a forward's attention metadata.
    """

    def prepare(prepare_attn, input_batch, *args, for_capture=False, **kwargs):
        metadata = prepare_attn(input_batch, *args, for_capture=for_capture, **kwargs)
        observe(input_batch, metadata, for_capture)
        return metadata

    names = ("input_batch", "cudagraph_mode", "block_tables", "slot_mappings", "for_capture")
    wrap(model_state, "prepare_attn", prepare, *names)


def take_over_pixels(model_state: Any, share: Callable) -> None:
    """Let us copy to the device what the target's encoder is about to encode, so that the copy can outlive its call.

    Why: vLLM makes the copy inside of the call and drops it there. Tensors that are on the device it leaves where they
    are, because a processor may run there. Until: vLLM can keep the copy for a draft that has a vision tower.

    `share` turns `(identifiers, items)` into the `MultiModalKwargsItem`s to
    encode: all of a call must be on the device, or none, as vLLM joins them.
    """
    encoder = getattr(model_state, "encoder_runner", None)
    if encoder is None:
        return

    def prepare(prepare_mm_inputs, scheduled_encoder_inputs):
        identifiers, items = prepare_mm_inputs(scheduled_encoder_inputs)
        if not items:  # as in a step that decodes
            return identifiers, items
        shared = share(identifiers, [item for _, item in items])
        return identifiers, [(modality, item) for (modality, _), item in zip(items, shared, strict=True)]

    wrap(encoder, "prepare_mm_inputs", prepare, "scheduled_encoder_inputs")


def observe_encoder(model_state: Any, observe: Callable) -> None:
    """Call `observe(outputs)` with what a step's encoder has just made, a dict by identifier.

    Why: a draft that is shown the target's embeddings needs them before vLLM frees them, which may be a step later.
    Until: vLLM hands a speculator the outputs of its encoder.
    """
    if getattr(model_state, "encoder_runner", None) is None:
        return
    outputs = model_state.encoder_cache.encoder_outputs

    def execute(execute_mm_encoder, scheduled_encoder_inputs):
        before = set(outputs) if scheduled_encoder_inputs else ()
        execute_mm_encoder(scheduled_encoder_inputs)
        if scheduled_encoder_inputs:
            observe({name: made for name, made in outputs.items() if name not in before})

    wrap(model_state, "execute_mm_encoder", execute, "scheduled_encoder_inputs")


def keep_deepstack(network: Any, num_layers: int, max_tokens: int, like: torch.Tensor) -> None:
    """Give a model that was loaded without its vision tower the buffers by which embeddings reach its first decoder
    layers: `num_layers` of `[max_tokens, like.shape[-1]]`.

    Why: vLLM takes a model without a tower for one that is shown nothing, and leaves them out. Until: it makes them
    wherever embeddings may come in.
    """
    if not hasattr(network, "_set_deepstack_input_embeds"):
        raise VidSpecError(f"{type(network).__name__} takes no embeddings of several levels in vLLM: draft_vision own")
    network.use_deepstack, network.deepstack_num_level = True, num_layers
    network.deepstack_input_embeds = [like.new_zeros(max_tokens, like.shape[-1]) for _ in range(num_layers)]
    network.deepstack_input_embeds_num_tokens = 0


def observe_block_ids(block_tables: Any, observe: Callable[[int, list[int], bool], None]) -> None:
    """Call `observe(req_state_idx, block_ids, overwrite)` when a runner hears of blocks that its scheduler has given a
    request; they replace those that it had if `overwrite`.

    Why: a draft that reads the target's cache has tables of its own, and vLLM's are known to the device alone.
    Until: vLLM keeps a request's blocks where a method can read them on the host.
    """

    def append(original, req_index, new_block_ids, overwrite):
        original(req_index, new_block_ids, overwrite)
        observe(req_index, new_block_ids[0], overwrite)

    wrap(block_tables, "append_block_ids", append, "req_index", "new_block_ids", "overwrite")


def expose_hidden_states(target: Any, layers: tuple[int, ...]) -> None:
    """Make a target return the hidden states that enter these layers beside its output, as it does for EAGLE-3.

    Why: vLLM offers this to its own methods only, by their names. LLaVA-OneVision passes its language model's result
    through, but does not declare so; the decoder inside does. Layer 0 is the embeddings, i what layer i - 1 puts out.
    Until: vLLM offers it to every method.
    """
    language_model = target.get_language_model() if hasattr(target, "get_language_model") else target
    decoder = getattr(language_model, "model", language_model)
    if not hasattr(decoder, "_set_aux_hidden_state_layers"):
        raise VidSpecError(f"{type(target).__name__} returns no hidden states in vLLM: use another pruner than uv")
    decoder._set_aux_hidden_state_layers(layers)


def keep_shared_noise(sampler: Any) -> None:
    """Let a runner's sampler draw by vLLM's own kernel, whatever a batch asks for.

    Why: on a GPU a batch with top-k or top-p, no greedy request and no seed goes to FlashInfer's sampler, whose noise
    is not a function of seed, position and token: draft and target share none. So do prompts' first tokens.
    Until: FlashInfer's sampler takes vLLM's noise.
    """
    if not isinstance(getattr(sampler, "use_flashinfer", None), bool):
        raise VidSpecError(f"this vLLM's sampler no longer says use_flashinfer; {NEEDED_VLLM}")
    sampler.use_flashinfer = False


def gather_token_logprobs(sampler: Any) -> None:
    """Let a runner count `logprob_token_ids` among what its sampler returns, in steps that verify drafts too.

    Why: batch-sharded sampling gathers as many columns as the sampler says that a step has, and vLLM asks for them
    without these, as its own rejection sampler does not make them. Until: it does.
    """

    def all_dims(dims, idx_mapping_np, include_token_ids=True):
        return dims(idx_mapping_np)

    wrap(sampler, "get_logprobs_dims", all_dims, "idx_mapping_np", "include_token_ids")


def intercept_penalties(penalties: Any, penalise: Callable[[torch.Tensor, Any], bool]) -> None:
    """Ask `penalise(logits, context)` first whenever a sampler applies penalties; what it answers is whether it did.

    Why: vLLM counts the drafts on the rows before a row, which a tree's nodes have others of. The place among its
    processors must stay. It works in place, on float32 `[num_logits, vocab_size]`; see vLLM's `LogitsContext`.
    Until: vLLM counts drafts along a tree's paths.
    """

    def apply_to_paths(apply, logits, ctx):
        return logits if penalise(logits, ctx) else apply(logits, ctx)

    wrap(penalties, "apply", apply_to_paths, "logits", "ctx")


def one_stage() -> contextlib.AbstractContextManager[None]:
    """Build or run a model that has no stages.

    Why: vLLM's model classes ask the process's pipeline group which layers they have, and whether embeddings or another
    stage's states are their input. The target's last stage has few layers and no embeddings, the draft has all of its.
    Until: a model class takes its stage as an argument.
    """
    return put_in(parallel_state, "_PP", _ONE_STAGE)


def without_kv_connector() -> contextlib.AbstractContextManager[None]:
    """Run a forward that no KV connector sees.

    Why: vLLM's attention operator offers every layer of every forward to the connector, and a draft's layers are not
    the target's, though they may have its layers' names. vLLM passes one by in the same manner, for dummy runs.
    Until: vLLM hides a draft's layers from connectors.
    """
    from vllm.distributed.kv_transfer import kv_transfer_state

    return put_in(kv_transfer_state, "_KV_CONNECTOR_AGENT", None)
