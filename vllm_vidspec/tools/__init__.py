"""What people run: the demo, calibration, pictures of what pruning and scoring do. Uses vLLM's public API only.

What a user got wrong, and an engine that stopped, is a VidSpecError everywhere here: one line that names it.
"""
