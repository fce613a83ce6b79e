"""Names that rooms share which share nothing else; no import."""

PRUNERS = (
    *("none", "specvlm", "attention", "uv", "uniform", "random"),
    *("window:front", "window:middle", "window:end", "frame", "fastvid", "dycoke"),
)
# Of the target's thread that writes what is large for the drafter, on the drafter's cores.
WRITER_THREAD = "vidspec-channel"
