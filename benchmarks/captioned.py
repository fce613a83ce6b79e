"""Shape-world videos with their captions; numpy only, no engine.

A caption says all that is to be seen in a small closed vocabulary, with filler phrases that have synonyms of skewed
probability: visual anchors and linguistic filler, as in real captions. One frame of words serves every motion and one
clause every event, so that no early filler word commits a later fact.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from vllm_vidspec.shapeworld import world
from vllm_vidspec.shapeworld.world import (
    BACKGROUNDS,
    COLORS,
    EVENTS,
    MOTIONS,
    NUMBERS,
    PATTERNS,
    POSITIONS,
    QUESTION,
    SHAPES,
    SIZES,
    Sample,
    SceneFact,
    pick,
)

SYNONYM_PROBS = (0.6, 0.25, 0.15)
FILLERS = {
    "opening": ("the video shows", "this clip opens with", "at first we see"),
    "next": ("next", "after that", "then"),
    "arrives": ("comes", "we see", "there follows"),
    "background": ("background", "backdrop", "setting"),
    "exists": ("there is", "we find", "appears"),
    "that": ("that", "which"),
    "goes": ("goes", "travels", "heads"),
    "and": ("and then", "and later", "and finally"),
    "closing": ("in total the clip has", "all in all we saw", "in the end we saw"),
}


@cache
def vocabulary() -> tuple[str, ...]:
    """All words a caption or the usual question can contain, in a fixed order."""
    texts = [w for options in FILLERS.values() for w in options]
    texts += [*POSITIONS.values(), *COLORS, *BACKGROUNDS, *PATTERNS, *SHAPES, *SIZES, *MOTIONS, *EVENTS, *NUMBERS]
    texts += [QUESTION, "a", "scenes", ".", ","]
    return tuple(dict.fromkeys(" ".join(texts).split()))


@dataclass(frozen=True)
class Captioned(Sample):
    """A video and its `caption`: words of `vocabulary()`, separated by single spaces, that tell its facts."""

    caption: str


def held_out(i: int) -> Captioned:
    """Return the i-th sample that no bundled model was trained on, with a caption."""
    sample = world.held_out(i)
    return Captioned(**vars(sample), caption=_write_caption(sample.rng, sample.facts))


def _write_caption(rng: np.random.Generator, facts: tuple[SceneFact, ...]) -> str:
    def say(name: str) -> str:
        options = FILLERS[name]
        return pick(rng, options, SYNONYM_PROBS if len(options) == 3 else (0.7, 0.3))

    words: list[str] = []
    for scene_idx, scene in enumerate(facts):
        words += [say("next"), say("arrives")] if scene_idx else [say("opening")]
        words += ["a", scene.pattern, scene.background, say("background")]
        for fact in scene.objects:
            words += [",", POSITIONS[fact.position], say("exists"), "a", fact.size, fact.color, fact.shape]
            words += [say("that"), say("goes"), fact.motion, say("and"), fact.event]
            words += [fact.new_color] if fact.new_color else []
        words += ["."]
    words += [say("closing"), NUMBERS[len(facts) - 1], "scenes", "."]
    return " ".join(words)
