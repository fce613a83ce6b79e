"""The `vllm serve` line of a plan; plain Python."""

import json
import shlex
from typing import Any

from vllm_vidspec.config.model import METHOD, SELF
from vllm_vidspec.planning.candidates import CHAIN, GROWN_DEPTHS, PARALLEL, Candidate, Question
from vllm_vidspec.planning.shapes import FP8, WEIGHT_BYTES, ModelShape

_LENGTHS = 1024  # what a longest length is a multiple of


def serve_line(question: Question, draft: Candidate | None) -> str:
    """Return the command of a server for such requests, drafting as `draft` says, or not (None).

    Its longest length is that of the requests: vLLM keeps memory for a longer one, which the plan has in requests.
    """
    longest = question.context + question.answer_tokens
    words = ["vllm", "serve", _checkpoint(question.target)]
    if question.ranks > 1:
        words += ["--tensor-parallel-size", str(question.ranks)]
    words += ["--max-model-len", str(-(-longest // _LENGTHS) * _LENGTHS)]
    if question.fps is not None:
        # By default vLLM samples 32 frames of a video, or so many a second as the model's own loader says.
        words += ["--media-io-kwargs", json.dumps({"video": {"fps": question.fps, "num_frames": -1}})]
    if draft is not None:
        words += ["--speculative-config", json.dumps(_speculative_config(question, draft))]
    return shlex.join(words)


def _speculative_config(question: Question, draft: Candidate) -> dict[str, Any]:
    # The policy takes the depth of a grown tree by what is accepted, and a chain where that is faster.
    shape = {CHAIN: CHAIN, PARALLEL: CHAIN, **dict.fromkeys(GROWN_DEPTHS, "auto")}.get(draft.shape, draft.shape)
    found: dict[str, Any] = {
        "method": METHOD,
        "model": SELF if question.is_self else _checkpoint(question.draft),
        "draft_shape": shape,
        "num_speculative_tokens": draft.num_tokens,
        "prune_ratio": draft.prune_ratio,
    }
    if question.draft.vision_bytes < WEIGHT_BYTES and not question.is_self:  # of what vLLM quantises as it loads
        found["quantization"] = FP8
    if draft.shape == PARALLEL:
        found["parallel"] = {"device": f"cuda:{question.ranks}", "tensor_parallel_size": question.draft_gpus}
    return found


def _checkpoint(shape: ModelShape) -> str:
    return shape.checkpoint or f"a checkpoint of {shape.name}"
