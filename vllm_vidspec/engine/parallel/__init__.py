"""The drafter in a process of its own, beside the target (ParallelVLM): both ends, and what they say to each other."""
