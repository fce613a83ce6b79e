"""The synthetic world of the bundled models, and what is right in a caption of it."""
