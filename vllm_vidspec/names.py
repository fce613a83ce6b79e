"""Names shared by rooms that do not import each other; imports nothing."""

PRUNERS = (
    *("none", "specvlm", "specvlm:stride", "attention", "uv", "uniform", "uniform:stride", "random"),
    *("window:front", "window:middle", "window:end", "frame", "fastvid", "dycoke"),
)
WRITER_THREAD = "vidspec-channel"  # of the target's process, on the drafter's cores: it writes large messages
# Classes of requests: text alone, or images or videos of up to about this many tokens.
CLASS_SIZES = ("256", "512", "1k", "2k", "4k", "8k", "16k", "32k")
CLASS_LABELS = ("text", *(f"{kind}_{size}" for kind in ("image", "video") for size in CLASS_SIZES))
