"""The kernels, beside their peers (`python -m benchmarks.kernels`) and compiled (`... .compiled`)."""

# Each has a module here; last the one whose peers compile longest.
KERNELS = ("draw", "candidates", "guidance_scores", "visual_relevance", "tree_attention")
