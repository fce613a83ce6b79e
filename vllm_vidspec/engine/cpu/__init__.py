"""What the CPU engine alone needs. Nothing outside this folder may import it at module level, and on CUDA nothing does."""
