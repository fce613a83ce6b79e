"""From a target's visual embeddings to its draft's: the map that makes a second vision tower unnecessary."""

from vllm_vidspec.visual_map.fit import Fit
from vllm_vidspec.visual_map.maps import Shape, VisualMap

__all__ = ["Fit", "Shape", "VisualMap"]
