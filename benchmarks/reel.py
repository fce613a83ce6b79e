"""Generator of long synthetic videos with questions about a few of their scenes ("reel world"); numpy only.

A reel is a row of numbered scenes, each of four to eight frames: one shape in one quarter of the frame moves on a
patterned background, and its last two frames may show it in another colour or fading. The scene's number is drawn in
the bottom right corner, as a clock is in a security film. What a question asks about is in a few of many scenes, and
in few tokens of each, so a pruner can be right or wrong. An answer tells one to five scenes, in 26 tokens each.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks import captioned
from vllm_vidspec.shapeworld.world import BACKGROUNDS, COLORS, PATTERNS, SHAPES, _sprite, patterned, pick

FRAME_SIZE, CELL_SIZE = 224, 28
GRID_SIZE = FRAME_SIZE // CELL_SIZE
TOKENS_PER_PAIR = GRID_SIZE**2  # a video token covers one cell of two frames
SCENE_PAIRS = (2, 3, 4)
SIZES = {"small": 11, "large": 18}  # radius in pixels
POSITIONS = {  # the quarter's words, and its left and top edge in pixels; the lowest row of cells stays free
    "at the top left": (0, 0), "at the top right": (112, 0),
    "at the bottom left": (0, 112), "at the bottom right": (112, 112),
}  # fmt: skip
QUARTER_WIDTH, QUARTER_HEIGHT = 112, 84
MOTIONS = ("leftwards", "rightwards", "upwards", "downwards", "nowhere")
EVENTS = ("remains", "turns", "vanishes")
COUNTS = ("no", "one", "two", "three", "four", "five")
MAX_TOLD = 5  # scenes that one answer describes
KINDS = ("number", "look", "after", "last", "first", "which")
FILLERS = {name: captioned.FILLERS[name] for name in ("background", "exists", "goes", "and")}
HELD_OUT_SEED = 50_000_000  # training seeds stay below


@dataclass(frozen=True)
class Scene:
    """One scene: `num_pairs` pairs of frames and what they show; `new_color` only with the event "turns"."""

    number: int
    num_pairs: int
    background: str
    pattern: str
    size: str
    color: str
    shape: str
    position: str
    motion: str
    event: str
    new_color: str | None

    @property
    def digits(self) -> str:
        return " ".join(f"{self.number:03d}")


@dataclass(frozen=True)
class Question:
    """A question and its answer, words separated by spaces."""

    kind: str  # One of KINDS
    text: str
    answer: str


def draw_reel(rng: np.random.Generator, num_pairs: int) -> tuple[Scene, ...]:
    """Draw scenes that last `num_pairs` pairs of frames (64 video tokens each) together; at least two pairs."""
    number, scenes, left = int(rng.integers(1, 800)), [], num_pairs
    while left:
        fitting = [n for n in SCENE_PAIRS if n == left or left - n >= SCENE_PAIRS[0]]
        length = int(rng.choice(fitting)) if fitting else left
        color = pick(rng, COLORS)
        event = pick(rng, EVENTS, (0.45, 0.3, 0.25))
        other = pick(rng, [c for c in COLORS if c != color]) if event == "turns" else None
        look = (pick(rng, BACKGROUNDS), pick(rng, PATTERNS), pick(rng, SIZES), color, pick(rng, SHAPES))
        scenes.append(Scene(number, length, *look, pick(rng, POSITIONS), pick(rng, MOTIONS), event, other))
        number, left = number + 1, left - length
    return tuple(scenes)


def held_out(i: int, num_tokens: int) -> tuple[np.ndarray, Question]:
    """The i-th video of `num_tokens` video tokens (a multiple of 64, from 128) that no model was trained on: frames as
    of `render`, and a question. Kinds of questions and numbers of scenes told take turns with `i`.
    """
    rng = np.random.default_rng([HELD_OUT_SEED, i, num_tokens])
    scenes = draw_reel(rng, num_tokens // TOKENS_PER_PAIR)
    count = 1 + (i // len(KINDS) + 2 * i) % MAX_TOLD
    question = next(q for k in range(len(KINDS)) if (q := ask(rng, scenes, KINDS[(i + k) % len(KINDS)], count)))
    return render(rng, scenes), question


def render(rng: np.random.Generator, scenes: tuple[Scene, ...]) -> np.ndarray:
    """Frames uint8 [2 * pairs, FRAME_SIZE, FRAME_SIZE, 3], RGB."""
    return np.concatenate([_render_scene(rng, scene) for scene in scenes])


def _render_scene(rng: np.random.Generator, scene: Scene) -> np.ndarray:
    empty, num_frames = _empty_frames(scene.background, scene.pattern), 2 * scene.num_pairs
    frames = empty[rng.integers(0, len(empty), num_frames)]
    for i, digit in enumerate(map(int, f"{scene.number:03d}")):
        column = GRID_SIZE - 3 + i
        frames[:, -CELL_SIZE:, column * CELL_SIZE : (column + 1) * CELL_SIZE] = _digit(digit)
    sprite, radius = _sprite(scene.shape, SIZES[scene.size]), SIZES[scene.size]
    for i, (x, y) in enumerate(_path(rng, scene, num_frames)):
        is_end = i >= num_frames - 2
        box = (slice(y - radius, y + radius + 1), slice(x - radius, x + radius + 1))
        paint = np.array(COLORS[scene.new_color if is_end and scene.new_color else scene.color], np.int16)
        if scene.event == "vanishes" and is_end:
            paint = (paint + frames[i][box][sprite].astype(np.int16)) // 2
        frames[i][box][sprite] = np.clip(paint + rng.integers(-6, 7, 3), 0, 255)
    return frames


def _path(rng: np.random.Generator, scene: Scene, length: int) -> np.ndarray:
    """Centres of the shape, int [length, 2] as (x, y)."""
    radius, (left, top) = SIZES[scene.size], POSITIONS[scene.position]
    low = np.array([left, top]) + radius + 1
    high = np.array([left + QUARTER_WIDTH, top + QUARTER_HEIGHT]) - radius - 2
    path = np.repeat(rng.uniform(low, high)[None], length, 0)
    if scene.motion != "nowhere":
        axis = 0 if scene.motion in ("leftwards", "rightwards") else 1
        time = np.linspace(0, 1, length)
        time = 1 - time if scene.motion in ("leftwards", "upwards") else time
        path[:, axis] = low[axis] + (high - low)[axis] * time
    return np.round(path).astype(int)


def ask(rng: np.random.Generator, scenes: tuple[Scene, ...], kind: str, count: int) -> Question | None:
    """Draw a question of a kind about `count` scenes, 1 to MAX_TOLD ("which" describes none); None if the reel has
    nothing to ask of this kind.
    """
    if kind == "which":
        return _ask_which(rng, scenes)
    count, skipped = min(count, len(scenes)), int(kind == "after")
    starts = list(range(len(scenes) - count - skipped + 1))
    if kind in ("look", "after"):
        starts = [i for i in starts if _look(scenes, i)]
    if not starts:
        return None
    start = {"first": 0, "last": len(scenes) - count}.get(kind, starts[int(rng.integers(len(starts)))])
    told = range(start + skipped, start + skipped + count)
    words, opening = COUNTS[count], ""
    if kind == "number":
        text = f"describe {words} from scene {scenes[start].digits}"
    elif kind == "look":
        text = f"describe {words} from the {_look(scenes, start)}"
    elif kind == "after":
        text, opening = f"what {words} come after the {_look(scenes, start)}", f"after scene {scenes[start].digits} : "
    else:
        text = f"describe the {kind} {words}"
    return Question(kind, text, opening + " ".join(_tell(rng, scenes[i]) for i in told))


def _ask_which(rng: np.random.Generator, scenes: tuple[Scene, ...]) -> Question | None:
    chosen = scenes[int(rng.integers(len(scenes)))]
    found = [s.digits for s in scenes if (s.color, s.shape) == (chosen.color, chosen.shape)]
    if len(found) >= len(COUNTS):
        return None
    named = " , ".join(f"scene {digits}" for digits in found)
    text = f"which scenes show a {chosen.color} {chosen.shape}"
    return Question("which", text, f"{named} . {COUNTS[len(found)]} in all .")


def _look(scenes: tuple[Scene, ...], index: int) -> str:
    """The shortest of a few ways to name a scene's shape that fits no other scene; "" if none does."""
    chosen = scenes[index]
    for names in (("color", "shape"), ("color", "shape", "background"), ("color", "shape", "pattern", "background")):
        values = [tuple(getattr(s, name) for name in names) for s in scenes]
        if values.count(values[index]) == 1:
            where = " ".join(values[index][2:])
            return f"{chosen.color} {chosen.shape}" + (f" on {where}" if where else "")
    return ""


