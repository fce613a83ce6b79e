"""The engine's side of `engine_session`: one job, then commands, each a line of JSON on stdin; answers go to a pipe."""

import itertools
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_vidspec import metrics
from vllm_vidspec.config import METHOD
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.names import WRITER_THREAD
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.progress import Report, silent

WARM_UP_TOKENS = 8
# What `clock` tells of each step.
_VERIFIED = ("draft_tokens", "accepted_tokens", "stale_streams")


def main() -> int:
    """Hold the conversation; the exit status is 1 if the engine failed, and the last message says why."""
    messages = os.fdopen(int(sys.argv[1]), "w")

    def send(event: str, fields: dict[str, Any]) -> None:
        print(json.dumps({"event": event, **fields}), file=messages, flush=True)

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        for answer in _answers(map(json.loads, sys.stdin), send):
            send("answer", answer)
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        name = type(error).__name__
        reason = lines[0] if name == "VidSpecError" else f"{name}: {lines[-1] if lines else 'no message'}"
        send("error", {"message": reason})
        return 1
    return 0


def _answers(commands: Iterator[dict[str, Any]], report: Report) -> Iterator[dict[str, Any]]:
    """Load the engine that the first command describes, then answer the others until there are no more.

    The first, the job, holds `llm` (arguments of LLM) and `prompts`: `family` (None: a pair of the user's own, asked
    through its chat template), `videos` (paths) or `held_out` (indices of shape-world videos), `question`, and
    `warm_up` (the index of one more video: what happens once, as lazy imports do, is then part of no figure).
    Requests of a bundled pair may have `num_videos` held-out videos each (a list: of one request after another), or
    `video_frac` of one's frames; with `reel_tokens` they are held-out reels of so many video tokens, each with its own
    question. `num_frames` is what a bundled pair's videos are sampled to, where it is not what the pair was trained on.
    `cpus` are the cores that the process may use; where there is none, any.
    """
    job = next(commands)
    if "cpus" in job:
        _pin(job["cpus"])

    from vllm import LLM

    llm, prompts = LLM(**job["llm"]), job["prompts"]

    from vllm_vidspec.pruning.guided import default_uv_layer

    vllm_config = llm.llm_engine.vllm_config
    if not vllm_config.use_v2_model_runner:  # V1's sampler draws other noise: a comparison with it says nothing
        raise VidSpecError("this vLLM runs Model Runner V1 (no Triton backend for this device); see `vidspec doctor`")
    is_chat = prompts["family"] is None
    make_requests = _own_requests if is_chat else _bundled_requests
    if "warm_up" in prompts:
        warm_up = make_requests(prompts | {"held_out": [prompts["warm_up"]]})
        Engine(llm, warm_up, is_chat).ask({"max_tokens": WARM_UP_TOKENS})
    is_stock = job["llm"].get("speculative_config", {}).get("method", METHOD) != METHOD
    engine = Engine(llm, make_requests(prompts), is_chat, report, is_stock)
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    yield {
        "num_layers": num_layers,
        "default_uv_layer": default_uv_layer(num_layers),
        "scheduling": "async" if vllm_config.scheduler_config.async_scheduling else "sync",
    }
    if "cpus" in job and (cores := _cores_of_threads()) != set(job["cpus"]):
        raise VidSpecError(f"the engine was to run on cores {job['cpus']} and may run on {sorted(cores)}")
    answers: dict[str, Callable] = {
        "answer": engine.answer,
        "look": engine.look,
        "cost": engine.cost,
        "clock": engine.clock,
        "batch": engine.batch,
        "timeline": engine.timeline,
        "retune": engine.retune,
    }
    for command in commands:
        # Guidance must come from each command's own prefill, not from what an earlier one left.
        if not llm.reset_prefix_cache():
            raise VidSpecError("the prefix cache cannot be emptied between measurements")
        yield answers[command.pop("command")](**command)


