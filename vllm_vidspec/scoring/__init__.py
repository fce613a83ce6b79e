"""Scoring: which draft tokens stand; pure torch, tensors in and tensors out, never touches vLLM."""

from vllm_vidspec.scoring.base import Looseness, Scored, ScoreInputs, Tally, TreeShapes
from vllm_vidspec.scoring.rules import RULES, normalized_entropy, score

__all__ = [
    "RULES",
    "Looseness",
    "ScoreInputs",
    "Scored",
    "Tally",
    "TreeShapes",
    "normalized_entropy",
    "score",
]
