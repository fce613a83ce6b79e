"""Videos of scripted events, told in varied English; numpy only.

A caption is written with its facts marked, `a [color:red] [shape:circle]`, and read by `parse`: the text, and which of
its characters say what. Only marked words need the video; what surrounds them is drawn from many phrasings.
"""

import re
from dataclasses import dataclass

import numpy as np

from vllm_vidspec.shapeworld.world import (
    BACKGROUNDS,
    COLORS,
    FRAME_SIZE,
    HELD_OUT_SEED,
    PATTERNS,
    SHAPES,
    SIZES,
    _background_image,
    _light,
    _noise,
    _sprite,
    pick,
)

MOTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), "still": (0, 0)}
POSITIONS = {"left": (0.25, 0.5), "right": (0.75, 0.5), "top": (0.5, 0.25), "bottom": (0.5, 0.75)}
NUMBERS = {"one": 1, "two": 2, "three": 3}
EVENTS = ("remains", "turns", "vanishes")
PLURALS = {shape: shape + ("es" if shape == "cross" else "s") for shape in SHAPES}
# What a marked word can be: the right value is one of these, and all values of a kind begin with different tokens.
VALUES = {
    "color": tuple(COLORS), "background": tuple(BACKGROUNDS), "pattern": PATTERNS, "shape": SHAPES,
    "size": tuple(SIZES), "motion": tuple(MOTIONS), "position": tuple(POSITIONS), "number": tuple(NUMBERS),
    "shapes": tuple(PLURALS.values()), "truth": ("Yes", "No"),
}  # fmt: skip


@dataclass(frozen=True)
class Thing:
    """What is seen of one object, or of several that are alike; `new_color` is set only for the event "turns"."""

    number: str
    size: str
    color: str
    shape: str
    position: str  # empty for one alone in its scene
    motion: str
    event: str
    new_color: str = ""


@dataclass(frozen=True)
class Scene:
    background: str
    pattern: str
    things: tuple[Thing, ...]


@dataclass(frozen=True)
class Text:
    """A question (empty: a text of its own) and its answer, whose facts are (first character, end, kind, value)."""

    question: str
    answer: str
    facts: tuple[tuple[int, int, str, str], ...]


def draw_scenes(rng: np.random.Generator, most: int = 3) -> tuple[Scene, ...]:
    """Draw one to `most` scenes, four things at most, so that a caption seldom has more than a hundred words."""
    scenes: list[Scene] = []
    for _ in range(int(rng.integers(1, most + 1))):
        places = [("left", "right"), ("top", "bottom"), ("",), ("",)][rng.integers(2 * (len(scenes) > 1), 4)]
        background = pick(rng, [b for b in BACKGROUNDS if not scenes or b != scenes[-1].background])
        scenes.append(Scene(background, pick(rng, PATTERNS), tuple(_draw_thing(rng, place) for place in places)))
    return tuple(scenes)


def _draw_thing(rng: np.random.Generator, position: str) -> Thing:
    size, color, shape, motion = (pick(rng, options) for options in (SIZES, COLORS, SHAPES, MOTIONS))
    event = pick(rng, EVENTS, (0.5, 0.3, 0.2))
    number = "one" if position else pick(rng, NUMBERS, (0.5, 0.25, 0.25))
    new_color = pick(rng, [c for c in COLORS if c != color]) if event == "turns" else ""
    return Thing(number, size, color, shape, position, motion, event, new_color)


def render(rng: np.random.Generator, scenes: tuple[Scene, ...], num_frames: int) -> np.ndarray:
    """Draw a video, uint8 [num_frames, FRAME_SIZE, FRAME_SIZE, 3]; scenes have a fifth of its frames or more each."""
    inner = (
        np.sort(rng.dirichlet([4.0] * len(scenes)).cumsum()[:-1]) * 0.4 + np.arange(1, len(scenes)) / len(scenes) * 0.6
    )
    cuts = [0, *np.round(inner * num_frames).astype(int).tolist(), num_frames]
    frames = _noise()[rng.integers(0, len(_noise()), num_frames)]  # int16
    for scene, start, end in zip(scenes, cuts[:-1], cuts[1:], strict=True):
        frames[start:end] += _background_image(scene.background, scene.pattern)
        for thing in scene.things:
            _paint(rng, frames[start:end], thing)
    return np.clip(frames, 0, 255).astype(np.uint8)