def _pin(cpus: list[int]) -> None:
    """Let this process and the threads that it will start use these cores only; vLLM would bind them anew."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.sched_setaffinity(0, cpus)


def _cores_of_threads() -> set[int]:
    """Return every core that a thread of this process may use, but for the one that works for the drafter."""
    writers = {thread.native_id for thread in threading.enumerate() if thread.name.startswith(WRITER_THREAD)}
    threads = {int(thread) for thread in os.listdir("/proc/self/task")} - writers
    return {core for thread in threads for core in os.sched_getaffinity(thread)}


def _bundled_requests(prompts: dict[str, Any]) -> list[Any]:
    """Return a prompt for every video, in the words of a bundled pair."""
    from vllm_vidspec.shapeworld import reel, world
    from vllm_vidspec.tools.user_files import read_video

    if "reel_tokens" in prompts:
        reels = [reel.held_out(i, prompts["reel_tokens"]) for i in prompts["held_out"]]
        return [pairs.video_prompt(prompts["family"], frames, question.text) for frames, question, _ in reels]
    family = prompts["family"]
    num_frames = prompts.get("num_frames") or pairs.pair_for(family).num_frames
    places, counts, frac = prompts.get("held_out", []), prompts.get("num_videos", 1), prompts.get("video_frac", 1.0)
    counts = [counts] * len(places) if isinstance(counts, int) else counts
    requests = [
        [_part(world.held_out(max(counts) * i + j).frames, frac, num_frames) for j in range(count)]
        for i, count in zip(places, counts, strict=False)
    ]
    requests += [[read_video(path, num_frames)] for path in prompts.get("videos", [])]
    question = prompts["question"]
    return [pairs.media_prompt(family, question, videos=videos, num_frames=num_frames) for videos in requests]


def _part(frames: Any, frac: float, num_frames: int) -> Any:
    """Return a video as it is, or evenly spaced frames of it: a share of those that its pair would sample."""
    import numpy as np

    if frac == 1.0:
        return frames
    wanted = max(1, round(frac * min(num_frames, len(frames))))
    return frames[np.linspace(0, len(frames) - 1, wanted, dtype=int)]


def _own_requests(prompts: dict[str, Any]) -> list[Any]:
    """Return a conversation for every video; a user's checkpoint has a chat template, and vLLM its video loader."""
    from vllm_vidspec.shapeworld import world
    from vllm_vidspec.tools.demo import data_url

    with tempfile.TemporaryDirectory(prefix="vidspec-videos-") as folder:
        paths = [Path(path) for path in prompts.get("videos", [])]
        for i in prompts.get("held_out", []):
            paths.append(Path(folder, f"{i}.mp4"))
            world.write_mp4(world.held_out(i).frames, paths[-1])
        urls = [data_url(path) for path in paths]
    question = {"type": "text", "text": prompts["question"]}
    return [[{"role": "user", "content": [{"type": "video_url", "video_url": {"url": url}}, question]}] for url in urls]


