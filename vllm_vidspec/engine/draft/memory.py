"""DraftMemory: how much of a rank's KV memory the draft takes, for its KV pool and for vision embeddings."""

from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.utils.mem_utils import format_gib

from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.draft.model import DraftModel, kv_bytes_per_token
from vllm_vidspec.engine.hints import level_width
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.planning import pool

logger = init_logger("vllm.vidspec")


def max_slots_per_request(max_model_len: int, num_speculative_tokens: int) -> int:
    """Return the most KV entries that one request can hold: its longest text, and K drafts past it."""
    return max_model_len + 1 + num_speculative_tokens


@dataclass(frozen=True)
class DraftMemory:
    """What is taken, in bytes per rank."""

    pool_bytes: int  # the draft's KV pool
    vision_bytes: int  # vision embeddings that were used lately
    pixel_bytes: int = 0  # the most that is kept of pixels on the device (`SharedPixels`)
    table_bytes: int = 0  # what a step hands on and looks up by row, which is allocated after vLLM's memory profile

    @property
    def num_bytes(self) -> int:
        return self.pool_bytes + self.vision_bytes + self.pixel_bytes + self.table_bytes

    @classmethod
    def least(cls, model: DraftModel) -> "DraftMemory":
        return cls(2 * model.bytes_per_block, 0)

    @classmethod
    def plan(cls, config: VidSpecConfig, vllm_config: Any, model: DraftModel, available_bytes: int) -> "DraftMemory":
        """Choose the sizes, given the KV memory of this rank, target and draft together (`DraftBackend.reserve`)."""
        # A target that drafts for itself sees entries of its own: no tower encodes for the draft.
        encodes = bool(_media(vllm_config)) and not config.is_self_draft
        vision = 0 if config.is_self_draft else config.state_bytes_for("embeddings")
        if vision is None:
            vision = int(pool.VISION_SHARE * available_bytes) if encodes else 0
        if vision >= available_bytes:
            left = f"leaves nothing of the {available_bytes} bytes of KV memory"
            raise VidSpecError(f"state_bytes: {vision} for vision embeddings {left}")
        tables = table_bytes(config, vllm_config, model)
        # Pixels are shared where both towers run in one process, on a device that they must be copied to.
        shares = encodes and model.device.type != "cpu" and not config.is_parallel and config.has_own_tower
        pixels = int(pool.PIXEL_SHARE * available_bytes) if shares else 0
        rest = available_bytes - vision - pixels - tables
        size = _pool_bytes(config, vllm_config, model, rest)
        if size >= rest:
            raise VidSpecError(f"the draft's KV pool ({size} bytes) leaves nothing of the {rest} bytes of KV memory")
        num_tokens, max_slots = (size // model.bytes_per_block - 1) * model.block_size, _max_slots(config, vllm_config)
        longer = f"; a request that keeps more, of {max_slots} at most, runs undrafted"
        logger.info(
            "vidspec: draft KV pool %s GiB, target KV cache %s GiB; the pool holds %d tokens, pruned%s",
            *(format_gib(size), format_gib(rest - size), num_tokens, "" if num_tokens >= max_slots else longer),
        )
        return cls(size, vision, pixels, tables)


def table_bytes(config: VidSpecConfig, vllm_config: Any, model: DraftModel) -> int:
    """Return a bound of what grows with the number of rows: block tables, and hidden states of a level's nodes."""
    width = max(level_width(config, shape) for shape in config.shapes)
    max_blocks = -(-_max_slots(config, vllm_config) // model.block_size)
    row = 2 * 4 * max_blocks + width * model.hidden_size * model.dtype.itemsize
    return vllm_config.scheduler_config.max_num_seqs * row


def _pool_bytes(config: VidSpecConfig, vllm_config: Any, model: DraftModel, available_bytes: int) -> int:
    """Return the size of the draft's KV pool, by default `planning.pool`'s, and no more than all requests can fill."""
    per_block, max_slots = model.bytes_per_block, _max_slots(config, vllm_config)
    most = (vllm_config.scheduler_config.max_num_seqs * -(-max_slots // model.block_size) + 1) * per_block
    if config.draft_kv_bytes is not None:
        wanted = config.draft_kv_bytes
    else:
        draft, target = kv_bytes_per_token(model.config), kv_bytes_per_token(vllm_config)
        # Of images more is kept, but videos are what fills a cache: a server that takes both has the room of videos.
        modality = "image" if _media(vllm_config) == ["image"] else "video"
        kept = 1 - min(variant.ratio_for(modality) for variant in config.variants)
        wanted = pool.pool_bytes(available_bytes, target, draft, kept, max_slots, model.block_size)
    if wanted < 2 * per_block:
        raise VidSpecError(f"a draft KV pool of {wanted} bytes holds nothing; one block takes {per_block} bytes")
    return min(wanted, most)


def _max_slots(config: VidSpecConfig, vllm_config: Any) -> int:
    return max_slots_per_request(vllm_config.model_config.max_model_len, config.num_speculative_tokens)


def _media(vllm_config: Any) -> list[str]:
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is None:
        return []
    return [modality for modality in ("image", "video") if multimodal.get_limit_per_prompt(modality)]
