"""Patches of vLLM's front end: what requests may ask for, and what responses and /metrics say."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from vllm.logger import init_logger

from vllm_vidspec.config import REQUEST_RECORD
from vllm_vidspec.engine.compat.contract import wrap
from vllm_vidspec.errors import VidSpecError

logger = init_logger("vllm.vidspec")

_RECORD = "_vidspec_record"  # on vLLM's outputs of requests that ask for one
_KINDS = "_vidspec_kinds"  # on vLLM's state of a request
_hearers: dict[str, Callable[[Any, dict[str, Any]], None]] = {}  # see `_hear_steps`
# Our parameters of the HTTP request that is being served.
_asked: ContextVar[dict[str, Any]] = ContextVar("vidspec_asked", default={})  # noqa: B039 - it is never written


def allow_sampling_parameters() -> None:
    """Let requests use `min_p` and `logit_bias` when the speculative method is ours, and check what they ask of it.

    Why: vLLM refuses both for every speculative method; Model Runner V2 applies both at every logits row, so here they
    are exact. What a request asks of our scorers must be refused here, in the API server, as the client's error.
    Until: vLLM asks a method which parameters it supports.
    """
    from vllm.sampling_params import SamplingParams

    def checked(original, self, speculative_config):
        check = getattr(speculative_config, "_vidspec", None)
        if check is None:
            original(self, speculative_config)
            return
        with _clients_error():
            check(self.extra_args)

    wrap(SamplingParams, "_validate_spec_decode", checked, "self", "speculative_config")


def mark_as_ours(speculative_config: Any, check: Callable) -> None:
    """Remember that a `SpeculativeConfig` is our method's, and what checks a request's `extra_args`."""
    speculative_config._vidspec = check


def is_ours(speculative_config: Any) -> bool:
    """Return whether a `SpeculativeConfig` is the translation of our method."""
    return hasattr(speculative_config, "_vidspec")


@contextlib.contextmanager
def _clients_error() -> Iterator[None]:
    """Turn a VidSpecError about a request into vLLM's, which the API server answers with a 400."""
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except VidSpecError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from None


@contextlib.contextmanager
def _spared() -> Iterator[None]:
    """Log an error within, one of each kind, and go on: here vLLM serves all requests, and no figure is worth their
    answers.
    """
    try:
        yield
    except Exception as error:
        logger.warning_once("vidspec: responses go without our counts and records: %s", repr(type(error)))


def _hear_steps(purpose: str, hear: Callable[[Any, dict[str, Any]], None]) -> None:
    """Let `hear(state, step)` (of each purpose the last given) have what the engine says of a request's steps, given
    vLLM's `RequestState` of the answer.

    Why: vLLM passes what the engine says of a step on in types of its own; ours travels in `kv_transfer_params`
    (`scheduler._hand_over`), and is taken out of it here, where an output becomes a client's.
    Until: a worker's output may carry a plugin's fields to the response.
    """
    from vllm.v1.engine.output_processor import RequestState

    def made(
        original, self, new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params=None, *args, **kw
    ):  # vLLM's own names: an abort gives all by name
        if step := (kv_transfer_params or {}).get(REQUEST_RECORD):
            kv_transfer_params = {key: of for key, of in kv_transfer_params.items() if key != REQUEST_RECORD} or None
            for each in _hearers.values():
                with _spared():
                    each(self, step)
        given = (new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params)
        output = original(self, *given, *args, **kw)
        if output is not None and hasattr(self, _RECORD):
            setattr(output, _RECORD, getattr(self, _RECORD).take())
        return output

    _hearers[purpose] = hear
    outputs = ("new_token_ids", "pooling_output", "finish_reason", "stop_reason", "kv_transfer_params")
    wrap(RequestState, "make_request_output", made, "self", *outputs)


