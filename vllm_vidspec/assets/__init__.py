"""The bundled checkpoints and the sample video; paths only, nothing is loaded here."""

from pathlib import Path

_ROOT = Path(__file__).resolve().parent
FAMILIES = ("qwen2.5-vl", "llava-onevision", "qwen3-vl")
ROLES = ("target", "draft")
SAMPLE_VIDEO: Path = _ROOT / "sample.mp4"


def checkpoint(family: str, role: str) -> Path:
    """Directory of a bundled checkpoint in Hugging Face layout.

    Args:
        family: one of `FAMILIES`.
        role: "target" or "draft".

    Raises:
        ValueError: an unknown family or role.
    """
    if family not in FAMILIES or role not in ROLES:
        raise ValueError(f"no bundled checkpoint {family!r} / {role!r}; families {FAMILIES}, roles {ROLES}")
    return _ROOT / family / role
