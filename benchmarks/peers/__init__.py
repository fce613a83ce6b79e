"""Others that do what we do, measured beside ours in the same run."""