def extend_request_metrics(extend: Callable[[Any, Sequence[int]], Any]) -> None:
    """Let what `--per-request-spec-decode-metrics` reports of a finished request be `extend(reported, kinds)`, given
    the kinds of its tokens.

    Why: vLLM's scheduler counts accepted tokens; which of them were loosened, only our scorer knows.
    Until: a rejection sampler can report counts of its own.
    """
    from vllm.v1.engine.output_processor import RequestState

    def hear(state, step):
        vars(state).setdefault(_KINDS, []).extend(step["kinds"])

    def extended(original, self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        if output.spec_decode_metrics is not None:
            with _spared():
                output.spec_decode_metrics = extend(output.spec_decode_metrics, getattr(self, _KINDS, ()))
        return output

    _hear_steps("metrics", hear)
    wrap(RequestState, "_new_completion_output", extended)


def show_request_records(make: Callable[[Any], Any]) -> None:
    """Let the response of a chat request that asks with `REQUEST_RECORD` have its record under the same name.

    Why: a response has no place for a plugin's fields. Until: it has.

    In a stream each chunk has the steps since the last; of `n` answers there are none. `make(state)` is the record of
    one answer, given vLLM's `RequestState`: `add` takes a step in, `take` returns what is new.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.outputs import RequestOutput

    def hear(state, step):
        if "drafted" not in step:
            return  # another request's than one that asks
        if not hasattr(state, _RECORD):
            setattr(state, _RECORD, make(state))
        getattr(state, _RECORD).add(step)

    def add(original, self, next_output, aggregate):
        original(self, next_output, aggregate)
        setattr(self, _RECORD, [*getattr(self, _RECORD, ()), *getattr(next_output, _RECORD, ())])

    async def watched(results, steps):
        async for result in results:
            steps += getattr(result, _RECORD, ())
            yield result

    def asks(request):
        return (request.n or 1) == 1 and (request.model_extra or {}).get(REQUEST_RECORD) is True

    async def with_steps(lines, steps):
        async for line in lines:
            if steps and line.startswith("data: {"):
                chunk = json.loads(line[6:]) | {REQUEST_RECORD: steps.copy()}
                line = f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
                steps.clear()
            yield line

    def stream(original, self, request, result_generator, *args, **kwargs):
        if not asks(request):
            return original(self, request, result_generator, *args, **kwargs)
        steps = []  # type: ignore[var-annotated]
        return with_steps(original(self, request, watched(result_generator, steps), *args, **kwargs), steps)

    async def full(original, self, request, result_generator, *args, **kwargs):
        steps = []  # type: ignore[var-annotated]
        results = watched(result_generator, steps) if asks(request) else result_generator
        response = await original(self, request, results, *args, **kwargs)
        if steps and isinstance(response, ChatCompletionResponse):
            setattr(response, REQUEST_RECORD, steps)
        return response

    _hear_steps("records", hear)
    wrap(RequestOutput, "add", add, "self", "next_output", "aggregate")
    wrap(OpenAIServingChat, "chat_completion_stream_generator", stream, "self", "request", "result_generator")
    wrap(OpenAIServingChat, "chat_completion_full_generator", full, "self", "request", "result_generator")


def show_to_every_api_server(collector: Any) -> None:
    """Show a collector (the last given) on /metrics where vLLM does not serve prometheus_client's default registry.

    Why: with several API servers (or PROMETHEUS_MULTIPROC_DIR set) every scrape makes a registry of its own, of nothing
    but a collector that adds up what the servers' processes wrote to files; it knows none of the default registry's.
    Until: vLLM adds those.
    """
    from prometheus_client.multiprocess import MultiProcessCollector

    def joined(original, self):
        yield from original(self)
        yield from self._vidspec_collector.collect()

    MultiProcessCollector._vidspec_collector = collector  # type: ignore[attr-defined]
    wrap(MultiProcessCollector, "collect", joined, "self")


def hear_request_choices(prefix: str, calls_tools: str, check: Callable) -> None:
    """Let our request parameters reach the worker from every API of vLLM's, and the fact that a request may call tools.

    Why: vLLM forwards `vllm_xargs` and drops other unknown fields, where clients that use `extra_body` put ours, and
    all of them where an API's body becomes another's (messages, batches); whether a parser for tool calls reads the
    output is known to the API server alone. What is wrong is refused before the prompt is rendered: else the front end
    believes that the engine holds its video, and would leave it out of the corrected request. In `vllm_xargs` vLLM
    turns false into 0 and answers other types with a list of all that it would have taken, so ours are lifted out
    before it looks. Until: vLLM forwards a body's unknown fields to `extra_args`.

    `check` (the last given is used) raises VidSpecError for parameters, which all begin with `prefix`;
    what begins with an underscore and that is ours to say, as is `calls_tools`, which marks requests with tools.
    """
    from vllm.entrypoints.generate.generative_scoring.serving import ServingGenerativeScoring
    from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens

    def found(request):
        return {**_ours(request.model_extra, prefix), **_ours(getattr(request, "vllm_xargs", None), prefix)}

    def found_in_body(raw_request):  # as FastAPI has parsed it; to ask for more of it could be to wait for ever
        body = getattr(raw_request, "_json", None)
        return {**_ours(body, prefix), **_ours(body.get("vllm_xargs"), prefix)} if isinstance(body, dict) else {}

    def observe(original, self, *args, **kwargs):
        params = original(self, *args, **kwargs)
        given = {key: value for key, value in (params.extra_args or {}).items() if not key.startswith(f"_{prefix}")}
        extra = {**found(self), **given, **_asked.get()}
        if getattr(self, "tools", None) and getattr(self, "tool_choice", None) != "none":
            extra[calls_tools] = True
        params.extra_args = extra or None
        return params

    async def guard(original, self, request, raw_request=None, *args, **kwargs):
        asked = {**found(request), **found_in_body(raw_request), **_asked.get()}
        with _clients_error():
            self._vidspec_check(asked)
        if asked and hasattr(request, "sampling_params"):  # of tokens, where the client gives vLLM's own
            request.sampling_params.extra_args = {**asked, **(request.sampling_params.extra_args or {})}
        token = _asked.set(asked)
        try:
            return await original(self, request, raw_request, *args, **kwargs)
        finally:
            _asked.reset(token)

    for serving, name in (
        (OpenAIServingChat, "create_chat_completion"),  # messages pass here, too
        (OpenAIServingChatBatch, "create_batch_chat_completion"),
        (OpenAIServingCompletion, "create_completion"),
        (OpenAIServingResponses, "create_responses"),
        (ServingTokens, "serve_tokens"),
        (ServingGenerativeScoring, "create_generative_scoring"),
    ):
        serving._vidspec_check = staticmethod(check)
        wrap(serving, name, guard, "self", "request", "raw_request")
    for request in (ChatCompletionRequest, CompletionRequest, ResponsesRequest):
        if wrap(request, "to_sampling_params", observe):
            _lift_out_of_xargs(request, prefix)


def _ours(fields: Any, prefix: str) -> dict[str, Any]:
    """Return those fields, of a dict if it is one, whose names begin with the prefix."""
    fields = fields if isinstance(fields, dict) else {}
    return {key: value for key, value in fields.items() if str(key).startswith(prefix)}


def _lift_out_of_xargs(model: Any, prefix: str) -> None:
    """Let a pydantic model of a request find our parameters beside `vllm_xargs` where a client put them inside."""
    from pydantic_core import core_schema

    def lift(body):
        within = body.get("vllm_xargs") if isinstance(body, dict) else None
        if not isinstance(within, dict) or not (ours := _ours(within, prefix)):
            return body
        others = {key: value for key, value in within.items() if key not in ours}
        return {**body, "vllm_xargs": others or None, **ours}

    def schema(cls, source, handler):
        return core_schema.no_info_before_validator_function(lift, handler(source))

    model.__get_pydantic_core_schema__ = classmethod(schema)
    model.model_rebuild(force=True)
