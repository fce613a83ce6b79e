"""Every patch of vLLM, and nothing else: each is idempotent, checks what it relies on and says why it exists.

`config` and `api` are put on by the plugin and by the start-up checks, `cpu` by the CPU engine alone; `model` is put
on a loaded target.
"""
