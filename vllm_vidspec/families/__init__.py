"""Families: what differs between model families, read off Hugging Face configs. Touches no vLLM and no weights."""

from vllm_vidspec.families.base import FamilyAdapter, adapter_for, check_pair, check_ranks, families, register_family
from vllm_vidspec.families.llava_onevision import LlavaOnevisionAdapter
from vllm_vidspec.families.qwen2_5_vl import Qwen2_5_VLAdapter
from vllm_vidspec.families.tokens import check_tokens

register_family(Qwen2_5_VLAdapter())
register_family(LlavaOnevisionAdapter())

__all__ = [
    "FamilyAdapter",
    "LlavaOnevisionAdapter",
    "Qwen2_5_VLAdapter",
    "adapter_for",
    "check_pair",
    "check_ranks",
    "check_tokens",
    "families",
    "register_family",
]
