"""Hooks observe the target: its prefill, its layers and its final states, without changing a number of them."""
