"""What drafts would gain: shapes of models, cards, rooflines, acceptance, speed, and a plan made of them; plain Python.

Everything here is modelled or computed from figures that a caller has measured; nothing loads a model or a device.
"""

from vidspec_tools.gpus import GPUS, Gpu, gpu_named
from vidspec_tools.planning.acceptance import (
    RUNNER_UP,
    Agreement,
    agreement_of_positions,
    default_agreement,
    rate_of_chain,
)
from vidspec_tools.planning.candidates import Candidate
from vidspec_tools.planning.models import KNOWN, draft_shape, target_shape
from vidspec_tools.planning.planner import Planner, plan
from vidspec_tools.planning.question import RATIOS, Question, check
from vidspec_tools.planning.roofline import ASSUMED, Assumptions, MemorySplit, Placement, forward_seconds
from vidspec_tools.planning.speed import StreamRun, run_streams, speedup, window_of
from vllm_vidspec.planning.shapes import ModelShape

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
    "agreement_of_positions",
    "check",
    "default_agreement",
    "draft_shape",
    "forward_seconds",
    "gpu_named",
    "plan",
    "rate_of_chain",
    "run_streams",
    "speedup",
    "target_shape",
    "window_of",
]