def _tell(rng: np.random.Generator, scene: Scene) -> str:
    say = {name: pick(rng, options, captioned.SYNONYM_PROBS) for name, options in FILLERS.items()}
    event = f"{scene.event} {scene.new_color}" if scene.new_color else scene.event
    return (
        f"scene {scene.digits} : on a {scene.pattern} {scene.background} {say['background']} {say['exists']} a "
        f"{scene.size} {scene.color} {scene.shape} {scene.position} that {say['goes']} {scene.motion} {say['and']} "
        f"{event} ."
    )


@cache
def _empty_frames(background: str, pattern: str) -> np.ndarray:
    """A background under eight draws of camera noise, uint8 [8, FRAME_SIZE, FRAME_SIZE, 3].

    A soft gradient of light tells a patch where it is in the frame.
    """
    y, x = np.mgrid[0:FRAME_SIZE, 0:FRAME_SIZE]
    light = np.stack([x * 60, 0 * x, y * 60], -1) / FRAME_SIZE - [30, 0, 30]
    noise = np.random.default_rng(7).normal(0, 5, (8, FRAME_SIZE, FRAME_SIZE, 3))
    return np.clip(patterned(background, pattern, FRAME_SIZE) + light + noise, 0, 255).astype(np.uint8)


@cache
def _digit(digit: int) -> np.ndarray:
    """A digit, white on black, uint8 [CELL_SIZE, CELL_SIZE, 3], of 3 x 5 blocks of four pixels."""
    rows = {  # bit 2 is the left column
        0: (7, 5, 5, 5, 7), 1: (2, 6, 2, 2, 7), 2: (7, 1, 7, 4, 7), 3: (7, 1, 7, 1, 7), 4: (5, 5, 7, 1, 1),
        5: (7, 4, 7, 1, 7), 6: (7, 4, 7, 5, 7), 7: (7, 1, 2, 2, 2), 8: (7, 5, 7, 5, 7), 9: (7, 5, 7, 1, 7),
    }[digit]  # fmt: skip
    blocks = np.array([[row >> bit & 1 for bit in (2, 1, 0)] for row in rows])
    image = np.zeros((CELL_SIZE, CELL_SIZE, 3), np.uint8)
    image[4:24, 8:20] = 255 * blocks.repeat(4, 0).repeat(4, 1)[..., None]
    return image
