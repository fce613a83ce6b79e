"""A MiniCPM-V checkpoint's own code in small; family_models.py copies it. Frames are whole, never cut into slices."""

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature, ProcessorMixin, Qwen3Config
from transformers.image_processing_utils import BaseImageProcessor
from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig

SIDE, PATCH, QUERIES = 112, 14, 8


class MiniCPMVConfig(Qwen3Config):
    model_type = "minicpmv"

    def __init__(self, vision_config: dict | None = None, **fields):
        self.vision_config = Idefics2VisionConfig(**(vision_config or {}))
        self.version, self.query_num, self.image_size, self.drop_vision_last_layer = 4.5, QUERIES, SIDE, False
        super().__init__(**fields)


class MiniCPMVImageProcessor(BaseImageProcessor):
    model_input_names = ["pixel_values"]  # noqa: RUF012

    def __init__(self, max_slice_nums: int = 1, **kwargs):
        super().__init__(**kwargs)
        self.max_slice_nums, self.image_feature_size, self.use_image_id = max_slice_nums, QUERIES, True

    def get_sliced_grid(self, image_size, max_slice_nums=None):
        return None

    def get_slice_image_placeholder(self, image_size, image_idx=0, max_slice_nums=None, use_image_id=True):
        number = f"<image_id>{image_idx}</image_id>" if use_image_id else ""
        return f"{number}<image>{'<unk>' * QUERIES}</image>"

    def preprocess(self, images, do_pad=True, max_slice_nums=None, return_tensors=None, **kwargs):
        """Return by prompt its images' `[3, PATCH, num_patches * PATCH]` strips, sizes and patches a side."""
        pixels, sizes, grids = [], [], []
        for batch in images if isinstance(images[0], list | tuple | np.ndarray) else [images]:
            shown = [Image.fromarray(one) if isinstance(one, np.ndarray) else one for one in batch]
            pixels.append([_strip(one.convert("RGB").resize((SIDE, SIDE))) for one in shown])
            sizes.append([one.size for one in shown])
            grids.append(torch.full((len(shown), 2), SIDE // PATCH))
        return BatchFeature({"pixel_values": pixels, "image_sizes": sizes, "tgt_sizes": grids})


class MiniCPMVProcessor(ProcessorMixin):
    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


def _strip(image: Image.Image) -> torch.Tensor:
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1
    rows = pixels.unflatten(1, (-1, PATCH)).unflatten(3, (-1, PATCH))  # [3, rows, PATCH, columns, PATCH]
    return rows.permute(0, 2, 1, 3, 4).flatten(2).contiguous()
