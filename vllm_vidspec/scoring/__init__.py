"""Scoring: which draft tokens are accepted; tensors in and tensors out, never touches vLLM."""

from vidspec_kernels import Looseness, Tally, TreeShapes
from vllm_vidspec.scoring.rules import FLY_TOP_K, RULES, TOP_N, Scored, ScoreInputs, score, top_entropy
