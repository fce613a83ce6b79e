"""The engine room: the only one that touches vLLM; only `compat/` patches it."""
