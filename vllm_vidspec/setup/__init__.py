"""Repairs of a Python environment that holds the CPU build of vLLM; standard library only, touches site-packages."""
