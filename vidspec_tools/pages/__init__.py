"""Pages of docs/ from recorded results and from the planner's model: `python -m vidspec_tools.pages` writes them."""
