"""Patches of start-up: our method becomes a configuration, our errors one line."""

import copy
import os
import sys
from collections.abc import Callable
from typing import Any, get_args

from vllm_vidspec.config import METHOD
from vllm_vidspec.engine.compat.api import is_ours
from vllm_vidspec.engine.compat.contract import NEEDED_VLLM, wrap
from vllm_vidspec.errors import VidSpecError


def methods() -> set[str]:
    """Return the speculative methods that vLLM's own configuration takes."""
    from vllm.config.speculative import SpeculativeMethod

    found, left = set(), [SpeculativeMethod]
    while left:
        one = left.pop()
        found |= {one} if isinstance(one, str) else set()
        left += get_args(one)
    return found


def allow_method_flag() -> None:
    """Let vLLM's parsers take our method after `--spec-method`.

    Why: the flag's choices are those of vLLM's own methods, and its parser ends the command before `EngineArgs` exist.
    vLLM loads plugins before it adds its server's arguments. Until: vLLM lets plugins name a speculative method.
    """
    from vllm.engine.arg_utils import EngineArgs

    def with_ours(original, parser):
        parser = original(parser)
        (flag,) = (action for action in parser._actions if "--spec-method" in action.option_strings)
        if flag.choices is not None and METHOD not in flag.choices:
            flag.choices = [*flag.choices, METHOD]
        return parser

    wrap(EngineArgs, "add_cli_args", with_ours, "parser")


def hook_engine_config(translate: Callable, finish: Callable, warn_unnamed: Callable) -> None:
    """Wrap `EngineArgs.create_engine_config`.

    Why: vLLM knows no third-party speculative methods, and `worker_cls` is read before `create_speculative_config`
    runs, so this is the first place where "vidspec" can become something that vLLM understands.
    Until: vLLM lets plugins add a speculative method.

    `translate` makes a `VidSpecConfig` of `EngineArgs`, which it rewrites, or None; `finish` checks what vLLM built;
    `warn_unnamed` checks it where no method is named.
    """
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    ours = False  # whether the configuration that is being built uses our method

    def hooked(original, self, *args, **kwargs):
        nonlocal ours
        config = translate(self)
        ours = config is not None
        is_named = ours or self.spec_method or "method" in (self.speculative_config or {})
        try:
            vllm_config = original(self, *args, **kwargs)
        finally:
            ours = False
        if config is not None:
            finish(vllm_config, config)
        elif not is_named:
            warn_unnamed(vllm_config)
        return vllm_config

    def unless_ours(original, self):
        if not ours and not is_ours(self):  # configurations are checked again wherever a model is made
            original(self)

    def unless_of_ours(original, self):
        if not ours and not is_ours(self.speculative_config):
            original(self)

    def own_config(original, target_hf_overrides=None, *args, **kwargs):
        if not ours:
            return original(target_hf_overrides, *args, **kwargs)
        return target_hf_overrides if callable(target_hf_overrides) else {}

    wrap(EngineArgs, "create_engine_config", hooked)
    # Of a draft whose checkpoints bring heads for multi-token prediction (GLM-OCR, EXAONE 4.5) vLLM would load these.
    wrap(SpeculativeConfig, "compose_draft_hf_overrides", own_config, "target_hf_overrides")
    # Two vocabularies that are padded differently are no reason to refuse a draft of ours.
    wrap(SpeculativeConfig, "verify_equal_vocab_size_if_draft_model", unless_ours, "self")
    # From 0.33 on a draft's shorter context would shorten the target's; ours goes on without speculation there.
    if hasattr(VllmConfig, "_limit_max_model_len_to_draft"):
        wrap(VllmConfig, "_limit_max_model_len_to_draft", unless_of_ours, "self")


def drafter_config(base: Any, num_ranks: int, rank: int) -> Any:
    """Return a target's `VllmConfig` as it holds for a rank of a drafter in processes of its own.

    Why: vLLM configures one set of ranks, the target's. Until: it runs a draft model in processes of its own.
    """
    own = copy.copy(base)
    own.parallel_config = _own_ranks(base.parallel_config, num_ranks, rank)
    own.cache_config = copy.copy(base.cache_config)
    own.speculative_config = copy.copy(base.speculative_config)
    theirs = base.speculative_config.draft_parallel_config
    own.speculative_config.draft_parallel_config = _own_ranks(theirs, num_ranks, rank)
    return own


def _own_ranks(base: Any, num_ranks: int, rank: int) -> Any:
    from vllm.platforms import current_platform

    alone = ("pipeline_parallel_size", "data_parallel_size")
    values: dict[str, Any] = dict.fromkeys(("tensor_parallel_size", "world_size"), num_ranks) | dict.fromkeys(alone, 1)
    values |= {"data_parallel_rank": 0, "data_parallel_index": 0, "rank": rank, "assigned_physical_gpu_ids": None}
    values["disable_custom_all_reduce"] = base.disable_custom_all_reduce or current_platform.is_cpu()
    own = copy.copy(base)
    for name, value in values.items():
        if not hasattr(own, name):
            raise VidSpecError(f"this vLLM's ParallelConfig no longer has {name}; {NEEDED_VLLM}")
        setattr(own, name, value)
    return own


def install_error_line(refusal: Callable[[], str | None]) -> None:
    """Print an uncaught `VidSpecError` of a `vllm` command, or a worker's `refusal`, as one line, not a stack trace.

    Why: vLLM's own start-up prints some forty lines of frames around a wrong knob, and what a worker refuses reaches
    the server as "Engine core initialization failed". Python programs that use `LLM(...)` keep their traceback.
    Until: vLLM prints a refusal as one line.
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
