"""From a `--speculative-config` dict, and the calibration file that it names, to a `VidSpecConfig`."""

import json
from pathlib import Path
from typing import Any

from vllm_vidspec.config.fields import AUTO, Fields
from vllm_vidspec.config.model import SELF, VidSpecConfig
from vllm_vidspec.config.spelling import MAX_MESSAGE, PASS_THROUGH_KEYS
from vllm_vidspec.errors import VidSpecError, quoted

# Ours that say how a draft model computes.
_OF_A_DRAFT = ("draft_lm_head_quantization", "draft_vision", "linear_backend_per_quant")
# What `vidspec calibrate` measures.
CALIBRATED_KEYS = frozenset({"lambda_r", "guidance_layers", "uv_layer", "draft_vision"})


def parse_config(raw: dict[str, Any]) -> tuple[VidSpecConfig, dict[str, Any]]:
    """Split a `--speculative-config` dict, dashes in keys as underscores, into our configuration and vLLM's own keys;
    a VidSpecError names the wrong key or value.
    """
    given = {key.replace("-", "_"): value for key, value in raw.items()}
    given.pop("method", None)
    passed = {key: given.pop(key) for key in list(given) if key in PASS_THROUGH_KEYS}
    problems = []
    shape = given.get("draft_shape", Fields.model_fields["draft_shape"].default)
    if given.get("draft_table") is not None and shape != AUTO:
        problems.append(f'draft_table needs "draft_shape": "{AUTO}", this is {quoted(shape)}')
    if given.get("model") == SELF:
        if given.get("draft_vision", AUTO) == AUTO:
            given.pop("draft_vision", None)
        theirs = passed | {key: given[key] for key in _OF_A_DRAFT if key in given}
        of_a_draft = sorted(key for key, value in theirs.items() if value is not None)
        problems += [f'{key} is a draft model\'s, and with "model": "{SELF}" there is none' for key in of_a_draft]
    if given.get("calibration") is not None:
        given = _read_calibration(given["calibration"]) | given
    return VidSpecConfig.checked(given, problems), passed


def _read_calibration(path: Any) -> dict[str, Any]:
    """Return the fields that a calibration file sets; a VidSpecError for one that `vidspec calibrate` did not write."""
    # Unprintable characters in a path would break the line; any other path is shown as it is.
    shown = path if isinstance(path, str) and path.isprintable() and len(path) <= MAX_MESSAGE else quoted(path)
    not_ours = VidSpecError(f"speculative config: calibration: {shown} is not a file of `vidspec calibrate`")
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise not_ours  # reading a pipe or a device could block for ever
        values = json.loads(Path(path).read_text())["config"]
        unknown = sorted(values.keys() - CALIBRATED_KEYS)
    except OSError as error:
        raise VidSpecError(f"speculative config: calibration: {shown}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise not_ours from None
    if unknown:
        raise VidSpecError(
            f"speculative config: calibration: {shown} sets {quoted(unknown[0])}, which is not calibrated"
        )
    if isinstance(values.get("draft_vision"), str):  # a file that lies beside it
        values["draft_vision"] = str(Path(path).parent / values["draft_vision"])
    return values
