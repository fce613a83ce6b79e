"""The engine's side of `engine_session`: one job, then commands, each a line of JSON on stdin; answers go to a pipe."""

import dataclasses
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from vllm_vidspec import metrics
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.names import WRITER_THREAD
from vllm_vidspec.tools import pairs


def main(kind: "type[Engine] | None" = None) -> int:
    """Hold the conversation; the exit status is 1 if the engine failed, and the last message says why."""
    messages = os.fdopen(int(sys.argv[1]), "w")

    def send(event: str, fields: dict[str, Any]) -> None:
        print(json.dumps({"event": event, **fields}), file=messages, flush=True)

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        for answer in _answers(kind or Engine, map(json.loads, sys.stdin)):
            send("answer", answer)
    except Exception as error:
        traceback.print_exc()
        send("error", {"message": _reason(error)})
        return 1
    return 0


def _reason(error: Exception) -> str:
    """Return one line of what went wrong; of an error that says nothing, as a bare assertion, what it stood for."""
    lines, name = str(error).strip().splitlines(), type(error).__name__
    if lines:
        return lines[0] if name == "VidSpecError" else f"{name}: {lines[-1]}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{name} at {place.filename}:{place.lineno}: {place.line}"


def _answers(kind: "type[Engine]", commands: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Load the engine that the first command describes, then answer the others until there are no more.

    The first, the job, holds `llm` (arguments of LLM) and `prompts`: `family` (None: a pair of the user's own, asked
    through its chat template), `videos` (paths) or `held_out` (indices of shape-world videos), `question`,
    and maybe `warm_up`, the index of one more video: what happens once, as lazy imports do, is then part of no figure.
    It may also hold `cpus`, the cores that the process may use.
    """
    job = next(commands)
    kind.prepare(job)

    from vllm import LLM

    from vllm_vidspec.pruning.pruners import default_uv_layer

    llm = LLM(**job["llm"])
    vllm_config = llm.llm_engine.vllm_config
    if not vllm_config.use_v2_model_runner:  # V1's sampler draws other noise: a comparison with it says nothing
        raise VidSpecError("this vLLM runs Model Runner V1 (no Triton backend for this device); see `vidspec doctor`")
    is_chat = job["prompts"]["family"] is None
    requests = _own_requests(job["prompts"]) if is_chat else kind.bundled_requests(job["prompts"])
    engine = kind(llm, requests, is_chat, job)
    engine.warm_up()
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    yield {
        "num_layers": num_layers,
        "default_uv_layer": default_uv_layer(num_layers),
        "scheduling": "async" if vllm_config.scheduler_config.async_scheduling else "sync",
    }
    for command in commands:
        # Guidance must come from each command's own prefill, not from what an earlier one left.
        if not command.pop("keeps_prefixes", False) and not llm.reset_prefix_cache():
            raise VidSpecError("the prefix cache cannot be emptied between measurements")
        name = command.pop("command")
        assert name in kind.commands, name
        yield getattr(engine, name)(**command)


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


# What `clock` tells of each step.
_VERIFIED = ("draft_tokens", "accepted_tokens", "stale_streams")
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Engine:
    """An engine and the questions it is asked; each of its commands takes the fields of a line and returns an answer's.

    `requests` are a prompt per video, or with `is_chat` a conversation; `job` see `_answers`.
    """

    commands: ClassVar[tuple[str, ...]] = ("answer", "look", "clock", "fit")

    llm: Any
    requests: list[Any]
    is_chat: bool = False
    job: dict[str, Any] | None = None

    @classmethod
    def prepare(cls, job: dict[str, Any]) -> None:
        """Let this process and the threads that it will start use the job's cores only; vLLM would bind them anew."""
        if "cpus" in job:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            os.sched_setaffinity(0, job["cpus"])

    def warm_up(self) -> None:
        """Answer the warm-up request; then all threads must be on the job's cores."""
        assert self.job is not None
        prompts, cpus = self.job["prompts"], self.job.get("cpus")
        if "warm_up" in prompts:
            requests = self.bundled_requests(prompts | {"held_out": [prompts["warm_up"]]})
            dataclasses.replace(self, requests=requests).ask({"max_tokens": WARM_UP_TOKENS})
        if cpus is not None and (cores := _cores_of_threads()) != set(cpus):
            raise VidSpecError(f"the engine was to run on cores {cpus} and may run on {sorted(cores)}")

    @staticmethod
    def bundled_requests(prompts: dict[str, Any]) -> list[Any]:
        """Return a prompt for every video, in the words of a bundled pair."""
        from vllm_vidspec.shapeworld import world
        from vllm_vidspec.tools.user_files import read_video

        family = prompts["family"]
        num_frames = prompts.get("num_frames") or pairs.pair_for(family).num_frames
        videos = [world.held_out(i).frames for i in prompts.get("held_out", [])]
        videos += [read_video(path, num_frames) for path in prompts.get("videos", [])]
        question = prompts["question"]
        return [pairs.media_prompt(family, question, videos=[video], num_frames=num_frames) for video in videos]

    def ask(
        self,
        sampling: dict[str, Any],
        seed: int | None = None,
        indices: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> list[Any]:
        """Answer requests, by default all, in one batch, by default greedily; request i has `seed` + i.

        `lengths` are the tokens of each answer, by default those of `sampling`.
        """
        ask = self.llm.chat if self.is_chat else self.llm.generate
        chosen = range(len(self.requests)) if indices is None else indices
        ends = [{}] * len(chosen) if lengths is None else [{"max_tokens": length} for length in lengths]
        params = [
            sampling_params(sampling | end, seed=None if seed is None else seed + i)
            for i, end in zip(chosen, ends, strict=True)
        ]
        return ask([self.requests[i] for i in chosen], params, use_tqdm=False)

    def counters(self) -> dict[str, int] | None:
        """Return what our counters say now; None for vanilla."""
        config = self.llm.llm_engine.vllm_config
        if config.speculative_config is None:
            return None
        return metrics.read_metrics(metrics.path_for(config.instance_id))

    def step_counters(self) -> dict[str, int] | None:
        """Return what is counted at each step."""
        return self.counters()

    def answer(self, **asked: Any) -> dict[str, Any]:
        """Answer every prompt; arguments and answer are those of `engine_session.answer_command`."""
        return self.answered(**asked)[0]

    def answered(
        self,
        knobs: dict[str, Any] | None,
        sampling: dict[str, Any],
        seed: int | None,
        indices: Sequence[int] | None = None,
    ) -> tuple[dict[str, Any], list[Any]]:
        """Answer every prompt, or those of `indices`; return the answer, and vLLM's outputs."""
        if knobs:
            self.retune(knobs)
        before, start = self.counters(), time.perf_counter()
        outputs = self.ask(sampling, seed, indices)
        answer = {
            "seconds": time.perf_counter() - start,
            "texts": [output.outputs[0].text for output in outputs],
            "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
            "metrics": gain(before, self.counters()),
        }
        return answer, outputs

    def retune(self, knobs: dict[str, Any]) -> dict[str, Any]:
        """Change knobs of VidSpecConfig from here on."""
        self.llm.collective_rpc("vidspec_retune", args=(knobs,))
        return {}

    def look(self, knobs: dict[str, Any]) -> dict[str, Any]:
        """Change knobs; return how the first item of every prompt was pruned then.

        Returns:
            `items`: each one's `grid` (frames, rows, columns, trailing tokens), `kept_indices`, and `scores`, None
            where nothing was measured of it.
        """
        from vllm_vidspec.tools import watching

        self.retune(knobs)
        self.llm.collective_rpc(watching.pruning, args=(True,))
        self.ask({"max_tokens": 2})  # after a first token that is also the last one, nothing is drafted
        watched = self.llm.collective_rpc(watching.pruning, args=(False,))[0]
        return {
            "items": [
                {
                    "grid": dataclasses.astuple(record["grids"][0]),
                    "kept_indices": record["kept_indices"][0].tolist(),
                    "scores": None if record["scores"] is None else record["scores"][0].tolist(),
                }
                for record in watched
                if record["grids"]
            ]
        }

    def fit(self, path: str, about: dict[str, Any], held_out: list[int]) -> dict[str, Any]:
        """Fit a map between the towers to all videos but those that are held out; see `fitting.finish`."""
        from vllm_vidspec.tools import fitting

        seen = [i for i in range(len(self.requests)) if i not in set(held_out)]
        for step, indices in ((fitting.begin, seen), (fitting.hold_out, held_out)):
            self.llm.collective_rpc(step)
            self.ask({"max_tokens": 1}, indices=indices)
        return self.llm.collective_rpc(fitting.finish, args=(path, about))[0]

    def clock(self, index: int, sampling: dict[str, Any], seed: int | None) -> dict[str, Any]:
        """Answer one request alone; return when its tokens came.

        Returns:
            `token_ids`; `ttft_s`, from handing the request in (its video still to be preprocessed) to the first token;
            `decode_s`, from the first token to the last; `step_s`, the wall time of each step in between; `verified`,
            what our counters gained in each of these steps: drafts verified, drafts accepted, stale streams (nothing
            for vanilla); `metrics`.
        """
        enqueue = self.llm.enqueue_chat if self.is_chat else self.llm.enqueue
        engine, steps, outputs = self.llm.llm_engine, [], []
        counted: list[dict[str, int] | None] = []
        before, start = self.counters(), time.monotonic()
        enqueue([self.requests[index]], sampling_params(sampling, seed=seed), use_tqdm=False)
        while engine.has_unfinished_requests():
            begin = time.monotonic()
            outputs += engine.step()
            steps.append((begin, time.monotonic()))
            counted.append(self.step_counters())
        # What vLLM notes of a request: times of time.monotonic(), as each of its steps ends.
        noted = outputs[-1].metrics
        return {
            "token_ids": list(outputs[-1].outputs[0].token_ids),
            "ttft_s": noted.first_token_ts - start,
            "decode_s": noted.last_token_ts - noted.first_token_ts,
            "step_s": [end - begin for begin, end in steps if begin >= noted.first_token_ts],
            "verified": [
                [gained.get(name, 0) for name in _VERIFIED]
                for (begin, _), *readings in zip(steps, [before, *counted], counted, strict=False)
                if begin >= noted.first_token_ts and (gained := gain(*readings)) is not None
            ],
            "metrics": gain(before, self.counters()),
        }


def sampling_params(sampling: dict[str, Any], **more: Any) -> Any:
    """Return vLLM's SamplingParams, greedy unless they say otherwise."""
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0, **sampling, **more})


def gain(before: dict[str, int] | None, after: dict[str, int] | None) -> dict[str, int] | None:
    """Return what counters gained between two readings, None where there are none."""
    return None if before is None or after is None else metrics.difference(before, after)


def _cores_of_threads() -> set[int]:
    """Return every core that a thread of this process may use, but for the one that works for the drafter."""
    writers = {thread.native_id for thread in threading.enumerate() if thread.name.startswith(WRITER_THREAD)}
    threads = {int(thread) for thread in os.listdir("/proc/self/task")} - writers
    return {core for thread in threads for core in os.sched_getaffinity(thread)}


if __name__ == "__main__":
    sys.exit(main())
