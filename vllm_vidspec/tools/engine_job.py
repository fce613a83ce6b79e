"""One engine in one process for `vidspec bench`: job on stdin, JSON events on a pipe; vLLM's public API only."""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from vllm_vidspec.tools import pairs

WARM_UP_TOKENS = 8


class Events:
    """Writes events to the parent."""

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`."""
        self._stream = stream

    def send(self, event: str, **fields: Any) -> None:
        """Write one event."""
        print(json.dumps({"event": event, **fields}), file=self._stream, flush=True)


def main(run: Callable[[dict[str, Any], Events], None]) -> int:
    """Read a job, the first line of stdin, and run it; the exit status is 1 if it failed, the last event says why."""
    events = Events(os.fdopen(int(sys.argv[1]), "w"))
    job = json.loads(sys.stdin.readline())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        run(job, events)
    except Exception as error:
        import traceback

        traceback.print_exc()
        lines = str(error).strip().splitlines()
        name = type(error).__name__
        reason = lines[0] if name == "VidSpecError" else f"{name}: {lines[-1] if lines else 'no message'}"
        events.send("error", message=reason)
        return 1
    return 0


def _run(job: dict[str, Any], events: Events) -> None:
    """Load the engine, then generate once per sampling.

    Args:
        job: `llm` (arguments of LLM), `family`, `question`, `requests`, `samplings` (SamplingParams arguments,
            each without its seed), `seed` (None: unseeded).
        events: Where to report.
    """
    from vllm import LLM, SamplingParams

    from vllm_vidspec import metrics
    from vllm_vidspec.shapeworld import world

    start = time.perf_counter()
    llm = LLM(**job["llm"])
    require_runner_v2(llm.llm_engine.vllm_config)
    family, question = job["family"], job["question"]
    # One video outside the measured ones: what happens once (lazy imports, thread pools) is not part of any figure.
    warm_up = pairs.video_prompt(family, world.held_out(job["requests"]).frames, question)
    llm.generate([warm_up], SamplingParams(temperature=0, max_tokens=WARM_UP_TOKENS), use_tqdm=False)
    prompts = [pairs.video_prompt(family, world.held_out(i).frames, question) for i in range(job["requests"])]
    events.send("ready", seconds=time.perf_counter() - start)

    scheduling = "async" if llm.llm_engine.vllm_config.scheduler_config.async_scheduling else "sync"
    path = metrics.path_for(llm.llm_engine.vllm_config.instance_id) if "speculative_config" in job["llm"] else None
    for index, sampling in enumerate(job["samplings"]):
        llm.reset_prefix_cache()  # every sampling pays for its own prefill
        before = metrics.read_metrics(path) if path else None
        params = [
            SamplingParams(**sampling, seed=None if job["seed"] is None else job["seed"] + i)
            for i in range(len(prompts))
        ]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=_progress(events, index))
        seconds = time.perf_counter() - start
        events.send(
            "result",
            index=index,
            seconds=seconds,
            scheduling=scheduling,
            token_ids=[list(output.outputs[0].token_ids) for output in outputs],
            metrics=metrics.difference(before, metrics.read_metrics(path)) if path and before else None,
        )


def require_runner_v2(vllm_config: Any) -> None:
    """Refuse Model Runner V1: its sampler draws other noise, so a comparison with it would say nothing."""
    from vllm_vidspec.errors import VidSpecError

    if not vllm_config.use_v2_model_runner:
        raise VidSpecError("this vLLM runs Model Runner V1 (no Triton backend for this device); see `vidspec doctor`")


def _progress(events: Events, index: int) -> Any:
    """Return a tqdm class whose updates become events."""
    from tqdm import tqdm

    class Reporter(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # LLM.generate shows one bar for rendering prompts and one for processing them; only the second counts.
            self._counts = str(kwargs.get("desc", "")).startswith("Processed")
            super().__init__(*args, **kwargs | {"file": open(os.devnull, "w")})  # noqa: SIM115

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if self._counts:
                events.send("progress", index=index, done=int(self.n))
            return shown

    return Reporter


if __name__ == "__main__":
    sys.exit(main(_run))
