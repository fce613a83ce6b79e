"""What drafts would gain: shapes of models, cards, rooflines, acceptance, speed, and a plan made of them; plain Python.

Everything here is modelled or computed from figures that a caller has measured; nothing loads a model or a device.
"""

from vllm_vidspec.planning.acceptance import (
    RUNNER_UP,
    Agreement,
    agreement_of_positions,
    answer_length,
    default_agreement,
    rate_of_chain,
    rate_of_tree,
)
from vllm_vidspec.planning.candidates import Candidate
from vllm_vidspec.planning.gpus import ASSUMED, GPUS, Assumptions, Gpu, gpu_named
from vllm_vidspec.planning.planner import Planner, plan
from vllm_vidspec.planning.question import RATIOS, Question, check
from vllm_vidspec.planning.roofline import MemorySplit, Placement, forward_seconds
from vllm_vidspec.planning.shapes import KNOWN, ModelShape, draft_shape, target_shape
from vllm_vidspec.planning.speed import StreamRun, StreamTimes, rounds_speedup, run_streams, speedup, window_of

__all__ = [
    "ASSUMED",
    "GPUS",
    "KNOWN",
    "RATIOS",
    "RUNNER_UP",
    "Agreement",
    "Assumptions",
    "Candidate",
    "Gpu",
    "MemorySplit",
    "ModelShape",
    "Placement",
    "Planner",
    "Question",
    "StreamRun",
    "StreamTimes",
    "agreement_of_positions",
    "answer_length",
    "check",
    "default_agreement",
    "draft_shape",
    "forward_seconds",
    "gpu_named",
    "plan",
    "rate_of_chain",
    "rate_of_tree",
    "rounds_speedup",
    "run_streams",
    "speedup",
    "target_shape",
    "window_of",
]
