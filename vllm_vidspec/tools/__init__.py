"""What people run: the demo, calibration, status. Uses vLLM's public API only.

What a user got wrong, and an engine that stopped, is a VidSpecError everywhere here: one line that names it.
"""
