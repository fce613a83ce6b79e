"""Shape-world videos with their captions; numpy only, no engine.

A caption says all that is to be seen in a small closed vocabulary, with filler phrases that have synonyms of skewed
probability: visual anchors and linguistic filler, as in real captions. One frame of words serves every motion and one
clause every event, so that no early filler word commits a later fact. There are three styles of captions (STYLES).
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from vllm_vidspec.shapeworld.world import (
    BACKGROUNDS,
    COLORS,
    EVENTS,
    HELD_OUT_SEED,
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
from vllm_vidspec.shapeworld.world import make_sample as make_video

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
    # Of wordy captions alone: before an object, and after it.
    "lead": ("later in the clip", "and in this video", "with the setting"),
    "aside": ("with this setting", "and see the clip", "later in the video"),
}
STYLES = ("usual", "flat", "wordy")
"""How captions are put. `usual`: synonyms of skewed probability. `flat`: synonyms are equally likely, so what a model
makes its favourites is its own. `wordy`: flat, with about three tokens of filler for each that tells a fact, and an
object's place before or after its look: what is uncertain is how to say it.
"""


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


def make_sample(seed: int, brief: bool = True, style: str = STYLES[0]) -> Captioned:
    """Return the video of one seed (`world.make_sample`) with a caption in one of STYLES."""
    sample = make_video(seed, brief)
    return Captioned(**vars(sample), caption=_write_caption(sample.rng, sample.facts, style))


def held_out(i: int) -> Captioned:
    """Return the i-th sample that no bundled model was trained on."""
    return make_sample(HELD_OUT_SEED + i)


def _write_caption(rng: np.random.Generator, facts: tuple[SceneFact, ...], style: str) -> str:
    def say(name: str) -> str:
        options = FILLERS[name]
        probs = SYNONYM_PROBS if len(options) == 3 else (0.7, 0.3)
        return pick(rng, options, probs if style == "usual" else None)

    words: list[str] = []
    for scene_idx, scene in enumerate(facts):
        words += [say("next"), say("arrives")] if scene_idx else [say("opening")]
        words += ["a", scene.pattern, scene.background, say("background")]
        for fact in scene.objects:
            words += [","]
            place, look = [POSITIONS[fact.position]], [say("exists"), "a", fact.size, fact.color, fact.shape]
            if style == "wordy":
                words += [say("lead"), *(place + look if rng.random() < 0.5 else look + place)]
            else:
                words += place + look
            words += [say("that"), say("goes"), fact.motion, say("and"), fact.event]
            words += [fact.new_color] if fact.new_color else []
            words += [say("aside")] if style == "wordy" else []
        words += ["."]
    words += [say("closing"), NUMBERS[len(facts) - 1], "scenes", "."]
    return " ".join(words)
