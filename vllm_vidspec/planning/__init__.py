"""Sizes that the engine derives from model shapes: the draft's KV pool, and what a draft step costs; plain Python."""
