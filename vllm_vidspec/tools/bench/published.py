"""What ParallelVLM's paper publishes of the methods that `vidspec bench parallel --table` runs (its Table 1)."""

from dataclasses import dataclass

BENCHMARK = "VideoDetailCaption"


@dataclass(frozen=True)
class PublishedPair:
    """A pair of the paper.

    Attributes:
        family: The bundled pair that stands for it.
        name: As the paper names it.
        ratio: Its c = T_p / T_q, without pruning, rounded.
        figures: By method its mean accepted length M, the target's own token included, and its speedup, on BENCHMARK.
    """

    family: str
    name: str
    ratio: float
    figures: dict[str, tuple[float, float]]


# 128 frames, 512 output tokens, 8 L40S; a window of 5, ParallelVLM's from the ratio (3, 9 and 5 here); pruning 0.9.
PUBLISHED = (
    PublishedPair(
        *("llava-onevision", "LLaVA-OV 0.5B & 7B", 2),
        {
            "SD": (4.26, 1.08),
            "OnSD": (3.73, 1.40),
            "SD-Tree": (5.08, 1.28),
            "SpecVLM": (4.89, 1.83),
            "ParallelVLM": (8.47, 2.12),
        },
    ),
    PublishedPair(
        *("llava-onevision", "LLaVA-OV 7B & 72B", 5),
        {
            "SD": (4.14, 1.98),
            "OnSD": (3.67, 2.14),
            "SD-Tree": (4.64, 2.18),
            "SpecVLM": (4.51, 2.76),
            "ParallelVLM": (6.82, 3.43),
        },
    ),
    PublishedPair(
        *("qwen2.5-vl", "Qwen2.5-VL 7B & 32B", 3),
        {
            "SD": (3.37, 1.26),
            "OnSD": (2.76, 1.38),
            "SD-Tree": (4.21, 1.60),
            "SpecVLM": (4.18, 2.11),
            "ParallelVLM": (4.23, 2.40),
        },
    ),
)


def published(family: str, ratio: float, method: str) -> dict[str, str | float | None]:
    """Return the columns of a row: the family's pair whose ratio is nearest, and what is published of the method there.

    Args:
        family: Of the row.
        ratio: Target time to draft time, as asked for; of two pairs that are equally near the first.
        method: "SD", "SD-Tree", "OnSD", "SpecVLM" or "ParallelVLM"; of any other nothing is published.
    """
    pair = min((one for one in PUBLISHED if one.family == family), key=lambda one: abs(one.ratio - ratio))
    length, speedup = pair.figures.get(method, (None, None))
    return {"published_pair": pair.name, "published_m": length, "published_speedup": speedup}
