"""Every patch of vLLM, and nothing else; each is idempotent, checks what it relies on and says why it exists."""

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from vllm_vidspec.config import METHOD
from vllm_vidspec.errors import VidSpecError

_MARK = "_vidspec_original"


def expect_parameters(function: Callable, *names: str) -> None:
    """Check that a vLLM function still takes the parameters we rely on, in this order.

    Raises:
        VidSpecError: Upstream renamed or moved one of them.
    """
    found = [name for name in inspect.signature(function).parameters if name in names]
    if found != list(names):
        where = f"{function.__module__}.{function.__qualname__}"
        raise VidSpecError(f"this vLLM's {where} no longer takes ({', '.join(names)}); vllm_vidspec needs vLLM 0.32")


def _patch(owner: Any, name: str, replacement: Any) -> None:
    """Replace an attribute once, keeping the original on the replacement."""
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return
    setattr(replacement, _MARK, original)
    setattr(owner, name, replacement)


def hook_engine_config(translate: Callable, finish: Callable) -> None:
    """Wrap `EngineArgs.create_engine_config`.

    Why: vLLM knows no third-party speculative methods, and `worker_cls` is read before `create_speculative_config`
    runs, so this is the first place where "vidspec" can become something that vLLM understands.

    Args:
        translate: `EngineArgs -> VidSpecConfig | None`; rewrites the arguments, before vLLM builds its configuration.
        finish: `(VllmConfig, VidSpecConfig) -> None`; checks what vLLM built.
    """
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def create_engine_config(self, *args, **kwargs):
        config = translate(self)
        vllm_config = original(self, *args, **kwargs)
        if config is not None:
            finish(vllm_config, config)
        return vllm_config

    _patch(EngineArgs, "create_engine_config", create_engine_config)


def install_error_line(refusal: Callable[[], str | None]) -> None:
    """Print an uncaught `VidSpecError` of a `vllm` command as one line instead of a stack trace.

    Why: a wrong knob is the user's to mend, and vLLM's own start-up prints some forty lines of frames around it. What a
    worker refuses reaches the server as "Engine core initialization failed", a hundred lines below the reason. Python
    programs that use `LLM(...)` keep their traceback.

    Args:
        refusal: Returns the line of a worker that refused to start, or None.
    """
    is_server = os.path.basename(sys.argv[0]) in ("vllm", "api_server.py")
    if not is_server or getattr(sys.excepthook, "_vidspec", False):
        return
    previous = sys.excepthook

    def excepthook(kind, error, traceback):
        reason = str(error) if isinstance(error, VidSpecError) else refusal()
        if reason is not None:
            print(f"vidspec: {reason}", file=sys.stderr)
        else:
            previous(kind, error, traceback)

    excepthook._vidspec = True  # type: ignore[attr-defined]
    sys.excepthook = excepthook


def allow_sampling_parameters() -> None:
    """Let requests use `min_p` and `logit_bias` when the speculative method is ours, and check what they ask of it.

    Why: vLLM refuses both for every speculative method. Model Runner V2 applies both at every logits row, and the
    strict scorer samples through that same code, so here they are exact. What a request asks of our scorers must be
    refused here, in the API server, as the client's error.
    """
    from vllm.sampling_params import SamplingParams

    original = SamplingParams._validate_spec_decode
    expect_parameters(original, "self", "speculative_config")

    def validate(self, speculative_config):
        check = getattr(speculative_config, "_vidspec", None)
        if check is None:
            original(self, speculative_config)
            return
        with _clients_error():
            check(self.extra_args)

    _patch(SamplingParams, "_validate_spec_decode", validate)


def mark_as_ours(speculative_config: Any, check: Callable) -> None:
    """Remember that a `SpeculativeConfig` is the translation of our method.

    Args:
        speculative_config: vLLM's.
        check: Called with each request's `extra_args`; raises VidSpecError for what the server does not allow.
    """
    speculative_config._vidspec = check


