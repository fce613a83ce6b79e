"""What proves this repository, run as `python -m benchmarks.<case>` in a clone; the product never imports it."""
