"""The bundled checkpoints and the sample video; paths only, nothing is loaded here."""

from pathlib import Path

_ROOT = Path(__file__).resolve().parent
PAIR = ("target", "draft")
FAR = "far"  # a second draft, which is wrong about as often as those of large models
FAMILIES = ("qwen2.5-vl", "llava-onevision", "qwen3-vl")
ROLES = (*PAIR, FAR)  # of each family
# Pairs whose targets were not taught what guided pruning relies on: one of short videos, two of up to 16,384 tokens.
# They are in a clone alone, as a wheel is to stay small.
PLAIN, LONG = "qwen2.5-vl-plain", "qwen2.5-vl-long"
LONG_PAIRS = (LONG, "llava-onevision-long")
CLONE_ONLY = (PLAIN, *LONG_PAIRS)
_CLONE_ROOT = _ROOT.parents[1] / "benchmarks" / "training" / "models"
SAMPLE_VIDEO: Path = _ROOT / "sample.mp4"


def checkpoint(family: str, role: str) -> Path:
    """Folder of a bundled checkpoint in Hugging Face layout; one of `CLONE_ONLY` may be missing, and has no `far`."""
    if family in CLONE_ONLY and role in PAIR:
        return _CLONE_ROOT / family / role
    if family not in FAMILIES or role not in ROLES:
        known = ", ".join(f"{name} / {one}" for name in FAMILIES for one in ROLES)
        raise ValueError(f"no bundled checkpoint {family} / {role}; there are {known}")
    return _ROOT / family / role
