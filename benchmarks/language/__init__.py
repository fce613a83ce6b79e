"""A pair that speaks English: SmolLM2 behind small vision towers, taught to tell of scripted videos."""