@dataclass(frozen=True)
class Engine:
    """An engine and the questions it is asked; each of its commands takes the fields of a line and returns an answer's.

    Attributes:
        llm: vLLM's.
        requests: A prompt, or a conversation, per video.
        is_chat: Which of the two they are.
        report: Called with "progress" (`done` requests).
        is_stock: Whether it drafts as vLLM does without us.
    """

    llm: Any
    requests: list[Any]
    is_chat: bool = False
    report: Report = silent
    is_stock: bool = False

    def ask(self, sampling: dict[str, Any], seed: int | None = None, indices: Sequence[int] | None = None) -> list[Any]:
        """Answer requests, all of them by default, in one batch, greedily unless `sampling` says otherwise.

        Request i has `seed` + i.
        """
        ask = self.llm.chat if self.is_chat else self.llm.generate
        chosen = range(len(self.requests)) if indices is None else indices
        params = [_params(sampling, seed=None if seed is None else seed + i) for i in chosen]
        return ask([self.requests[i] for i in chosen], params, use_tqdm=_progress(self.report))

    def counters(self) -> dict[str, int] | None:
        """Return what our counters say now, or vLLM's own where it drafts without us; None for vanilla."""
        config = self.llm.llm_engine.vllm_config
        if config.speculative_config is None:
            return None
        if self.is_stock:
            return _stock_counters(self.llm)
        return metrics.read_metrics(metrics.path_for(config.instance_id))

    def retune(self, knobs: dict[str, Any]) -> dict[str, Any]:
        """Change knobs of VidSpecConfig from here on."""
        self.llm.collective_rpc("vidspec_retune", args=(knobs,))
        return {}

    def answer(
        self, knobs: dict[str, Any] | None, sampling: dict[str, Any], seed: int | None, watch: bool
    ) -> dict[str, Any]:
        """Answer every prompt; arguments and answer are those of `engine_session.answer_command`."""
        if knobs:
            self.retune(knobs)
        if watch:
            self.llm.collective_rpc("vidspec_watch_scores", args=(True,))
        before, start = self.counters(), time.perf_counter()
        outputs = self.ask(sampling, seed)
        seconds, captions = time.perf_counter() - start, None
        gained = _gain(before, self.counters())
        if watch:
            watched = self.llm.collective_rpc("vidspec_watch_scores", args=(False,))[0]
            captions = _watched_captions(self.llm.get_tokenizer(), outputs, watched)
        return {
            "seconds": seconds,
            "texts": [output.outputs[0].text for output in outputs],
            "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
            "metrics": gained,
            "captions": captions,
        }

    def look(self, path: str) -> dict[str, Any]:
        """Save to `path` how the first item of every prompt was pruned, and what was measured of it for that."""
        import torch

        self.llm.collective_rpc("vidspec_watch", args=(True,))
        self.ask({"max_tokens": 2})  # after a first token that is also the last one, nothing is drafted
        watched = self.llm.collective_rpc("vidspec_watch", args=(False,))[0]
        records = [
            {
                "grid": (grid.num_frames, grid.height, grid.width, grid.num_trailing),
                "kept_indices": record["kept_indices"][0],
                "scores": None if record["scores"] is None else record["scores"][0],
                "features": None if record["embeddings"] is None else record["embeddings"][0],
            }
            for record in watched
            for grid in record["grids"][:1]
        ]
        torch.save(records, path)
        return {}

    def cost(self, batches: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Answer batches of requests one after another; return the times of the steps in which a whole batch decoded.

        Steps before the whole batch has been prefilled are known by our counters; vanilla has none, and its few steps
        with prefills do not move a median. What follows the first answer's end is not timed.
        """
        enqueue = self.llm.enqueue_chat if self.is_chat else self.llm.enqueue
        engine, runs = self.llm.llm_engine, []
        for number, indices in enumerate([batches[0], *batches]):
            enqueue([self.requests[i] for i in indices], _params({"max_tokens": max_tokens}), use_tqdm=False)
            before = now = self.counters()
            step_s, is_whole = [], True
            while engine.has_unfinished_requests():
                start = time.perf_counter()
                finished = engine.step()
                seconds = time.perf_counter() - start
                earlier, now = now, self.counters()
                is_whole &= not finished
                drafted = None if earlier is None or now is None else now["drafts"] - earlier["drafts"]
                if is_whole and drafted in (None, len(indices)):
                    step_s.append(seconds)
            if number > 0:  # the first is there for what happens once
                runs.append({"batch_size": len(indices), "step_s": step_s, "metrics": _gain(before, now)})
        return {"runs": runs}

    def clock(self, index: int, sampling: dict[str, Any], seed: int | None) -> dict[str, Any]:
        """Answer one request alone; return when its tokens came.

        Returns:
            `token_ids`; `ttft_s`, from handing the request in (its video still to be preprocessed) to the first token;
            `decode_s`, from the first token to the last; `step_s`, the wall time of each step in between; `verified`,
            what our counters gained in each of these steps: drafts verified, drafts accepted, stale streams (nothing
            for vanilla); `metrics`; `start_s`, when it was handed in, by time.monotonic().
        """
        enqueue = self.llm.enqueue_chat if self.is_chat else self.llm.enqueue
        engine, steps, outputs = self.llm.llm_engine, [], []
        counted: list[dict[str, int] | None] = []
        before, start = self.counters(), time.monotonic()
        enqueue([self.requests[index]], _params(sampling, seed=seed), use_tqdm=False)
        while engine.has_unfinished_requests():
            begin = time.monotonic()
            outputs += engine.step()
            steps.append((begin, time.monotonic()))
            counted.append(None if self.is_stock else self.counters())  # vLLM's own take too long to read
        # What vLLM notes of a request: times of time.monotonic(), as each of its steps ends.
        noted = outputs[-1].metrics
        return {
            "token_ids": list(outputs[-1].outputs[0].token_ids),
            "start_s": start,
            "ttft_s": noted.first_token_ts - start,
            "decode_s": noted.last_token_ts - noted.first_token_ts,
            "step_s": [end - begin for begin, end in steps if begin >= noted.first_token_ts],
            "verified": [
                [gained.get(name, 0) for name in _VERIFIED]
                for (begin, _), *readings in zip(steps, [before, *counted], counted, strict=False)
                if begin >= noted.first_token_ts and (gained := _gain(*readings)) is not None
            ],
            "metrics": _gain(before, self.counters()),
        }

    def batch(self, indices: list[int], sampling: dict[str, Any], seed: int | None) -> dict[str, Any]:
        """Answer some requests at once; return when their tokens came.

        Returns:
            `answers`, of each request `token_ids` and `first_s` and `last_s`, when its first and its last token came,
            from handing all of them in (their videos still to be preprocessed); `metrics`.
        """
        before, start = self.counters(), time.monotonic()
        outputs = self.ask(sampling, seed, indices)
        return {
            "answers": [
                {
                    "token_ids": list(output.outputs[0].token_ids),
                    "first_s": output.metrics.first_token_ts - start,
                    "last_s": output.metrics.last_token_ts - start,
                }
                for output in outputs
            ],
            "metrics": _gain(before, self.counters()),
        }

    def timeline(self, on: bool) -> dict[str, Any]:
        """Return what target and drafter have done since watching began, as `events`, and go on watching or not."""
        return {"events": self.llm.collective_rpc("vidspec_timeline", args=(on,))[0]}


def _stock_counters(llm: Any) -> dict[str, int]:
    """Return what vLLM's own metrics say of its drafts, by our names; all else is 0."""
    values = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in llm.get_metrics()}
    found = {name: int(values[name].value) for name in ("drafts", "draft_tokens", "accepted_tokens") if name in values}
    return dict.fromkeys(metrics.NAMES, 0) | found


