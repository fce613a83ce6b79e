"""What proves this repository: benchmarks, soaks, how the bundled models were made. In no wheel; the package never
imports it. Run as `python -m benchmarks.<case>`.
"""
