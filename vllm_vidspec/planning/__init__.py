"""Sizes: the draft's KV pool, and what a draft step reads; plain Python."""
