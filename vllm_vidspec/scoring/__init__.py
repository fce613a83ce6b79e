"""Scoring: which draft tokens stand; pure torch, tensors in and tensors out, never touches vLLM."""

from vllm_vidspec.scoring.base import (
    Scored,
    ScoreInputs,
    Scorer,
    TreeShapes,
    get_scorer,
    register_scorer,
    scorer_names,
)
from vllm_vidspec.scoring.strict import score_strict

register_scorer("strict", score_strict)

__all__ = [
    "ScoreInputs",
    "Scored",
    "Scorer",
    "TreeShapes",
    "get_scorer",
    "register_scorer",
    "score_strict",
    "scorer_names",
]
