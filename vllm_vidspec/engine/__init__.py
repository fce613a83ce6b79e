"""The engine room: the only one that touches vLLM. Only `compat/` patches it."""
