"""In-process engines for tests: load one, run scenarios on it, read our counters, take it down again."""

import contextlib
import gc
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from vllm_vidspec import metrics
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs, watching

FAMILIES = QWEN, LLAVA = pairs.FAMILIES[:2]
QWEN3 = pairs.FAMILIES[2]
MAX_TOKENS = 28
NO_CACHE = {"enable_prefix_caching": False}
# Some ten thousand tokens. An engine fills its cache with zeros when it starts, which took an eighth of all tests' time
# while it was pairs.KV_CACHE_BYTES.
KV_CACHE_BYTES = 96 * 2**20
# vLLM's encoder budget must hold one Qwen video, so its prompts of 266 to 550 tokens make a border each.
CHUNK_SIZES = {QWEN: 260, LLAVA: 64, QWEN3: 420}


# What counts an error on the draft's side; one in the drafter's process may end that, and it is started again.
DRAFT_ERRORS = ("skipped_draft_error", "draft_failures", "drafter_restarts")
_running: list["Engine"] = []
_of_ended: Counter[str] = Counter()


def draft_errors() -> Counter[str]:
    """Return the errors on the draft's side that all engines of this process have counted so far."""
    return sum((engine.draft_errors() for engine in _running), Counter(_of_ended))


def _at(path: str) -> Any:
    return property(operator.attrgetter(path))


@dataclass
class Engine:
    """A running engine and what tests read of it: vLLM's parts and ours, by where the engine keeps them."""

    llm: Any
    family: str

    core = _at("llm.llm_engine")
    scheduler = _at("core.engine_core.engine_core.scheduler")
    runner = _at("core.model_executor.driver_worker.worker.model_runner")
    config = _at("runner.knobs.current")
    guides = _at("runner.parts.guides")
    visual = _at("runner.parts.visual")
    verifier = _at("runner.rejection_sampler")
    speculator = _at("runner.speculator")
    draft = _at("speculator.backend.draft_model")
    kv = _at("speculator.backend.drafter.kv")
    breaker = _at("scheduler._vidspec_side._breaker")

    def used_blocks(self) -> int:
        """Return the pool's used blocks after the runner has been told that all requests are finished."""
        self.idle()
        return self.kv.num_used_blocks

    def idle(self) -> None:
        """Run a request of one token: vLLM tells of the end of a request with its next step."""
        self.generate([(pairs.media_prompt(self.family, "describe the video"), {"max_tokens": 1})])

    def look(self) -> None:
        """Let the scheduler's side, which looks now and then, look at what has failed, and at the time."""
        time.sleep(0.3)
        self.idle()

    def counters(self) -> dict[str, int]:
        return metrics.read_metrics(metrics.path_for(self.core.vllm_config.instance_id))

    def draft_errors(self) -> "Counter[str]":
        counted = self.counters()
        return Counter({name: counted[name] for name in DRAFT_ERRORS if counted[name]})

    def generate(self, requests: list[tuple[dict, dict]]) -> list[Any]:
        """Run `(prompt, SamplingParams arguments)` pairs in one batch; return vLLM's outputs in order."""
        prompts = [prompt for prompt, _ in requests]
        return self.llm.generate(prompts, [_params(**arguments) for _, arguments in requests], use_tqdm=False)

    def measured(self, requests: list[tuple[dict, dict]]) -> tuple[list[Any], dict[str, int]]:
        """Return `generate`'s outputs and what our counters gained meanwhile."""
        before = self.counters()
        outputs = self.generate(requests)
        return outputs, metrics.difference(before, self.counters())

    def begin(self, requests: list[tuple[dict, dict]], steps: int = 0) -> None:
        for prompt, arguments in requests:
            self.llm.enqueue([prompt], _params(**arguments), use_tqdm=False)
        for _ in range(steps):
            self.core.step()

    def finish(self) -> list[list[int]]:
        """Let every request end; return their token ids, in the order in which they entered."""
        answers = {}
        while self.core.has_unfinished_requests():
            done = [output for output in self.core.step() if output.finished]
            answers |= {int(output.request_id): list(output.outputs[0].token_ids) for output in done}
        return [answers[number] for number in sorted(answers)]

    def abort(self) -> None:
        self.core.abort_request(list(self.core.output_processor.request_states), internal=True)
        while self.core.has_unfinished_requests():
            self.core.step()

    def retune(self, **knobs: Any) -> None:
        self.llm.collective_rpc("vidspec_retune", args=(knobs,))

    @contextlib.contextmanager
    def retuned(self, **knobs: Any) -> Iterator[None]:
        before = {name: self.config.model_dump()[name] for name in knobs}
        self.retune(**knobs)
        try:
            yield
        finally:
            self.retune(**before)

    @contextlib.contextmanager
    def watched(self, what: Any = watching.pruning) -> Iterator[list[dict]]:
        """Yield a list that holds, afterwards, what was pruned, or with `scores` what became of every token."""
        records: list[dict] = []
        self.llm.collective_rpc(what, args=(True,))
        try:
            yield records
        finally:
            records += self.llm.collective_rpc(what, args=(False,))[0]

    @contextlib.contextmanager
    def preemptions(self) -> Iterator[list]:
        """Yield a list that gains the calls that preempt a request, their first argument."""
        original = self.scheduler._preempt_request
        with mock.patch.object(self.scheduler, "_preempt_request", side_effect=original) as preempt:
            yield preempt.call_args_list


def _params(**arguments: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"max_tokens": MAX_TOKENS, **arguments})


