"""What people run: the demo, calibration, pictures of what pruning and scoring do. Uses vLLM's public API only."""
