"""A picture of what pruning does to one video: `vidspec show-pruning`."""
