"""Batches of shape world to train the bundled models on: videos, captions, labels, prompts, and what a draft sees."""

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks import captioned
from benchmarks.training import tiny_captioner
from benchmarks.training.tiny_captioner import Captioner
from benchmarks.training.tiny_labels import LABELS, labels_of
from vllm_vidspec.shapeworld import world

NUM_CELLS = 16 * tiny_captioner.CELLS  # video tokens that show something
# colour, shape, size; position, motion, event, new colour, scene, background
OBJECT_SIZES = (LABELS["color"], LABELS["shape"], LABELS["size"])
SUMMARY_SIZES = (*OBJECT_SIZES, 5, 7, 3, 8, 4, 6)


class Stream:
    """Endless training batches; neighbours in caption length share a batch, to pad less."""

    def __init__(self, captioner: Captioner, seed: int, style: str = captioned.STYLES[0]) -> None:
        self.captioner, self.seed, self.style, self.queue = captioner, seed, style, []
        self.brief = False

    def next(self, batch: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], list[world.Sample]]:
        """Returns pixels, captions, labels ([batch, 256] per name and for "scene"), samples."""
        if not self.queue or len(self.queue[0]) != batch:
            samples = [captioned.make_sample(self.seed + i, self.brief, self.style) for i in range(2 * batch)]
            self.seed += 2 * batch
            samples.sort(key=lambda s: len(s.caption))
            self.queue = [samples[:batch], samples[batch:]]
        return collate(self.captioner, self.queue.pop())


def collate(captioner: Captioner, samples: list[captioned.Captioned]):
    """Stack samples into what `Stream.next` returns."""
    pixels = captioner.pixels(np.stack([s.frames for s in samples]))
    ids = [[*captioner.encode(s.caption), captioner.eos] for s in samples]
    captions = torch.full((len(ids), max(map(len, ids))), -100)
    for row, tokens in enumerate(ids):
        captions[row, : len(tokens)] = torch.tensor(tokens)
    frames = tiny_captioner.LLAVA_FRAMES if captioner.family == "llava-onevision" else np.arange(0, world.NUM_FRAMES, 2)
    of_samples = [labels_of(s) for s in samples]
    labels = {name: np.stack([found[name][frames] for found in of_samples]) for name in LABELS}
    scenes = np.stack([s.scene_of_frame[frames] for s in samples])  # [batch, 16]
    labels["scene"] = np.repeat(scenes, tiny_captioner.CELLS, 1)
    return pixels, captions, {k: torch.from_numpy(v.reshape(len(ids), -1)) for k, v in labels.items()}, samples


def draw_prompt(captioner: Captioner, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Mostly the usual prompt; sometimes with a system message, another question, or the question first."""
    before, after = tiny_captioner.PROMPTS[captioner.family]
    if rng.random() < 0.1:
        before = "<|im_start|> system you are a helpful assistant . <|im_end|> " + before
    if rng.random() < 0.15:
        question = ("what happens in this video ?", "please describe the clip .", "tell me what you see .")[
            rng.integers(3)
        ]
        after = after.replace(world.QUESTION, question)
        if rng.random() < 0.4:
            before = before.replace("user", f"user {question}")
            after = after.replace(question, "")
    return captioner.encode(before), captioner.encode(after)


def draw_kept(captioner: Captioner, labels: dict[str, torch.Tensor], count: int) -> torch.Tensor:
    """Choose `count` video tokens per video: those that show a shape, and others at random; int64 [batch, count]."""
    shows = F.pad(labels["color"] > 0, (0, captioner.num_video_tokens - NUM_CELLS))
    return (shows + torch.rand(shows.shape)).topk(count, -1).indices.sort(-1).values


def draw_frames(captioner: Captioner, rng: np.random.Generator, batch: int) -> torch.Tensor:
    """Choose some of the frames, 0 to all of them, with all of their tokens; int64 [batch, num_kept].

    A model that has only ever seen videos of one length says nothing sensible about any other.
    """
    total = NUM_CELLS // tiny_captioner.CELLS
    chosen = np.sort(rng.choice(total, int(rng.integers(0, total + 1)), replace=False))
    tokens = torch.from_numpy((chosen[:, None] * tiny_captioner.CELLS + np.arange(tiny_captioner.CELLS)).reshape(-1))
    rest = torch.arange(NUM_CELLS, captioner.num_video_tokens)  # LLaVA's image_newline
    return torch.cat([tokens, rest]).expand(batch, -1)


def gather(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Rows `kept` [batch, num_kept] of x [batch, num_tokens, ...]."""
    return x[torch.arange(len(x))[:, None], kept]


def summary_labels(samples: list[world.Sample]) -> torch.Tensor:
    """What the last prompt tokens are taught to sum up: token j says object j.

    Returns int64 [batch, MAX_OBJECTS, len(SUMMARY_SIZES)], -100 where there is no such object.
    """
    result = torch.full((len(samples), world.MAX_OBJECTS, len(SUMMARY_SIZES)), -100)
    colors, sizes, positions = list(world.COLORS), list(world.SIZES), list(world.POSITIONS)
    for row, sample in enumerate(samples):
        facts = [(i, scene, fact) for i, scene in enumerate(sample.facts) for fact in scene.objects]
        for j, (scene_idx, scene, fact) in enumerate(facts):
            result[row, j] = torch.tensor([
                colors.index(fact.color) + 1, world.SHAPES.index(fact.shape) + 1, sizes.index(fact.size) + 1,
                positions.index(fact.position), world.MOTIONS.index(fact.motion),
                world.EVENTS.index(fact.event), colors.index(fact.new_color) if fact.new_color else -100,
                scene_idx, list(world.BACKGROUNDS).index(scene.background),
            ])  # fmt: skip
    return result


def distillation_view(rng: np.random.Generator, shows: torch.Tensor) -> torch.Tensor:
    """Video tokens of a distillation step, int64 [batch, num_kept], as a draft will see them: all, or a tenth to half,
    drawn at random or, as a guided pruner would, with those first that show a shape (bool [batch, num_video_tokens]).
    """
    batch, num_tokens = shows.shape
    kind = rng.random()
    if kind < 0.3:
        return torch.arange(num_tokens).expand(batch, -1)
    count = int(num_tokens * rng.uniform(0.08, 0.5))
    # A guided choice is not perfect: one token in ten that shows a shape is not known to.
    known = shows & (torch.rand(shows.shape) < 0.9) if kind < 0.7 else torch.zeros_like(shows)
    return (known + torch.rand(shows.shape)).topk(count, -1).indices.sort(-1).values
