"""The draft's side: its network, its KV memory, prefill, chains and trees."""
