"""vllm_vidspec: speculative decoding for video language models, as a vLLM plugin."""

__version__ = "0.1.0"

SUPPORTED_VLLM = "0.32."  # what a version must begin with
