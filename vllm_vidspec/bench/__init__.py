"""Benchmarks, baselines and the synthetic world that the bundled models are trained on."""
