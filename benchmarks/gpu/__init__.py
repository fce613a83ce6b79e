"""The GPU runner: `python -m benchmarks.gpu --smoke`, `python -m benchmarks.gpu --half 1`."""