@contextlib.contextmanager
def _clients_error() -> Iterator[None]:
    """Turn a VidSpecError about a request into vLLM's, which the API server answers with a 400."""
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except VidSpecError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from None


def extend_request_metrics(extend: Callable) -> None:
    """Let what `--per-request-spec-decode-metrics` reports of a finished request be extended.

    Why: vLLM's scheduler counts accepted tokens; which of them were loosened, only our scorer knows.

    Args:
        extend: `(RequestSpecDecodeMetrics, request id) -> RequestSpecDecodeMetrics`; the last given is used.
    """
    from vllm.v1.engine.output_processor import RequestState

    RequestState._vidspec_extend = staticmethod(extend)
    original = RequestState._new_completion_output
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def new_completion_output(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        if output.spec_decode_metrics is not None:
            output.spec_decode_metrics = self._vidspec_extend(output.spec_decode_metrics, self.request_id)
        return output

    _patch(RequestState, "_new_completion_output", new_completion_output)


def show_to_every_api_server(collector: Any) -> None:
    """Show a collector on /metrics where vLLM does not serve prometheus_client's default registry.

    Why: with several API servers (or PROMETHEUS_MULTIPROC_DIR set) every scrape makes a registry of its own, of nothing
    but a collector that adds up what the servers' processes wrote to files; it knows none of the default registry's.

    Args:
        collector: prometheus_client's; the last given is shown.
    """
    from prometheus_client.multiprocess import MultiProcessCollector

    MultiProcessCollector._vidspec_collector = collector  # type: ignore[attr-defined]
    original = MultiProcessCollector.collect
    if hasattr(original, _MARK):
        return
    expect_parameters(original, "self")

    @functools.wraps(original)
    def collect(self):
        yield from original(self)
        yield from self._vidspec_collector.collect()

    _patch(MultiProcessCollector, "collect", collect)


def hear_request_choices(prefix: str, calls_tools: str, check: Callable) -> None:
    """Let our request parameters reach the worker from the OpenAI API, and the fact that a request may call tools.

    Why: vLLM forwards `vllm_xargs` and drops other unknown fields, where clients that use `extra_body` put ours; and
    whether a parser for tool calls reads the output is known to the API server alone. What is wrong is refused before
    the prompt is rendered: once a video is, the front end believes that the engine holds it, and the same video in the
    client's corrected request would be missed there. In `vllm_xargs` vLLM turns false into 0 and answers other types
    with a list of all that it would have taken, so ours are lifted out before it looks.

    Args:
        prefix: Of our parameters' names; beside or in `vllm_xargs`.
        calls_tools: The name under which requests with tools are marked.
        check: Parameters of a request -> None; raises VidSpecError. The last given is used.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

    def ours(fields):
        return {key: value for key, value in (fields or {}).items() if str(key).startswith(prefix)}

    def lift(body):
        within = body.get("vllm_xargs") if isinstance(body, dict) else None
        if not isinstance(within, dict) or not ours(within):
            return body
        others = {key: value for key, value in within.items() if key not in ours(within)}
        return {**body, "vllm_xargs": others or None, **ours(within)}

    def found(request):
        return {**ours(request.model_extra), **(getattr(request, "vllm_xargs", None) or {})}

    def hear(original):
        @functools.wraps(original)
        def to_sampling_params(self, *args, **kwargs):
            params = original(self, *args, **kwargs)
            extra = {**found(self), **(params.extra_args or {})}
            if getattr(self, "tools", None) and getattr(self, "tool_choice", None) != "none":
                extra[calls_tools] = True
            params.extra_args = extra or None
            return params

        return to_sampling_params

    def guard(serving, original):
        @functools.wraps(original)
        async def create(self, request, *args, **kwargs):
            with _clients_error():
                serving._vidspec_check(found(request))
            return await original(self, request, *args, **kwargs)

        return create

    for request, serving, name in (
        (ChatCompletionRequest, OpenAIServingChat, "create_chat_completion"),
        (CompletionRequest, OpenAIServingCompletion, "create_completion"),
        (ResponsesRequest, OpenAIServingResponses, "create_responses"),
    ):
        serving._vidspec_check = staticmethod(check)
        original = getattr(serving, name)
        if not hasattr(original, _MARK):
            expect_parameters(original, "self", "request", "raw_request")
            _patch(request, "to_sampling_params", hear(request.to_sampling_params))
            _patch(serving, name, guard(serving, original))
            _validate_before(request, lift)


def _validate_before(model: Any, function: Callable) -> None:
    """Let a pydantic model's input pass a function first."""
    from pydantic_core import core_schema

    def schema(cls, source, handler):
        return core_schema.no_info_before_validator_function(function, handler(source))

    model.__get_pydantic_core_schema__ = classmethod(schema)
    model.model_rebuild(force=True)


@contextlib.contextmanager
def cpu_model_runner(runner_cls: type) -> Iterator[None]:
    """Make `CPUWorker.init_device` build our runner.

    Why: it imports `CPUModelRunner` inside the function, with no method to override (the GPU worker has one).

    Args:
        runner_cls: Ours, a subclass of vLLM's.
    """
    import vllm.v1.worker.cpu.model_runner as module

    original = module.CPUModelRunner
    module.CPUModelRunner = runner_cls  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        module.CPUModelRunner = original  # type: ignore[misc]


def keep_media_of_cached_prefixes() -> None:
    """Hand workers the pixels of images and videos that the prefix cache covers, in engines that use our method.

    Why: the target needs no encoder run for them, so the scheduler strips their data; the draft has a cache of its own,
    which knows nothing of the target's, and needs to see them: the second turn of every conversation about a video.
    """
    from vllm.v1.core.sched import output
    from vllm.v1.core.sched.scheduler import Scheduler

    strip, init = output.strip_covered_mm_data, Scheduler.__init__
    if hasattr(strip, _MARK):
        return
    expect_parameters(strip, "mm_features", "num_computed_tokens", "uses_mrope")
    expect_parameters(init, "self", "vllm_config")
    ours = False  # whether this process's engine, of which there is one at a time, uses our method

    @functools.wraps(init)
    def init_scheduler(self, vllm_config, *args, **kwargs):
        nonlocal ours
        ours = METHOD in (vllm_config.additional_config or {})
        init(self, vllm_config, *args, **kwargs)

    def strip_unless_ours(mm_features, num_computed_tokens, uses_mrope=False):
        return mm_features if ours else strip(mm_features, num_computed_tokens, uses_mrope=uses_mrope)

    _patch(Scheduler, "__init__", init_scheduler)
    _patch(output, "strip_covered_mm_data", strip_unless_ours)


def observe_attention(layer: Any, observer: Callable) -> None:
    """Call `observer(layer, query, kv_cache, attn_metadata)` after each forward of a target's attention layer.

    Why: fused attention keeps its weights to itself; q and the paged keys meet here and nowhere else. The wrapper sits
    on one layer's implementation object, so the draft's layers and every other engine of the process stay untouched; it
    runs inside vLLM's opaque attention operator, hence under torch.compile and piecewise graphs too.

    Args:
        layer: vLLM's `Attention`.
        observer: Reads only.
    """
    original = layer.impl.forward
    expect_parameters(original, "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")

    @functools.wraps(original)
    def forward(attn_layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs):
        result = original(attn_layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)
        observer(attn_layer, query, kv_cache, attn_metadata)
        return result

    layer.impl.forward = forward


def intercept_attention(layer: Any, interceptor: Callable) -> None:
    """Run `interceptor(original, layer, query, key, value, kv_cache, attn_metadata, output, ...)` as a layer's forward.

    Why: vLLM's backends know no tree masks (upstream removed tree attention, #42121). As with `observe_attention` only
    this layer object changes, and the call comes from inside vLLM's opaque attention operator.

    Args:
        layer: vLLM's `Attention`.
        interceptor: Calls `original` with the same arguments for whatever it does not compute itself.

    Raises:
        VidSpecError: The backend writes its cache inside `forward`, so that it cannot be left out.
    """
    original = layer.impl.forward
    expect_parameters(original, "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")
    backend = layer.get_attn_backend()
    if backend.forward_includes_kv_cache_update:
        raise VidSpecError(
            f"tree drafts need an attention backend with a separate cache update, not {backend.get_name()}"
        )
    layer.impl.forward = functools.wraps(original)(functools.partial(interceptor, original))


def adjust_positions(model_state: Any, adjust: Callable, dummy: Callable) -> None:
    """Choose the positions that the target's forward sees.

    Why: tree nodes need the position of their depth, and the positions in the batch must stay: slots, the sampler and
    vLLM's own bookkeeping read them. Dummy runs are covered too, so that captured graphs see the same buffer.

    Args:
        model_state: The runner's; two methods are wrapped on the object.
        adjust: `[num_tokens]` or `[num_axes, num_tokens]` positions -> those to use.
        dummy: Number of tokens -> positions of a dummy run, where the model has 1-D positions.
    """
    prepare_inputs, prepare_dummy_inputs = model_state.prepare_inputs, model_state.prepare_dummy_inputs
    expect_parameters(prepare_inputs, "input_batch", "req_states")
    expect_parameters(prepare_dummy_inputs, "num_reqs", "num_tokens")

    def prepare(input_batch, req_states):
        inputs = prepare_inputs(input_batch, req_states)
        return {**inputs, "positions": adjust(inputs.get("positions", input_batch.positions))}

    def prepare_dummy(num_reqs, num_tokens):
        inputs = prepare_dummy_inputs(num_reqs, num_tokens)
        return inputs if "positions" in inputs else {**inputs, "positions": dummy(num_tokens)}

    model_state.prepare_inputs, model_state.prepare_dummy_inputs = prepare, prepare_dummy


def expose_hidden_states(target: Any, layers: tuple[int, ...]) -> None:
    """Make a target return the hidden states that enter these layers beside its output, as it does for EAGLE-3.

    Why: vLLM offers this to its own methods only, by their names. LLaVA-OneVision passes its language model's result
    through, but does not declare so; the decoder inside does.

    Args:
        target: The loaded model.
        layers: 0 is the embeddings, i what layer i - 1 puts out.

    Raises:
        VidSpecError: Its decoder cannot.
    """
    language_model = target.get_language_model() if hasattr(target, "get_language_model") else target
    decoder = getattr(language_model, "model", language_model)
    if not hasattr(decoder, "_set_aux_hidden_state_layers"):
        raise VidSpecError(f"{type(target).__name__} returns no hidden states in vLLM: use another pruner than uv")
    decoder._set_aux_hidden_state_layers(layers)


def keep_shared_noise(sampler: Any) -> None:
    """Let a runner's sampler draw by vLLM's own kernel, whatever a batch asks for.

    Why: on a GPU a batch with top-k or top-p, no greedy request and no seed goes to FlashInfer's sampler, whose noise
    is not a function of seed, position and token. Then draft and target share none, and no output is what vanilla's
    own kernel would have drawn. Prompts' first tokens come from the same sampler.

    Args:
        sampler: Model Runner V2's.
    """
    if not isinstance(getattr(sampler, "use_flashinfer", None), bool):
        raise VidSpecError("this vLLM's sampler no longer says use_flashinfer; vllm_vidspec needs vLLM 0.32")
    sampler.use_flashinfer = False


@contextlib.contextmanager
def without_kv_connector() -> Iterator[None]:
    """Run a forward that no KV connector sees.

    Why: vLLM's attention operator offers every layer of every forward to the connector, and a draft's layers are not
    the target's, though they may have its layers' names. vLLM's own way to pass one by is the same, for dummy runs.
    """
    from vllm.distributed.kv_transfer import kv_transfer_state

    connector, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, None
    try:
        yield
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = connector


def repair_interpreter_kernels() -> None:
    """Replace the two sampling kernels that Triton's interpreter cannot run by torch versions; CPU engine only.

    Why: under the interpreter vLLM's top-k/top-p kernel and its grammar-bitmask kernel raise `'int' object has no
    attribute 'to'`. The first has a torch twin in vLLM itself; the second's specification is one masked fill. The GPU
    path is never touched.
    """
    if not _is_interpreted():
        return
    import vllm.v1.sample.ops.topk_topp_sampler as topk_topp
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    expect_parameters(topk_topp.apply_top_k_top_p_triton, "logits", "k", "p")
    expect_parameters(topk_topp.apply_top_k_top_p_pytorch, "logits", "k", "p", "allow_cpu_sync")

    def apply_top_k_top_p(logits, k, p, *_args, **_kwargs):
        return topk_topp.apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)

    _patch(topk_topp, "apply_top_k_top_p_triton", apply_top_k_top_p)

    expect_parameters(
        StructuredOutputsWorker.apply_grammar_bitmask, "logits", "input_batch", "grammar_req_ids", "grammar_bitmask"
    )
    _patch(StructuredOutputsWorker, "apply_grammar_bitmask", _apply_grammar_bitmask)


