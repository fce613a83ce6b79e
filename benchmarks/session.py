"""Engines of the benchmarks: `EngineSession` with commands for batches, roles and watched answers; the second half runs
in the subprocess.
"""

import functools
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

from benchmarks import reel, watching
from benchmarks.roles import Roles
from vllm_vidspec import metrics
from vllm_vidspec.config import METHOD
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.engine_session import EngineSession
from vllm_vidspec.tools.session_job import Engine, gain, main

_ROOT = Path(__file__).resolve().parents[1]


class BenchSession(EngineSession):
    """An `EngineSession` that knows the commands of `BenchEngine`.

    In its job's `prompts` there may also be `num_videos`, how many held-out videos each request has, or `reel_tokens`:
    held-out reels of so many video tokens, each with its own question.
    """

    # This package is in no wheel: the subprocess may not find it.
    program = (
        "-c",
        f"import sys; sys.path.append({str(_ROOT)!r}); from benchmarks import session; session.run_job()",
    )


def run_job() -> None:
    """Be the subprocess of a `BenchSession`."""
    sys.exit(main(BenchEngine))


class BenchEngine(Engine):
    """An engine that answers batches, plays roles and is watched."""

    commands: ClassVar[tuple[str, ...]] = (*Engine.commands, "batch", "keep", "retune", "play")

    @staticmethod
    def bundled_requests(prompts: dict[str, Any]) -> list[Any]:
        """Return a prompt for every request, in the words of a bundled pair."""
        family, places = prompts["family"], prompts.get("held_out", [])
        if "reel_tokens" in prompts:
            reels = [reel.held_out(i, prompts["reel_tokens"]) for i in places]
            return [pairs.video_prompt(family, frames, question.text) for frames, question in reels]
        if "num_videos" not in prompts:
            return Engine.bundled_requests(prompts)
        num_frames, counts = pairs.pair_for(family).num_frames, prompts["num_videos"]
        return [
            pairs.media_prompt(
                family,
                prompts["question"],
                videos=[world.held_out(max(counts) * i + j).frames for j in range(count)],
                num_frames=num_frames,
            )
            for i, count in zip(places, counts, strict=False)
        ]

    @property
    def is_stock(self) -> bool:
        """Whether it drafts as vLLM does without us."""
        spec = self.job["llm"].get("speculative_config", {}) if self.job else {}
        return spec.get("method", METHOD) != METHOD

    def counters(self) -> dict[str, int] | None:
        """Return what our counters say now, or vLLM's own, by our names, where it drafts without us; None for vanilla.

        What vLLM does not count is 0.
        """
        if not self.is_stock:
            return super().counters()
        values = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in self.llm.get_metrics()}
        names = [name for name in ("drafts", "draft_tokens", "accepted_tokens") if name in values]
        return dict.fromkeys(metrics.NAMES, 0) | {name: int(values[name].value) for name in names}

    def step_counters(self) -> dict[str, int] | None:
        """Return nothing of vLLM's own, which take too long to read."""
        return None if self.is_stock else self.counters()

    @functools.cached_property
    def _roles(self) -> Roles:
        return Roles(self.llm)

    def play(self, role: str | int) -> dict[str, Any]:
        """Be vanilla, the policy, or a fixed chain of so many draft tokens, from here on."""
        self._roles.play(role)
        return {}

    def answer(self, watch: bool = False, **asked: Any) -> dict[str, Any]:
        """Answer every prompt (`engine_session.answer_command`); with `watch` return `captions`, too.

        They are `words`, `relevance` and `kinds` of each answer, one of each per token.
        """
        if not watch:
            return self.answered(**asked)[0] | {"captions": None}
        self.llm.collective_rpc(watching.scores, args=(True,))
        answer, outputs = self.answered(**asked)
        watched = self.llm.collective_rpc(watching.scores, args=(False,))[0]
        return answer | {"captions": _watched_captions(self.llm.get_tokenizer(), outputs, watched)}

    def keep(self, index: int, sampling: dict[str, Any]) -> dict[str, Any]:
        """Answer a request alone as `batch` does; from then on its videos are sent by name: vLLM has them processed.

        Commands that give `keeps_prefixes` then find the prompt in the prefix cache, too.
        """
        request = self.requests[index]
        videos = request["multi_modal_data"]["video"]
        request["multi_modal_uuids"] = {"video": [f"{index}-{i}" for i in range(len(videos))]}
        answer = self.batch([index], sampling, None)
        request["multi_modal_data"]["video"] = [None] * len(videos)
        return answer

    def batch(
        self, indices: list[int], sampling: dict[str, Any], seed: int | None, lengths: list[int] | None = None
    ) -> dict[str, Any]:
        """Answer some requests at once, of these lengths or all of one; return when their tokens came.

        Returns:
            `answers`, of each request `token_ids` and `first_s` and `last_s`, when its first and its last token came,
            from handing all of them in (their videos still to be preprocessed); `metrics`.
        """
        before, start = self.counters(), time.monotonic()
        outputs = self.ask(sampling, seed, indices, lengths)
        return {
            "answers": [
                {
                    "token_ids": list(output.outputs[0].token_ids),
                    "first_s": output.metrics.first_token_ts - start,
                    "last_s": output.metrics.last_token_ts - start,
                }
                for output in outputs
            ],
            "metrics": gain(before, self.counters()),
        }


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
        words = [tokenizer.decode([token]) for token in token_ids]  # the bundled pairs' tokens are words
        captions.append({"words": words, "relevance": relevance, "kinds": kinds})
    return captions
