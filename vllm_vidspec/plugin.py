"""vLLM's entry point into this project: idempotent, runs in every vLLM process, never raises."""

import os


def register() -> None:
    """Teach this vLLM process `--speculative-config '{"method": "vidspec", ...}'`.

    vLLM logs and skips a plugin that raises, which would hide a wrong version behind "unknown method"; so the hook is
    installed regardless and complains, in one line, when the method is used.
    """
    from vllm_vidspec.engine import preflight, scheduling
    from vllm_vidspec.engine.compat import api, config, scheduler
    from vllm_vidspec.engine.report import lines, server_counters

    lines.bound_log_lines()
    config.install_error_line(server_counters.refusal)
    config.allow_method_flag()
    config.hook_engine_config(preflight.translate, preflight.finish, preflight.warn_unnamed)
    if preflight.version_problem() is not None:
        return
    api.allow_sampling_parameters()
    scheduler.hook_scheduler(scheduling.SchedulerSide)

    from vllm.platforms import current_platform

    if current_platform.is_cpu() and os.environ.get("TRITON_INTERPRET") == "1":
        from vllm_vidspec.engine.cpu.install import install

        install()
