"""Repairs of a Python environment that holds the CPU build of vLLM. Standard library only, touches site-packages."""
