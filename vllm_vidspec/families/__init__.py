"""Families: what differs between model families, read off Hugging Face configs. Touches no vLLM and no weights."""

from vllm_vidspec.families.base import FamilyAdapter, adapter_for, check_pair, check_ranks, families, register_family
from vllm_vidspec.families.llava_onevision import LlavaOnevisionAdapter
from vllm_vidspec.families.qwen_vl import QwenVLAdapter
from vllm_vidspec.families.tokens import check_tokens

register_family(QwenVLAdapter("qwen2-vl", {"qwen2_vl"}, {"Qwen2VLForConditionalGeneration"}))
register_family(QwenVLAdapter("qwen2.5-vl", {"qwen2_5_vl"}, {"Qwen2_5_VLForConditionalGeneration"}))
register_family(
    QwenVLAdapter(
        "qwen3-vl",
        {"qwen3_vl", "qwen3_vl_moe"},
        {"Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"},
    )
)
register_family(LlavaOnevisionAdapter())

__all__ = [
    "FamilyAdapter",
    "LlavaOnevisionAdapter",
    "QwenVLAdapter",
    "adapter_for",
    "check_pair",
    "check_ranks",
    "check_tokens",
    "families",
    "register_family",
]
