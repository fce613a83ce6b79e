"""vllm_vidspec: speculative decoding for video language models, as a vLLM plugin."""

__version__ = "0.1.0"
