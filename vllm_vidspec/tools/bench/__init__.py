"""Benchmarks of acceptance and of what loose verification keeps."""
