"""The bundled checkpoints and the sample video; paths only, nothing is loaded here."""

from pathlib import Path

_ROOT = Path(__file__).resolve().parent
PAIR = ("target", "draft")
FAR = "far"  # a second draft, which is wrong about as often as those of large models
FAMILIES = ("qwen2.5-vl", "llava-onevision", "qwen3-vl")
ROLES = (*PAIR, FAR)  # of each family
# A pair whose target was not taught what guided pruning relies on; in a clone alone, as a wheel is to stay small.
PLAIN = "qwen2.5-vl-plain"
_PLAIN_ROOT = _ROOT.parents[1] / "training" / "models" / PLAIN
SAMPLE_VIDEO: Path = _ROOT / "sample.mp4"


def checkpoint(family: str, role: str) -> Path:
    """Directory of a bundled checkpoint in Hugging Face layout; that of `PLAIN` may be missing.

    Args:
        family: one of `FAMILIES`, or `PLAIN`, which has no far draft.
        role: one of `ROLES`.

    Raises:
        ValueError: an unknown family or role.
    """
    if family == PLAIN and role in PAIR:
        return _PLAIN_ROOT / role
    if family not in FAMILIES or role not in ROLES:
        known = ", ".join(f"{name} / {one}" for name in FAMILIES for one in ROLES)
        raise ValueError(f"no bundled checkpoint {family} / {role}; there are {known}")
    return _ROOT / family / role
