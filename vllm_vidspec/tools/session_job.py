"""The engine's side of `engine_session`: one job, then commands, each a line of JSON on stdin."""

import itertools
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import engine_job, pairs


def _run(job: dict[str, Any], events: engine_job.Events) -> None:
    """Load the engine, then answer commands until stdin ends.

    Args:
        job: `llm` (arguments of LLM) and `prompts`: `family` (None: a pair of the user's own, asked through its chat
            template), `videos` (paths) or `held_out` (indices of shape-world videos), `question`.
        events: Where to answer.
    """
    from vllm import LLM

    from vllm_vidspec.engine.listen.hidden_states import default_uv_layer

    llm = LLM(**job["llm"])
    vllm_config = llm.llm_engine.vllm_config
    engine_job.require_runner_v2(vllm_config)
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    ask = _own_pair(llm, job["prompts"]) if job["prompts"]["family"] is None else _bundled_pair(llm, job["prompts"])
    commands = {"measure": _measure, "look": _look, "cost": _cost, "caption": _caption}
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

    def caption(self, seed: int, **sampling: Any) -> list[Any]:
        """Answer all of them in one batch, request i with `seed` + i."""
        ask = self.llm.chat if self.is_chat else self.llm.generate
        params = [self._params(sampling | {"seed": seed + i}) for i in range(len(self.requests))]
        return ask(self.requests, params, use_tqdm=False)

    @staticmethod
    def _params(sampling: dict[str, Any]) -> Any:
        from vllm import SamplingParams

        return SamplingParams(**{"temperature": 0, **sampling})


def _bundled_pair(llm: Any, prompts: dict[str, Any]) -> Asker:
    """Return what asks a bundled pair about every video."""
    from vllm_vidspec.shapeworld import world
    from vllm_vidspec.tools.user_files import read_video

    family, num_frames = prompts["family"], pairs.pair_for(prompts["family"]).num_frames
    frames = [world.held_out(i).frames for i in prompts.get("held_out", [])]
    frames += [read_video(path, num_frames) for path in prompts.get("videos", [])]
    return Asker(llm, [pairs.video_prompt(family, video, prompts["question"]) for video in frames], is_chat=False)


def _own_pair(llm: Any, prompts: dict[str, Any]) -> Asker:
    """Return the same for a checkpoint of the user's, whose chat template and video loader are vLLM's business."""
    from vllm_vidspec.shapeworld import world
    from vllm_vidspec.tools.demo import data_url

    with tempfile.TemporaryDirectory(prefix="vidspec-videos-") as folder:
        paths = [Path(path) for path in prompts.get("videos", [])]
        for i in prompts.get("held_out", []):
            paths.append(Path(folder, f"{i}.mp4"))
            world.write_mp4(world.held_out(i).frames, paths[-1])
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


def _caption(llm: Any, ask: Asker, command: dict[str, Any]) -> dict[str, Any]:
    """Answer every prompt with `knobs` in force, as `sampling` and `seed` say; what is said, and in what time.

    With `watch`, `captions` says of each token its text, its relevance and its kind as well.
    """
    from vllm_vidspec import metrics

    config = llm.llm_engine.vllm_config
    path = None if config.speculative_config is None else metrics.path_for(config.instance_id)
    if command["knobs"]:
        llm.collective_rpc("vidspec_retune", args=(command["knobs"],))
    if command["watch"]:
        llm.collective_rpc("vidspec_watch_scores", args=(True,))
    before = None if path is None else metrics.read_metrics(path)
    start = time.perf_counter()
    outputs = ask.caption(command["seed"], **command["sampling"])
    seconds = time.perf_counter() - start
    gained = None if path is None or before is None else metrics.difference(before, metrics.read_metrics(path))
    captions = None
    if command["watch"]:
        watched = llm.collective_rpc("vidspec_watch_scores", args=(False,))[0]
        captions = _watched_captions(llm.get_tokenizer(), outputs, watched)
    return {
        "seconds": seconds,
        "texts": [output.outputs[0].text for output in outputs],
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "metrics": gained,
        "captions": captions,
    }


def _watched_captions(tokenizer: Any, outputs: list[Any], watched: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return of each answer `words`, `relevance` and `kinds`, one of each per token.

    Raises:
        VidSpecError: What was watched is not what was said.
    """
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
    sys.exit(engine_job.main(_run))