@contextlib.contextmanager
def engine(
    family: str, draft: str | None = None, overrides: dict | None = None, is_ahead: bool = False, **spec: Any
) -> Iterator[Engine]:
    """Load the bundled pair of a family; `draft` None is vanilla vLLM. Draft errors raise unless the test says not.

    With `is_ahead` the scheduler runs a step ahead and always plans K drafts.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    if draft is not None:
        spec = {"on_draft_error": "raise", **spec}
    overrides = {"kv_cache_memory_bytes": KV_CACHE_BYTES, **(overrides or {})}
    with _cheap_collections(), _async_scheduling() if is_ahead else contextlib.nullcontext():
        llm = LLM(**pairs.llm_kwargs(family, draft, overrides=overrides, **spec))
        running = Engine(llm, family)
        if draft is not None:
            _running.append(running)
        try:
            yield running
        finally:
            if draft is not None:
                _of_ended.update(running.draft_errors())
                _running.remove(running)
            llm.llm_engine.engine_core.shutdown()
            del llm, running.llm  # the test may hold on to `running`
            cleanup_dist_env_and_memory()


def in_place_of(patch: Any, owner: Any, name: str) -> Callable[[Callable], Callable]:
    """Let the decorated function run where a method would, which it is given first, until pytest's `patch` ends."""
    original = getattr(owner, name)

    def put(function: Callable) -> Callable:
        patch.setattr(owner, name, lambda *args, **kwargs: function(original, *args, **kwargs))
        return function

    return put


@contextlib.contextmanager
def _cheap_collections() -> Iterator[None]:
    """Collect an engine's garbage at its end alone: vLLM does so some twenty times, a third of a second each."""
    gc.freeze()
    try:
        with mock.patch.object(gc, "freeze", lambda: None), mock.patch.object(gc, "unfreeze", lambda: None):
            yield
    finally:
        gc.collect()


@contextlib.contextmanager
def _async_scheduling() -> Iterator[None]:
    """Turn on again what vLLM's CPU platform turns off."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        original(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    with mock.patch.object(CpuPlatform, "check_and_update_config", staticmethod(check_and_update_config)):
        yield


def token_ids(outputs: list[Any]) -> list[list[list[int]]]:
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


def assert_same_answers(expected: list[Any], got: list[Any]) -> None:
    """Token ids, text, finish reasons and logprobs of every completion are equal."""
    assert token_ids(got) == token_ids(expected)
    for one, other in zip(expected, got, strict=True):
        for left, right in zip(one.outputs, other.outputs, strict=True):
            assert (left.text, left.finish_reason) == (right.text, right.finish_reason)
            assert (left.logprobs is None) == (right.logprobs is None)
            for a, b in zip(left.logprobs or [], right.logprobs or [], strict=True):
                assert {t: v.rank for t, v in a.items()} == {t: v.rank for t, v in b.items()}
                assert all(abs(a[t].logprob - b[t].logprob) < 1e-4 for t in a)


def assert_begins(got: list[Any], expected: list[Any]) -> None:
    for one, whole in zip(token_ids(got), token_ids(expected), strict=False):
        assert one == [whole[0][: len(one[0])]]


def skipped(counted: dict[str, int]) -> dict[str, int]:
    """Return the counted reasons for running without speculation."""
    return {name.removeprefix("skipped_"): n for name, n in counted.items() if name.startswith("skipped_") and n}


def assert_all_stands(counted: dict[str, int]) -> None:
    """Every step accepted as deep a path as its draft has; in a chain that is every token."""
    assert counted["accepted_tokens"] == counted["draft_depth"] > 0


def videos(family: str, count: int, question: str = pairs.DEFAULT_QUESTION, **sampling: Any) -> list[tuple[dict, dict]]:
    """Return requests that describe held-out videos; request i samples with seed i."""
    return [
        (pairs.video_prompt(family, frames, question), {"temperature": 0.0, "seed": i, **sampling})
        for i, frames in enumerate(shown(count))
    ]


def greedy_and_sampled(family: str, num_greedy: int = 4, num_sampled: int = 4, **sampling: Any) -> list:
    """Return requests that describe videos greedily, and then at T = 1."""
    sampled = videos(family, num_sampled, temperature=1.0, **sampling)
    return videos(family, num_greedy, **sampling) + sampled


def shown(count: int) -> list[np.ndarray]:
    return [world.held_out(i).frames for i in range(count)]


def videos_and_texts(family: str) -> list[tuple[dict, dict]]:
    """Return endless answers to three videos and three texts, greedy and sampled."""
    text = pairs.media_prompt(family, "describe the video")
    texts = [(text, {"temperature": 0.5 * i, "seed": i, "max_tokens": 60, "ignore_eos": True}) for i in range(3)]
    return videos(family, 3, max_tokens=60, ignore_eos=True) + texts


def sparse_videos(family: str) -> list[tuple[dict, dict]]:
    """Return endless answers to two Qwen videos whose rope positions follow a slow clock, far past their tokens."""
    requests = videos(family, 2, max_tokens=60, ignore_eos=True)
    for prompt, _ in requests:
        ((_, metadata),) = prompt["multi_modal_data"]["video"]
        metadata.update(fps=metadata["fps"] / 60, duration=metadata["duration"] * 60)
    return requests


def mixed_batch(family: str) -> list[tuple[dict, dict]]:
    """Return one batch of every kind of prompt under every sampling parameter, each request seeded."""
    frames = shown(4)
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
        (video(3), {"temperature": 1.0, "min_tokens": 20, "seed": 21}),
        (text, {"temperature": 1.0, "top_p": 0.8, "top_k": 7, "min_p": 0.02, "repetition_penalty": 1.1, "seed": 22}),
        (video(0), {"temperature": 1.0, "allowed_token_ids": list(range(3, 60)), "seed": 23}),
    ]
