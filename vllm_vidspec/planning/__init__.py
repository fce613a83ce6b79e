"""Sizes: the draft's KV pool, what a draft step reads; and which drafts would pay on given cards; plain Python."""
