"""The engine room: the only one that touches vLLM; `compat` is the only module that patches it."""
