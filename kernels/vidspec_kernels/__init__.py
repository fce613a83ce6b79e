"""vidspec_kernels: Triton kernels beside their torch references; needs torch and triton only."""

from vidspec_kernels.accept_chain import accept_chain, accept_chain_reference
from vidspec_kernels.chain_step import chain_step, chain_step_reference

__all__ = ["accept_chain", "accept_chain_reference", "chain_step", "chain_step_reference"]
