"""Generator of short synthetic videos ("shape world"); numpy only, touches nothing outside itself.

A video has 2-4 scenes. A scene has a patterned background and one or two shapes that move, and that may change colour
or vanish. What a caption tells is in few video tokens, as in real videos: a shape is small, stays for six frames only,
and shows how it ends (its last two frames) even more briefly; specks that no caption mentions flicker around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

FRAME_SIZE = 112
NUM_FRAMES = 32
FRAME_RATE = 2.0  # nominal: the video lasts 16 s
GRID_SIZE = 4  # one video token covers a 28 x 28 cell
CELL_SIZE = FRAME_SIZE // GRID_SIZE
HELD_OUT_SEED = 5_000_000  # training seeds stay below
QUESTION = "describe the video"

COLORS = {
    "red": (220, 40, 40), "green": (40, 190, 60), "blue": (50, 70, 220), "yellow": (230, 220, 40),
    "purple": (150, 50, 190), "orange": (240, 130, 20), "white": (245, 245, 245), "black": (15, 15, 15),
}  # fmt: skip
BACKGROUNDS = {
    "grey": (128, 128, 128), "navy": (20, 30, 90), "brown": (110, 70, 35),
    "pink": (240, 160, 190), "teal": (20, 120, 120), "lime": (165, 225, 120),
}  # fmt: skip
PATTERNS = ("plain", "striped", "dotted")
SHAPES = ("circle", "square", "triangle", "cross", "diamond", "ring")
SIZES = {"small": 10, "large": 14}  # radius in pixels
VISIBLE_FRAMES = 6  # how long a shape stays
SPECK_RADIUS, SPECKS_PER_FRAME = 4, 3  # distractors
MAX_OBJECTS = 6  # of a video
MOTIONS = ("leftwards", "rightwards", "upwards", "downwards", "sideways", "vertically", "nowhere")
SIDEWAYS = ("leftwards", "rightwards", "sideways")  # those along x
POSITIONS = {
    "left": "on the left", "right": "on the right", "top": "at the top", "bottom": "at the bottom",
    "middle": "in the middle",
}  # fmt: skip
# Where that is in the frame: left, top, right and bottom, as shares of its side.
REGIONS = {
    "left": (0, 0, 0.5, 1), "right": (0.5, 0, 1, 1), "top": (0, 0, 1, 0.5), "bottom": (0, 0.5, 1, 1),
    "middle": (0.25, 0.25, 0.75, 0.75),
}  # fmt: skip
LAYOUTS = (("left", "right"), ("top", "bottom"), ("middle",))
EVENTS = ("remains", "turns", "vanishes")
NUMBERS = ("one", "two", "three", "four")


@dataclass(frozen=True)
class ObjectFact:
    """What a caption says of one object; `new_color` is set only for the event "turns"."""

    position: str
    size: str
    color: str
    shape: str
    motion: str
    event: str
    new_color: str | None = None


@dataclass(frozen=True)
class SceneFact:
    """What a caption says of one scene."""

    background: str
    pattern: str
    objects: tuple[ObjectFact, ...]


@dataclass(frozen=True)
class Sample:
    """One video."""

    frames: np.ndarray  # uint8 RGB [NUM_FRAMES, FRAME_SIZE, FRAME_SIZE, 3]
    facts: tuple[SceneFact, ...]  # of its caption
    rng: np.random.Generator  # by which a caption of it is drawn next


def make_sample(seed: int) -> Sample:
    """Make the video of one seed, the same each time."""
    rng = np.random.default_rng(seed)
    facts = _draw_facts(rng)
    cuts = _draw_cuts(rng, len(facts))
    frames = np.empty((NUM_FRAMES, FRAME_SIZE, FRAME_SIZE, 3), np.uint8)
    for scene, start, end in zip(facts, cuts[:-1], cuts[1:], strict=True):
        frames[start:end] = _render_scene(rng, scene, end - start)
    return Sample(frames, facts, rng)


def held_out(i: int) -> Sample:
    """The i-th sample that no bundled model was trained on."""
    return make_sample(HELD_OUT_SEED + i)


def _draw_facts(rng: np.random.Generator) -> tuple[SceneFact, ...]:
    num_scenes = int(rng.choice([2, 3, 4], p=[0.3, 0.4, 0.3]))
    layouts: list[tuple[str, ...]] = []
    # Four objects at least, so that no caption is short.
    while not 4 <= sum(map(len, layouts)) <= MAX_OBJECTS:
        layouts = [LAYOUTS[rng.choice(3, p=[0.3, 0.3, 0.4])] for _ in range(num_scenes)]
    scenes: list[SceneFact] = []
    for layout in layouts:
        previous = scenes[-1].background if scenes else None
        background = pick(rng, [b for b in BACKGROUNDS if b != previous])
        objects = tuple(_draw_object(rng, position) for position in layout)
        scenes.append(SceneFact(background, pick(rng, PATTERNS), objects))
    return tuple(scenes)


def _draw_object(rng: np.random.Generator, position: str) -> ObjectFact:
    size, color, shape, motion = (pick(rng, options) for options in (SIZES, COLORS, SHAPES, MOTIONS))
    event = pick(rng, EVENTS, (0.45, 0.3, 0.25))
    new_color = pick(rng, [c for c in COLORS if c != color]) if event == "turns" else None
    return ObjectFact(position, size, color, shape, motion, event, new_color)


def _draw_cuts(rng: np.random.Generator, num_scenes: int) -> list[int]:
    """Scene boundaries in frames, on even frames; a scene has 6 to 20 frames."""
    while True:
        inner = np.sort(rng.choice(np.arange(3, NUM_FRAMES // 2 - 2), num_scenes - 1, replace=False))
        cuts = [0, *(2 * inner).tolist(), NUM_FRAMES]
        lengths = np.diff(cuts)
        if lengths.min() >= 6 and lengths.max() <= 20:
            return cuts


def _render_scene(rng: np.random.Generator, scene: SceneFact, length: int) -> np.ndarray:
    """Draw one scene, uint8 [length, FRAME_SIZE, FRAME_SIZE, 3]."""
    noise = _noise()[rng.integers(0, len(_noise()), length)]  # [length, FRAME_SIZE, FRAME_SIZE, 3]
    frames = _background_image(scene.background, scene.pattern) + noise
    _draw_specks(rng, frames, noise)
    for fact in scene.objects:
        stay = min(length, VISIBLE_FRAMES)
        start = 2 * int(rng.integers(0, (length - stay) // 2 + 1))  # even: a video token spans two frames
        ending = stay - max(2, stay // 6 * 2)  # the first frame of what `event` says
        path = _draw_path(rng, fact, stay)
        colors = [fact.color] * ending + [fact.new_color or fact.color] * (stay - ending)
        sprite, radius = _sprite(fact.shape, SIZES[fact.size]), SIZES[fact.size]
        for i in range(stay):
            x, y = path[i]
            box = (slice(y - radius, y + radius + 1), slice(x - radius, x + radius + 1))
            paint = np.array(COLORS[colors[i]], np.int16) + _light()[box][sprite] + noise[start + i][box][sprite]
            if fact.event == "vanishes" and i >= ending:
                paint = paint // 2 + frames[start + i][box][sprite] // 2
            frames[start + i][box][sprite] = paint
    return np.clip(frames, 0, 255).astype(np.uint8)


def _draw_specks(rng: np.random.Generator, frames: np.ndarray, noise: np.ndarray) -> None:
    """Paint small discs, here and there for two frames each, into int16 [length, FRAME_SIZE, FRAME_SIZE, 3]."""
    mask = _sprite("circle", SPECK_RADIUS)
    for first in range(0, len(frames), 2):
        for x, y in rng.integers(SPECK_RADIUS, FRAME_SIZE - SPECK_RADIUS, (SPECKS_PER_FRAME, 2)):
            box = (slice(y - SPECK_RADIUS, y + SPECK_RADIUS + 1), slice(x - SPECK_RADIUS, x + SPECK_RADIUS + 1))
            color = np.array(COLORS[pick(rng, COLORS)], np.int16)
            for i in range(first, min(first + 2, len(frames))):
                frames[i][box][mask] = color + noise[i][box][mask]


def _draw_path(rng: np.random.Generator, fact: ObjectFact, length: int) -> np.ndarray:
    """Centres of a moving object, int [length, 2] as (x, y)."""
    low, high = FRAME_SIZE * np.array(REGIONS[fact.position], float).reshape(2, 2)
    low, high = low + SIZES[fact.size] + 1, high - SIZES[fact.size] - 2
    # Across its motion a shape sits in the middle of a cell, so that it fills few cells.
    point = np.clip((rng.integers(0, GRID_SIZE, 2) + 0.5) * CELL_SIZE, low, high)
    time = np.linspace(0, 1, length)
    bounce = 1 - np.abs(2 * time - 1) if rng.random() < 0.5 else np.abs(2 * time - 1)
    progress = {"leftwards": 1 - time, "rightwards": time, "upwards": 1 - time, "downwards": time}
    path = np.repeat(point[None], length, 0)
    if fact.motion != "nowhere":
        axis = 0 if fact.motion in SIDEWAYS else 1
        path[:, axis] = low[axis] + (high - low)[axis] * progress.get(fact.motion, bounce)
    return np.round(path).astype(int)


def write_mp4(frames: np.ndarray, path: str | Path) -> None:
    """Write uint8 RGB frames [num_frames, height, width, 3] as an mp4 file (needs opencv)."""
    import cv2

    height, width = frames.shape[1:3]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), FRAME_RATE, (width, height))
    if not writer.isOpened():
        raise OSError(f"opencv cannot write {path}")
    for frame in frames:
        writer.write(np.ascontiguousarray(frame[..., ::-1]))
    writer.release()


def pick(rng: np.random.Generator, options, probs=None) -> str:
    """Draw one of some words."""
    return list(options)[rng.choice(len(options), p=probs)]


@cache
def _noise() -> np.ndarray:
    """Camera noise, int16 [48, FRAME_SIZE, FRAME_SIZE, 3], shared by all videos."""
    return np.random.default_rng(7).normal(0, 5, (48, FRAME_SIZE, FRAME_SIZE, 3)).astype(np.int16)


@cache
def _light() -> np.ndarray:
    """A soft colour gradient, int16 [FRAME_SIZE, FRAME_SIZE, 3]: it tells a patch where it is in the frame."""
    y, x = np.mgrid[0:FRAME_SIZE, 0:FRAME_SIZE] / FRAME_SIZE - 0.5
    return np.stack([x * 40, 0 * x, y * 40], -1).astype(np.int16)


@cache
def _background_image(background: str, pattern: str) -> np.ndarray:
    """Background without noise, int16 [FRAME_SIZE, FRAME_SIZE, 3]."""
    return patterned(background, pattern, FRAME_SIZE).astype(np.int16) + _light()


def patterned(background: str, pattern: str, side: int) -> np.ndarray:
    """A background's colour with its pattern, float64 [side, side, 3]; neither light nor noise."""
    y, x = np.mgrid[0:side, 0:side]
    marks = {
        "plain": np.zeros_like(x, bool),
        "striped": y % 14 < 5,
        "dotted": (y % 14 - 7) ** 2 + (x % 14 - 7) ** 2 < 10,
    }[pattern]
    color = np.array(BACKGROUNDS[background], float)
    return np.where(marks[..., None], color * 0.7, color)


@cache
def _sprite(shape: str, radius: int) -> np.ndarray:
    """Mask of a shape, bool [2 * radius + 1, 2 * radius + 1]."""
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1].astype(float)
    distance = np.hypot(x, y)
    return {
        "circle": distance <= radius,
        "square": np.maximum(abs(x), abs(y)) <= radius * 0.85,
        "triangle": (y <= radius * 0.8) & (abs(x) <= (y + radius) * 0.56),
        "cross": np.minimum(abs(x), abs(y)) <= radius * 0.32,
        "diamond": abs(x) + abs(y) <= radius,
        "ring": (distance <= radius) & (distance >= radius * 0.55),
    }[shape]
