"""Scoring: which draft tokens stand; pure torch, tensors in and tensors out, never touches vLLM."""

from vllm_vidspec.scoring.base import (
    Looseness,
    Scored,
    ScoreInputs,
    Scorer,
    TreeShapes,
    get_scorer,
    register_scorer,
    scorer_names,
)
from vllm_vidspec.scoring.loose import RULES, normalized_entropy, random_scores, score_loose
from vllm_vidspec.scoring.strict import score_strict

register_scorer("strict", score_strict)
for _name in ("loose", "fly", "fly-entropy", "random"):
    register_scorer(_name, score_loose)

__all__ = [
    "RULES",
    "Looseness",
    "ScoreInputs",
    "Scored",
    "Scorer",
    "TreeShapes",
    "get_scorer",
    "normalized_entropy",
    "random_scores",
    "register_scorer",
    "score_loose",
    "score_strict",
    "scorer_names",
]
