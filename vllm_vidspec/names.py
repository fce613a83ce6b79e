"""Names that rooms share which share nothing else; no import."""

PRUNERS = (
    *("none", "specvlm", "attention", "uv", "uniform", "random"),
    *("window:front", "window:middle", "window:end", "frame", "fastvid", "dycoke"),
)
