"""How captions of shape-world videos are scored, and how well relevance separates their words; pure, no engine."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import captioned
from vllm_vidspec.metrics import KINDS, Kind
from vllm_vidspec.shapeworld import world
from vllm_vidspec.shapeworld.world import SceneFact

# Every attribute of `score_caption`, by what it is about: each counts in one group.
GROUPS: dict[str, tuple[str, ...]] = {
    "color": ("color", "new_color", "background"),
    "shape": ("shape", "size", "pattern"),
    "motion": ("motion", "event"),
    "order": ("num_scenes", "num_objects", "position"),
}
ATTRIBUTES = tuple(name for names in GROUPS.values() for name in names)

# Words that depend on the video, and words that depend on the language; other tokens (the end of the text) are not
# compared.
ATTRIBUTE_WORDS = frozenset(
    {
        *(*world.COLORS, *world.BACKGROUNDS, *world.PATTERNS, *world.SHAPES),
        *(*world.SIZES, *world.MOTIONS, *world.POSITIONS, *world.EVENTS, *world.NUMBERS),
    }
)
FILLER_WORDS = frozenset(captioned.vocabulary()) - {"describe"} - ATTRIBUTE_WORDS  # "describe" is the question's alone

# What only the video can tell, by whatever word: also whether another object, another scene or the end comes, and where
# an object is, which is settled by the first word of its place.
TELLING_WORDS = ATTRIBUTE_WORDS | {
    *(",", "."),
    *(option.split()[0] for name in ("next", "closing") for option in captioned.FILLERS[name]),
    *(option.split()[0] for option in world.POSITIONS.values()),
}

Counts = Mapping[str, tuple[int, int]]


def parse_caption(text: str) -> list[SceneFact]:
    """Read the facts back from a caption; what is missing or malformed becomes an empty word."""
    scenes = []
    for sentence in text.lower().split(".")[:-1]:
        head, *clauses = (part.split() for part in sentence.split(","))
        if "scenes" in head or not (clauses or head):
            continue
        objects = []
        for words in clauses:
            middle = next((i for i, w in enumerate(words) if w in captioned.FILLERS["that"]), len(words))
            front, back = words[:middle], words[middle:]
            event = _first(back, world.EVENTS)
            position, size, color, shape = (
                _first(front, options) for options in (world.POSITIONS, world.SIZES, world.COLORS, world.SHAPES)
            )
            motion, new_color = _first(back, world.MOTIONS), _first(back, world.COLORS) or None
            objects.append(world.ObjectFact(position, size, color, shape, motion, event, new_color))
        scenes.append(SceneFact(_first(head, world.BACKGROUNDS), _first(head, world.PATTERNS), tuple(objects)))
    return scenes


def score_caption(text: str, facts: tuple[SceneFact, ...]) -> dict[str, tuple[int, int]]:
    """Compare a caption with the facts in order: attribute -> (right, total); what it lacks counts as wrong."""
    said, nothing = parse_caption(text), SceneFact("", "", ())
    marks = [("num_scenes", len(said) == len(facts))]
    for scene, heard in itertools.zip_longest(facts, said[: len(facts)], fillvalue=nothing):
        marks += [(name, getattr(heard, name) == getattr(scene, name)) for name in ("background", "pattern")]
        marks += [("num_objects", len(heard.objects) == len(scene.objects))]
        for fact, other in itertools.zip_longest(scene.objects, heard.objects[: len(scene.objects)]):
            names = ["position", "size", "color", "shape", "motion", "event"] + ["new_color"] * bool(fact.new_color)
            marks += [(name, getattr(other, name, None) == getattr(fact, name)) for name in names]
    right = Counter(name for name, is_right in marks if is_right)
    return {name: (right[name], total) for name, total in Counter(name for name, _ in marks).items()}


def _first(words: list[str], options) -> str:
    return next((w for w in words if w in options), "")


def count_right(texts: Sequence[str], facts: Sequence[tuple[SceneFact, ...]]) -> dict[str, tuple[int, int]]:
    """Return (right, total) of each of ATTRIBUTES over all captions, one per video, given what the videos show."""
    counts = dict.fromkeys(ATTRIBUTES, (0, 0))
    for one in zip(texts, facts, strict=True):
        for name, (right, total) in score_caption(*one).items():
            counts[name] = (counts[name][0] + right, counts[name][1] + total)
    return counts


def accuracy(counts: Counts, names: Iterable[str] = ATTRIBUTES) -> float | None:
    """Return the share that is right of all attributes with these names, pooled; None where there are none."""
    right, total = (sum(counts[name][i] for name in names) for i in range(2))
    return right / total if total else None


def accuracies(counts: Counts) -> dict[str, Any]:
    """Return `accuracy` of everything pooled, and by `group` and by `attribute`."""
    return {
        "accuracy": accuracy(counts),
        "group": {name: accuracy(counts, names) for name, names in GROUPS.items()},
        "attribute": {name: accuracy(counts, [name]) for name in ATTRIBUTES},
    }


def retention(ours: float | None, reference: float | None) -> float | None:
    """Return what is left of the reference's accuracy; more than 1 where ours is better."""
    return None if ours is None or not reference else ours / reference


def auc(positives: Sequence[float], negatives: Sequence[float]) -> float | None:
    """Return the chance that a positive ranks above a negative, where ties count half; None where there are none."""
    if not len(positives) or not len(negatives):
        return None
    below = np.sort(np.asarray(negatives, float))
    ranks = np.searchsorted(below, positives, "left") + np.searchsorted(below, positives, "right")  # [num_positives]
    return float(ranks.mean() / 2 / len(below))


def relevance_auc(words: Sequence[Sequence[str]], relevance: Sequence[Sequence[float | None]]) -> float | None:
    """Return the area under the ROC curve of relevance, words about the video against fillers; None without either."""
    pairs = [
        (word.strip(), value)
        for caption, values in zip(words, relevance, strict=True)
        for word, value in zip(caption, values, strict=True)
        if value is not None
    ]
    classes = ([value for word, value in pairs if word in known] for known in (ATTRIBUTE_WORDS, FILLER_WORDS))
    return auc(*classes)


def kind_shares(kinds: Sequence[Sequence[int]]) -> dict[str, float | None]:
    """Return the shares of accepted drafts by how they were accepted, of tokens' `Kind`s; None without any."""
    flat = [kind for caption in kinds for kind in caption]
    num_accepted = len(flat) - flat.count(Kind.OWN)
    return {f"{name}_frac": flat.count(i) / num_accepted if num_accepted else None for i, name in enumerate(KINDS, 1)}
