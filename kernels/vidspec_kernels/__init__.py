"""vidspec_kernels: Triton kernels beside their torch references; needs torch and triton only."""

from vidspec_kernels.accept_chain import accept_chain, accept_chain_reference
from vidspec_kernels.chain_step import chain_step, chain_step_reference
from vidspec_kernels.guidance_scores import guidance_scores, guidance_scores_reference
from vidspec_kernels.uv_scores import uv_scores_reference, uv_text_sum, uv_video_scores

__all__ = [
    "accept_chain",
    "accept_chain_reference",
    "chain_step",
    "chain_step_reference",
    "guidance_scores",
    "guidance_scores_reference",
    "uv_scores_reference",
    "uv_text_sum",
    "uv_video_scores",
]