def speed_up_interpreter_kernels() -> None:
    """Replace interpreted kernels on the decode path by bit-equal numpy twins; CPU engine only.

    Why: the interpreter runs one program at a time at some milliseconds each, and sampling launches one per logits row;
    at temperature > 0 that is most of a step.
    """
    if not _is_interpreted():
        return
    import vllm.v1.worker.gpu.sample.gumbel as gumbel

    from vllm_vidspec.engine.cpu import kernels as cpu_kernels

    kernel = gumbel._gumbel_sample_kernel
    if hasattr(kernel, _MARK):
        return
    expect_parameters(
        kernel.fn,
        "local_argmax_ptr",
        "local_max_ptr",
        "logits_cache_ptr",
        "logits_ptr",
        "expanded_idx_mapping_ptr",
        "seeds_ptr",
        "pos_ptr",
        "temp_ptr",
        "vocab_size",
        "BLOCK_SIZE",
        "IS_DRAFTING",
        "APPLY_TEMPERATURE",
        "USE_FP64",
    )
    _patch(gumbel, "_gumbel_sample_kernel", cpu_kernels.GumbelSampleKernel(kernel))

    import vllm.v1.worker.gpu.sample.bad_words as bad_words
    import vllm.v1.worker.gpu.sample.penalties as penalties

    expect_parameters(
        penalties._penalties_kernel.fn,
        "logits_ptr",
        "expanded_idx_mapping_ptr",
        "token_ids_ptr",
        "expanded_local_pos_ptr",
        "repetition_penalty_ptr",
        "frequency_penalty_ptr",
        "presence_penalty_ptr",
        "prompt_bin_mask_ptr",
        "output_bin_counts_ptr",
        "vocab_size",
    )
    expect_parameters(
        bad_words._bad_words_kernel.fn,
        "logits_ptr",
        "expanded_idx_mapping_ptr",
        "bad_word_token_ids_ptr",
        "bad_word_offsets_ptr",
        "num_bad_words_ptr",
        "all_token_ids_ptr",
        "prompt_len_ptr",
        "total_len_ptr",
        "input_ids_ptr",
        "expanded_local_pos_ptr",
    )
    _patch(penalties, "_penalties_kernel", cpu_kernels.PenaltiesKernel())
    _patch(bad_words, "_bad_words_kernel", cpu_kernels.BadWordsKernel())


def _is_interpreted() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu() and os.environ.get("TRITON_INTERPRET") == "1"


def _apply_grammar_bitmask(self, logits, input_batch, grammar_req_ids, grammar_bitmask) -> None:
    """Torch version of vLLM's grammar mask: bit v of row m allows token v at logits row (request, position) of m.

    Args:
        logits: `[num_logits, vocab_size]` float, masked in place.
        input_batch: vLLM's batch.
        grammar_req_ids: Requests with a grammar, in bitmask order.
        grammar_bitmask: `[num_masks, ceil(vocab_size / 32)]` int32 numpy.
    """
    import torch
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
