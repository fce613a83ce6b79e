"""Generated text of README.md and docs/: `python -m benchmarks.pages` writes it, `measure` beside it measures."""
