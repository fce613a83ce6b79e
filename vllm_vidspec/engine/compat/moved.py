"""Names that supported versions of vLLM keep in different places; the engine room imports them from here."""

try:  # 0.33 has moved what plans a KV cache out of its utilities
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
except ModuleNotFoundError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

__all__ = ["get_kv_cache_config_from_groups", "get_kv_cache_groups"]
