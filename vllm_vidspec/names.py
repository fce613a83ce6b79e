"""Names that rooms share which share nothing else; no import."""

PRUNERS = (
    *("none", "specvlm", "attention", "uv", "uniform", "random"),
    *("window:front", "window:middle", "window:end", "frame", "fastvid", "dycoke"),
)
# Of the target's thread that writes what is large for the drafter, on the drafter's cores.
WRITER_THREAD = "vidspec-channel"
# Classes of requests: text alone, or images or videos of up to so many tokens, which are names and no exact numbers.
CLASS_SIZES = ("256", "512", "1k", "2k", "4k", "8k", "16k", "32k")
CLASS_LABELS = ("text", *(f"{kind}_{size}" for kind in ("image", "video") for size in CLASS_SIZES))
