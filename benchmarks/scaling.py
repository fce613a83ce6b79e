"""Batches of requests interleaved with vanilla, for `benchmarks/bench_never_slower.py`: video length and batch size."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.inflated import InflatedBenchmark
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.bench.speed import Variant, Workload

VIDEO_TOKENS = 256  # of a whole video of the bundled pairs; LLaVA-OneVision's newline comes on top
MAX_POSITIONS = 16384  # of the bundled models


@dataclasses.dataclass(frozen=True)
class ScalingBenchmark(InflatedBenchmark):
    """What to measure: requests of a length, several at once."""

    batch_size: int = 1  # requests that are handed in at once
    video_tokens: int = VIDEO_TOKENS  # of each request: whole videos, one after another, or a part of one's frames
    kept_requests: int = 0  # requests that are asked again and again, whose prompts stay in the prefix cache

    @property
    def num_videos(self) -> int:
        return max(1, self.video_tokens // VIDEO_TOKENS)

    def job(self, workload: Workload, variant: Variant) -> dict[str, Any]:
        """Return what `session_job` reads; every round has requests of its own, and the warm-up comes before them."""
        job = workload.job(self, variant, list(range(self.rounds * self.batch_size + 1)))
        # A request has text between its videos, and Qwen3-VL a time before every two frames.
        longest = 2 * self.video_tokens + self.max_tokens + 256
        job["llm"] |= {
            "max_model_len": min(MAX_POSITIONS, max(pairs.MAX_MODEL_LEN, longest)),
            "max_num_seqs": max(pairs.MAX_NUM_SEQS, self.batch_size),
            "limit_mm_per_prompt": {"video": self.num_videos},
        }
        if self.kept_requests:
            positions = (self.kept_requests + 1) * job["llm"]["max_model_len"]
            job["llm"] |= {
                "kv_cache_memory_bytes": pairs.KV_CACHE_BYTES // 2 + positions * (4 + workload.target_layers) * 1024,
                "mm_processor_cache_gb": 8,
            }
        job["prompts"] |= {"num_videos": self.num_videos, "video_frac": min(1.0, self.video_tokens / VIDEO_TOKENS)}
        return job


def token_ids(rounds: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [answer["token_ids"] for one in rounds for answer in one["answers"]]


def median_error(values: Sequence[float]) -> float:
    """Return twice the standard error of the median of values, 0 for one."""
    return 2 * 1.25 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def by_round(one: dict[str, Any]) -> dict[str, float]:
    """Return the figures of one round: decoded tokens over the span of its decode, the mean time of a token of one
    answer, and the mean time to first token.
    """
    answers = one["answers"]
    decoded = sum(len(answer["token_ids"]) - 1 for answer in answers)
    span = max(answer["last_s"] for answer in answers) - min(answer["first_s"] for answer in answers)
    if not decoded or not span:
        raise VidSpecError("no answer has a second token: there is no decode to measure")
    each = [(answer["last_s"] - answer["first_s"]) / max(len(answer["token_ids"]) - 1, 1) for answer in answers]
    ttft_s = statistics.mean(answer["first_s"] for answer in answers)
    return {"tokens_per_s": decoded / span, "tpot_s": statistics.mean(each), "ttft_s": ttft_s}
