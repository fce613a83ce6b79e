"""Pictures of what pruning and scoring do to one video: `vidspec show-pruning` and `vidspec show-relevance`."""