def _paint(rng: np.random.Generator, frames: np.ndarray, thing: Thing) -> None:
    """Draw what happens to a thing into a scene's frames, int16 [length, FRAME_SIZE, FRAME_SIZE, 3]."""
    length, radius, count = len(frames), SIZES[thing.size], NUMBERS[thing.number]
    direction, sprite = np.array(MOTIONS[thing.motion]), _sprite(thing.shape, SIZES[thing.size])
    centre = np.array(POSITIONS[thing.position] if thing.position else (0.5, 0.5)) + rng.uniform(-0.04, 0.04, 2)
    reach = np.where(np.array(POSITIONS.get(thing.position, (0.5, 0.5))) == 0.5, 0.33, 0.11) * rng.uniform(0.8, 1)
    aside = np.array([0, 1]) if direction[0] else np.array([1, 0])  # copies stand across their motion
    changes = max(1, round(length * (0.5 if thing.event == "turns" else 0.7)))
    for i, time in enumerate(np.linspace(-1, 1, length) if length > 1 else [0.0]):
        changed = i >= changes
        if thing.event == "vanishes" and changed:
            continue
        paint = np.array(COLORS[thing.new_color if changed and thing.new_color else thing.color], np.int16)
        for k in range(count):
            at = (centre + direction * reach * time + aside * 0.3 * (k - (count - 1) / 2)) * FRAME_SIZE
            x, y = np.clip(np.round(at), radius, FRAME_SIZE - radius - 1).astype(int)
            box = (slice(y - radius, y + radius + 1), slice(x - radius, x + radius + 1))
            frames[i][box][sprite] = paint + _light()[box][sprite]


OPENINGS = (
    "the video shows ", "in this clip, there is ", "here we see ", "the clip begins with ", "to begin with, we see ",
    "this short video opens on ", "what we get to see first is ", "at the start of the recording there is ",
)  # fmt: skip
NEXT = (
    "then there is ", "after that comes ", "next, the video shows ", "a moment later we see ", "the scene changes to ",
    "after a cut, there is ", "it is followed by ", "the next thing to appear is ", "once that is over, we get ",
)  # fmt: skip
ASIDES = (
    "Nothing else is going on.", "The camera itself never moves.", "It is easy to follow with the eye.",
    "There is no sound that would tell us more.", "One could watch this for quite a while.",
    "It all looks rather simple, but that is part of the charm.", "As far as I can tell, nobody is in the picture.",
    "The whole thing has a calm and quiet mood.", "It reminds me of an old screen saver.",
    "Somebody must have drawn this with a computer.", "This part of the video does not last very long.",
    "There is not much more to say about it.", "The lighting stays the same throughout.",
    "It could be an exercise for a class on drawing.", "If you blink, you might miss it.",
)  # fmt: skip
GROUNDS = ("background", "backdrop", "setting", "wall", "surface")
MOVES = {  # by whether it is sideways, None where there is none
    True: ("moving [{}]", "drifting to the [{}]", "sliding [{}]", "gliding slowly to the [{}]",
        "on its way to the [{}]"),
    False: ("moving [{}]", "drifting [{}]", "sliding [{}]", "gliding slowly [{}]", "on its way [{}]"),
    None: ("standing [{}]", "staying [{}]", "remaining perfectly [{}]", "sitting [{}]", "holding [{}]"),
}  # fmt: skip
TURNS = (
    " before turning [{}]",
    " until it turns [{}]",
    ", whose color changes to [{}] after a while",
    " and later on turning [{}]",
)
VANISHES = (
    " before vanishing",
    " until it is gone",
    " and disappearing in the end",
    ", of which nothing is left in the end",
)
OF_MANY = {"its way": "their way", "it turns": "they turn", "it is gone": "they are gone"}
GENERAL = (
    ("How many sides does a triangle have?", "A triangle has three sides."),
    ("What is a circle?", "A circle is a round shape: all of its points are equally far from its center."),
    ("What do you get if you mix blue and yellow?", "Mixing blue and yellow gives you green."),
    ("Are you able to hear the sound of this video?", "No, I can only look at its pictures."),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Tell me something that has nothing to do with the video.", "Water boils at a lower temperature on a mountain."),
    ("Why is the sky blue?", "Because the air scatters blue light more than it scatters red light."),
    ("Could you say hello?", "Hello! How can I help you today?"),
)
CAPTION_QUESTIONS = (
    "Describe the video.", "What happens in this video?", "What do you see?", "Please tell me what is going on here.",
    "Could you describe this clip for me?", "Write a caption for this video.", "Summarize the clip.",
)  # fmt: skip
WORDY_QUESTIONS = (
    "Describe the video in detail.", "Tell me about the video at length.", "Give me a long description, please.",
)  # fmt: skip


def parse(question: str, marked: str) -> Text:
    """Read marked text: `an [color:orange] [shape:ring]s`; `a` becomes `an` where the word after it asks for it."""
    marked = re.sub(r"\b([Aa]) (?=(\[\w+:)?[aeiou])", r"\1n ", marked)
    marked = re.sub(r"(^|[.!?] )(\w)", lambda m: m[1] + m[2].upper(), marked)
    text, facts, last = "", [], 0
    for found in re.finditer(r"\[(\w+):(\w+)\]", marked):
        text += marked[last : found.start()]
        facts.append((len(text), len(text) + len(found[2]), found[1], found[2]))
        text, last = text + found[2], found.end()
    return Text(question, text + marked[last:], tuple(facts))


def _noun(rng: np.random.Generator, thing: Thing) -> str:
    many = thing.number != "one"
    first = f"[number:{thing.number}] " if many else "a "
    size = f"[size:{thing.size}] " if rng.random() < 0.6 else ""
    shape = f"[shapes:{PLURALS[thing.shape]}]" if many else f"[shape:{thing.shape}]"
    return f"{first}{size}[color:{thing.color}] {shape}"


