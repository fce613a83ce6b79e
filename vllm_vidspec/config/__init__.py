"""Every knob of `--speculative-config '{"method": "vidspec", ...}'`, its range and its default; needs pydantic only."""

from vllm_vidspec.config.groups import (
    DIGITS,
    PROTECTED_TOKENS,
    PRUNERS,
    REQUEST_LAMBDA,
    REQUEST_SCORER,
    PruneKnobs,
    ScoreKnobs,
    TreeKnobs,
    nearest,
)
from vllm_vidspec.config.model import CALIBRATED_KEYS, METHOD, PASS_THROUGH_KEYS, SELF, VidSpecConfig, parse_config
from vllm_vidspec.config.plans import NONE, Plan

__all__ = [
    "CALIBRATED_KEYS",
    "DIGITS",
    "METHOD",
    "NONE",
    "PASS_THROUGH_KEYS",
    "PROTECTED_TOKENS",
    "PRUNERS",
    "REQUEST_LAMBDA",
    "REQUEST_SCORER",
    "SELF",
    "Plan",
    "PruneKnobs",
    "ScoreKnobs",
    "TreeKnobs",
    "VidSpecConfig",
    "nearest",
    "parse_config",
]
