"""vllm_vidspec: speculative decoding for video language models, as a vLLM plugin."""

__version__ = "0.1.0"

SUPPORTED_VLLM = ("0.32", "0.33")  # their patch releases included; oldest first
SUPPORTED_CPU = "0.32"  # the newest of them that has a build for CPUs


def supports_vllm(version: str) -> bool:
    """Return whether a version of vLLM is a release of one that is supported."""
    return version.startswith(tuple(f"{supported}." for supported in SUPPORTED_VLLM))


def supported_releases() -> str:
    """Return the supported versions in words."""
    return " and ".join(f"{supported}.*" for supported in SUPPORTED_VLLM)
