"""Patches of start-up and of the scheduler: our method becomes a configuration, our errors one line."""

import os
import sys
from collections.abc import Callable

from vllm_vidspec.config import METHOD
from vllm_vidspec.engine.compat.api import is_ours
from vllm_vidspec.engine.compat.contract import wrap
from vllm_vidspec.errors import VidSpecError

RETUNE = "vidspec_retune"  # the workers' method that changes knobs


def hook_engine_config(translate: Callable, finish: Callable) -> None:
    """Wrap `EngineArgs.create_engine_config`.

    Why: vLLM knows no third-party speculative methods, and `worker_cls` is read before `create_speculative_config`
    runs, so this is the first place where "vidspec" can become something that vLLM understands.

    Args:
        translate: `EngineArgs -> VidSpecConfig | None`; rewrites the arguments, before vLLM builds its configuration.
        finish: `(VllmConfig, VidSpecConfig) -> None`; checks what vLLM built.
    """
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    ours = False  # whether the configuration that is being built uses our method

    def hooked(original, self, *args, **kwargs):
        nonlocal ours
        config = translate(self)
        ours = config is not None
        try:
            vllm_config = original(self, *args, **kwargs)
        finally:
            ours = False
        if config is not None:
            finish(vllm_config, config)
        return vllm_config

    def unless_ours(original, self):
        if not ours and not is_ours(self):  # configurations are checked again wherever a model is made
            original(self)

    def unless_of_ours(original, self):
        if not ours and not is_ours(self.speculative_config):
            original(self)

    wrap(EngineArgs, "create_engine_config", hooked)
    # Two vocabularies that are padded differently are no reason to refuse a draft of ours.
    wrap(SpeculativeConfig, "verify_equal_vocab_size_if_draft_model", unless_ours, "self")
    # From 0.33 on a draft's shorter context would shorten the target's; ours goes on without speculation there.
    if hasattr(VllmConfig, "_limit_max_model_len_to_draft"):
        wrap(VllmConfig, "_limit_max_model_len_to_draft", unless_of_ours, "self")


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


def hook_scheduler(attach: Callable) -> None:
    """Let something of ours sit on the scheduler of an engine that uses our method, and keep the media that we need.

    Why: the scheduler alone sees every step of every request on the host, exactly, and what it decides reaches all
    ranks with its output; vLLM's own way in, `--scheduler-cls`, is the user's. And for images and videos that the
    prefix cache covers it strips the pixels, as the target needs no encoder run for them: the draft has a cache of its
    own, which knows nothing of the target's, and needs to see them, in the second turn of every chat about a video.

    Args:
        attach: `(scheduler, VllmConfig)` -> what has `add(request)`, called before a new request is queued,
            `hear(scheduler_output, output)` after each step, `close()`, and `retuned(knobs)`, entered around the
            workers' change of what it yields.
    """
    from vllm.v1.core.sched import output
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    ours = False  # whether this process's engine, of which there is one at a time, uses our method

    def noting(init, self, vllm_config, *args, **kwargs):
        nonlocal ours
        ours = METHOD in (vllm_config.additional_config or {})
        init(self, vllm_config, *args, **kwargs)
        self._vidspec_side = attach(self, vllm_config) if ours else None

    def unless_ours(strip, mm_features, num_computed_tokens, uses_mrope=False):
        return mm_features if ours else strip(mm_features, num_computed_tokens, uses_mrope=uses_mrope)

    def added(original, self, request):
        if self._vidspec_side is not None and request.request_id not in self.requests:
            self._vidspec_side.add(request)
        original(self, request)

    def heard(original, self, scheduler_output, model_runner_output):
        if self._vidspec_side is not None:
            self._vidspec_side.hear(scheduler_output, model_runner_output)
        return original(self, scheduler_output, model_runner_output)

    def closed(original, self):
        if self._vidspec_side is not None:
            self._vidspec_side.close()
        original(self)

    def called(original, self, method, timeout=None, args=(), kwargs=None):
        side = getattr(self.scheduler, "_vidspec_side", None)
        if method != RETUNE or side is None or not args:
            return original(self, method, timeout, args, kwargs)
        with side.retuned(args[0]) as left:
            return original(self, method, timeout, (left, *args[1:]), kwargs)

    wrap(Scheduler, "__init__", noting, "self", "vllm_config")
    wrap(output, "strip_covered_mm_data", unless_ours, "mm_features", "num_computed_tokens", "uses_mrope")
    wrap(Scheduler, "add_request", added, "self", "request")
    wrap(Scheduler, "update_from_output", heard, "self", "scheduler_output", "model_runner_output")
    wrap(Scheduler, "shutdown", closed, "self")
    wrap(EngineCore, "collective_rpc", called, "self", "method", "timeout", "args", "kwargs")
