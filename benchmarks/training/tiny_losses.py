"""What the bundled models are trained on: captions, and dense labels that large models need not be told."""

import torch
import torch.nn.functional as F

from benchmarks import captioned
from benchmarks.training.tiny_captioner import Captioner
from benchmarks.training.tiny_data import OBJECT_SIZES, SUMMARY_SIZES
from benchmarks.training.tiny_labels import LABELS
from vllm_vidspec.shapeworld import world

FILLER_WEIGHT, EVENT_WEIGHT = 0.3, 2.0  # loss weights; other words have 1
STRUCTURE_WORDS = ("on", "at", "in", ",", ".", "next", "after", "then", "all")  # they tell layouts and numbers
# Where wordy captions begin with an object's place ("on") or not ("there"), both must weigh the same.
ORDER_WORDS = tuple(option.split()[0] for option in captioned.FILLERS["exists"])
UV_LAYER = 3  # of four, as the paper's 20 of 28


def alignment_loss(
    states: list[torch.Tensor], kept_shows: torch.Tensor, video_at: torch.Tensor, num_prompt: int
) -> torch.Tensor:
    """Rank tokens that show a shape above others by UV-Prune's score (ParallelVLM eq. 2-4) at UV_LAYER.

    In large models visual tokens that matter grow towards the text by themselves; four layers need to be told. `states`
    are the embeddings and layer outputs [batch, num_tokens, hidden], `video_at` where the kept video tokens are among
    the `num_prompt` tokens of the prompt, int64 [batch, num_kept].
    """
    scores = torch.zeros(())
    for state, sign in ((states[UV_LAYER], 1), (states[0], -1)):
        unit = F.normalize(state[:, :num_prompt].float(), dim=-1)
        video = unit[torch.arange(len(unit))[:, None], video_at]
        text = unit.sum(1) - video.sum(1)  # [batch, hidden]
        scores = scores + sign * (video @ text[:, :, None])[..., 0]
    margin = scores[:, :, None] - scores[:, None, :]  # [batch, num_kept, num_kept]
    pairs = kept_shows[:, :, None] & ~kept_shows[:, None, :]
    return F.softplus(-margin)[pairs].mean()


class AuxiliaryHeads(torch.nn.Module):
    """Dense losses: what one frame shows at the vision output, the rest at the text model's video and prompt tokens.

    The prompt's last tokens learn to sum up the video, one object each, before the caption begins: large models do so
    by themselves, and it is what makes a target's attention from the prompt worth following. One head reads an
    object's look off video and prompt tokens alike.
    """

    TEXT_SIZES = (4, LABELS["direction"], LABELS["turned"])  # scene, direction, turned

    def __init__(self, hidden_size: int, family: str, num_levels: int = 1) -> None:
        super().__init__()
        # One LLaVA frame shows no motion: only its text model, which sees several frames, can learn the direction.
        of_time = ("turned",) if family != "llava-onevision" else ("turned", "direction")
        self.names = [n for n in LABELS if n not in of_time]
        self.vision = torch.nn.Linear(num_levels * hidden_size, sum(LABELS[n] for n in self.names))
        self.text = torch.nn.Linear(hidden_size, sum(self.TEXT_SIZES))
        self.object = torch.nn.Linear(hidden_size, sum(OBJECT_SIZES))
        self.summary = torch.nn.Linear(hidden_size, sum(SUMMARY_SIZES[len(OBJECT_SIZES) :]))
        for head in (self.vision, self.text, self.object, self.summary):  # a fresh head cannot disturb a trained tower
            torch.nn.init.zeros_(head.weight)

    def vision_loss(
        self, video: torch.Tensor, labels: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Loss and accuracy at object tokens; video [batch, 256, num_levels * hidden]."""
        parts = self.vision(video).float().flatten(0, 1).split([LABELS[n] for n in self.names], -1)
        loss, accuracy, objects = torch.zeros(()), {}, labels["color"].flatten() > 0
        for name, logits in zip(self.names, parts, strict=True):
            label = labels[name].flatten()
            if name in ("shape", "size", "direction", "x", "y", "faded"):  # colour alone tells where objects are
                label = label.masked_fill(~objects, -100)
            loss = loss + F.cross_entropy(logits, label) * (2.0 if name in ("shape", "color", "direction") else 1.0)
            accuracy[name] = (logits.argmax(-1) == label)[objects].float().mean().item()
        return loss, accuracy

    def text_loss(self, hidden: torch.Tensor, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        """Hidden [batch, num_kept, hidden] at video tokens; labels [batch, num_kept], -100 where there is no cell."""
        scene, direction, turned = self.text(hidden).float().flatten(0, 1).split(self.TEXT_SIZES, -1)
        looks = self.object(hidden).float().flatten(0, 1).split(OBJECT_SIZES, -1)
        flat = {name: label.flatten() for name, label in labels.items()}
        flat["turned"] = flat["turned"].masked_fill(flat["turned"] == 0, -100)
        loss = 0.1 * F.cross_entropy(scene, flat["scene"]) + F.cross_entropy(direction, flat["direction"])
        loss = loss + F.cross_entropy(turned, flat["turned"])
        for name, logits in zip(("color", "shape", "size"), looks, strict=True):
            loss = loss + 0.5 * F.cross_entropy(logits, flat[name])
        return loss

    def summary_loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Hidden [batch, MAX_OBJECTS, hidden] at the prompt's last tokens; labels as of `summary_labels`."""
        logits = torch.cat([self.object(hidden), self.summary(hidden)], -1).float().flatten(0, 1)
        parts, labels = logits.split(SUMMARY_SIZES, -1), labels.flatten(0, 1)
        return sum(F.cross_entropy(part, labels[:, i]) for i, part in enumerate(parts)) / len(parts)


def caption_loss(
    captioner: Captioner, hidden: torch.Tensor, captions: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Cross entropy, facts at full weight; a position's candidates are all facts or all fillers: no bias."""
    loss = F.cross_entropy(
        captioner.lm_head(hidden).float().flatten(0, 1), captions.flatten(), ignore_index=-100, reduction="none"
    )
    weight = weights[captions.clamp(min=0)].flatten() * (captions >= 0).flatten()
    return (loss * weight).sum() / weight.sum()


def token_weights(captioner: Captioner, style: str = captioned.STYLES[0]) -> torch.Tensor:
    """Weight of each token in the caption's loss, [vocab]: facts and what tells layouts before fillers."""
    weights = torch.full((len(captioner.ids),), FILLER_WEIGHT)
    named = (world.COLORS, world.BACKGROUNDS, world.PATTERNS, world.SHAPES, world.SIZES, world.MOTIONS, world.POSITIONS)
    weights[[captioner.ids[word] for words in named for word in words]] = 1.0
    structure = STRUCTURE_WORDS + (ORDER_WORDS if style == "wordy" else ())
    weights[[captioner.ids[word] for word in structure]] = 1.0
    weights[[captioner.ids[word] for word in world.EVENTS]] = EVENT_WEIGHT
    return weights
