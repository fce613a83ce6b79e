"""The engine's side of `engine_session`: one job, then commands, each a line of JSON on stdin."""

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_vidspec.bench import engine_job, pairs
from vllm_vidspec.errors import VidSpecError


def _run(job: dict[str, Any], events: engine_job.Events) -> None:
    """Load the engine, then answer commands until stdin ends.

    Args:
        job: `llm` (arguments of LLM) and `prompts`: `family` (None: a pair of the user's own, asked through its chat
            template), `videos` (paths) or `held_out` (indices of shape-world videos), `question`.
        events: Where to answer.
    """
    from vllm import LLM

    from vllm_vidspec.engine.state_guidance import default_uv_layer

    llm = LLM(**job["llm"])
    vllm_config = llm.llm_engine.vllm_config
    engine_job.require_runner_v2(vllm_config)
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    ask = _own_pair(llm, job["prompts"]) if job["prompts"]["family"] is None else _bundled_pair(llm, job["prompts"])
    commands = {"measure": _measure, "look": _look, "cost": _cost}
    events.send("ready", num_layers=num_layers, default_uv_layer=default_uv_layer(num_layers))
    for line in sys.stdin:
        command = json.loads(line)
        # Guidance must come from each command's own prefill, not from what an earlier one left.
        if not llm.reset_prefix_cache():
            raise VidSpecError("the prefix cache cannot be emptied between measurements")
        events.send("answer", **commands[command["command"]](llm, ask, command))


@dataclass(frozen=True)
class Asker:
    """Asks the question about the videos: `generate` for a bundled pair, `chat` for one of the user's own.

    Attributes:
        llm: The engine.
        requests: A prompt, or a conversation, per video.
        is_chat: Which of the two they are.
    """

    llm: Any
    requests: list[Any]
    is_chat: bool

    def __call__(self, **sampling: Any) -> list[Any]:
        """Answer all of them in one batch, greedily; `sampling` adds arguments of SamplingParams."""
        ask = self.llm.chat if self.is_chat else self.llm.generate
        return ask(self.requests, self._params(sampling), use_tqdm=False)

    def enqueue(self, indices: list[int], **sampling: Any) -> None:
        """Hand some of them to the engine, which waits for its steps."""
        ask = self.llm.enqueue_chat if self.is_chat else self.llm.enqueue
        ask([self.requests[i] for i in indices], self._params(sampling), use_tqdm=False)

    @staticmethod
    def _params(sampling: dict[str, Any]) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0, **sampling)


def _bundled_pair(llm: Any, prompts: dict[str, Any]) -> Asker:
    """Return what asks a bundled pair about every video."""
    from vllm_vidspec.bench import shape_world
    from vllm_vidspec.bench.user_files import read_video

    family, num_frames = prompts["family"], pairs.pair_for(prompts["family"]).num_frames
    frames = [shape_world.held_out(i).frames for i in prompts.get("held_out", [])]
    frames += [read_video(path, num_frames) for path in prompts.get("videos", [])]
    return Asker(llm, [pairs.video_prompt(family, video, prompts["question"]) for video in frames], is_chat=False)


def _own_pair(llm: Any, prompts: dict[str, Any]) -> Asker:
    """Return the same for a checkpoint of the user's, whose chat template and video loader are vLLM's business."""
    from vllm_vidspec.bench import shape_world
    from vllm_vidspec.bench.demo import data_url

    with tempfile.TemporaryDirectory(prefix="vidspec-videos-") as folder:
        paths = [Path(path) for path in prompts.get("videos", [])]
        for i in prompts.get("held_out", []):
            paths.append(Path(folder, f"{i}.mp4"))
            shape_world.write_mp4(shape_world.held_out(i).frames, paths[-1])
        urls = [data_url(path) for path in paths]
    question = {"type": "text", "text": prompts["question"]}
    requests = [
        [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": url}}, question]}] for url in urls
    ]
    return Asker(llm, requests, is_chat=True)


def _measure(llm: Any, ask: Asker, command: dict[str, Any]) -> dict[str, Any]:
    """Answer every prompt with `knobs` in force; return our counters' gain and the time."""
    from vllm_vidspec import metrics

    path = metrics.path_for(llm.llm_engine.vllm_config.instance_id)
    if command["knobs"]:
        llm.collective_rpc("vidspec_retune", args=(command["knobs"],))
    before, start = metrics.read_metrics(path), time.perf_counter()
    outputs = ask(max_tokens=command["max_tokens"])
    return {
        "seconds": time.perf_counter() - start,
        "num_prompts": len(outputs),
        "output_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "metrics": metrics.difference(before, metrics.read_metrics(path)),
    }


def _look(llm: Any, ask: Asker, command: dict[str, Any]) -> dict[str, Any]:
    """Save to `path` how the first item of every prompt was pruned, and what was measured of it for that."""
    import torch

    llm.collective_rpc("vidspec_watch", args=(True,))
    ask(max_tokens=2)  # after a first token that is also the last one, nothing is drafted
    watched = llm.collective_rpc("vidspec_watch", args=(False,))[0]
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
    torch.save(records, command["path"])
    return {"num_records": len(records)}


def _cost(llm: Any, ask: Asker, command: dict[str, Any]) -> dict[str, Any]:
    """Answer `batches` of prompts one after another; return the times of the steps in which a whole batch decoded.

    Steps before the whole batch has been prefilled are known by our counters; vanilla has none, and its few steps with
    prefills do not move a median. What follows the first answer's end is not timed.
    """
    from vllm_vidspec import metrics

    engine = llm.llm_engine
    config = engine.vllm_config.speculative_config
    path = None if config is None else metrics.path_for(engine.vllm_config.instance_id)
    read = lambda: None if path is None else metrics.read_metrics(path)  # noqa: E731
    runs = []
    for number, indices in enumerate([command["batches"][0], *command["batches"]]):
        ask.enqueue(indices, max_tokens=command["max_tokens"])
        before = now = read()
        step_s, is_whole = [], True
        while engine.has_unfinished_requests():
            start = time.perf_counter()
            finished = engine.step()
            seconds = time.perf_counter() - start
            earlier, now = now, read()
            is_whole &= not finished
            drafted = None if earlier is None or now is None else now["drafts"] - earlier["drafts"]
            if is_whole and drafted in (None, len(indices)):
                step_s.append(seconds)
        gained = None if before is None or now is None else metrics.difference(before, now)
        if number > 0:  # the first is there for what happens once
            runs.append({"batch_size": len(indices), "step_s": step_s, "metrics": gained})
    return {"runs": runs}


if __name__ == "__main__":
    sys.exit(engine_job.main(_run))
