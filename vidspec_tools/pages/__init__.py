"""Pages of docs/ from recorded results and from the configuration: `python -m vidspec_tools.pages` writes them."""
