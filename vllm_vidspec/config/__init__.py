"""Every knob of `--speculative-config '{"method": "vidspec", ...}'`, its range and its default; needs pydantic only."""

from vllm_vidspec.config.fields import (
    AUTO,
    DIGITS,
    PROTECTED_TOKENS,
    PRUNERS,
    REQUEST_LAMBDA,
    REQUEST_RECORD,
    REQUEST_SCORER,
    SHELVES,
    PruneKnobs,
    ScoreKnobs,
)
from vllm_vidspec.config.model import METHOD, OWN_TOWER, SELF, TARGET_TOWER, VidSpecConfig
from vllm_vidspec.config.parse import CALIBRATED_KEYS, parse_config
from vllm_vidspec.config.schedule import NONE, Plan
from vllm_vidspec.config.spelling import MAX_MESSAGE, PASS_THROUGH_KEYS
