"""In-process engines for tests: load one, run scenarios on it, read our counters, take it down again."""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from vllm_vidspec import metrics
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs

MAX_TOKENS = 40


@dataclass
class Engine:
    """A running engine and what tests read of it."""

    llm: Any
    family: str

    @property
    def runner(self) -> Any:
        """The model runner of the (single) worker."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    @property
    def speculator(self) -> Any:
        """Our speculator."""
        return self.runner.speculator

    def counters(self) -> dict[str, int]:
        """Return our counters so far."""
        return metrics.read_metrics(metrics.path_for(self.llm.llm_engine.vllm_config.instance_id))

    def generate(self, requests: list[tuple[dict, dict]]) -> list[Any]:
        """Run `(prompt, SamplingParams arguments)` pairs in one batch; return vLLM's outputs in order."""
        from vllm import SamplingParams

        prompts = [prompt for prompt, _ in requests]
        params = [SamplingParams(**{"max_tokens": MAX_TOKENS, **arguments}) for _, arguments in requests]
        return self.llm.generate(prompts, params, use_tqdm=False)

    def measured(self, requests: list[tuple[dict, dict]]) -> tuple[list[Any], dict[str, int]]:
        """Return `generate`'s outputs and what our counters gained meanwhile."""
        before = self.counters()
        outputs = self.generate(requests)
        return outputs, metrics.difference(before, self.counters())


@contextlib.contextmanager
def engine(family: str, draft: str | None = None, overrides: dict | None = None, **spec: Any) -> Iterator[Engine]:
    """Load the bundled pair of a family; `draft` None is vanilla vLLM. Draft errors raise unless the test says not."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    if draft is not None:
        spec = {"on_draft_error": "raise", **spec}
    with _cheap_collections():
        llm = LLM(**pairs.llm_kwargs(family, draft, overrides=overrides, **spec))
        try:
            yield Engine(llm, family)
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()


@contextlib.contextmanager
def _cheap_collections() -> Iterator[None]:
    """Collect an engine's garbage once, at the end.

    vLLM collects garbage some twenty times while an engine starts and stops. Each time is a third of a second over all
    that the process has imported, and takes most of what a tiny engine's start does. What is frozen is not looked at.
    """
    gc.freeze()
    try:
        with mock.patch.object(gc, "unfreeze", lambda: None):
            yield
    finally:
        gc.unfreeze()
        gc.collect()


def token_ids(outputs: list[Any]) -> list[list[list[int]]]:
    """Return the token ids of every completion of every request."""
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


def videos(family: str, count: int, **sampling: Any) -> list[tuple[dict, dict]]:
    """Return requests that describe held-out videos; request i samples with seed i."""
    return [
        (pairs.video_prompt(family, world.held_out(i).frames), {"temperature": 0.0, "seed": i, **sampling})
        for i in range(count)
    ]


def mixed_batch(family: str) -> list[tuple[dict, dict]]:
    """Return one batch of every kind of prompt under every sampling parameter, each request seeded."""
    frames = [world.held_out(i).frames for i in range(4)]
    stills = [video[0] for video in frames]
    video, image, text = (
        lambda i: pairs.video_prompt(family, frames[i]),
        lambda *i: pairs.media_prompt(family, "describe the video", images=[stills[k] for k in i]),
        pairs.media_prompt(family, "describe the video"),
    )
    two_videos = pairs.media_prompt(family, "describe the video", videos=frames[:2])
    both = pairs.media_prompt(family, "describe the video", videos=[frames[2]], images=[stills[3]])
    common = [3, 5, 8, 13, 21, 34]  # words of the small vocabulary
    return [
        (video(0), {"temperature": 0.0}),
        (video(1), {"temperature": 0.7, "seed": 11}),
        (video(2), {"temperature": 1.0, "top_p": 0.9, "seed": 12}),
        (video(3), {"temperature": 1.0, "top_k": 5, "seed": 13}),
        (text, {"temperature": 1.0, "seed": 14}),
        (text, {"temperature": 0.0}),
        (image(0), {"temperature": 0.7, "min_p": 0.05, "seed": 15}),
        (image(1, 2), {"temperature": 0.0}),
        (two_videos, {"temperature": 1.0, "presence_penalty": 0.6, "frequency_penalty": 0.4, "seed": 16}),
        (both, {"temperature": 0.0, "repetition_penalty": 1.2}),
        (video(0), {"temperature": 1.0, "bad_words": ["left", "moves", "in the middle"], "seed": 17}),
        (video(1), {"temperature": 1.0, "logit_bias": dict.fromkeys(common, 2.0), "seed": 18}),
        (video(2), {"temperature": 0.7, "logprobs": 3, "seed": 19}),
        (video(3), {"temperature": 1.0, "n": 3, "seed": 20}),
        (video(0), {"temperature": 0.0, "stop": ["."]}),
        (video(1), {"temperature": 0.0, "max_tokens": 1}),
        (video(2), {"temperature": 0.0, "max_tokens": 2}),
        (video(3), {"temperature": 1.0, "min_tokens": 30, "seed": 21}),
        (text, {"temperature": 1.0, "top_p": 0.8, "top_k": 7, "min_p": 0.02, "repetition_penalty": 1.1, "seed": 22}),
        (video(0), {"temperature": 1.0, "allowed_token_ids": list(range(3, 60)), "seed": 23}),
    ]
