"""Every patch of vLLM, and nothing else: each is idempotent, checks what it relies on and says why it exists."""
