"""Trains one model of the pair by next-token loss; the same command goes on where it was stopped.

    python -m benchmarks.language.train target SMOLLM2 RUN
    python -m benchmarks.language.train draft SMOLLM2 RUN
    python -m benchmarks.language.train stranger SMOLLM2 RUN

SMOLLM2 is the folder of `benchmarks.language.fetch`. RUN gets `state.safetensors`: what is trained, and the optimizer's
moments. A step's data follow from the seed and the step alone, so that a run in parts ends in the same weights.
"""

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.language import model as models
from benchmarks.language import world
from benchmarks.language.world import Text


@dataclass(frozen=True)
class Role:
    """One model: its layers of the language model's 30, its bundled tower, the adapters' rank, its run."""

    layers: tuple[int, ...]
    tower: str
    rank: int
    seed: int
    steps: int
    plain_every: int  # one step in so many is of plain English, so that the model keeps it; 0: none
    frozen_steps: int = 0  # at first only tower and projector are trained


ROLES = {
    "target": Role(tuple(range(30)), "target", 16, 1, 2400, 8, 60),
    "draft": Role(tuple(range(8)), "draft", 64, 2, 3000, 0),
    "stranger": Role((0, 1, 2, 3, 4, 9, 16, 23, 28, 29), "far", 64, 3, 3000, 0),
}
LEARNING_RATE, TOWER_RATE, WARM_UP = 1e-3, 3e-4, 50
# What a step is of: up to this share of the run videos of one scene, which are quick and teach what things look like.
EARLY, EARLY_VIDEOS, VIDEOS = 0.3, 4, 2
EARLY_FRAMES = {4: 0.5, 8: 0.5}
NUM_FRAMES = {8: 0.35, 12: 0.25, 16: 0.3, 32: 0.07, 64: 0.03}
PLAIN_TOKENS = 256


class Run:
    """A model, its optimizer and the number of steps that were done."""

    def __init__(self, model: torch.nn.Module, tokens, role: Role, folder: Path) -> None:
        self.model, self.tokens, self.role, self.path = model, tokens, role, folder / "state.safetensors"
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        slow = [p for name, p in self.trained.items() if "vision_tower" in name]
        fast = [p for name, p in self.trained.items() if "vision_tower" not in name]
        groups = [{"params": fast, "peak": LEARNING_RATE}, {"params": slow, "peak": TOWER_RATE}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
        self.step = 0
        if self.path.exists():
            self._load()

    def _load(self) -> None:
        with safe_open(self.path, "pt") as found:
            self.step = int(found.metadata()["step"])
            for name, p in self.trained.items():
                p.data.copy_(found.get_tensor(name))
                if f"{name}/exp_avg" in found.keys():  # noqa: SIM118
                    moments = ("step", "exp_avg", "exp_avg_sq")
                    self.optimizer.state[p] = {key: found.get_tensor(f"{name}/{key}") for key in moments}

    def save(self) -> None:
        state = {name: p.data for name, p in self.trained.items()}
        for name, p in self.trained.items():
            state |= {f"{name}/{key}": value for key, value in self.optimizer.state.get(p, {}).items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        half = self.path.with_suffix(".part")
        save_file(state, half, {"step": str(self.step)})
        half.rename(self.path)  # a run that is killed leaves a whole file

    def one_step(self) -> float:
        """Train on the next step's data; return its loss."""
        role, rng = self.role, np.random.default_rng([self.role.seed, self.step])
        is_plain = role.plain_every and self.step % role.plain_every == role.plain_every - 1
        is_early = self.step < EARLY * role.steps
        videos = 0 if is_plain else EARLY_VIDEOS if is_early else VIDEOS
        batch = [draw(rng, is_early) for _ in range(videos)] or [plain(rng, self.tokens)]
        total = 0.0
        for frames, texts in batch:
            loss = models.answer_loss(self.model, self.tokens, models.pack(self.tokens, texts), frames) / len(batch)
            loss.backward()
            total += loss.item()
        rate = min(1, (self.step + 1) / WARM_UP, max(0.02, (1 - self.step / role.steps) / 0.4))
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * rate
        for name, p in self.trained.items():
            if self.step < role.frozen_steps and "language_model" in name:
                p.grad = None
        torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return math.nan if is_plain else total


def draw(rng: np.random.Generator, is_early: bool) -> tuple[np.ndarray, list[Text]]:
    """A video with three captions and three questions."""
    scenes, lengths = world.draw_scenes(rng, 1 if is_early else 3), EARLY_FRAMES if is_early else NUM_FRAMES
    frames = world.render(rng, scenes, int(rng.choice(list(lengths), p=list(lengths.values()))))
    return frames, [world.caption(rng, scenes) for _ in range(3)] + [world.ask(rng, scenes) for _ in range(3)]


def plain(rng: np.random.Generator, tokens) -> tuple[None, list[Text]]:
    """Some English that has nothing to do with videos: a piece of Python's own help."""
    text = list(topics.topics.values())[rng.integers(len(topics.topics))]
    start = int(rng.integers(max(1, len(text) - 4 * PLAIN_TOKENS)))
    return None, [Text("", text[start : start + 4 * PLAIN_TOKENS], ())]


def facts_right(model: torch.nn.Module, tokens, num_videos: int, num_frames: int = 16) -> dict[str, float]:
    """Share of facts right on held-out videos, by kind and in all."""
    right: dict[str, list[bool]] = {kind: [] for kind in models.KINDS}
    for i in range(num_videos):
        frames, scenes, rng = world.held_out(i, num_frames)
        texts = [world.caption(rng, scenes) for _ in range(2)] + [world.ask(rng, scenes) for _ in range(4)]
        for kind, more in models.facts_right(model, tokens, models.pack(tokens, texts), frames).items():
            right[kind] += more
    found = {kind: round(sum(values) / len(values), 3) for kind, values in right.items() if values}
    return {"all": round(sum(map(sum, right.values())) / sum(map(len, right.values())), 3), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("language", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many, to go on another time")
    parser.add_argument("--report", type=int, default=25, help="steps between two lines of the log")
    args = parser.parse_args()
    torch.set_num_threads(1)
    role, tokens = ROLES[args.role], models.tokenizer(args.language)
    run = Run(models.build(args.language, role.layers, role.tower, role.rank, role.seed), tokens, role, args.run)
    start, saved, losses, begun = time.time(), time.time(), [], run.step
    while run.step < role.steps and time.time() - start < 60 * args.minutes:
        losses.append(run.one_step())
        if run.step % args.report == 0:
            log: dict = {"step": run.step, "loss": round(float(np.nanmean(losses)), 3)}
            log |= {"minutes_a_step": round((time.time() - start) / 60 / (run.step - begun), 3)}
            if run.step % (4 * args.report) == 0:
                log |= {"right": facts_right(run.model, tokens, 8)}
            print(json.dumps(log), flush=True)
            losses = []
        if time.time() - saved > 240:
            run.save()
            saved = time.time()
    run.save()
    print(json.dumps({"step": run.step, "right": facts_right(run.model, tokens, 48)}), flush=True)


if __name__ == "__main__":
    main()
