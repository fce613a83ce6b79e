"""Families: what differs between model families, read off Hugging Face configs. Touches no vLLM and no weights."""

from vllm_vidspec.families.base import FamilyAdapter
from vllm_vidspec.families.pairs import adapter_for, check_pair, check_ranks, known_families
from vllm_vidspec.families.tokens import check_tokens
from vllm_vidspec.families.towers import tower_fingerprint, tower_of
