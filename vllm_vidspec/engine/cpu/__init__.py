"""What the CPU engine alone needs. Nothing outside this folder imports it at module level, on CUDA nothing does."""
