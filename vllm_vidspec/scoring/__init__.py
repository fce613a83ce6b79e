"""Scoring: which draft tokens are accepted; tensors in and tensors out, never touches vLLM."""

from vllm_vidspec.scoring.base import Looseness, Scored, ScoreInputs, Tally, TreeShapes
from vllm_vidspec.scoring.rules import RULES, score, top_entropy

__all__ = [
    "RULES",
    "Looseness",
    "ScoreInputs",
    "Scored",
    "Tally",
    "TreeShapes",
    "score",
    "top_entropy",
]
