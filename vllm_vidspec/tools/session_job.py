"""The engine's side of `engine_session`: one job, then commands, each a line of JSON on stdin; answers go to a pipe."""

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from vllm_vidspec import metrics
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.progress import Report, silent


def main(kind: "type[Engine] | None" = None) -> int:
    """Hold the conversation; the exit status is 1 if the engine failed, and the last message says why."""
    messages = os.fdopen(int(sys.argv[1]), "w")

    def send(event: str, fields: dict[str, Any]) -> None:
        print(json.dumps({"event": event, **fields}), file=messages, flush=True)

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        for answer in _answers(kind or Engine, map(json.loads, sys.stdin), send):
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


def _answers(kind: "type[Engine]", commands: Iterator[dict[str, Any]], report: Report) -> Iterator[dict[str, Any]]:
    """Load the engine that the first command describes, then answer the others until there are no more.

    The first, the job, holds `llm` (arguments of LLM) and `prompts`: `family` (None: a pair of the user's own, asked
    through its chat template), `videos` (paths) or `held_out` (indices of shape-world videos), and `question`.
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
    engine = kind(llm, requests, is_chat, report, job)
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


@dataclass(frozen=True)
class Engine:
    """An engine and the questions it is asked; each of its commands takes the fields of a line and returns an answer's.

    `requests` are a prompt per video, or with `is_chat` a conversation; `job` see `_answers`.
    """

    commands: ClassVar[tuple[str, ...]] = ("answer",)

    llm: Any
    requests: list[Any]
    is_chat: bool = False
    report: Report = silent
    job: dict[str, Any] | None = None

    @classmethod
    def prepare(cls, job: dict[str, Any]) -> None:
        """Prepare the process, before vLLM is imported."""

    def warm_up(self) -> None:
        """Get ready for the first command, once the engine has loaded."""

    def progress(self) -> Any:
        """Return what `LLM.generate` takes as `use_tqdm`."""
        return False

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
        return ask([self.requests[i] for i in chosen], params, use_tqdm=self.progress())

    def counters(self) -> dict[str, int] | None:
        """Return what our counters say now; None for vanilla."""
        config = self.llm.llm_engine.vllm_config
        if config.speculative_config is None:
            return None
        return metrics.read_metrics(metrics.path_for(config.instance_id))

    def answer(self, **asked: Any) -> dict[str, Any]:
        """Answer every prompt; arguments and answer are those of `engine_session.answer_command`."""
        return self.answered(**asked)[0]

    def answered(
        self, knobs: dict[str, Any] | None, sampling: dict[str, Any], seed: int | None
    ) -> tuple[dict[str, Any], list[Any]]:
        """Answer every prompt; return the answer, and vLLM's outputs."""
        if knobs:
            self.llm.collective_rpc("vidspec_retune", args=(knobs,))
        before, start = self.counters(), time.perf_counter()
        outputs = self.ask(sampling, seed)
        answer = {
            "seconds": time.perf_counter() - start,
            "texts": [output.outputs[0].text for output in outputs],
            "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
            "metrics": gain(before, self.counters()),
        }
        return answer, outputs


def sampling_params(sampling: dict[str, Any], **more: Any) -> Any:
    """Return vLLM's SamplingParams, greedy unless they say otherwise."""
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0, **sampling, **more})


def gain(before: dict[str, int] | None, after: dict[str, int] | None) -> dict[str, int] | None:
    """Return what counters gained between two readings, None where there are none."""
    return None if before is None or after is None else metrics.difference(before, after)


if __name__ == "__main__":
    sys.exit(main())