def _params(sampling: dict[str, Any], **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0, **sampling, **more})


def _gain(before: dict[str, int] | None, after: dict[str, int] | None) -> dict[str, int] | None:
    return None if before is None or after is None else metrics.difference(before, after)


def _progress(report: Report) -> Any:
    """Return a tqdm class whose updates become events, or False where nobody listens."""
    if report is silent:
        return False
    from tqdm import tqdm

    class Reporter(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # LLM.generate shows one bar for rendering prompts and one for processing them; only the second counts.
            self._counts = str(kwargs.get("desc", "")).startswith("Processed")
            super().__init__(*args, **kwargs | {"file": open(os.devnull, "w")})  # noqa: SIM115

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if self._counts:
                report("progress", {"done": int(self.n)})
            return shown

    return Reporter


def _watched_captions(tokenizer: Any, outputs: list[Any], watched: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return of each answer `words`, `relevance` and `kinds`, one of each per token."""
    records = {record["req_id"].split("-")[0]: record for record in watched}  # vLLM adds a suffix of its own
    captions = []
    for output in outputs:
        token_ids = list(output.outputs[0].token_ids)
        # A request that was never drafted for is not watched: all its tokens are the target's own.
        unwatched = {"tokens": token_ids, "relevance": [None] * len(token_ids), "kinds": [0] * len(token_ids)}
        record = records.get(output.request_id, unwatched)
        # What was verified past a stop is watched, and not said.
        if list(record["tokens"])[: len(token_ids)] != token_ids:
            raise VidSpecError("what was watched are not the tokens of the answer; please report this")
        relevance, kinds = (list(record[name])[: len(token_ids)] for name in ("relevance", "kinds"))
        captions.append({"words": token_texts(tokenizer, token_ids), "relevance": relevance, "kinds": kinds})
    return captions


def token_texts(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """Return what each token adds to the text; of a character in several tokens the last one has it."""
    texts, shown = [], ""
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:end])
        # An unfinished character is shown as U+FFFD until its last byte comes.
        if text.endswith("\ufffd") and end < len(token_ids):
            texts.append("")
            continue
        pairs_alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, shown, strict=False))
        texts.append(text[sum(1 for _ in pairs_alike) :])
        shown = text
    return texts


if __name__ == "__main__":
    sys.exit(main())
