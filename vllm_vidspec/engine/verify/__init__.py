"""Which drafts stand, in vLLM's rejection-sampler slot."""