def _tell_thing(rng: np.random.Generator, thing: Thing) -> str:
    sideways = None if thing.motion == "still" else thing.motion in ("left", "right")
    where = f" {'on' if thing.position in ('left', 'right') else 'at'} the [position:{thing.position}]"
    text = _noun(rng, thing) + where * bool(thing.position and rng.random() < 0.7)
    text += " " + pick(rng, MOVES[sideways]).format(f"motion:{thing.motion}")
    if thing.event != "remains":
        text += pick(rng, TURNS if thing.event == "turns" else VANISHES).format(f"color:{thing.new_color}")
    for one, many in OF_MANY.items() if thing.number != "one" else ():
        text = text.replace(one, many)
    return text


def _tell_scene(rng: np.random.Generator, scene: Scene) -> str:
    pattern = f"[pattern:{scene.pattern}] " if rng.random() < 0.5 else ""
    ground = (
        f"{pick(rng, ('on', 'in front of', 'over'))} a {pattern}[background:{scene.background}] {pick(rng, GROUNDS)}"
    )
    told = pick(rng, (", and ", ", together with ", "; besides, there is ")).join(
        _tell_thing(rng, thing) for thing in scene.things
    )
    return told + pick(rng, (" ", ", all of it ", ", and that ")) + ground


def caption(rng: np.random.Generator, scenes: tuple[Scene, ...], wordy: bool | None = None) -> Text:
    """Tell of all scenes in their order; a wordy caption has a sentence after each that needs no video."""
    wordy = bool(rng.random() < 0.4) if wordy is None else wordy
    parts = []
    for i, scene in enumerate(scenes):
        parts.append(pick(rng, NEXT if i else OPENINGS) + _tell_scene(rng, scene) + ".")
        parts += [pick(rng, ASIDES)] * (wordy or rng.random() < 0.1)
    return parse(pick(rng, WORDY_QUESTIONS if wordy else CAPTION_QUESTIONS), " ".join(parts))


def ask(rng: np.random.Generator, scenes: tuple[Scene, ...]) -> Text:
    """Draw a question about one thing, the whole, or nothing in the video, with its answer."""
    things = [thing for scene in scenes for thing in scene.things]
    thing, kind = things[rng.integers(len(things))], rng.integers(7)
    name = f"{thing.color} {thing.shape if thing.number == 'one' else PLURALS[thing.shape]}"
    alone = sum((t.color, t.shape) == (thing.color, thing.shape) for t in things) == 1
    is_are, does = ("is", "does") if thing.number == "one" else ("are", "do")
    if kind == 0 and alone:
        how = "standing" if thing.motion == "still" else "moving"
        return parse(f"Which way {does} the {name} move?", f"The {name} {is_are} {how} [motion:{thing.motion}].")
    if kind == 1 and alone:
        more = f"There {is_are} [number:{thing.number}] of that kind."
        return parse(f"How many {thing.color} {PLURALS[thing.shape]} are there?", more)
    if kind == 2 and len(things) > 1 and sum(t.shape == thing.shape for t in things) == 1:
        return parse(f"What color did the {thing.shape} have at first?", f"It was [color:{thing.color}].")
    if kind in (3, 4):
        others = [c for c in COLORS if all(c not in (t.color, t.new_color) for t in things)]
        color = thing.color if rng.random() < 0.5 else pick(rng, others)
        shown = [t for t in things if color in (t.color, t.new_color)]
        asked = f"Is there anything {color} among the shapes?"
        if not shown:
            return parse(asked, f"[truth:No], nothing {color} is there.")
        if len(shown) == 1:
            return parse(asked, f"[truth:Yes], I can see a {color} [shape:{thing.shape}].")
    if kind == 5:
        which, scene = ("first", scenes[0]) if rng.random() < 0.5 else ("last", scenes[-1])
        looks = f"It is [pattern:{scene.pattern}] and [background:{scene.background}]."
        return parse(f"What is the {which} background like?", looks)
    return parse(*GENERAL[rng.integers(len(GENERAL))]) if kind == 6 else ask(rng, scenes)


def claims(text: str, scenes: tuple[Scene, ...]) -> list[bool]:
    """Which of the things and backgrounds that a text names, whoever wrote it, are in the video."""
    things = [t for scene in scenes for t in scene.things]
    named = rf"(?:({'|'.join(SIZES)}) )?({'|'.join(COLORS)}) ({'|'.join(SHAPES)})"
    found = [
        any(size in ("", t.size) and color == t.color and shape == t.shape for t in things)
        for size, color, shape in re.findall(named, text)
    ]
    grounds = rf"({'|'.join(BACKGROUNDS)}) (?:{'|'.join(GROUNDS)})"
    return found + [any(name == s.background for s in scenes) for name in re.findall(grounds, text)]


def held_out(i: int, num_frames: int = 16) -> tuple[np.ndarray, tuple[Scene, ...], np.random.Generator]:
    """The i-th video that no model was trained on: frames, scenes, and the generator that draws texts of it."""
    rng = np.random.default_rng(HELD_OUT_SEED + i)
    scenes = draw_scenes(rng)
    return render(rng, scenes, num_frames), scenes, rng
