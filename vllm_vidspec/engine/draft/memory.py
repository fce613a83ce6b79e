"""DraftMemory: how much of a rank's KV memory the draft takes: for its KV pool, vision embeddings and pixels."""

from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.utils.mem_utils import format_gib

from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.draft.model import DraftModel, kv_bytes_per_token
from vllm_vidspec.errors import VidSpecError

logger = init_logger("vllm.vidspec")

# A draft that holds less of its requests than the target does runs out first; this margin over the kept share pays for
# text, and for prompts without video.
_TEXT_SHARE = 0.1

# Of the KV memory, for the draft's vision embeddings.
VISION_SHARE = 0.02

# Of the KV memory, for pixels that the target has seen and the draft has not: 25,000 tokens of video are 236 MB.
_PIXEL_SHARE = 0.01


def max_slots_per_request(max_model_len: int, num_speculative_tokens: int) -> int:
    """Return the most KV entries that one request can hold: its longest text, and K drafts past it."""
    return max_model_len + 1 + num_speculative_tokens


@dataclass(frozen=True)
class DraftMemory:
    """What is taken, in bytes per rank.

    Attributes:
        pool_bytes: The draft's KV pool.
        vision_bytes: Vision embeddings of what was shown lately.
        pixel_bytes: The most that is kept of pixels on the device (`SharedPixels`).
    """

    pool_bytes: int
    vision_bytes: int
    pixel_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.pool_bytes + self.vision_bytes + self.pixel_bytes

    @classmethod
    def least(cls, model: DraftModel) -> "DraftMemory":
        """Return what padding needs: the null block, and one that a row could have."""
        return cls(2 * model.bytes_per_block, 0)

    @classmethod
    def plan(cls, config: VidSpecConfig, vllm_config: Any, model: DraftModel, available_bytes: int) -> "DraftMemory":
        """Choose the sizes.

        Args:
            config: The knobs.
            vllm_config: Of the target.
            model: The draft, loaded.
            available_bytes: KV memory of this rank, target and draft together.

        Raises:
            VidSpecError: A knob asks for too much, or for too little for one request.
        """
        vision = _vision_bytes(config, vllm_config, available_bytes)
        # Pixels are shared where both towers run in one process, on a device that they must be copied to.
        shares = model.device.type != "cpu" and not config.is_parallel and not config.is_self_draft
        pixels = int(_PIXEL_SHARE * available_bytes) if shares and _shows(vllm_config) else 0
        left = available_bytes - vision - pixels
        pool = _pool_bytes(config, vllm_config, model, left)
        if pool >= left:
            raise VidSpecError(f"the draft's KV pool ({pool} bytes) leaves nothing of the {left} bytes of KV memory")
        logger.info("vidspec: draft KV pool %s GiB, target KV cache %s GiB", format_gib(pool), format_gib(left - pool))
        return cls(pool, vision, pixels)


def _pool_bytes(config: VidSpecConfig, vllm_config: Any, model: DraftModel, available_bytes: int) -> int:
    """Return the size of the draft's KV pool: by default what holds the pruned copy of all that the target holds."""
    per_block = model.bytes_per_block
    max_slots = max_slots_per_request(vllm_config.model_config.max_model_len, config.num_speculative_tokens)
    blocks_per_req = -(-max_slots // model.block_size)
    most = (vllm_config.scheduler_config.max_num_seqs * blocks_per_req + 1) * per_block
    if config.pool.kv_bytes is not None:
        wanted = config.pool.kv_bytes
    elif config.pool.kv_fraction is not None:
        wanted = int(config.pool.kv_fraction * available_bytes)
    else:
        draft, target = kv_bytes_per_token(model.config), kv_bytes_per_token(vllm_config)
        kept = 1 - min(way.ratio_for(modality) for way in config.prune.ways for modality in ("video", "image"))
        share = min(1.0, kept + _TEXT_SHARE) * draft
        wanted = max(int(available_bytes * share / (target + share)), (blocks_per_req + 1) * per_block)
    if wanted < 2 * per_block:
        raise VidSpecError(f"a draft KV pool of {wanted} bytes holds nothing; one block takes {per_block} bytes")
    return min(wanted, most)


def _vision_bytes(config: VidSpecConfig, vllm_config: Any, available_bytes: int) -> int:
    """Return the size of the cache of vision embeddings: none for a target that is shown nothing."""
    wanted = config.pool.encoder_bytes
    if wanted is None:
        wanted = int(VISION_SHARE * available_bytes) if _shows(vllm_config) else 0
    if wanted >= available_bytes:
        raise VidSpecError(f"draft_encoder_bytes: {wanted} leaves nothing of the {available_bytes} bytes of KV memory")
    return wanted


def _shows(vllm_config: Any) -> bool:
    """Return whether a target is ever shown anything."""
    multimodal = vllm_config.model_config.multimodal_config
    return multimodal is not None and any(map(multimodal.get_limit_per_prompt, ("image", "video")))
